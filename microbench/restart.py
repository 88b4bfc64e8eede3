"""A high job's first steps: in a daemon that knows nothing, and in one that took up what an earlier one had learned.

    python -m microbench.restart --out restart.json

Random pairs of jobs on the simulated GPU (sweep.py). An earlier daemon runs `--learned` steps of the high job; then two
new ones run the same jobs from the start, with what it kept and without. Compared are the first `--steps` steps: the
high job's mean and 99th percentile over alone, the launches that were explored although they should have been held, and
the low job's share of the time.
"""

from __future__ import annotations

import sys
from typing import Any

from gpumux import config
from gpumux.cli.arguments import whole
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.scheduler.scheduler import Scheduler
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from microbench import common, sweep

FIGURES = ("mean", "p99", "explored", "low")


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--gpu-model", choices=config.SIMULATED_GPUS, default="a100", help="default: a100")
    parser.add_argument("--pairs", type=whole, default=30, help="how many (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-slowdown", type=float, default=1.05, help="what is promised (default: 1.05)")
    parser.add_argument("--learned", type=whole, default=1500, help="high steps of the earlier daemon (default 1500)")
    parser.add_argument("--steps", type=whole, default=200, help="high steps that are compared (default 200)")
    args = parser.parse_args(argv)
    facts = common.machine()
    print(common.describe(facts))
    spec, rows = preset(args.gpu_model), []
    for pair in range(args.pairs):
        rows.append({"pair": pair, **compare(sweep.random_pair(args.seed, pair, spec, args.max_slowdown), spec, args)})
        if sys.stderr.isatty():
            print(f"{len(rows)} of {args.pairs}", end="\r", file=sys.stderr)
    print(common.table(*table(rows)))
    common.report("restart", args.out, {"machine": facts, "seed": args.seed, "rows": rows, "targets": targets(rows)})
    return 0


def compare(jobs: tuple[Workload, Workload], spec: GpuSpec, args: Any) -> dict[str, Any]:
    earlier = daemon(jobs, spec)
    earlier.run(steps=args.learned)
    knows = scheduler(earlier)
    kept = {program: knows.kept(program) for program in knows.learned()}
    after = daemon(jobs, spec)
    for program, known in kept.items():
        scheduler(after).take_up(program, known)
    return {"new": first_steps(daemon(jobs, spec), args.steps), "taken up": first_steps(after, args.steps)}


def daemon(jobs: tuple[Workload, Workload], spec: GpuSpec) -> Simulation:
    return Simulation(jobs, spec, "guarded")


def scheduler(simulation: Simulation) -> Scheduler:
    found = simulation.scheduler
    assert isinstance(found, Scheduler)
    return found


def first_steps(simulation: Simulation, steps: int) -> dict[str, float]:
    result = simulation.run(steps=steps)
    if result.interrupted:
        raise KeyboardInterrupt
    job = result.job("high")
    explored = scheduler(simulation).snapshot()["guard"]["probes_total"]
    return {"mean": job.mean_slowdown, "p99": job.p99_slowdown, "explored": explored, "low": result.harvest}


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Median and worst over the pairs."""
    lines = []
    for figure in FIGURES:
        line = [figure]
        for kind in ("new", "taken up"):
            values = [row[kind][figure] for row in rows]
            worst = min(values) if figure == "low" else max(values)
            digits = 0 if figure == "explored" else 3
            line += [f"{common.percentile(values, 0.5):.{digits}f}", f"{worst:.{digits}f}"]
        lines.append(line)
    return ["", "new: median", "worst", "taken up: median", "worst"], lines


def targets(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Hardly anything is to be learned twice."""
    new, again = (sum(row[kind]["explored"] for row in rows) for kind in ("new", "taken up"))
    part = again / new if new else 0.0
    return {"explored launches, over those of a new daemon": {"value": part, "target": 0.1, "met": part <= 0.1}}


if __name__ == "__main__":
    sys.exit(main())
