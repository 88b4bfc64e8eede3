"""One experiment as a program: its question, what it measures, a table and a JSON file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpumux.cli.arguments import whole
from microbench import common
from microbench.cuda.driver import Gpu, NoDevice

Row: TypeAlias = dict[str, Any]
NO_DEVICE = 69  # EX_UNAVAILABLE


@dataclass(frozen=True)
class Experiment:
    """`measure(gpu, repeats)` gives rows of equal keys, which end in their unit (`_us`, `_ms`, `_gib_s`, or none for
    ratios and counts). `answer(rows)` is a sentence about them."""

    name: str
    question: str
    method: str
    measure: Callable[[Gpu, int], list[Row]]
    answer: Callable[[Sequence[Row]], str]
    repeats: int = 30


def main(experiment: Experiment, argv: Sequence[str] | None = None, *, gpu: Gpu | None = None) -> int:
    """Measure, print the table last, write the file. Exit status 69 where there is no GPU."""
    arguments = common.parser(f"{experiment.question}\n\n{experiment.method}")
    arguments.add_argument("--repeats", type=whole, default=experiment.repeats, help=f"default: {experiment.repeats}")
    args = arguments.parse_args(argv)
    try:
        gpu = gpu or Gpu()
    except NoDevice as error:
        print(f"{experiment.name}: not run: {error}", file=sys.stderr)
        return NO_DEVICE
    rows = experiment.measure(gpu, args.repeats)
    answer = experiment.answer(rows)
    facts = gpu.facts()
    result = {"question": experiment.question, "method": experiment.method, "repeats": args.repeats, "device": facts}
    common.report(f"cuda.{experiment.name}", args.out, {**result, "rows": rows, "answer": answer})
    print(f"{facts['name']}, driver {facts['driver']}\n{experiment.question}\n{answer}\n{show(rows)}")
    return 0


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with equal keys."""
    header = list(rows[0])
    return common.table(header, [[cell(row[key]) for key in header] for row in rows])


def cell(value: Any) -> str:
    """Three significant digits; counts and words as they are."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)


def spread(samples: Sequence[float], name: str, unit: float = 1e6) -> Row:
    """`name` is the median's key, `name_p99` and `name_max` those beside it; samples in seconds, shown in
    microseconds."""
    base, _, suffix = name.rpartition("_")
    ordered = sorted(samples)
    return {
        name: unit * ordered[len(ordered) // 2],
        f"{base}_p99_{suffix}": unit * common.percentile(ordered, 0.99),
        f"{base}_max_{suffix}": unit * ordered[-1],
    }


def median(samples: Sequence[float]) -> float:
    return common.figure(samples).median
