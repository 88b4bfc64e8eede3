"""Is the promise kept where the guard's picture of the jobs is wrong?

    python -m microbench.guard_trials --out guard-trials.json

On the simulated GPU, random pairs of jobs (sweep.py), each as it is and disturbed: the high job's steps change their
length, once for all or from step to step; every operator takes a little more or less each time; a low job does
something else from some step on; there are four high jobs, or sixteen low ones of sixteen programs; on the device as it
is and at three corners of what is guessed about hardware. Steps are compared with those of the same high jobs without
low work, disturbed in the same way: the mean over theirs, and the 99th percentile over theirs. The first steps, in
which the guard learns, are reported by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from gpumux.cli.arguments import whole
from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from microbench import common, published, sweep

PROMISED = 1.05
LEARNING = 200
CORNERS: dict[str, Callable[[GpuSpec], GpuSpec]] = {
    name: published.ORION_ENVELOPE[name][0] for name in ("as it is", "shared queue", "saturation least", "gaps most")
}
Kernels = Sequence[Kernel]
# What the kernels of a job are in its step `step`, None: as before; `calm` is what they are undisturbed.
Disturbance = Callable[[int, Kernels, Random], "Kernels | None"]


def scaled(kernels: Kernels, factor: float) -> Kernels:
    return [kernel._replace(block_s=kernel.block_s * factor) for kernel in kernels]


def from_step_to_step(step: int, calm: Kernels, random: Random) -> Kernels:
    """Lengths of half to one and a half times the usual one."""
    return scaled(calm, random.uniform(0.5, 1.5))


def in_phases(step: int, calm: Kernels, random: Random) -> Kernels | None:
    """Every 150 steps another length."""
    return scaled(calm, random.uniform(0.7, 1.5)) if step % 150 == 0 else None


def longer_once(step: int, calm: Kernels, random: Random) -> Kernels | None:
    """Twice as long from step 600 on, as with another batch size."""
    return scaled(calm, 2.0) if step == 600 else None


def noise(part: float) -> Disturbance:
    """Every operator takes more or less by so much, each time."""

    def disturb(step: int, calm: Kernels, random: Random) -> Kernels:
        return [kernel._replace(block_s=kernel.block_s * max(0.3, random.gauss(1.0, part))) for kernel in calm]

    return disturb


def another_job(step: int, calm: Kernels, random: Random) -> Kernels | None:
    """From step 400 on its operators come the other way round, each twice as long."""
    return scaled([*reversed(calm)], 2.0) if step == 400 else None


class Trial(NamedTuple):
    """How high and low jobs are disturbed, and how many there are."""

    high: Disturbance | None = None
    low: Disturbance | None = None
    highs: int = 1
    lows: int = 1


TRIALS = {
    "undisturbed": Trial(),
    "length from step to step": Trial(high=from_step_to_step),
    "length in phases": Trial(high=in_phases),
    "twice as long": Trial(high=longer_once),
    "noise of 5 %": Trial(high=noise(0.05), low=noise(0.05)),
    "noise of 10 %": Trial(high=noise(0.1), low=noise(0.1)),
    "noise of 20 %": Trial(high=noise(0.2), low=noise(0.2)),
    "another low job": Trial(low=another_job),
    "4 high jobs": Trial(highs=4),
    "16 low programs": Trial(lows=16),
}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--trials", nargs="+", choices=list(TRIALS), default=list(TRIALS), metavar="TRIAL")
    parser.add_argument("--corners", nargs="+", choices=list(CORNERS), default=list(CORNERS), metavar="CORNER")
    parser.add_argument("--pairs", type=whole, default=4, help="of each trial (default 4)")
    parser.add_argument("--steps", type=whole, default=1200, help=f"high steps after {LEARNING} (default 1200)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    facts = common.machine()
    print(common.describe(facts))
    rows: list[dict[str, Any]] = []
    for name in args.trials:
        for corner in args.corners:
            for pair in range(args.pairs):
                rows += measure(name, corner, pair, args.seed, args.steps)
                if sys.stderr.isatty():
                    print(f"{name}, {corner}, pair {pair}".ljust(70), end="\r", file=sys.stderr)
    print(common.table(*table(rows)))
    common.report("guard_trials", args.out, {"machine": facts, "seed": args.seed, "rows": rows, "targets": goal(rows)})
    return 0


def measure(name: str, corner: str, pair: int, seed: int, steps: int) -> list[dict[str, Any]]:
    """A row for each high job."""
    trial, spec = TRIALS[name], CORNERS[corner](preset("a100"))
    # Each of several low jobs has a program of its own, and each of several high ones a share of the device's time.
    pairs = [sweep.random_pair(seed, pair + 100 * at, spec, PROMISED) for at in range(max(trial.highs, trial.lows))]
    highs = [replace(high, name=f"high{at}") for at, (high, _) in enumerate(pairs[: trial.highs])]
    lows = [replace(low, name=f"low{at}") for at, (_, low) in enumerate(pairs[: trial.lows])]
    alone, _ = run(highs, trial, spec, f"{seed}/{pair}", steps)
    beside, low = run([*highs, *lows], trial, spec, f"{seed}/{pair}", steps)
    rows = []
    for high in highs:
        found: dict[str, Any] = {"trial": name, "corner": corner, "pair": pair, "job": high.name, "low": low}
        for part, chosen in (("learning", slice(0, LEARNING)), ("after", slice(LEARNING, LEARNING + steps))):
            ours, theirs = beside[high.name][chosen], alone[high.name][chosen]
            found[part] = {
                "mean": sum(ours) / len(ours) / (sum(theirs) / len(theirs)),
                "p99": common.percentile(ours, 0.99) / common.percentile(theirs, 0.99),
            }
        rows.append(found)
    return rows


def run(
    jobs: Sequence[Workload], trial: Trial, spec: GpuSpec, seed: str, steps: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds of each high job's steps, by name, and the low jobs' work over the time."""
    simulation = Simulation(jobs, spec, "guarded")
    disturbed = [
        Disturbed(simulation, at, job, trial.high if job.name.startswith("high") else trial.low, seed)
        for at, job in enumerate(jobs)
    ]

    def look(_: Simulation) -> bool:
        for each in disturbed:
            each.look()
        return False

    result = simulation.run(steps=steps + LEARNING, enough=look)
    if result.interrupted:
        raise KeyboardInterrupt
    seconds = {each.name: list(each.client.step_seconds) for each in disturbed if each.name.startswith("high")}
    return seconds, result.harvest


class Disturbed:
    """Disturbs a job between two of its steps, in the same way whatever runs beside it."""

    def __init__(self, simulation: Simulation, at: int, job: Workload, how: Disturbance | None, seed: str) -> None:
        self.name, self.client = job.name, simulation.clients[at]
        self._simulation, self._calm, self._how = simulation, job.kernels, how
        self._random = Random(f"{seed}/{job.name}")
        self._seen = -1

    def look(self) -> None:
        ended = len(self.client.step_ends)
        while self._how is not None and self._seen < ended:
            self._seen += 1
            kernels = self._how(self._seen, self._calm, self._random)
            if kernels is not None and self._seen == ended:
                self._simulation.change(self.name, kernels)


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """For each trial the worst over pairs, jobs and corners, and the mean of low work."""
    lines = []
    for name in dict.fromkeys(row["trial"] for row in rows):
        of = [row for row in rows if row["trial"] == name]
        worst = [max(row[part][what] for row in of) for part in ("after", "learning") for what in ("mean", "p99")]
        over = sum(broken(row) for row in of)
        low = sum(row["low"] for row in of) / len(of)
        lines.append([name, *[f"{value:.3f}" for value in worst], f"{over} of {len(of)}", f"{low:.2f}"])
    return ["", "mean", "p99", "learning: mean", "p99", "over", "low work"], lines


def broken(row: dict[str, Any]) -> bool:
    after = row["after"]
    return bool(after["mean"] > PROMISED or after["p99"] > 1 + 2 * (PROMISED - 1))


def goal(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    over = sum(broken(row) for row in rows)
    return {"runs that break the promise": {"value": over, "target": 0, "met": not over}}


if __name__ == "__main__":
    sys.exit(main())
