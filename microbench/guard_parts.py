"""What each part of the guard is worth: the same jobs, with one part turned off at a time.

    python -m microbench.guard_parts --out guard-parts.json

On the simulated GPU: random pairs of one seed (sweep.py), a few of them on devices at three corners of what is guessed
about hardware (published.py), random arrivals (arrivals.py), four of Orion's configurations, and jobs of which the
guard has a wrong picture (guard_trials.py). A part is worth what the low jobs lose without it, and what the promise
loses: `over` counts runs of which the mean or the 99th percentile is over what was promised. Each part gets a switch in
the sources of a copy of gpumux, which is compiled once, as the core is (`python -m gpumux.compile_core`);
`--interpreted` does without, and takes several times as long. `--together` turns off several parts at once.

Pairs differ by more than most parts are worth: without the repeat factor nothing was lost over 12 pairs, and 0.02 of
the oracle's harvest over 25. So `--pairs 100` says whether a part may be deleted.
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
from collections.abc import Callable, Iterable, Iterator
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

# ---- How a part is turned off: its source is edited so that a switch decides, which is read from the environment when
# the module is imported. So all parts take one build. A source that an edit no longer fits is an error.

SWITCHES = "GPUMUX_WITHOUT"  # names of parts, separated by commas
Edit = Callable[[Path, str], None]  # of the directory of gpumux's sources, and the name of the part's switch


class NotFound(GpumuxError):
    """A source does not have what is to be edited."""


def constant(module: str, **values: object) -> Edit:
    """Gives named constants other values."""

    def edit(sources: Path, switch: str) -> None:
        path = sources / f"{module}.py"
        text = path.read_text()
        for name, value in values.items():
            text, found = re.subn(
                rf"^{name}: Final = ([^#\n]*[^#\s])", rf"{name}: Final = {value} if {switch} else \1", text,
                flags=re.MULTILINE,
            )  # fmt: skip
            if found != 1:
                raise NotFound(f"{path} has {found} constants {name}", "mend microbench/guard_parts.py")
        path.write_text(text)

    return edit


def function(module: str, name: str, *lines: str) -> Edit:
    """Has a function, `name` or `Class.name`, do these lines first, the last of which returns."""

    def edit(sources: Path, switch: str) -> None:
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
        switched = [f"if {switch}:", *[f"    {line}" for line in lines]]
        into.insert(at, indent("\n".join(switched) + "\n", " " * first.col_offset))
        path.write_text("".join(into))

    return edit


def expression(module: str, old: str, new: str) -> Edit:
    """Has another expression where this one is, once."""

    def edit(sources: Path, switch: str) -> None:
        path = sources / f"{module}.py"
        found = path.read_text()
        if found.count(old) != 1:
            raise NotFound(f"{path} has {found.count(old)} times {old!r}", "mend microbench/guard_parts.py")
        path.write_text(found.replace(old, f"(({new}) if {switch} else ({old}))"))

    return edit


def switched(sources: Path, parts: Iterable[str]) -> None:
    """Edit gpumux's sources, so that each of these parts is off where SWITCHES names it. Raises NotFound."""
    switches: list[str] = []
    for number, part in enumerate(parts):
        switch = f"_OFF_{number}"
        switches.append(
            f'{switch}: Final[bool] = bool("{part}" in __import__("os").environ.get("{SWITCHES}", "").split(","))\n'
        )
        for edit in PARTS[part]:
            edit(sources, switch)
    for path in sorted((sources / "scheduler").rglob("*.py")):
        text = path.read_text()
        used = [line for line in switches if re.search(rf"\b{line.partition(':')[0]}\b", text)]
        if used:
            imports = [each for each in ast.parse(text).body if isinstance(each, ast.Import | ast.ImportFrom)]
            into = text.splitlines(keepends=True)
            typed = (
                []
                if re.search(r"^from typing import .*\bFinal\b", text, re.MULTILINE)
                else ["from typing import Final\n"]
            )
            into[imports[-1].end_lineno : imports[-1].end_lineno] = [*typed, *used]
            path.write_text("".join(into))


DECISIONS, GUARD = "scheduler/guard/decisions", "scheduler/guard/guard"
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
        expression(TIMING, "at, next_step, START, until", "at, next_step, LATER, until"),
        expression(TIMING, "len(solo_s), True, START, until", "len(solo_s) - 1, False, LATER, until"),
        expression(TIMING, "at, next_step, AFTER_START, until", "at, next_step, LATER, until"),
        expression(TIMING, "MIDDLE if abs(2 * start - until - began) <= 2 * TIMED_S else LATER", "LATER"),
    ),
    "the middle of pieces": (constant(COSTS, MOMENTS="(START, AFTER_START)"),),
    "effects of moments": (expression(COSTS, "base > NOISE_FLOOR_S and moment in MOMENTS", "False"),),
    "the end of the step": (function(HIGH, "HighJob.pause", "return 0.0"),),
    "stuck modes": (
        expression(HIGH, "EXPLORE_IF_STUCK if budget.violations_left >= 1.0 and held_long else EXPLORE_NEVER",
                   "EXPLORE_NEVER"),
    ),
    "confirming fits": (function(COSTS, "LaunchCost.may_fit", "return False"),),
    "repeat factor": (constant(COSTS, REPEAT_FACTOR=1.0),),
    "measuring again": (constant(COSTS, PROBE_EVERY=NEVER),),
    "price": (expression(BUDGET, "gain < self.price * avoidable", "gain < 0.0"),),
    "credit": (expression(BUDGET, '"budget"', '""'),),
    "saved credit": (constant(BUDGET, MOST_CREDIT=1.0),),
    "asking out of turn": (expression("scheduler/policy", "ready.size > 1 + len(others)", "False"),),
    "asking others": (function("scheduler/policy", "Guarded._others", "return []"),),
    "finer cuts": (function(LEARN, "Cutting.step_ended", "return"),),
    "finest cuts": (constant(LEARN, FINEST=3.0),),
    "calibration": (constant(HIGH, SOLO_EVERY=NEVER),),
    "look-ahead: pauses": (constant(TIMING, MOST_LOOKAHEAD=1),),
    "bans": (function(LEARN, "judge", "return"),),
    "wider window": (function("scheduler/guard/decisions", "LowWindow.adapt", "return"),),
    "measured speed": (constant(LEARN, LEAST_SPEED=1.0),),
    "overrun": (function(LEARN, "overrun", "return 0.0"),),
    "launch overhead": (expression(LEARN, "SMOOTHING * (max(0.0, late) - view.launch_overhead)", "0.0"),),
    "unpaid losses": (expression(BUDGET, "excess - MOST_OVERDRAFT * self.credit", "0.0"),),
    "recovery without low work": (constant(BUDGET, TAIL_RECOVER=1.0),),
    "arrivals that the scheduler sees late": (constant(BUDGET, UNSEEN_S=0.0),),
    "trust in arrivals": (function(HIGH, "ArrivalTrust.step_ended", "return"),),
    "arrivals at random": (constant(HIGH, AT_RANDOM=0.0),),
    "decisions kept": (function(DECISIONS, "Decisions.cached", "return None"),),
    "moments that a timer marks": (function(TIMING, "next_timed_launch", "return inf"),),
    "part beside high work": (function(TIMING, "exposed_part", "return 1.0"),),
    "host's delays": (constant(BUDGET, MOST_DELAY_S=0.0),),
    "optimism": (constant(COSTS, OPTIMISM=1.0),),
    "exploring at a high price": (constant(HIGH, SPARE_VIOLATIONS=NEVER),),
    "capped peaks": (expression(COSTS, "self.count > MIN_SAMPLES", "False"),),
    "worth of time": (constant(COSTS, WORTH_S=0.0),),
    "one launch at a time": (constant(HIGH, KNOWN_RANGES=0),),
    "pieces that never ran": (function(HIGH, "HighCosts.never_ran", "return False"),),
    "what is left of the step": (
        expression(COSTS, "[*accumulate(reversed(solo_s))][::-1] if stuck else []", "[]"),
    ),
    "too costly anywhere": (constant(TIMING, TOO_COSTLY=1e9),),
    "bans by price": (constant(LEARN, BAN_RATIO=1e9),),
    "robust means": (
        function(
            COSTS, "RobustMean.add", "self.count += 1",
            "self.third, self.second, self.newest = self.second, self.newest, sample",
            "self.mean += weight / min(self.count, MEMORY) * (sample - self.mean) if self.count > 1 else sample",
            "self.deviation += (abs(sample - self.mean) - self.deviation) / min(self.count, MEMORY)", "return",
        ),
    ),
    "shares": (expression(GUARD, "info.shares", "(1.0,)"),),
    "risk at random": (constant(TIMING, RISK=0.0, UNKNOWN_RISK=0.0, MOST_RISK=0.0),),
}  # fmt: skip


@contextmanager
def built(parts: Iterable[str], *, compiled: bool) -> Iterator[Path]:
    """A directory with the packages gpumux, in which each of these parts has a switch, and microbench. Raises NotFound;
    where gpumux is to be compiled, BuildFailed or compile_core.Missing."""
    with tempfile.TemporaryDirectory(prefix="guard-parts-") as name:
        left_out = shutil.ignore_patterns("__pycache__", "__compiled__", "results")
        for package in ("gpumux", "microbench"):
            shutil.copytree(ROOT / package, Path(name) / package, ignore=left_out)
        switched(Path(name) / "gpumux", parts)
        if compiled:
            compile_core.build(Path(name) / "gpumux")
        yield Path(name)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--together", action="append", default=[], metavar="PART,PART...", help="parts that are off at once, as one row"
    )
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
    off = [[part] for part in args.parts] + [group.split(",") for group in args.together]
    parts = list(dict.fromkeys(part for each in off for part in each))
    for part in parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose from {', '.join(PARTS)}")
    facts = common.machine()
    print(common.describe(facts))
    found: list[dict[str, Any]] = []
    runs = [case for case in cases(args.pairs, args.corner_pairs) if case[0] in args.kinds]
    compiled = not args.interpreted
    with built(parts, compiled=compiled) as directory, ThreadPoolExecutor(args.processes) as pool:
        work = [pool.submit(without, directory, each, runs, args.seed, args.steps, compiled=compiled) for each in off]
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


def without(
    directory: Path, parts: list[str], runs: list[Case], seed: int, steps: int, *, compiled: bool
) -> dict[str, Any]:
    """All runs with these parts turned off, in a process of its own, with the packages in `directory`. Raises
    CalledProcessError."""
    source = "import json, sys; from microbench import guard_parts as it; it.measure(*json.load(sys.stdin))"
    core = "compiled" if compiled else "interpreted"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory), "GPUMUX_CORE": core, SWITCHES: ",".join(parts)},
        input=json.dumps([runs, seed, steps]), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout)
    name = ", ".join(parts)
    return {"part": name, "rows": rows, "summary": summary(name, rows)}


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
