"""A coverage-guided fuzzer for the decoders (targets.py), with libFuzzer by way of atheris (`pip install atheris`).

    python -m tests.fuzz.decoders --seconds 60 [--seed N] [--target NAME] [--keep] [--out FILE.json]

Each target runs in a process of its own for its part of the time. `--keep` adds the inputs that reached new code, and
findings, to corpus/, which `make test` replays. What breaks a decoder is written to findings/ and reported; the exit
code is then 1.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
FINDINGS = HERE / "findings"
ROOT = HERE.parents[1]
SLOW_S = 10  # one input that takes longer is a finding
MEMORY_MIB = 1024
LONGEST = 4096  # bytes of an input
KEPT = 400  # of a target's inputs, the shortest first


def read(target: str) -> list[bytes]:
    """The inputs kept for a target: one in base64 a line."""
    path = CORPUS / f"{target}.txt"
    return [base64.b64decode(line) for line in path.read_text().split()] if path.exists() else []


def write(target: str, inputs: list[bytes]) -> None:
    """Keep the shortest inputs."""
    CORPUS.mkdir(exist_ok=True)
    lines = [base64.b64encode(data).decode() for data in sorted(set(inputs), key=lambda d: (len(d), d))[:KEPT]]
    (CORPUS / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines))


def fuzz(target: str, seconds: int, seed: int, keep: bool) -> dict[str, object]:
    """Run one target's fuzzer; what came of it."""
    with tempfile.TemporaryDirectory() as name:
        inputs, broken = Path(name, "inputs"), Path(name, "broken")
        for folder in (inputs, broken):
            folder.mkdir()
        for number, data in enumerate(read(target)):
            (inputs / f"kept-{number}").write_bytes(data)
        options = [
            f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={SLOW_S}", f"-rss_limit_mb={MEMORY_MIB}",
            f"-max_len={LONGEST}", f"-artifact_prefix={broken}/", "-print_final_stats=1", "-verbosity=1",
        ]  # fmt: skip
        ran = _run(target, [*options, str(inputs)])
        found = [path.read_bytes() for path in sorted(broken.iterdir())]
        if keep:
            write(target, [path.read_bytes() for path in inputs.iterdir()] + found)
        for data in found:
            FINDINGS.mkdir(exist_ok=True)
            (FINDINGS / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
    count = re.search(r"stat::number_of_executed_units: (\d+)", ran)
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", ran)
    if count is None or not (reached or found):
        raise SystemExit(f"the fuzzer of {target} did not run:\n{ran[-4000:]}")
    coverage, features, inputs_kept = map(int, reached[-1]) if reached else (0, 0, 0)
    return {
        "executions": int(count[1]),
        "seconds": seconds,
        "edges": coverage,
        "features": features,
        "inputs": inputs_kept,
        "findings": [base64.b64encode(data).decode() for data in found],
        "said": ran[-4000:] if found else "",
    }


def _run(target: str, options: list[str]) -> str:
    command = [sys.executable, "-m", "tests.fuzz.decoders", "--inside", target, "--", *options]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout.decode(errors="replace")


def inside(target: str, options: list[str]) -> None:
    """Be the fuzzer of one target. Does not return."""
    try:
        import atheris
    except ImportError:
        raise SystemExit("this fuzzer needs atheris: pip install atheris") from None

    with atheris.instrument_imports(include=["gpumux.wire", "gpumux.program"]):
        from tests.fuzz import mutate, targets

    check = targets.TARGETS[target]

    def once(data: bytes) -> None:
        check(data)

    def changed(data: bytes, most: int, seed: int) -> bytes:
        return mutate.mutate(target, data, most, seed, atheris.Mutate)

    atheris.Setup(["fuzz", *options], once, custom_mutator=changed)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (default 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", help="one of the targets; may be given again (default: all)")
    parser.add_argument("--keep", action="store_true", help="add what reached new code to corpus/")
    parser.add_argument("--out", metavar="FILE.json", help="where to write the report")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside, args.options)
    from tests.fuzz.targets import TARGETS

    names = args.target or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        parser.error(f"there is no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    each = max(1, args.seconds // len(names))
    results = {name: fuzz(name, each, args.seed, args.keep) for name in names}
    for name, result in results.items():
        sys.stdout.write(
            f"{name:8} {result['executions']:>10} executions in {each} s, {result['features']} features, "
            f"{result['inputs']} inputs, {len(result['findings'])} findings\n"  # type: ignore[arg-type]
        )
        sys.stdout.write(str(result["said"]))
    if args.out:
        Path(args.out).write_text(json.dumps({"seed": args.seed, "targets": results}, indent=1) + "\n")
    return 1 if any(result["findings"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
