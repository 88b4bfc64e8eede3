"""Pictures of `microbench.fusion`'s results: throughput over the number of models, and memory (HFTA, figures 4, 6 and
8).

python -m microbench.fusionplot microbench/results/cpu-fusion-tiny.json --throughput docs/img/fusion_throughput.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpumux.errors import ConfigError
from microbench import charts, fusionfile

WAYS = {
    "fused": "array",
    "vmap": "vmap",
    "hand": "fused by hand",
    "processes": "a process each",
    "compiled": "vmap, compiled",
    "fused-compiled": "array, compiled",
    "serial": "one after another",
    "captured": "captured, one after another",
}


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("result", type=Path, metavar="RESULT.json", help="that microbench.fusion wrote")
    arguments.add_argument(
        "--throughput", type=Path, metavar="FILE.png", help="models' steps a second over the plain loop's"
    )
    arguments.add_argument(
        "--memory", type=Path, metavar="FILE.png", help="the most that was held beside the libraries"
    )
    args = arguments.parse_args(argv)
    if args.throughput is None and args.memory is None:
        arguments.error("say what to draw: --throughput FILE.png, --memory FILE.png or both")
    try:
        result = fusionfile.read(args.result)
        of = (
            f"\n{result['size']} models on {result['machine']['cpu']}, {result['threads']}"
            f" thread{'s' * (result['threads'] > 1)}"
        )
        if args.throughput is not None:
            title = f"Training throughput over one model after another{of}"
            _draw(args.throughput, title, throughput(result), "models' steps/s over serial (times)")
        if args.memory is not None:
            _draw(args.memory, f"Memory beside the libraries'{of}", memory(result), "memory (MiB)")
    except ConfigError as error:
        print(f"fusionplot: {error}", file=sys.stderr)
        return 1
    return 0


def throughput(result: dict[str, Any]) -> list[charts.Panel]:
    """A panel a workload: of each way (models, median, lowest, highest turn), over the plain loop's."""

    def point(way: dict[str, Any]) -> tuple[float, float, float] | None:
        found = way.get("over_serial")
        return None if found is None else (found.median, found.low, found.high)

    return _panels(result, point)


def memory(result: dict[str, Any]) -> list[charts.Panel]:
    def point(way: dict[str, Any]) -> tuple[float, float, float] | None:
        return (way["bytes"] / 2**20,) * 3 if "bytes" in way else None

    return _panels(result, point)


def _panels(result: dict[str, Any], point: Any) -> list[charts.Panel]:
    """Without the workloads of which nothing of the kind was measured."""
    panels = []
    for name, workload in result["workloads"].items():
        curves: dict[str, list[tuple[int, float, float, float]]] = {}
        for models, ways in sorted(workload["models"].items(), key=lambda each: int(each[0])):
            for way in WAYS:
                found = point(ways.get(way, {}))
                if found is not None:
                    curves.setdefault(way, []).append((int(models), *found))
        if curves:
            panels.append(charts.Panel(f"{name}, batch {workload['batch']}", curves))
    return panels


def _draw(path: Path, title: str, panels: list[charts.Panel], unit: str) -> None:
    if not panels:
        raise ConfigError(f"nothing of what {path} would show was measured", "measure it with microbench.fusion")
    charts.curves(path, title, panels, WAYS, ("models", unit))


if __name__ == "__main__":
    sys.exit(main())
