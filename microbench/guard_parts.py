"""What each part of the guard is worth: the same jobs, with one part turned off at a time.

    python -m microbench.guard_parts --out guard-parts.json

On the simulated GPU: random pairs of one seed (sweep.py), a few of them on devices at three corners of what is guessed
about hardware (published.py), random arrivals (arrivals.py), four of Orion's configurations, and jobs of which the
guard has a wrong picture (guard_trials.py). A part is worth what the low jobs lose without it, and what the promise
loses: `over` counts runs of which the mean or the 99th percentile is over what was promised. Each part is turned off in
the sources of a copy of gpumux, which is compiled as the core is (`python -m gpumux.compile_core`); `--interpreted`
does without, and takes several times as long.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from pathlib import Path
from textwrap import indent
from typing import Any

from gpumux import compile_core
from gpumux.cli.arguments import whole
from gpumux.device.sim.spec import V100, GpuSpec, preset
from gpumux.errors import GpumuxError
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from microbench import arrivals, common, guard_trials, published, sweep

ROOT = Path(__file__).resolve().parents[1]
CORNERS: dict[str, Callable[[GpuSpec], GpuSpec]] = {
    name: published.ORION_ENVELOPE[name][0] for name in ("shared queue", "saturation least", "gaps most")
}
DISTURBED = ("noise of 20 %", "length from step to step", "16 low programs", "4 high jobs")
DISTURBED_PAIRS = 2  # of each
DISTURBED_STEPS = 800
PROMISED = 1.05
STEPS, LEARNING = 2000, 200

# ---- How a part is turned off: its source is edited. A source that an edit no longer fits is an error.

Edit = Callable[[Path], None]  # of the directory of gpumux's sources


class NotFound(GpumuxError):
    """A source does not have what is to be edited."""


def constant(module: str, **values: float) -> Edit:
    """Gives named constants other values."""

    def edit(sources: Path) -> None:
        path = sources / f"{module}.py"
        text = path.read_text()
        for name, value in values.items():
            text, found = re.subn(rf"^{name}: Final = [^#\n]*", f"{name}: Final = {value}  ", text, flags=re.MULTILINE)
            if found != 1:
                raise NotFound(f"{path} has {found} constants {name}", "mend microbench/guard_parts.py")
        path.write_text(text)

    return edit


def function(module: str, name: str, *lines: str) -> Edit:
    """Has a function, `name` or `Class.name`, do these lines first, the last of which returns."""

    def edit(sources: Path) -> None:
        path = sources / f"{module}.py"
        text = path.read_text()
        scope: list[ast.stmt] = ast.parse(text).body
        for part in name.split("."):
            found = [each for each in scope if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == part]
            if len(found) != 1:
                raise NotFound(f"{path} has no {name}", "mend microbench/guard_parts.py")
            scope = found[0].body
        first = scope[0]
        at = first.lineno - 1
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):  # its docstring
            assert first.end_lineno is not None
            at = first.end_lineno
        into = text.splitlines(keepends=True)
        into.insert(at, indent("\n".join(lines) + "\n", " " * first.col_offset))
        path.write_text("".join(into))

    return edit


def text(module: str, old: str, new: str) -> Edit:
    """Has other text where this one is, once."""

    def edit(sources: Path) -> None:
        path = sources / f"{module}.py"
        found = path.read_text()
        if found.count(old) != 1:
            raise NotFound(f"{path} has {found.count(old)} times {old!r}", "mend microbench/guard_parts.py")
        path.write_text(found.replace(old, new))

    return edit


HIGH, LEARN = "scheduler/guard/high_job", "scheduler/guard/learning"
BUDGET, COSTS, TIMING = "scheduler/guard/budget", "scheduler/guard/costs", "scheduler/guard/timing"
NEVER = 1 << 40
STEADY_TAIL = constant(BUDGET, TAIL_FALL=1.0, TAIL_RISE=1.0, TAIL_RECOVER=1.0)

PARTS: dict[str, tuple[Edit, ...]] = {
    "nothing": (),
    "noise: steps": (
        function(BUDGET, "StepNoise.add", "return"), function(BUDGET, "StepNoise.confirmations", "return 1"),
    ),
    "noise: baselines": (
        function(
            HIGH, "Baseline.add", "self.samples.append(seconds)", "self.count += 1",
            "self.known = self.known or self.count >= ENOUGH_SAMPLES", "del self.samples[:-MEDIAN_OF]",
            "self.value = sorted(self.samples)[(len(self.samples) - 1) // 2]", "return False",
        ),
    ),
    "surprise": (STEADY_TAIL,),
    "surprise, started at the most": (STEADY_TAIL, constant(BUDGET, TAIL_START=0.92)),
    "violations' debt": (constant(BUDGET, DEBT_FACTOR=1.0),),
    "moments": (
        function(COSTS, "LaunchPlan.__init__", "at, tried = [None] * len(at), [None] * len(tried)"),
        text(TIMING, "return at, next_step, START, until", "return at, next_step, FIRST_HALF, until"),
        text(TIMING, "return len(solo_s), True, START, until", "return len(solo_s) - 1, False, SECOND_HALF, until"),
        text(TIMING, "return at, next_step, AFTER_START, until", "return at, next_step, FIRST_HALF, until"),
        text(TIMING, "return at, next_step, MIDDLE, until", "return at, next_step, SECOND_HALF, until"),
    ),
    "halves of pieces": (text(TIMING, "SECOND_HALF if 2 * (start - began)", "FIRST_HALF if 2 * (start - began)"),),
    "the middle of pieces": (
        text(COSTS, "MOMENTS: Final = (START, AFTER_START, MIDDLE)", "MOMENTS: Final = (START, AFTER_START)"),
    ),
    "effects of moments": (constant(COSTS, MOST_EFFECT=1.0),),
    "the end of the step": (function(HIGH, "HighJob.pause", "return 0.0"),),
    "stuck modes": (
        text(HIGH, "return EXPLORE_IF_STUCK if budget.violations_left >= 1.0 and held_long else EXPLORE_NEVER",
             "return EXPLORE_NEVER"),
    ),
    "confirming fits": (function(COSTS, "LaunchCost.may_fit", "return False"),),
    "repeat factor": (constant(COSTS, REPEAT_FACTOR=1.0),),
    "measuring again": (constant(COSTS, PROBE_EVERY=NEVER),),
    "price": (text(BUDGET, "if gain < self.price * avoidable:", "if gain < 0.0:"),),
    "credit": (text(BUDGET, 'return "budget"', 'return ""'),),
    "saved credit": (constant(BUDGET, MOST_CREDIT=1.0),),
    "asking out of turn": (text("scheduler/policy", "if ready.size > 1 + len(others):", "if ready.size < 0:"),),
    "asking others": (function("scheduler/policy", "Guarded._others", "return []"),),
    "finer cuts": (function(LEARN, "Cutting.step_ended", "return"),),
    "finest cuts": (constant(LEARN, FINEST=3.0),),
    "calibration": (constant(HIGH, SOLO_EVERY=NEVER),),
    "look-ahead: next step": (function(TIMING, "next_step_loss", "return 0.0"),),
    "look-ahead: pauses": (constant(TIMING, MOST_LOOKAHEAD=1),),
    "shares": (function("scheduler/guard/guard", "SlowdownGuard._best_share", "return whole"),),
    "bans": (function(LEARN, "judge", "return"),),
    "watching one step in four": (constant(HIGH, KNOWN_STEPS=NEVER),),
    "wider window": (function("scheduler/guard/decisions", "LowWindow.adapt", "return"),),
    "inherited costs": (function(HIGH, "HighCosts.recut", "return HighCosts(self.key, bounds, predicted)"),),
    "unknown ranges": (text(HIGH, "range_cost.rate = range_cost.upper_rate = prior", "pass"),),
    "measured speed": (constant(LEARN, LEAST_SPEED=1.0),),
    "speed beside each range": (text(LEARN, "max(range_cost.speed, low_costs.speed,", "max(low_costs.speed,"),),
    "overrun": (function(LEARN, "overrun", "return 0.0"),),
    "launch overhead": (text(LEARN, "SMOOTHING * (max(0.0, late) - view.launch_overhead)", "0.0"),),
    "old costs are no reason to wait": (constant("scheduler/guard/guard", OLD_STEPS=NEVER),),
    "costs elsewhere": (
        text("scheduler/guard/guard", "min(low_costs.best(piece.span, high.steps - OLD_STEPS), plan.cost)",
             "plan.cost"),
    ),
    "holds that outlast a piece": (function(HIGH, "HighJob.piece_changed", "self._reconsider()", "return"),),
    "moments not afforded": (function("scheduler/guard/guard", "SlowdownGuard._unaffordable", "return False"),),
    "rates of low pieces": (function(COSTS, "LowCosts.relative_rate", "return 1.0"),),
    "unpaid losses": (text(BUDGET, "unpaid = excess - MOST_OVERDRAFT * self.credit", "unpaid = 0.0"),),
    "recovery without low work": (constant(BUDGET, TAIL_RECOVER=1.0),),
    "arrivals that the scheduler sees late": (constant(BUDGET, UNSEEN_S=0.0),),
    "trust in arrivals": (function(HIGH, "ArrivalTrust.step_ended", "return"),),
    "arrivals at random": (constant(HIGH, AT_RANDOM=0.0),),
    "risk at random": (constant(TIMING, RISK=0.0, UNKNOWN_RISK=0.0, MOST_RISK=0.0),),
}  # fmt: skip


@contextmanager
def turned_off(part: str, *, compiled: bool) -> Iterator[Path]:
    """A directory with the packages gpumux, without that part, and microbench. Raises NotFound; where gpumux is to be
    compiled, BuildFailed or compile_core.Missing."""
    with tempfile.TemporaryDirectory(prefix="guard-parts-") as name:
        left_out = shutil.ignore_patterns("__pycache__", "__compiled__", "results")
        for package in ("gpumux", "microbench"):
            shutil.copytree(ROOT / package, Path(name) / package, ignore=left_out)
        for edit in PARTS[part]:
            edit(Path(name) / "gpumux")
        if compiled:
            compile_core.build(Path(name) / "gpumux")
        yield Path(name)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--pairs", type=whole, default=30, help="on the device as it is (default 30)")
    parser.add_argument("--corner-pairs", type=whole, default=8, help="on each of three others (default 8)")
    parser.add_argument("--steps", type=whole, default=STEPS, help=f"high steps, {LEARNING} of them to learn")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of runs (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=whole, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--interpreted", action="store_true", help="don't compile: needs no C compiler")
    args = parser.parse_args(argv)
    if args.steps <= LEARNING:
        parser.error(f"--steps has to be more than {LEARNING}")
    facts = common.machine()
    print(common.describe(facts))
    found: list[dict[str, Any]] = []
    runs = [case for case in cases(args.pairs, args.corner_pairs) if case[0] in args.kinds]
    with ThreadPoolExecutor(args.processes) as pool:
        work = [
            pool.submit(without, part, runs, args.seed, args.steps, compiled=not args.interpreted)
            for part in args.parts
        ]
        try:
            for each in work:
                found.append(each.result())
                print(json.dumps(found[-1]["summary"]), flush=True)
                report = {"machine": facts, "seed": args.seed, "steps": args.steps, "parts": found}
                common.report("guard_parts", args.out, report)  # an interrupted run keeps what is done
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(common.table(*table(found)))
    return 0


KINDS = ("pairs", "arrivals", "orion", "disturbed")
Case = tuple[str, str, int]  # the kind of run, the device or what is disturbed, which


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
    for name in DISTURBED:
        for pair in range(DISTURBED_PAIRS):
            yield "disturbed", name, pair


def without(part: str, runs: list[Case], seed: int, steps: int, *, compiled: bool) -> dict[str, Any]:
    """All runs with this part turned off, in a process of its own. Raises what `turned_off` does, or
    CalledProcessError."""
    source = "import json, sys; from microbench import guard_parts as it; it.measure(*json.load(sys.stdin))"
    core = "compiled" if compiled else "interpreted"
    with turned_off(part, compiled=compiled) as directory:
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=directory, env={**os.environ, "GPUMUX_CORE": core},
            input=json.dumps([runs, seed, steps]), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    rows = json.loads(done.stdout)
    return {"part": part, "rows": rows, "summary": summary(part, rows)}


def measure(runs: list[Case], seed: int, steps: int) -> None:
    """All runs with the guard of this process: prints a row for each high job, as JSON."""
    rows = []
    for kind, device, which in runs:
        if kind == "disturbed":
            for found in guard_trials.measure(device, "as it is", which, seed, min(steps - LEARNING, DISTURBED_STEPS)):
                row = {"kind": kind, "device": device, "which": which, "learning": found["learning"]["mean"]}
                rows.append(row | found["after"] | {"low": found["low"]})
            continue
        high, low, spec = jobs(kind, device, which, seed)
        learning_steps = arrivals.LEARNING if kind == "arrivals" else LEARNING
        result = Simulation((high, low), spec, "guarded").run(steps=steps - LEARNING, warmup_steps=learning_steps)
        if result.interrupted:
            raise KeyboardInterrupt
        job = result.job(high.name)
        row = {"kind": kind, "device": device, "which": which, "mean": job.mean_slowdown, "p99": job.p99_slowdown}
        rows.append(row | {"learning": job.learning_slowdown, "low": result.job(low.name).relative_throughput})
    print(json.dumps(rows))


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
