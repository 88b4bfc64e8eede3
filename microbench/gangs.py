"""Is the promise kept where one step runs over several devices, with a low job beside every rank?

Simulated GPUs on one virtual clock, each with the daemon's own scheduler and guard. A data-parallel step of VGG-16
stops at a gate for each of its all-reduces: the ranks wait there for the last of them, and then exchange data, which
takes 2.2 times as long while low work runs beside any of them (DeepPool, section 5). Shown are the steps with low work
over those without, and the low jobs' work over what they do alone on a GPU, for two kinds of guard:

    apart      each daemon takes its rank for a job like any other: a pause is a pause, and the time alone is learned in
               steps in which it runs no low work itself
    together   it knows that the job is one of several ranks, and what of a pause was the exchange
               (docs/multiplexing.md)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import inf
from statistics import fmean
from typing import Any

from gpumux.cli.arguments import whole
from gpumux.device.sim.device import Pieces, cut_kernels
from gpumux.device.sim.gpu import Finished
from gpumux.device.sim.spec import A100, GpuSpec
from gpumux.program.profile import OpProfile
from gpumux.scheduler.events import LaunchPiece
from gpumux.simulate import workload as workloads
from gpumux.simulate.daemon import Clock, DaemonSettings, SimulatedDaemon
from gpumux.simulate.run import Client, solo
from gpumux.simulate.workload import Workload, cut_workload
from gpumux.types import CollectiveEnded, Gang, JobSpec, Priority, ProgramId, ProgramReady
from microbench import common

HIGH = "vgg16-b4-ddp"
EXCHANGE = "nccl.all_reduce"


class LowClient(Client):
    """A low job, which tells the ranks' exchange when work of it begins and ends."""

    def __init__(self, index: int, load: Workload, pieces: Pieces, gpu: int, exchange: Exchange) -> None:
        super().__init__(index, load, pieces, gpu)
        self._gpu, self._exchange = gpu, exchange

    def launch(self, daemon: SimulatedDaemon, launched: LaunchPiece) -> None:
        self._exchange.low_changed(self._gpu, 1)
        super().launch(daemon, launched)

    def ended(self, daemon: SimulatedDaemon, launched: LaunchPiece, done: Finished) -> bool:
        self._exchange.low_changed(self._gpu, -1)
        return super().ended(daemon, launched, done)


class RankClient(Client):
    """One rank of the step. `gates`: by operator, seconds that the exchange before it takes alone."""

    def __init__(
        self, rank: int, load: Workload, pieces: Pieces, exchange: Exchange, *, gates: dict[int, float],
        gang: Gang | None,
    ) -> None:  # fmt: skip
        super().__init__(0, load, pieces, rank)
        self.rank, self._exchange, self._gang, self._gates = rank, exchange, gang, gates

    @property
    def job_spec(self) -> JobSpec:
        return replace(self.workload.job_spec, gang=self._gang)

    def ready(self, program: ProgramId) -> ProgramReady:
        pieces = self.cuts[self.newest]
        gated = tuple([piece for piece, first in enumerate(pieces.bounds[:-1]) if first in self._gates])
        return replace(super().ready(program), gated=gated)

    def announced(self, daemon: SimulatedDaemon, program: ProgramId) -> None:
        self._exchange.loaded()

    def ended(self, daemon: SimulatedDaemon, launched: LaunchPiece, done: Finished) -> bool:
        again = super().ended(daemon, launched, done)
        first = self.cuts[launched.cut].bounds[launched.piece + 1]
        if first in self._gates:
            self._exchange.parked(self.rank, launched, done.ended, self._gates[first])
        return again

    def answered(self, daemon: SimulatedDaemon, step: int) -> None:
        self._exchange.answered()

    def begin(self, daemon: SimulatedDaemon) -> None:
        """Submit a step."""
        self._submit(daemon)


class Exchange:
    """The ranks' collectives, and their client: all begin the next step when all have ended the last one. `seen`:
    whether the guard is told how much of a pause the exchange took."""

    def __init__(self, clock: Clock, client_s: float, seen: bool) -> None:
        self.ranks: list[RankClient] = []
        self.daemons: list[SimulatedDaemon] = []
        self.steps: list[float] = []  # seconds of each
        self._clock, self._client_s, self._seen = clock, client_s, seen
        self._missing = 0  # ranks that are not loaded, or have not ended the step
        self._began = 0.0
        self._low: Counter[int] = Counter()  # low launches that are out, by GPU
        self._parked: dict[int, tuple[LaunchPiece, float]] = {}  # by rank
        self._left = self._since = self._met = 0.0  # of the exchange under way: seconds of it alone, as of `since`
        self._version = count()
        self._newest = -1

    def loaded(self) -> None:
        self._missing += 1
        if self._missing == len(self.ranks):
            self._begin(None)

    def _begin(self, _: None) -> None:
        self._began, self._missing = self._clock.now, len(self.ranks)
        for rank, daemon in zip(self.ranks, self.daemons, strict=True):
            rank.begin(daemon)

    def answered(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.steps.append(max(rank.step_ends[-1] for rank in self.ranks) - self._began)
            self._clock.push(self._clock.now + self._client_s, self._begin, None)

    def parked(self, rank: int, launched: LaunchPiece, ended: float, seconds: float) -> None:
        """The rank has come to its gate. The last one begins the exchange."""
        self._parked[rank] = launched, ended
        if len(self._parked) == len(self.ranks):
            self._left, self._since, self._met = seconds, self._clock.now, self._clock.now
            self._plan()

    def low_changed(self, gpu: int, by: int) -> None:
        """A low launch was made on a GPU, or ended."""
        under_way = self._newest >= 0
        if under_way:
            now = self._clock.now
            self._left, self._since = max(0.0, self._left - (now - self._since) / self._slowness()), now
        self._low[gpu] += by
        if under_way:
            self._plan()

    def _slowness(self) -> float:
        return workloads.ALLREDUCE_SENSITIVITY if any(self._low.values()) else 1.0

    def _plan(self) -> None:
        self._newest = next(self._version)
        self._clock.push(self._clock.now + self._left * self._slowness(), self._ended, self._newest)

    def _ended(self, version: int) -> None:
        if version != self._newest:
            return
        self._newest, now, parked, self._parked = -1, self._clock.now, self._parked, {}
        seconds = now - self._met if self._seen else 0.0
        for number, (launched, ended) in parked.items():
            self.daemons[number].feed(
                CollectiveEnded(launched.job, launched.step, launched.piece + 1, ended, now, (), seconds)
            )


def measure(
    ranks: int, low: Workload | None, *, together: bool, steps: int, warmup: int, max_slowdown: float, spec: GpuSpec
) -> dict[str, Any]:
    """Steps of so many ranks, each beside a low job."""
    settings, clock = DaemonSettings("guarded"), Clock()
    exchange = Exchange(clock, settings.client_s, together)
    load, gates = data_parallel(max_slowdown, spec)
    pieces = cut_kernels(load.kernels, spec, Priority.HIGH, gates=gates)
    lows: list[LowClient] = []
    for number in range(ranks):
        gang = Gang(f"{0:032x}", number, ranks, "127.0.0.1:1") if together else None
        daemon = SimulatedDaemon(spec, clock, settings)
        rank = RankClient(number, load, pieces, exchange, gates=gates, gang=gang)
        exchange.ranks.append(rank)
        exchange.daemons.append(daemon)
        jobs: list[Client] = [rank]
        if low is not None:
            cut = cut_workload(low, spec)
            later = replace(low, starts_at=cut.step_s * number / ranks)  # not all at the same moment
            lows.append(LowClient(1, later, cut, number, exchange))
            jobs.append(lows[-1])
        daemon.open(jobs)
    _run(exchange, clock, warmup)
    for each in lows:
        each.begin_window()
    began = clock.now
    _run(exchange, clock, warmup + steps)
    window = clock.now - began
    alone = solo(low, spec).steps_per_s if low is not None else 1.0
    work = [(each.work_s - each.work_before_s) / each.cuts[0].step_s / window / alone for each in lows]
    bans = [len(daemon.scheduler.snapshot()["guard"]["bans"]) for daemon in exchange.daemons]
    taken = exchange.steps[warmup:]
    return {"step_s": fmean(taken), "p99_s": common.percentile(taken, 0.99), "low": sum(work), "bans": sum(bans)}


def _run(exchange: Exchange, clock: Clock, steps: int) -> None:
    """Let time pass until so many steps have ended. What comes first, on any GPU or on the clock, is done first."""
    gpus = [daemon.gpu for daemon in exchange.daemons]
    while len(exchange.steps) < steps:
        first, which = min((gpu.next_event(), place) for place, gpu in enumerate(gpus))
        if first > clock.next_at:
            clock.act()
        elif first == inf:
            raise RuntimeError("nothing will ever happen again: the ranks wait for each other")
        elif finished := gpus[which].advance_to_finish(first):
            clock.now = gpus[which].now
            for each in finished:
                exchange.daemons[which].finished(each)


def data_parallel(max_slowdown: float, spec: GpuSpec) -> tuple[Workload, dict[int, float]]:
    """The operators of a rank, and by operator the seconds of the all-reduce before it."""
    profile = workloads.find(HIGH)
    gates: dict[int, float] = {}
    ops: list[OpProfile] = []
    for op in profile.ops:
        if op.target == EXCHANGE:
            gates[len(ops)] = gates.get(len(ops), 0.0) + op.seconds
        else:
            ops.append(op)
    high = replace(profile, ops=tuple(ops))
    return workloads.from_profile(high, spec, Priority.HIGH, max_slowdown=max_slowdown), gates


def main(argv: Sequence[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--ranks", type=whole, nargs="+", default=[1, 2, 4, 8])
    arguments.add_argument("--low", nargs="+", default=["small-kernels-b4", "vgg16-b4", "transformer-b16"])
    arguments.add_argument("--steps", type=whole, default=300)
    arguments.add_argument("--warm-up", type=whole, default=300, help="steps before those, in which the guard learns")
    arguments.add_argument("--max-slowdown", type=float, default=1.1)
    args = arguments.parse_args(argv)
    machine = common.machine()
    print(common.describe(machine))
    began = time.monotonic()
    given = {"steps": args.steps, "warmup": args.warm_up, "max_slowdown": args.max_slowdown, "spec": A100}
    rows, found = [], []
    for ranks in args.ranks:
        alone = measure(ranks, None, together=True, **(given | {"steps": 20, "warmup": 20}))
        for name in args.low:
            low = workloads.from_profile(workloads.find(name), A100, Priority.LOW)
            for guard in ("apart", "together"):
                made = measure(ranks, low, together=guard == "together", **given)
                mean, p99 = made["step_s"] / alone["step_s"], made["p99_s"] / alone["step_s"]
                found.append(
                    {"ranks": ranks, "low_job": name, "guard": guard, "alone_s": alone["step_s"], "slowdown": mean,
                     "slowdown_p99": p99, "low": made["low"], "bans": made["bans"]}
                )  # fmt: skip
                rows.append((f"{ranks}", name, guard, f"{mean:.3f}", f"{p99:.3f}", f"{made['low'] / ranks:.3f}"))
                print(" ".join(rows[-1]), flush=True)
    print(common.table(("RANKS", "LOW JOB", "GUARD", "SLOWDOWN", "P99", "LOW A GPU"), rows))
    worst = max(each["slowdown"] for each in found if each["guard"] == "together")
    kept = worst <= args.max_slowdown
    print(f"promised are {args.max_slowdown:g}: at most {worst:.3f} together, {'kept' if kept else 'NOT KEPT'}")
    common.report(
        "gangs", args.out,
        {"machine": machine, "high_job": HIGH, "max_slowdown": args.max_slowdown, "runs": found,
         "targets": {"largest slowdown": {"target": args.max_slowdown, "value": worst, "met": kept}},
         "seconds": time.monotonic() - began},
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
