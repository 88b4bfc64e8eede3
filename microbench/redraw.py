"""The diagrams of the manual, drawn again from the results in microbench/results, without measuring again.

    python -m microbench.redraw --out docs/img

Each benchmark draws the same from a run of its own (`--png`, `--picture`); pictures of plans and simulations come from
the commands beside them in the manual, those of screens from screenshots.py and status_page.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumux.errors import ConfigError
from gpumux.files import check_writable
from microbench import ablation, convergence, fusionplot, pairwise, sweep, wave_curves, waves

RESULTS = Path(__file__).parent / "results"


def read(name: str) -> Any:
    """A stored result. Raises ConfigError if there is none."""
    path = RESULTS / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", "run this in a checkout") from None


def draw_ablation(path: Path) -> None:
    ablation.draw(path, read("sim-ablation")["rows"], "a100 sim")


def draw_pairs(path: Path, name: str) -> None:
    found = read(name)
    labels = [pairwise.Kind(**kind).label for kind in found["kernels"]]
    pairwise.draw(path, labels, found["throughput"], f"{found['policy']} on {found['device']}")


def draw_sweep(path: Path) -> None:
    found = read("sim-sweep")
    sweep.draw(path, found, found[0]["max_slowdown"])


def draw_wave_curves(path: Path) -> None:
    found = read("wave-curves")
    wave_curves.draw(path, found["cells"], found["seeds"])


def draw_fusion(path: Path, name: str, flag: str) -> None:
    if fusionplot.main([str(RESULTS / f"{name}.json"), flag, str(path)]):
        raise ConfigError(f"{name} can't be drawn", "the line above says why")


DRAWN: dict[str, Callable[[Path], None]] = {
    "ablation.png": draw_ablation,
    "pairwise.png": lambda path: draw_pairs(path, "sim-pairwise"),
    "pairwise-half.png": lambda path: draw_pairs(path, "sim-pairwise-half"),
    "sweep.png": draw_sweep,
    "wave-curves.svg": draw_wave_curves,
    "wave-memory.svg": lambda path: waves.draw(path, read("sim-waves")["memory_over_time"]),
    "fusion_throughput.png": lambda path: draw_fusion(path, "cpu-fusion-floor", "--throughput"),
    "fusion_convergence.png": lambda path: convergence.draw(path, read("cpu-convergence")["models"]),
    "fusion_memory.png": lambda path: draw_fusion(path, "cpu-fusion-memory", "--memory"),
}


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write them")
    arguments.add_argument("--only", choices=DRAWN, metavar="NAME", nargs="+", default=list(DRAWN), help="not all")
    args = arguments.parse_args(argv)
    try:
        for name in args.only:
            check_writable(args.out / name)
            DRAWN[name](args.out / name)
            print(args.out / name)
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main())
