"""What a GPU did beside what the simulator says it would do: `pairwise` and `ablation` measured with --device cuda.

python -m microbench.predicted gpu-benchmarks.json, or the files that the two benchmarks wrote.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpumux.device.sim.spec import PRESETS
from gpumux.errors import ConfigError
from microbench import common

PREFIXES = {"H200": "h200", "H100": "h200", "A100": "a100"}  # the H100 has the H200's multiprocessors


def model_of(card: str) -> str:
    """The simulated device for a card by its name. Raises ConfigError where there is none."""
    for part, preset in PREFIXES.items():
        if part in card:
            return preset
    raise ConfigError(
        f"the simulator has no device like {card!r}", f"say which to compare with: --gpu-model {' or '.join(PRESETS)}"
    )


def grid(
    labels: Sequence[str], measured: Sequence[Sequence[float]], predicted: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """How far the simulator is off: measured - predicted, of each pair, and the pairs that are furthest."""
    off = [
        {"high": high, "low": low, "measured": m, "predicted": p, "off": m - p}
        for high, line, says in zip(labels, measured, predicted, strict=True)
        for low, m, p in zip(labels, line, says, strict=True)
    ]
    return {"pairs": off, **_errors([float(str(pair["off"])) for pair in off])}


def bars(measured: Sequence[dict[str, Any]], predicted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows that both have, by label: high and low throughput."""
    says = {row["label"]: row for row in predicted}
    off = []
    for row in measured:
        if row["label"] not in says:
            continue
        sources = {"measured": row, "predicted": says[row["label"]]}
        throughputs = {f"{what}_{source}": of[what] for source, of in sources.items() for what in ("high", "low")}
        off.append({"label": row["label"], **throughputs})
    return {
        "rows": off,
        **_errors([row[f"{what}_measured"] - row[f"{what}_predicted"] for row in off for what in ("high", "low")]),
    }


def _errors(off: Sequence[float]) -> dict[str, float]:
    sizes = [abs(each) for each in off]
    return {"mean_off": statistics.fmean(off), "median_size": statistics.median(sizes), "largest": max(sizes)}


def show_grid(found: dict[str, Any], most: int = 8) -> str:
    furthest = sorted(found["pairs"], key=lambda pair: -abs(pair["off"]))[:most]
    rows = [[p["high"], p["low"], *(f"{p[key]:.2f}" for key in ("measured", "predicted", "off"))] for p in furthest]
    return "\n".join([_summary(found), common.table(["furthest: high", "low", "measured", "predicted", "off"], rows)])


def show_bars(found: dict[str, Any]) -> str:
    names = ("high_measured", "high_predicted", "low_measured", "low_predicted")
    rows = [[row["label"], *(f"{row[name]:.3f}" for name in names)] for row in found["rows"]]
    header = ["technique", "high", "predicted", "low", "predicted"]
    return "\n".join([_summary(found), common.table(header, rows)])


def _summary(found: dict[str, Any]) -> str:
    return (
        f"measured less predicted: {found['mean_off']:+.3f} on average, {found['median_size']:.3f} in size (median), "
        f"{found['largest']:.3f} at most"
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument(
        "files", type=Path, nargs="+", metavar="FILE.json", help="what gpu_suite, pairwise or ablation wrote"
    )
    args = arguments.parse_args(argv)
    found: dict[str, Any] = {}
    try:
        for path in args.files:
            found |= read(path)
        if not found:
            raise ConfigError(
                "none of the files has a pairwise or ablation measured on a GPU", "run them with --device cuda"
            )
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        return 78
    for name, compared in found.items():
        print(f"{name}\n{show_grid(compared) if name == 'pairwise' else show_bars(compared)}")
    common.report("predicted", args.out, found)
    return 0


def read(path: Path) -> dict[str, Any]:
    """The comparisons in a file, by benchmark."""
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}", "name a file that gpu_suite, pairwise or ablation wrote"
        ) from error
    programs = body.get("programs", {str(body.get("benchmark")): {"result": body}})
    results = {name: ran.get("result") or {} for name, ran in programs.items() if name in ("pairwise", "ablation")}
    return {name: result["compared"] for name, result in results.items() if "compared" in result}


if __name__ == "__main__":
    sys.exit(main())
