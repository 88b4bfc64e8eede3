"""A high job whose steps come at random, as a server's requests do, beside low work: is the promise kept, and what is
left over?

    python -m microbench.arrivals --out arrivals.json

On the simulated GPU: steps of 0.5, 2 and 5 ms, so many a second, under `guarded`; with the same pauses at regular
times; under `paced`, which promises nothing. The low job's operators take 30 us each and fill the device, so that every
one of them delays a step that meets it. What the job is promised is a mean of `--max-slowdown` and a 99th percentile of
twice the excess; the first steps, in which the guard learns, are left out. Slowdowns are over the same job alone, which
waits for its own steps, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpumux import config
from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.spec import preset
from gpumux.errors import GpumuxError
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from microbench import common

KERNELS = (5, 20, 50)  # of a high step, 100 us each
RATES = (20.0, 100.0)  # steps a second
FULL = Kernel("high", 432, 100e-6, 4, 0)
LOW = Workload("low", Priority.LOW, (Kernel("low", 432, 30e-6, 4, 0),) * 30)
WAYS = (("guarded", True), ("guarded", False), ("paced", True))
LEARNING = 400  # steps


class Row(NamedTuple):
    """`step_s`: seconds of a high step's kernels; `rate`: of them a second; `random`: when they come; `low`: the low
    job's throughput over alone."""

    step_s: float
    rate: float
    random: bool
    policy: str
    mean_slowdown: float
    p99_slowdown: float
    low: float


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--gpu-model", choices=config.SIMULATED_GPUS, default="a100", help="default: a100")
    arguments.add_argument("--max-slowdown", type=float, default=1.05, help="what is promised (default: 1.05)")
    arguments.add_argument("--steps", type=int, default=1000, help="high steps of each, after those for learning")
    arguments.add_argument("--kernels", type=int, nargs="+", default=list(KERNELS), help="of a high step, 100 us each")
    arguments.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="high steps a second")
    args = arguments.parse_args(argv)
    facts = common.machine()
    print(common.describe(facts))
    found: list[Row] = []
    try:
        for row in rows(args):
            found.append(row)
            if sys.stderr.isatty():
                print(f"{len(found)} of {len(args.kernels) * len(args.rates) * len(WAYS)}", end="\r", file=sys.stderr)
    except GpumuxError as error:
        print(f"arrivals: {error}", file=sys.stderr)
        return 78
    header = ["high step", "a second", "they come", "policy", "mean", "p99", "low work"]
    print(common.table(header, [cells(row) for row in found]))
    most = 1 + 2 * (args.max_slowdown - 1)
    broken = [
        row
        for row in found
        if row.policy == "guarded" and (row.mean_slowdown > args.max_slowdown or row.p99_slowdown > most)
    ]
    print(f"promised {args.max_slowdown:.2f} and {most:.2f}; guarded breaks it in {len(broken)} of these")
    result: dict[str, Any] = {"machine": facts, "promise": {"mean": args.max_slowdown, "p99": most}}
    result["rows"] = [row._asdict() for row in found]
    common.report("arrivals", args.out, result)
    return 0


def rows(args: Any) -> Iterator[Row]:
    for kernels in args.kernels:
        for rate in args.rates:
            for policy, random in WAYS:
                step_s = kernels * FULL.block_s
                pace = {"rate": rate} if random else {"think_s": 1.0 / rate - step_s}
                high = Workload("high", Priority.HIGH, (FULL,) * kernels, max_slowdown=args.max_slowdown, **pace)
                simulation = Simulation((high, LOW), preset(args.gpu_model), policy)
                result = simulation.run(steps=args.steps + LEARNING, warmup_steps=LEARNING)
                job = result.job("high")
                yield Row(
                    step_s, rate, random, policy, job.mean_slowdown, job.p99_slowdown,
                    result.job("low").relative_throughput,
                )  # fmt: skip


def cells(row: Row) -> list[str]:
    when = "at random" if row.random else "regularly"
    slow = [f"{row.mean_slowdown:.3f}", f"{row.p99_slowdown:.3f}"]
    return [f"{row.step_s * 1e3:.1f} ms", f"{row.rate:g}", when, row.policy, *slow, f"{row.low:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
