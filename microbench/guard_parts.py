"""What each part of the guard is worth: the same jobs, with one part turned off at a time.

    GPUMUX_CORE=interpreted python -m microbench.guard_parts --out guard-parts.json

On the simulated GPU: random pairs of one seed (sweep.py), a few of them on devices at three corners of what is guessed
about hardware (published.py), random arrivals (arrivals.py) and four of Orion's configurations. A part is worth what
the low jobs lose without it, and what the promise loses: `over` counts runs of which the mean or the 99th percentile is
over what was promised. Parts are turned off in the running modules, so the core has to be interpreted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from math import inf
from multiprocessing import get_context
from typing import Any

from gpumux.cli.arguments import whole
from gpumux.device.sim.spec import V100, GpuSpec, preset
from gpumux.scheduler import RUNS
from gpumux.scheduler import policy as policies
from gpumux.scheduler.guard import bans, budget, costs, decisions, device_view, guard, high_job, learning, timing
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from microbench import arrivals, common, published, sweep

MODULES = (bans, budget, costs, decisions, device_view, guard, high_job, learning, timing, policies)
CORNERS: dict[str, Callable[[GpuSpec], GpuSpec]] = {
    name: published.ORION_ENVELOPE[name][0] for name in ("shared queue", "saturation least", "gaps most")
}
PROMISED = 1.05
STEPS, LEARNING = 2000, 200


def constant(**values: Any) -> Callable[[], None]:
    """Turns a part off by other values of named constants, in every module that has them."""

    def turn_off() -> None:
        for name, value in values.items():
            having = [module for module in MODULES if hasattr(module, name)]
            assert having, name
            for module in having:
                setattr(module, name, value)

    return turn_off


def function(owner: Any, name: str, instead: Any) -> Callable[[], None]:
    """Turns a part off by another function or property; of a module's functions in every module that has it."""

    def turn_off() -> None:
        having = [module for module in MODULES if hasattr(module, name)] if owner in MODULES else [owner]
        assert having, name
        for each in having:
            assert hasattr(each, name)
            setattr(each, name, instead)

    return turn_off


def all_of(*parts: Callable[[], None]) -> Callable[[], None]:
    def turn_off() -> None:
        for part in parts:
            part()

    return turn_off


def _plain_add(self: Any, seconds: float) -> bool:
    """Baseline.add without the work's change, noise and lateness."""
    self.samples.append(seconds)
    self.count += 1
    self.known = self.known or self.count >= high_job.ENOUGH_SAMPLES
    del self.samples[: -high_job.MEDIAN_OF]
    self.value = sorted(self.samples)[(len(self.samples) - 1) // 2]
    return False


def _no_plan(self: Any, low: Any, seconds: float, **about: Any) -> Any:
    nowhere: list[Any] = [None] * (3 * len(self.by_share[0].ranges) + 1)
    return costs.LaunchPlan(nowhere, nowhere, seconds=seconds, version=0, step=0, price=1.0, limit=0.0)


_position = timing._position


def _halves(running: Any, view: Any) -> tuple[int, bool, int, float]:
    at, next_step, moment, until = _position(running, view)
    if at == len(running.costs.solo_s):
        at, next_step = at - 1, False
    return at, next_step, moment if moment >= timing.FIRST_HALF else timing.FIRST_HALF, until


def _whole_piece(running: Any, view: Any) -> tuple[int, bool, int, float]:
    at, next_step, moment, until = _position(running, view)
    return at, next_step, timing.FIRST_HALF if moment == timing.SECOND_HALF else moment, until


def _never_stuck(self: Any, last_launch_step: int) -> int:
    bears = self.budget.violations_left >= high_job.SPARE_VIOLATIONS and self.budget.price > high_job.LEAST_PRICE
    explores = self.steps < high_job.LEARNING_STEPS or bears
    return int(costs.EXPLORE_ALWAYS if explores else costs.EXPLORE_NEVER)


def _no_recut(self: Any, bounds: Any, predicted: Any) -> Any:
    return high_job.HighCosts(self.key, bounds, predicted)


def _first_only(self: Any, ready: Any, first: Any) -> list[Any]:
    return []


def _next_two(self: Any, ready: Any, first: Any) -> list[Any]:
    return list(ready.next_two())


_refuses = budget.SlowdownBudget.refuses


def _no_price(self: Any, cost: float, upper: float, **about: Any) -> str:
    return _refuses(self, cost, upper, **{**about, "avoidable": 0.0})


def _no_credit(self: Any, cost: float, upper: float, **about: Any) -> str:
    reason = _refuses(self, cost, upper, **about)
    return "" if reason == "budget" else reason


def _nothing(*_: Any, **__: Any) -> None: ...


def _zero(*_: Any, **__: Any) -> float:
    return 0.0


PARTS: dict[str, Callable[[], None]] = {
    "nothing": _nothing,
    "noise: steps": all_of(
        function(budget.StepNoise, "add", _nothing), function(budget.StepNoise, "confirmations", lambda self: 1)
    ),
    "noise: baselines": function(high_job.Baseline, "add", _plain_add),
    "surprise": constant(TAIL_FALL=1.0, TAIL_RISE=1.0, TAIL_RECOVER=1.0),
    "surprise, started at the most": constant(TAIL_FALL=1.0, TAIL_RISE=1.0, TAIL_RECOVER=1.0, TAIL_START=0.92),
    "violations' debt": constant(DEBT_FACTOR=1.0),
    "moments": all_of(
        function(costs.LowPlacement, "plan", _no_plan), function(timing, "_position", _halves),
    ),
    "halves of pieces": function(timing, "_position", _whole_piece),
    "the middle of pieces": constant(MOMENTS=(costs.START, costs.AFTER_START)),
    "effects of moments": constant(MOST_EFFECT=1.0),
    "the end of the step": function(high_job.HighJob, "pause", _zero),
    "stuck modes": function(high_job.HighJob, "exploration", _never_stuck),
    "confirming fits": function(costs.LaunchCost, "may_fit", lambda self, limit: False),
    "repeat factor": constant(REPEAT_FACTOR=1.0),
    "measuring again": constant(PROBE_EVERY=1 << 40),
    "price": function(budget.SlowdownBudget, "refuses", _no_price),
    "credit": function(budget.SlowdownBudget, "refuses", _no_credit),
    "saved credit": constant(MOST_CREDIT=1.0),
    "asking out of turn": function(policies.Guarded, "_others", _next_two),
    "asking others": function(policies.Guarded, "_others", _first_only),
    "finer cuts": function(learning.Cutting, "step_ended", _nothing),
    "finest cuts": constant(FINEST=3.0),
    "calibration": constant(SOLO_EVERY=1 << 40),
    "look-ahead: next step": function(timing, "next_step_loss", _zero),
    "look-ahead: pauses": constant(MOST_LOOKAHEAD=1),
    "shares": function(guard.SlowdownGuard, "_best_share", lambda self, whole, piece: whole),
    "bans": function(learning, "judge", _nothing),
    "watching one step in four": constant(KNOWN_STEPS=1 << 40),
    "wider window": function(decisions.LowWindow, "adapt", _nothing),
    "trust by program": constant(PROGRAM_DEBT=0.0),
    "inherited costs": function(high_job.HighCosts, "recut", _no_recut),
    "unknown ranges": function(high_job.HighCosts, "fill_unknown", lambda self: self.updated.clear()),
    "measured speed": constant(LEAST_SPEED=1.0),
    "overrun": function(learning, "overrun", _zero),
    "old costs are no reason to wait": constant(OLD_STEPS=1 << 40),
    "trust in arrivals": function(high_job.ArrivalTrust, "step_ended", _nothing),
    "arrivals at random": constant(AT_RANDOM=0.0),
    "risk at random": constant(RISK=0.0, UNKNOWN_RISK=0.0, MOST_RISK=0.0),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--pairs", type=whole, default=30, help="on the device as it is (default 30)")
    parser.add_argument("--corner-pairs", type=whole, default=8, help="on each of three others (default 8)")
    parser.add_argument("--steps", type=whole, default=STEPS, help=f"high steps, {LEARNING} of them to learn")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of runs (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=whole, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    if RUNS.directory is not None:
        print("guard_parts: the core is compiled; set GPUMUX_CORE=interpreted", file=sys.stderr)
        return 78
    if args.steps <= LEARNING:
        parser.error(f"--steps has to be more than {LEARNING}")
    facts = common.machine()
    print(common.describe(facts))
    found: list[dict[str, Any]] = []
    runs = [case for case in cases(args.pairs, args.corner_pairs) if case[0] in args.kinds]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        work = [pool.submit(without, part, runs, args.seed, args.steps) for part in args.parts]
        for each in work:
            found.append(each.result())
            print(json.dumps(found[-1]["summary"]), flush=True)
    print(common.table(*table(found)))
    common.report("guard_parts", args.out, {"machine": facts, "seed": args.seed, "steps": args.steps, "parts": found})
    return 0


KINDS = ("pairs", "arrivals", "orion")
Case = tuple[str, str, int]  # the kind of run, the device, which


def cases(pairs: int, corner_pairs: int) -> Iterator[Case]:
    for pair in range(pairs):
        yield "pairs", "as it is", pair
    for corner in CORNERS:
        for pair in range(corner_pairs):
            yield "pairs", corner, pair
    for at in range(len(arrivals.KERNELS) * len(arrivals.RATES)):
        yield "arrivals", "as it is", at
    for at in range(0, len(published.CONFIGURATIONS), max(1, len(published.CONFIGURATIONS) // 4)):
        yield "orion", "as it is", at


def without(part: str, runs: list[Case], seed: int, steps: int) -> dict[str, Any]:
    """All runs with this part turned off, in a process of its own."""
    PARTS[part]()
    rows = []
    for kind, device, which in runs:
        high, low, spec = jobs(kind, device, which, seed)
        learning_steps = arrivals.LEARNING if kind == "arrivals" else LEARNING
        result = Simulation((high, low), spec, "guarded").run(steps=steps - LEARNING, warmup_steps=learning_steps)
        if result.interrupted:
            raise KeyboardInterrupt
        job = result.job(high.name)
        row = {"kind": kind, "device": device, "which": which, "mean": job.mean_slowdown, "p99": job.p99_slowdown}
        rows.append(row | {"learning": job.learning_slowdown, "low": result.job(low.name).relative_throughput})
    return {"part": part, "rows": rows, "summary": summary(part, rows)}


def jobs(kind: str, device: str, which: int, seed: int) -> tuple[Workload, Workload, GpuSpec]:
    """The jobs of a run, and its device."""
    spec = preset("a100")
    if device in CORNERS:
        spec = CORNERS[device](spec)
    if kind == "pairs":
        return *sweep.random_pair(seed, which, spec, PROMISED), spec
    if kind == "arrivals":
        kernels, rate = divmod(which, len(arrivals.RATES))
        pieces = (arrivals.FULL,) * arrivals.KERNELS[kernels]
        high = Workload("high", Priority.HIGH, pieces, max_slowdown=PROMISED, rate=arrivals.RATES[rate])
        return high, arrivals.LOW, spec
    one = published.CONFIGURATIONS[which]
    high = Workload("high", Priority.HIGH, published.trace(one.high, V100, 1.0), rate=one.rate,
                    max_slowdown=PROMISED)  # fmt: skip
    low = Workload("low", Priority.LOW, published.trace(one.low, V100, 1.0), rate=one.low_rate)
    return high, low, V100


def summary(part: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind and device: low work over alone, the worst of mean and 99th percentile, and how many are over."""
    said: dict[str, Any] = {"part": part}
    groups = {(row["kind"], row["device"]) for row in rows}
    for kind, device in sorted(groups):
        of = [row for row in rows if (row["kind"], row["device"]) == (kind, device)]
        over = [row for row in of if row["mean"] > PROMISED or row["p99"] > 1 + 2 * (PROMISED - 1)]
        said[f"{kind}, {device}"] = {
            "low": sum(row["low"] for row in of) / len(of), "mean": max(row["mean"] for row in of),
            "p99": max(row["p99"] for row in of), "learning": max(row["learning"] for row in of), "over": len(over),
        }  # fmt: skip
    return said


def table(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Low work over alone in each group, over that of the whole guard, and the worst of each over all."""
    groups = [key for key in found[0]["summary"] if key != "part"]
    whole_guard = found[0]["summary"]
    lines = []
    for each in found:
        said = each["summary"]
        kept = [said[key]["low"] / whole_guard[key]["low"] if whole_guard[key]["low"] else inf for key in groups]
        worst = [max(said[key][what] for key in groups) for what in ("mean", "p99", "learning")]
        over = sum(said[key]["over"] for key in groups)
        lines.append(
            [each["part"], *[f"{value:.3f}" for value in kept], *[f"{value:.3f}" for value in worst], str(over)]
        )
    return ["without", *groups, "mean", "p99", "learning", "over"], lines


if __name__ == "__main__":
    sys.exit(main())
