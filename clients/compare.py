"""Say whether two runs ended bit for bit equal: `python -m clients.compare A B`.

A and B are both what --save wrote, or both what --json wrote. Exit status 0: equal, 1: they differ,
2: they can't be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def differences(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """One line for each tensor that is not the same in both, down to the sign of a zero."""
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            lines.append(f"{name}: only in {'the first' if name in a else 'the second'}")
        elif a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
            lines.append(f"{name}: {a[name].dtype} {tuple(a[name].shape)}, {b[name].dtype} {tuple(b[name].shape)}")
        elif not torch.equal(_bytes(a[name]), _bytes(b[name])):
            apart = (a[name].double() - b[name].double()).abs().max().item() if a[name].numel() else 0.0
            lines.append(f"{name}: largest difference {apart:.3g}")
    return lines


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def differences_of_outcomes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The same for two --json files: the state's hash and everything that was computed on the way."""
    lines = [f"{key}: {a[key]!r}, {b[key]!r}" for key in ("client", "steps", "sha256") if a[key] != b[key]]
    for key in ("losses", "accuracy"):
        at = next((i for i, (x, y) in enumerate(zip(a[key], b[key], strict=False)) if x != y), None)
        if at is not None:
            lines.append(f"{key}: differ first at {at}: {a[key][at]!r}, {b[key][at]!r}")
        elif len(a[key]) != len(b[key]):
            lines.append(f"{key}: {len(a[key])} and {len(b[key])} of them")
    return lines


def compare(a: Path, b: Path) -> list[str]:
    """Raises ValueError when the two files are not of one kind."""
    if (a.suffix == ".json") != (b.suffix == ".json"):
        raise ValueError("one of the files is from --json and the other is not")
    if a.suffix == ".json":
        return differences_of_outcomes(json.loads(a.read_text()), json.loads(b.read_text()))
    return differences(torch.load(a, weights_only=True), torch.load(b, weights_only=True))


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description="Say whether two runs ended bit for bit equal.")
    flags.add_argument("a", type=Path)
    flags.add_argument("b", type=Path)
    args = flags.parse_args(argv)
    try:
        found = compare(args.a, args.b)
    except (OSError, ValueError, KeyError) as error:
        print(f"{flags.prog}: {error}", file=sys.stderr)
        return 2
    if not found:
        print("equal, bit for bit")
        return 0
    print("\n".join(found))
    return 1


if __name__ == "__main__":
    sys.exit(main())
