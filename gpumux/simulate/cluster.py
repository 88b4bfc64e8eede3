"""A cluster of simulated GPUs on one virtual clock: a plan's rows as high work on all of them, low jobs on each.

Each GPU has a daemon of its own (`daemon.py`). A row becomes up to three parts: moving its samples in, its computation,
and the sum of its gradients. Each part is a step of the high job that every GPU has, its rank, and is submitted when
what it waits for has ended, so between two parts the rank is idle and its daemon may run low work. Transfers and sums
are joint kernels: they start on all members when the last daemon has launched its piece, and end on all of them when
the slowest is done. Rows without gradients that follow each other on the same GPUs are one part.

A part waits for its own GPU where samples stay, and for all GPUs that take part in what is before it where they move.
Gates open in the daemons: a part costs what any step costs a daemon (`HANDLE_S` an event, GpuSpec's times of the host),
and no way to a client and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from math import ceil, inf
from typing import NamedTuple

from gpumux.device.sim.cost import MIN_BLOCK_S, Kernel, kernel_of
from gpumux.device.sim.device import Pieces, cut_kernels
from gpumux.device.sim.gpu import Finished
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError
from gpumux.program.profile import OpProfile
from gpumux.program.saved_plan import PlannedLayer, PlanRow
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.events import LaunchPiece
from gpumux.simulate.daemon import FOOTPRINT, Clock, DaemonSettings, SimulatedDaemon, SimulatedJob
from gpumux.simulate.result import LaunchRow
from gpumux.simulate.run import Client, solo
from gpumux.simulate.workload import ALLREDUCE_BLOCKS, ALLREDUCE_SENSITIVITY, Workload, cut_workload
from gpumux.types import JobId, JobSpec, Priority, ProgramId, ProgramReady, StepId

RANK = "plan"  # the high job's name on every GPU
PROGRESS_EVERY = 1024  # turns of the loop
PRODUCTS = ("Conv", "Linear", "Bottleneck", "Attention", "Transformer", "LSTM")  # kinds of layers bound by products
FLOAT = 4  # bytes of an element of a layer's output
LONGEST_S = 100e-6  # guess: few kernels of training have longer blocks
MOST_KERNELS = 32  # that a pass of one layer is taken as


def without_host_costs(spec: GpuSpec) -> GpuSpec:
    """The same GPU behind a host that takes no time."""
    return replace(
        spec, call_s=0.0, graph_s=0.0, graph_node_s=0.0, transmit_s=0.0, launch_gap_s=0.0, node_gap_s=0.0,
        completion_s=0.0,
    )  # fmt: skip


# ---- A plan's rows as parts, and the kernels of each.


class PlanPart(NamedTuple):
    """One part of an iteration, on GPUs `first` to `first + gpus - 1`: what runs there, and after which parts. `joint`:
    one kernel of several GPUs. `whole`: it waits until what is before it has ended on all GPUs, not only on its own. On
    no GPU it is only time. `title`: of pictures."""

    title: str
    kind: str  # comm, comp or sync
    seconds: float
    first: int
    gpus: int
    kernels: tuple[Kernel, ...]
    after: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return self.kind != "comp"

    @property
    def joint(self) -> bool:
        return self.whole and self.gpus > 1

    @property
    def members(self) -> range:
        return range(self.first, self.first + self.gpus)


def parts_of(rows: Sequence[PlanRow], layers: Sequence[PlannedLayer], batch: int, spec: GpuSpec) -> list[PlanPart]:
    """The parts of an iteration, each after those it waits for. What takes less than the simulator's shortest kernel
    takes as long as that; what takes no time has no part."""
    parts: list[PlanPart] = []
    ends: list[tuple[int, ...]] = []  # by row: the parts that have to end before what comes after it
    for row in rows:
        layer = layers[row.layer]
        after = tuple(dict.fromkeys(part for each in row.after for part in ends[each]))
        for kind, seconds, kernels in (
            ("comm", row.comm, _transfer(row.comm, layer, batch, spec)),
            ("comp", row.comp, _computation(row, layer, batch, spec)),
            ("sync", row.sync, _sum(row.sync, layer, spec)),
        ):
            if seconds:
                parts.append(PlanPart(layer.name, kind, seconds, row.first, row.gpus, kernels, after))
                after = (len(parts) - 1,)
        ends.append(after)
    return _joined(parts)


def _joined(parts: Sequence[PlanPart]) -> list[PlanPart]:
    """The parts, with computations as one where the second waits for the first alone, on the same GPUs, and nothing
    else does."""
    readers = [0] * len(parts)
    for part in parts:
        for each in part.after:
            readers[each] += 1
    made: list[PlanPart] = []
    places: list[int] = []  # in `made`, of each part
    for part in parts:
        after = tuple([places[each] for each in part.after])
        before = made[after[0]] if len(after) == 1 and readers[part.after[0]] == 1 else None
        if before is None or not _alike(before, part):
            made.append(part._replace(after=after))
            places.append(len(made) - 1)
            continue
        first = before.title.split(" to ")[0]
        made[after[0]] = before._replace(
            title=f"{first} to {part.title}",
            seconds=before.seconds + part.seconds,
            kernels=before.kernels + part.kernels,
        )
        places.append(after[0])
    return made


def _alike(before: PlanPart, part: PlanPart) -> bool:
    return before.kind == part.kind == "comp" and before.members == part.members


def _computation(row: PlanRow, layer: PlannedLayer, batch: int, spec: GpuSpec) -> tuple[Kernel, ...]:
    """The layer's kernels, forward and then backward. How they fill the GPU is guessed: from the size of the layer's
    output, or of its weights where a dense layer has more of those. What would have blocks of more than LONGEST_S, as a
    layer that stands for several does, is several kernels."""
    if not row.comp:
        return ()
    elements = max(1, layer.output_bytes * batch // max(row.gpus, 1) // FLOAT)
    if "Linear" in layer.kind:
        elements = max(elements, layer.parameter_bytes // FLOAT)
    target = "aten.mm" if any(kind in layer.kind for kind in PRODUCTS) else "aten.copy"
    moved = 2 * FLOAT * elements + layer.parameter_bytes
    forward = row.comp * layer.forward
    passes = [("forward", forward, moved), ("backward", row.comp - forward, 2 * moved)]
    if min(forward, row.comp - forward) < MIN_BLOCK_S:
        passes = [("forward and backward", row.comp, 3 * moved)]
    made: list[Kernel] = []
    for name, seconds, nbytes in passes:
        op = OpProfile(target, ((elements,),), seconds, nbytes)
        several = min(MOST_KERNELS, ceil(kernel_of(op, spec).block_s / LONGEST_S))
        part = kernel_of(replace(op, seconds=seconds / several, nbytes=nbytes // several), spec)
        made += [part._replace(name=name)] * several
    return tuple(made)


def _transfer(seconds: float, layer: PlannedLayer, batch: int, spec: GpuSpec) -> tuple[Kernel, ...]:
    moved = layer.output_bytes * batch
    return _collective("nccl.send_recv", seconds, moved, 1.0, spec)


def _sum(seconds: float, layer: PlannedLayer, spec: GpuSpec) -> tuple[Kernel, ...]:
    return _collective("nccl.all_reduce", seconds, 3 * layer.parameter_bytes, ALLREDUCE_SENSITIVITY, spec)


def _collective(name: str, seconds: float, nbytes: int, sensitivity: float, spec: GpuSpec) -> tuple[Kernel, ...]:
    op = OpProfile(name, (), seconds, nbytes, ALLREDUCE_BLOCKS, 1, sensitivity)
    return (kernel_of(op, spec),)


# ---- The high job: one rank on each GPU, and the gang that says which part comes next.


class RankJob:
    """A gang's job on one GPU, as its daemon sees it: a program for each different part. See SimulatedJob."""

    def __init__(self, gang: SimulatedGang, gpu: int, max_slowdown: float, spec: GpuSpec) -> None:
        self.id = JobId(f"{0:032x}")
        self.name = RANK
        self.gpu = gpu
        self.job_spec = JobSpec(RANK, Priority.HIGH, 1.0, max_slowdown, None, max_inflight=4)
        self.starts_at = 0.0
        self.device_s = 0.0
        self.steps: list[int] = []  # the part of each step
        self._gang = gang
        self._pieces: list[Pieces] = []
        self._programs: dict[int, ProgramId] = {}  # by part
        self._hashes: list[str] = []
        known: dict[tuple[tuple[Kernel, ...], bool], ProgramId] = {}
        for place, part in enumerate(gang.parts):
            if gpu not in part.members:
                continue
            key = (part.kernels, part.joint)
            if key not in known:
                known[key] = ProgramId(len(known))
                self._pieces.append(cut_kernels(part.kernels, spec, Priority.HIGH))
                self._hashes.append(blake2b(repr(key).encode(), digest_size=16).hexdigest())
            self._programs[place] = known[key]

    @property
    def programs(self) -> int:
        return len(self._pieces)

    def offers(self) -> Sequence[ev.ProgramOffered]:
        return [
            ev.ProgramOffered(
                self.id, ProgramId(i), FOOTPRINT, self._hashes[i], tuple([k.name for run in p.kernels for k in run])
            )
            for i, p in enumerate(self._pieces)
        ]

    def ready(self, program: ProgramId) -> ProgramReady:
        pieces = self._pieces[program]
        return ProgramReady(self.id, program, 0, pieces.seconds, pieces.bounds)

    def announced(self, daemon: SimulatedDaemon, program: ProgramId) -> None:
        self._gang.loaded()

    def submit(self, daemon: SimulatedDaemon, part: int) -> None:
        step = StepId(len(self.steps))
        self.steps.append(part)
        daemon.feed(ev.StepSubmitted(self.id, step, self._programs[part]))

    def launch(self, daemon: SimulatedDaemon, launched: LaunchPiece) -> None:
        part = self.steps[launched.step]
        if self._gang.parts[part].joint:
            self._gang.arrived(part, self.gpu, launched)
        else:
            kernels = self._pieces[launched.program].kernels[launched.piece]
            daemon.gpu.launch(launched.launch, launched.job, launched.stream, kernels, daemon.now, launched.share)

    def ended(self, daemon: SimulatedDaemon, launched: LaunchPiece, done: Finished) -> bool:
        self.device_s += done.ended - done.started
        if launched.piece == len(self._pieces[launched.program].seconds) - 1:
            self._gang.last_end = max(self._gang.last_end, done.ended)
        return False

    def cut_requested(self, program: ProgramId, target_s: float | None) -> None:
        """Nothing: only low programs are cut anew."""

    def answered(self, daemon: SimulatedDaemon, step: int) -> None:
        self._gang.ended(self.steps[step], self.gpu)


class SimulatedGang:
    """The ranks of one plan: which part each of them runs next, and which joint kernels wait for whom."""

    def __init__(self, parts: Sequence[PlanPart], clock: Clock, daemons: Sequence[SimulatedDaemon]) -> None:
        self.parts = list(parts)
        self.iterations: list[float] = []  # seconds of each
        self.last_end = 0.0
        self.ranks: dict[int, RankJob] = {}
        self._clock, self._daemons = clock, daemons
        self._to_load = 0
        self._began = 0.0
        # What waits for a part: (part, GPU) pairs where it has to end on one GPU, parts where on all.
        self._local: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._after_all: dict[int, list[tuple[int, int]]] = {}
        self._needs: dict[tuple[int, int], int] = {}
        for place, part in enumerate(self.parts):
            for gpu in part.members or (-1,):
                self._needs[place, gpu] = len(part.after)
                for each in part.after:
                    local = not part.whole and gpu in self.parts[each].members
                    key = (place, gpu)
                    if local:
                        self._local.setdefault((each, gpu), []).append(key)
                    else:
                        self._after_all.setdefault(each, []).append(key)
        self._left: dict[tuple[int, int], int] = {}
        self._members_left: list[int] = []
        self._parts_left = 0
        self._waiting: dict[int, list[tuple[int, LaunchPiece]]] = {}  # by part: members whose daemon has launched it
        self._running: dict[tuple[int, int], int] = {}  # (GPU, launch) of joint kernels: the part
        self._to_hold: dict[int, int] = {}  # by part: members whose kernel is not done yet

    def open(self, max_slowdown: float, spec: GpuSpec) -> None:
        """Make the ranks, on all GPUs with a part."""
        used = sorted({gpu for part in self.parts for gpu in part.members})
        self.ranks = {gpu: RankJob(self, gpu, max_slowdown, spec) for gpu in used}
        self._to_load = sum(rank.programs for rank in self.ranks.values())

    def loaded(self) -> None:
        """Called for each program that is loaded: the last one begins the first iteration."""
        self._to_load -= 1
        if not self._to_load:
            self._began = self._clock.now
            self._begin()

    def ended(self, part: int, gpu: int) -> None:
        """A part has ended on one of its GPUs."""
        for key in self._local.get((part, gpu), ()):
            self._satisfy(key)
        self._members_left[part] -= 1
        if self._members_left[part]:
            return
        self._parts_left -= 1
        for key in self._after_all.get(part, ()):
            self._satisfy(key)
        if not self._parts_left:
            end = max(self.last_end, self._began)
            self.iterations.append(end - self._began)
            self._began = end
            self._begin()

    def arrived(self, part: int, gpu: int, launched: LaunchPiece) -> None:
        """A daemon has launched its piece of a joint kernel. The last one starts it on all members."""
        waiting = self._waiting.setdefault(part, [])
        waiting.append((gpu, launched))
        if len(waiting) < self.parts[part].gpus:
            return
        del self._waiting[part]
        self._to_hold[part] = len(waiting)
        now = self._clock.now
        for member, piece in waiting:
            self._running[member, piece.launch] = part
            kernels = self.parts[part].kernels
            self._daemons[member].gpu.launch(piece.launch, piece.job, piece.stream, kernels, now, holds=True)

    def held(self, gpu: int, launch: int, now: float) -> None:
        """A member's part of a joint kernel is done. The slowest ends it on all of them."""
        part = self._running.pop((gpu, launch))
        self._to_hold[part] -= 1
        if not self._to_hold[part]:
            self._clock.push(now, self._release, part)

    def _release(self, part: int) -> None:
        for gpu in self.parts[part].members:
            self._daemons[gpu].gpu.release(self.ranks[gpu].id, self._clock.now)

    def _begin(self) -> None:
        """Submit what waits for nothing."""
        self._left = dict(self._needs)
        self._members_left = [max(part.gpus, 1) for part in self.parts]
        self._parts_left = len(self.parts)
        for (part, gpu), needs in self._needs.items():
            if not needs:
                self._submit(part, gpu)

    def _satisfy(self, key: tuple[int, int]) -> None:
        self._left[key] -= 1
        if not self._left[key]:
            self._submit(*key)

    def _submit(self, part: int, gpu: int) -> None:
        if gpu >= 0:
            self.ranks[gpu].submit(self._daemons[gpu], part)
        else:
            self._clock.push(self._clock.now + self.parts[part].seconds, self._passed, part)

    def _passed(self, part: int) -> None:
        """A part that is only time has passed."""
        self.last_end = max(self.last_end, self._clock.now)
        self.ended(part, -1)


# ---- The cluster.


@dataclass(frozen=True)
class LowResult:
    """A low job on one GPU. throughput: work done, relative to the job alone on a GPU in the same time. steps_per_s:
    steps' worth of work."""

    gpu: int
    name: str
    throughput: float
    steps_per_s: float


@dataclass(frozen=True)
class ClusterResult:
    """A run. iteration_s: mean seconds of the iterations after the warm-up (`iterations`: each of them). busy: by GPU,
    the part of the window in which blocks were resident. timeline: by GPU, the latest launches, with the titles of the
    plan's parts where the job is the plan's rank."""

    policy: str
    gpus: int
    iterations: tuple[float, ...]
    window_s: float
    low: tuple[LowResult, ...]
    busy: tuple[float, ...]
    ended_at: float
    interrupted: bool
    explanations: Mapping[str, list[str]]
    timeline: tuple[tuple[TimelineRow, ...], ...]

    @property
    def iteration_s(self) -> float:
        return sum(self.iterations) / len(self.iterations) if self.iterations else float("nan")

    def low_of(self, gpu: int) -> float:
        """Throughput of a GPU's low jobs together."""
        return sum(each.throughput for each in self.low if each.gpu == gpu)

    @property
    def low_throughput(self) -> float:
        """Of all low jobs: as many GPUs as would do their work alone."""
        return sum(each.throughput for each in self.low)


class TimelineRow(NamedTuple):
    """A launch on a GPU. `kind`: comm, comp or sync of the plan's rank; low for low jobs."""

    title: str
    kind: str
    share: float
    started: float
    ended: float


Progress = Callable[["ClusterSimulation"], None]


class ClusterSimulation:
    """The parts of a plan on so many GPUs, and low jobs on all of them. settings: policy, host times and so on of each
    daemon; its client_s is the low jobs'. Raises ConfigError for low jobs that are none or share a name."""

    def __init__(
        self,
        parts: Sequence[PlanPart],
        gpus: int,
        spec: GpuSpec,
        settings: DaemonSettings,
        *,
        low: Sequence[Workload] = (),
        max_slowdown: float = 1.10,
        seed: int = 0,
    ) -> None:
        if not parts:
            raise ConfigError("a plan in which nothing takes time", "name one with times above 0")
        names = [each.name for each in low]
        if len({*names, RANK}) != len(names) + 1 or any(each.priority is not Priority.LOW for each in low):
            raise ConfigError(f"low jobs named {names}", f"give low jobs, each a name of its own, none {RANK!r}")
        self.spec, self.policy, self.gpus = spec, settings.policy, gpus
        self._clock = Clock()
        self.daemons: list[SimulatedDaemon] = []
        self.gang = SimulatedGang(parts, self._clock, self.daemons)
        self.gang.open(max_slowdown, spec)
        most = max(rank.programs for rank in self.gang.ranks.values())
        limit = max(most, SchedulerConfig().max_programs_per_job)
        config = {"max_programs_per_job": limit, **settings.scheduler_config}
        for gpu in range(gpus):
            held = _holder(self.gang, gpu)
            self.daemons.append(
                SimulatedDaemon(spec, self._clock, replace(settings, scheduler_config=config), held=held)
            )
        self.low = [self._low_clients(low, gpu, seed) for gpu in range(gpus)]
        for gpu, daemon in enumerate(self.daemons):
            jobs: list[SimulatedJob] = [*self.low[gpu]]
            if gpu in self.gang.ranks:
                jobs.insert(0, self.gang.ranks[gpu])
            daemon.open(jobs)
        self._window_from: float | None = None
        self._left_out = 0  # iterations before the window
        self._busy_before = [0.0] * gpus

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now

    def run(
        self, iterations: int, warmup: int = 0, *, seconds: float = inf, progress: Progress | None = None
    ) -> ClusterResult:
        """Run so many iterations after the warm-up, for `seconds` of virtual time at most; then the warm-up ends after
        half of them at the latest. An interrupt from the keyboard ends the run early, with a result so far."""
        if iterations < 1:
            raise ConfigError(f"{iterations} iterations", "give at least one")
        interrupted = False
        try:
            self._run(iterations, warmup, seconds, progress)
        except KeyboardInterrupt:
            interrupted = True
        return self._result(interrupted)

    def _low_clients(self, low: Sequence[Workload], gpu: int, seed: int) -> list[Client]:
        """A GPU's low jobs. They start at different moments on each GPU, spread over a step: in step they would disturb
        all GPUs at once."""
        made = []
        for i, workload in enumerate(low):
            pieces = cut_workload(workload, self.spec)
            later = replace(workload, starts_at=workload.starts_at + pieces.step_s * gpu / self.gpus)
            made.append(Client(1 + i, later, pieces, seed + gpu))
        return made

    def _run(self, iterations: int, warmup: int, seconds: float, progress: Progress | None) -> None:
        clock, daemons, done = self._clock, self.daemons, self.gang.iterations
        gpus = [daemon.gpu for daemon in daemons]
        for turn in count(1):
            if self._window_from is None and (len(done) >= warmup or clock.now >= 0.5 * seconds):
                self._begin_window()
            if (self._window_from is not None and len(done) >= self._left_out + iterations) or clock.now >= seconds:
                return
            # The GPU on which something happens next advances to that moment, and no further: what happens there may
            # end a joint kernel, and so concern others at once.
            first, which = min((gpu.next_event(), place) for place, gpu in enumerate(gpus))
            if first <= clock.next_at:
                if first == inf:
                    raise RuntimeError("nothing will ever happen again: a part of the plan was never launched")
                if finished := gpus[which].advance_to_finish(first):
                    clock.now = gpus[which].now
                    for each in finished:
                        daemons[which].finished(each)
            else:
                clock.act()
            if progress is not None and turn % PROGRESS_EVERY == 0:
                progress(self)

    def _begin_window(self) -> None:
        self._window_from, self._left_out = self._clock.now, len(self.gang.iterations)
        for clients in self.low:
            for client in clients:
                client.begin_window()
        self._busy_before = [daemon.gpu.busy().device_s for daemon in self.daemons]

    def _result(self, interrupted: bool) -> ClusterResult:
        window_s = 0.0 if self._window_from is None else self.now - self._window_from
        low = []
        for gpu, clients in enumerate(self.low):
            for client in clients:
                steps = (client.work_s - client.work_before_s) / client.cuts[0].step_s
                per_s = steps / window_s if window_s else float("nan")
                alone = solo(client.workload, self.spec).steps_per_s
                low.append(LowResult(gpu, client.name, per_s / alone, per_s))
        busy = [
            daemon.gpu.busy().device_s - before for daemon, before in zip(self.daemons, self._busy_before, strict=True)
        ]
        explanations = {
            f"GPU {gpu}, {job.name}": daemon.scheduler.explain(job.id)
            for gpu, daemon in enumerate(self.daemons)
            for job in daemon.jobs
        }
        return ClusterResult(
            policy=self.policy,
            gpus=self.gpus,
            iterations=tuple(self.gang.iterations[self._left_out :]) if self._window_from is not None else (),
            window_s=window_s,
            low=tuple(low),
            busy=tuple([each / window_s if window_s else 0.0 for each in busy]),
            ended_at=self.now,
            interrupted=interrupted,
            explanations=explanations,
            timeline=tuple(
                [tuple([self._shown(gpu, row) for row in d.timeline]) for gpu, d in enumerate(self.daemons)]
            ),
        )

    def _shown(self, gpu: int, row: LaunchRow) -> TimelineRow:
        if row.job != RANK or gpu not in self.gang.ranks:
            return TimelineRow(row.job, "low", row.share, row.started, row.ended)
        part = self.gang.parts[self.gang.ranks[gpu].steps[row.step]]
        return TimelineRow(part.title, part.kind, row.share, row.started, row.ended)


def _holder(gang: SimulatedGang, gpu: int) -> Callable[[int, float], None]:
    return lambda launch, now: gang.held(gpu, launch, now)
