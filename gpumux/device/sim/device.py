"""The simulated GPU as a device. Steps take the time they would take on the GPU and compute nothing: results are zeros,
and state is what was copied in. No torch.

The clock is the caller's. With a real one (`gpumux serve --device sim`) simulated time passes as real time does, and
the daemon sees each end when it next polls. On a virtual one (tests) no call waits.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from sys import intern

from gpumux import __version__, hostmemory
from gpumux.device.base import (
    GENERATOR,
    DeviceEvent,
    Launch,
    MemoryFigures,
    ProgramChecked,
    ProgramProfiled,
    ProgramRefused,
    SegmentHandle,
    counted_twice,
)
from gpumux.device.sim.cost import MIN_BLOCK_S, Kernel, kernels_of, op_profiles, solo_seconds
from gpumux.device.sim.gpu import Gpu
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.errors import ProgramError
from gpumux.program import operators as allowlist
from gpumux.program.codec import decode
from gpumux.program.cut import cut, gated
from gpumux.program.ir import (
    DEFAULT,
    DIRECT_BYTES,
    Collective,
    Program,
    ProgramLimits,
    aligned,
    gates,
    labels,
    piece_starts,
    slot_layout,
)
from gpumux.program.memory import first_fit, footprint, live_bytes, traffic, wave_pieces, wave_plan
from gpumux.program.profile import StepProfile, batch_size, dumps, of_layer
from gpumux.program.validate import refuse_rank, state_slots, validate
from gpumux.types import (
    GENERATOR_BYTES,
    CollectiveEnded,
    DeviceInfo,
    Fault,
    Footprint,
    Gang,
    JobDied,
    JobId,
    JobReleased,
    JobSpec,
    LaunchId,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramId,
    ProgramReady,
    StepId,
    TransferEnded,
    TransferId,
    WavePieces,
)

# ---- The check of an encoded Program without torch: its structure, its operators' names and its memory.
#
# Operators' arguments are not checked, since nothing is computed. A real device can still refuse a Program that passes.


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """A Program that passed, with what the check found."""

    program: Program
    footprint: Footprint
    live: tuple[int, ...]  # bytes of temporaries alive at each operator
    content_hash: str


class SimChecks:
    """Checks Programs, and keeps those that passed until they are loaded or their job is unloaded."""

    def __init__(self, limits: ProgramLimits, extra_ops: Collection[str]) -> None:
        self._limits = limits
        self._extra_ops = extra_ops
        self._passed: dict[tuple[JobId, ProgramId], CheckedProgram] = {}

    def check(self, job: JobId, program: ProgramId, encoded: bytes) -> ProgramChecked | ProgramRefused:
        try:
            passed = self._check(encoded)
        except ProgramError as error:
            return ProgramRefused(job, program, Fault(error.code, error.message, error.remedy))
        self._passed[job, program] = passed
        scalars = passed.program.scalars
        operators = tuple([intern(op.target) for op in passed.program.ops])
        return ProgramChecked(
            job, program, passed.footprint, passed.content_hash, operators, tuple(scalars), passed.live
        )

    def take(self, job: JobId, program: ProgramId, encoded: bytes) -> CheckedProgram | None:
        """The checked program of exactly these bytes; None if they were not checked."""
        passed = self._passed.get((job, program))
        if passed is None or passed.content_hash != hashlib.sha256(encoded).hexdigest():
            return None
        return self._passed.pop((job, program))

    def forget(self, job: JobId) -> None:
        for key in [key for key in self._passed if key[0] == job]:
            del self._passed[key]

    def _check(self, encoded: bytes) -> CheckedProgram:
        program = decode(encoded, self._limits)
        validate(program, self._limits)
        for index, op in enumerate(program.ops):
            try:
                allowlist.resolve(op.target, self._extra_ops)
            except ProgramError as error:
                raise ProgramError(f"operator {index}: {error.message}", error.remedy) from None
        planned = first_fit(program)
        content_hash = hashlib.sha256(encoded).hexdigest()
        return CheckedProgram(program, footprint(program, planned), tuple(live_bytes(planned)), content_hash)


# ---- A step's kernels cut into pieces, by the time of each kernel alone on one GPU.


TARGET_S = {Priority.HIGH: 400e-6, Priority.LOW: 300e-6}  # how long a piece should run
MIN_HIGH_S = 250e-6  # shorter high pieces are merged


@dataclass(frozen=True)
class Pieces:
    """A step cut for one GPU: piece i is kernels [bounds[i], bounds[i + 1]) and takes `seconds[i]` alone."""

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    kernels: tuple[tuple[Kernel, ...], ...]

    @property
    def step_s(self) -> float:
        return sum(self.seconds)


def cut_kernels(
    kernels: Sequence[Kernel],
    spec: GpuSpec,
    priority: Priority,
    target_s: float | None = None,
    gates: Collection[int] = (),
) -> Pieces:
    """Pieces of about `target_s` seconds. None: the priority's target; inf: one piece. A piece begins at every kernel
    in `gates`. Without kernels there is one empty piece."""
    seconds = [solo_seconds(kernel, spec) + spec.node_gap_s for kernel in kernels]
    target = TARGET_S[priority] if target_s is None else target_s
    if target == inf:
        return recut(kernels, (*sorted({0, *gates}), len(seconds)), spec)
    minimum = None if priority is Priority.LOW else min(MIN_HIGH_S, target)
    return recut(kernels, cut(seconds, target, min_s=minimum, gates=sorted(gates)), spec)


def recut(kernels: Sequence[Kernel], bounds: tuple[int, ...], spec: GpuSpec) -> Pieces:
    """These kernels as pieces with given bounds."""
    parts = tuple([tuple(kernels[a:b]) for a, b in pairwise(bounds)])
    return Pieces(bounds, tuple([piece_seconds(part, spec) for part in parts]), parts)


def piece_seconds(kernels: Sequence[Kernel], spec: GpuSpec, share: float = 1.0) -> float:
    """Seconds that a launch of these kernels takes alone on the device, or on a share of it, with its gaps."""
    gaps = spec.launch_gap_s + max(len(kernels) - 1, 0) * spec.node_gap_s
    return gaps + sum([solo_seconds(kernel, spec, share) for kernel in kernels])


# ---- Collectives: this device simulates the time of a rank's own messages. Its peers are not simulated: they are there
# as soon as the rank is, and send nothing that is looked at.


LINK_BANDWIDTH = 25e9  # bytes a second that a rank sends and, at the same time, receives; guess: 200 Gbit/s
LINK_LATENCY_S = 10e-6  # until the first byte of a message arrives; guess


def collective_seconds(program: Program, one: Collective) -> float:
    """How long the collective takes this rank. A sum in parts has two rounds of messages (device/cpu/peers.py)."""
    moved = traffic(program, one).values()
    nbytes = max(sum(sent for sent, _ in moved), sum(received for _, received in moved))
    members = len(one.members)
    rounds = 2 if one.kind == "all_reduce" and members > 2 and nbytes > (members - 1) * DIRECT_BYTES else 1
    return nbytes / LINK_BANDWIDTH + rounds * LINK_LATENCY_S


@dataclass(frozen=True, slots=True)
class GateExchange:
    """The collectives before one operator."""

    seconds: float
    moved: tuple[tuple[int, int, int], ...]  # by rank: bytes sent and received


def exchanges(program: Program) -> dict[int, GateExchange]:
    """By operator, what is exchanged before it."""
    found: dict[int, GateExchange] = {}
    for one in program.collectives:
        before = found.get(one.op, GateExchange(0.0, ()))
        moved = tuple((rank, *nbytes) for rank, nbytes in traffic(program, one).items())
        found[one.op] = GateExchange(before.seconds + collective_seconds(program, one), (*before.moved, *moved))
    return found


# ---- Jobs: their programs with cuts, their buffers, and their commands in order.


NOTHING = (Kernel("nothing", 1, MIN_BLOCK_S, 1, 0),)  # the kernels of a piece without operators
COPY_BYTES = 16 << 20  # at a time
_BUG = "this is a bug in the daemon: report it"


@dataclass(frozen=True, slots=True)
class SimTransfer:
    """A transfer to carry out. It owns `fd`."""

    transfer: TransferId
    buffers: tuple[int, ...]
    fd: int
    nbytes: int
    into_device: bool


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A request for operator times."""

    program: ProgramId


Command = Launch | SimTransfer | ProfileRequest


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A program to load, as Device.load_program was given it."""

    program: ProgramId
    passed: CheckedProgram
    new_buffers: tuple[int, ...]
    binding: tuple[int, ...]
    data_bytes: int
    slots: int


class SimProgram:
    """A loaded program and its cuts. Cut 0 is by the roofline. Cut 1 follows after one step, by the kernels' times in
    this simulation, which differ if a profile gives others. Later cuts follow `target_s`. Steps keep the cut they began
    with, so the cut before the newest stays."""

    def __init__(
        self, passed: CheckedProgram, slots: int, *, spec: GpuSpec, job: JobSpec, known: Iterable[StepProfile]
    ) -> None:
        program = passed.program
        self.slots = slots
        self.scalars = len(program.scalars)
        self.newest = 0
        self.target_s: float | None = None  # target length of pieces; None: the priority's
        self._spec = spec
        self._priority = job.priority
        self._program = program
        self._gates, self._starts = gates(program), piece_starts(program)
        self._plan = wave_plan(program)[1] if program.wave is not None else None
        self._exchanges = exchanges(program)
        self._batch, self._labels = batch_size(program), labels(program)
        self._ops = op_profiles(program, spec, known)
        self._kernels = kernels_of(self._ops, spec)
        predicted = cut_kernels(kernels_of(op_profiles(program, spec), spec), spec, job.priority, gates=self._starts)
        self.predicted = predicted
        self.cuts: dict[int, Pieces] = {0: recut(self._kernels, predicted.bounds, spec)}
        self._made_for: float | None = None  # target length of the newest cut

    def refuses(self, launch: Launch) -> Fault | None:
        """Why a launch is refused, or None."""
        pieces = self.cuts.get(launch.cut)
        if pieces is None or not 0 <= launch.piece < len(pieces.seconds):
            return Fault("program", f"no piece {launch.piece} of cut {launch.cut}", _BUG)
        if not 0 <= launch.slot < self.slots:
            return Fault("program", f"no slot {launch.slot}", _BUG)
        if len(launch.scalars) != self.scalars:
            message = f"{len(launch.scalars)} scalars where the program takes {self.scalars}"
            return Fault("program", message, "send one each")
        if launch.share not in self._spec.shares:
            return Fault("program", f"no share {launch.share}", f"the device offers {self._spec.shares}")
        return None

    def gated(self, cut: int) -> tuple[int, ...]:
        """The pieces of a cut that begin with a collective."""
        return gated(self.cuts[cut].bounds, self._gates)

    def wave(self, bounds: Sequence[int]) -> WavePieces | None:
        """What the scheduler needs of pieces with these bounds, if the program is for one of two waves."""
        return wave_pieces(self._program, self._plan, bounds) if self._plan is not None else None

    def exchange(self, launch: Launch) -> GateExchange | None:
        """What is exchanged after this piece, if anything is."""
        bounds = self.cuts[launch.cut].bounds
        return self._exchanges.get(bounds[launch.piece + 1]) if launch.piece + 2 < len(bounds) else None

    def kernels(self, launch: Launch) -> tuple[Kernel, ...]:
        return self.cuts[launch.cut].kernels[launch.piece] or NOTHING

    def done(self, launch: Launch) -> Pieces | None:
        """A piece has ended. Returns the new cut that follows, if one does."""
        newest = self.cuts[self.newest]
        if launch.cut != self.newest or launch.piece + 1 < len(newest.seconds):
            return None
        if self.newest and self.target_s == self._made_for:
            return None
        self._made_for = self.target_s
        made = cut_kernels(self._kernels, self._spec, self._priority, self.target_s, self._starts)
        if self.newest and made.bounds == newest.bounds:
            return None
        self.cuts.pop(self.newest - 1, None)
        self.newest += 1
        self.cuts[self.newest] = made
        return made

    def profile(self) -> bytes:
        """The text of a profile file."""
        spec = self._spec
        note = f"computed for {spec.title} by the cost model of gpumux, except where a profile says more"
        versions = {"gpumux": __version__}
        ops = tuple([of_layer(op, label) for op, label in zip(self._ops, self._labels, strict=True)])
        return dumps(StepProfile("", spec.name, ops, versions, None, self._batch, note)).encode()


@dataclass(slots=True)
class SimJob:
    """One job. `running`: launches handed to the GPU, oldest first; `waiting`: later commands. `fault` is set from when
    the job is lost until the next poll reports it."""

    job: JobId
    spec: JobSpec
    sizes: list[int] = field(default_factory=list)  # of its buffers
    pushed: dict[int, bytes] = field(default_factory=dict)  # by buffer; all others are zeros
    programs: dict[ProgramId, SimProgram] = field(default_factory=dict)
    charged: int = 0  # bytes of its buffers and data segments
    transient: int = 0  # bytes of the program that needs most: they never run at once
    running: deque[Launch] = field(default_factory=deque)
    waiting: deque[Command] = field(default_factory=deque)
    under_way: set[StepId] = field(default_factory=set)  # steps that have begun
    gates: dict[StepId, tuple[int, GateExchange]] = field(default_factory=dict)  # the piece and what comes before it
    fault: Fault | None = None

    @property
    def memory(self) -> int:
        return self.charged + self.transient

    def load(
        self, request: LoadRequest, free_bytes: int, spec: GpuSpec, known: Iterable[StepProfile]
    ) -> SimProgram | Fault:
        """Load a program. Returns it, or the reason for refusing it."""
        passed = request.passed
        refusal = refuse_rank(passed.program, self.spec.gang)
        if refusal is not None:
            return Fault(refusal.code, refusal.message, refusal.remedy)
        transient = max(self.transient, passed.footprint.transient_bytes)
        charge = sum(request.new_buffers) + request.data_bytes
        wanted = charge + transient - self.transient
        fault = self._refuses(request)
        if fault is None and wanted > free_bytes:
            message = f"the program needs {wanted} bytes and {free_bytes} are free"
            fault = Fault("admission_refused", message, "use smaller batches, or wait for other jobs to end")
        if fault is not None:
            return fault
        loaded = self.programs[request.program] = SimProgram(
            passed, request.slots, spec=spec, job=self.spec, known=known
        )
        self.sizes.extend(request.new_buffers)
        self.charged += charge
        self.transient = transient
        return loaded

    def _refuses(self, request: LoadRequest) -> Fault | None:
        """Why a request is refused, memory apart, or None."""
        if request.program in self.programs:
            return Fault("program", f"program {request.program} is loaded already", "choose another number")
        needed = request.slots * slot_layout(request.passed.program).nbytes
        if request.slots < 1 or request.data_bytes < needed:
            message = f"{request.slots} slots do not fit a segment of {request.data_bytes} bytes"
            return Fault("program", message, _BUG)
        if any(size < 0 for size in request.new_buffers):
            return Fault("program", "a buffer of negative size", _BUG)
        slots, sizes = state_slots(request.passed.program), [*self.sizes, *request.new_buffers]
        if len(request.binding) != len(slots):
            message = f"{len(request.binding)} buffers bound where the program has {len(slots)} state slots"
            return Fault("program", message, _BUG)
        for slot, (buffer, wanted) in enumerate(zip(request.binding, slots, strict=True)):
            if not 0 <= buffer < len(sizes) or sizes[buffer] < wanted:
                message = f"state slot {slot} of {wanted} bytes is bound to buffer {buffer}, which does not hold it"
                return Fault("program", message, _BUG)
        return None

    def move(self, move: SimTransfer) -> TransferEnded:
        """Carry out a transfer, and close its descriptor."""
        try:
            return TransferEnded(self.job, move.transfer, self._copy(move))
        finally:
            os.close(move.fd)

    def _copy(self, move: SimTransfer) -> Fault | None:
        numbers = [buffer for buffer in move.buffers if buffer != GENERATOR]
        if any(not 0 <= buffer < len(self.sizes) for buffer in numbers):
            return Fault("program", f"no such buffer among {numbers[:8]}", "name buffers of the job")
        wanted = sum(aligned(self.sizes[buffer]) for buffer in numbers)
        wanted += GENERATOR_BYTES if GENERATOR in move.buffers else 0
        if wanted > move.nbytes:
            return Fault("program", f"{wanted} bytes do not fit a segment of {move.nbytes}", "send a larger one")
        at = 0
        try:
            for buffer in numbers:  # no random numbers are drawn: the bytes of a generator stay zeros
                if move.into_device:
                    self.pushed[buffer] = _read(move.fd, at, self.sizes[buffer])
                else:
                    _write(move.fd, at, self.sizes[buffer], self.pushed.get(buffer))
                at += aligned(self.sizes[buffer])
        except (OSError, MemoryError) as error:
            return Fault("job_failed", f"the copy failed: {error}", "see that the host has memory left")
        return None


def _read(fd: int, at: int, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = os.pread(fd, min(nbytes, COPY_BYTES), at)
        if not part:
            raise OSError("the segment is shorter than it should be")
        parts.append(part)
        at, nbytes = at + len(part), nbytes - len(part)
    return b"".join(parts)


def _write(fd: int, at: int, nbytes: int, data: bytes | None) -> None:
    """`data` None: zeros."""
    done = 0
    while done < nbytes:
        count = min(nbytes - done, COPY_BYTES)
        part = bytes(count) if data is None else memoryview(data)[done : done + count]
        done += os.pwrite(fd, part, at + done)


# ---- The device


_UNKNOWN = Fault("unknown_job", "the device holds no such job", "open the job first")
_UNCHECKED = Fault("program", "the program was not checked", "check these bytes before loading them")


class SimDevice:
    """See gpumux.device.base.Device. `known`: profiles whose times are used instead of the cost model's. `parallel`:
    pieces that run at once, None for as many as are launched."""

    def __init__(
        self,
        gpu: str | GpuSpec = "a100",
        *,
        clock: Callable[[], float] = time.monotonic,
        known: Sequence[StepProfile] = (),
        parallel: int | None = None,
        allow_ops: Collection[str] = (),
        limits: ProgramLimits = DEFAULT,
    ) -> None:
        self.spec = preset(gpu) if isinstance(gpu, str) else gpu
        self._clock = clock
        self._known = tuple(known)
        self._parallel = parallel
        self._checks = SimChecks(limits, allow_ops)
        self._gpu = Gpu(self.spec)
        self._jobs: dict[JobId, SimJob] = {}
        self._launches: dict[LaunchId, Launch] = {}  # handed to the GPU
        self._ages: dict[LaunchId, int] = {}  # of launches that wait
        self._age = 0
        self._events: list[DeviceEvent] = []
        self._collectives: list[CollectiveEnded] = []  # under way; `ended` is when they will have
        self._wakeup = -1
        self._readable = False  # the descriptor is readable
        self._total = 0

    # ---- the contract

    def open(self) -> DeviceInfo:
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # What jobs keep on this device lies in the host's memory, so that bounds it too.
        self._total = min(self.spec.memory_bytes, hostmemory.free_bytes())
        return DeviceInfo(
            kind="sim",
            name=f"simulated {self.spec.title}",
            memory_bytes=self._total,
            parallel=self._parallel,
            threads=0,
            torch_version="none",
            piece_target_s={priority.name.lower(): seconds for priority, seconds in TARGET_S.items()},
            shares=self.spec.shares,
        )

    def filenos(self) -> Sequence[int]:
        return () if self._wakeup < 0 else (self._wakeup,)

    def due(self) -> float:
        if self._wakeup < 0:
            return inf
        next_exchange = min((one.ended for one in self._collectives), default=inf)
        return self._clock() if self._readable else min(next_exchange, self._gpu.next_event())

    def poll(self) -> list[DeviceEvent]:
        if self._wakeup < 0:
            return []
        if self._readable:
            os.eventfd_read(self._wakeup)
            self._readable = False
        for job in [job for job in self._jobs.values() if job.fault is not None]:
            self._fail_job(job, job.fault or _UNKNOWN)
        for launch, started, ended in self._gpu.advance(self._clock()):
            self._launch_done(self._launches.pop(LaunchId(launch)), started, ended)
        now = self._clock()
        over = [one for one in self._collectives if one.ended <= now]
        over.sort(key=lambda one: one.ended)
        self._events += over
        self._collectives = [one for one in self._collectives if one.ended > now]
        events, self._events = self._events, []
        return events

    def check(self, job: JobId, program: ProgramId, encoded: bytes, user: int | None = None) -> None:
        self._emit(self._checks.check(job, program, encoded))

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        self._jobs.setdefault(job, SimJob(job, spec))

    def load_program(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        new_buffers: Sequence[int],
        binding: Sequence[int],
        data: SegmentHandle,
        slots: int,
    ) -> None:
        held = self._jobs.get(job)
        if held is None:
            self._emit(ProgramRefused(job, program, _UNKNOWN))
            return
        passed = self._checks.take(job, program, encoded)
        loaded: SimProgram | Fault = _UNCHECKED
        if passed is not None and passed.program.kind != "aten":
            loaded = Fault("program", "a simulated device compiles nothing", "submit it without compile=True")
        elif passed is not None:
            request = LoadRequest(program, passed, tuple(new_buffers), tuple(binding), data.nbytes, slots)
            loaded = held.load(request, self.memory().free_bytes, self.spec, self._known)
        if isinstance(loaded, Fault):
            self._emit(ProgramRefused(job, program, loaded))
        else:
            pieces = loaded.predicted
            self._emit(
                ProgramReady(
                    job, program, 0, pieces.seconds, pieces.bounds, loaded.gated(0), loaded.wave(pieces.bounds)
                )
            )

    def launch(self, launch: Launch) -> None:
        job = self._jobs.get(launch.job)
        if job is None:
            self._emit(PieceFailed(launch.launch, _UNKNOWN), JobDied(launch.job, _UNKNOWN))
            return
        program = job.programs.get(launch.program)
        fault = (
            program.refuses(launch) if program else Fault("program", f"no program {launch.program}", "load it first")
        )
        if fault is not None and job.fault is None:
            job.fault = fault
            self._wake()
        self._submit(job, launch)

    def may_join(self, gang: Gang) -> Fault | None:
        """See base.ProcessGroups."""
        return None

    def join(self, job: JobId, gang: Gang) -> None:
        """See base.ProcessGroups. No peers are looked for."""

    def leave(self, job: JobId) -> None:
        """See base.ProcessGroups."""

    def abort(self, job: JobId, fault: Fault) -> None:
        """See base.ProcessGroups."""
        held = self._jobs.get(job)
        if held is not None and held.fault is None:
            held.fault = fault
            self._wake()

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        held = self._jobs.get(job)
        if held is not None and program in held.programs:
            held.programs[program].target_s = target_s

    def transfer(
        self, job: JobId, transfer: TransferId, buffers: Sequence[int], segment: SegmentHandle, into_device: bool
    ) -> None:
        held = self._jobs.get(job)
        if held is None:
            self._emit(TransferEnded(job, transfer, _UNKNOWN))
            return
        self._submit(held, SimTransfer(transfer, tuple(buffers), os.dup(segment.fd), segment.nbytes, into_device))

    def profile(self, job: JobId, program: ProgramId) -> None:
        held = self._jobs.get(job)
        if held is None:
            self._emit(ProgramProfiled(job, program, b"", _UNKNOWN))
            return
        self._submit(held, ProfileRequest(program))

    def unload(self, job: JobId) -> None:
        held = self._jobs.get(job)
        if held is not None:
            self._forget_job(held)
            self._hand_over()
        self._checks.forget(job)
        self._events = [event for event in self._events if getattr(event, "job", None) != job]
        self._emit(JobReleased(job))

    def memory(self) -> MemoryFigures:
        by_job = {job.job: job.memory for job in self._jobs.values()}
        used = sum(by_job.values()) - counted_twice((job.spec.arena, job.transient) for job in self._jobs.values())
        return MemoryFigures(self._total, max(0, self._total - used), by_job)

    def close(self) -> None:
        if self._wakeup < 0:
            return
        for job in list(self._jobs.values()):
            self._forget_job(job)
        self._events.clear()
        os.close(self._wakeup)
        self._wakeup, self._readable, self._total = -1, False, 0

    # ---- commands

    def _submit(self, job: SimJob, command: Command) -> None:
        if isinstance(command, Launch):
            if self._parallel is None and not job.waiting and job.fault is None:
                self._start(job, command)
                return
            self._age += 1
            self._ages[command.launch] = self._age
        job.waiting.append(command)
        self._hand_over()

    def _hand_over(self) -> None:
        """Start all that can start."""
        while True:
            heads = []
            for job in self._jobs.values():
                if job.waiting and job.fault is None:
                    self._run_other_commands(job)
                    if job.waiting and isinstance(job.waiting[0], Launch) and self._may_start(job):
                        heads.append((-job.waiting[0].stream, self._ages[job.waiting[0].launch], job))
            if not heads:
                return
            _, _, job = min(heads, key=lambda head: head[:2])
            launch = job.waiting.popleft()
            assert isinstance(launch, Launch)
            self._start(job, launch)

    def _may_start(self, job: SimJob) -> bool:
        return self._parallel is None or (not job.running and len(self._launches) < self._parallel)

    def _run_other_commands(self, job: SimJob) -> None:
        """Carry out commands at the head that are no launches, once all launches before them have ended."""
        while job.waiting and not job.running and not isinstance(job.waiting[0], Launch):
            command = job.waiting.popleft()
            assert not isinstance(command, Launch)
            self._emit(job.move(command) if isinstance(command, SimTransfer) else _profiled(job, command))

    def _start(self, job: SimJob, launch: Launch) -> None:
        program = job.programs[launch.program]
        self._ages.pop(launch.launch, None)
        self._launches[launch.launch] = launch
        job.running.append(launch)
        kernels = program.kernels(launch)
        self._gpu.launch(launch.launch, launch.job, launch.stream, kernels, self._clock(), launch.share)

    def _launch_done(self, launch: Launch, started: float, ended: float) -> None:
        job = self._jobs[launch.job]
        job.running.popleft()
        self._events.append(PieceDone(launch.launch, started, ended))
        program = job.programs[launch.program]
        last = launch.piece + 1 == len(program.cuts[launch.cut].seconds)
        job.under_way.discard(launch.step) if last else job.under_way.add(launch.step)
        exchange = program.exchange(launch)
        if exchange is not None:
            job.gates[launch.step] = launch.piece + 1, exchange
        step = min(job.gates, default=None)
        if step is not None and step <= min(job.under_way):
            piece, exchange = job.gates.pop(step)
            until = ended + exchange.seconds
            self._collectives.append(
                CollectiveEnded(launch.job, step, piece, ended, until, exchange.moved, exchange.seconds)
            )
        pieces = program.done(launch)
        if pieces is not None:
            newest = program.newest
            begin, wave = program.gated(newest), program.wave(pieces.bounds)
            self._events.append(
                ProgramReady(launch.job, launch.program, newest, pieces.seconds, pieces.bounds, begin, wave)
            )
        self._hand_over()

    # ---- endings

    def _fail_job(self, job: SimJob, fault: Fault) -> None:
        """Report that the job is lost, and answer its outstanding commands."""
        for command in (*job.running, *job.waiting):
            if isinstance(command, Launch):
                self._events.append(PieceFailed(command.launch, fault))
            elif isinstance(command, SimTransfer):
                self._events.append(TransferEnded(job.job, command.transfer, fault))
            else:
                self._events.append(ProgramProfiled(job.job, command.program, b"", fault))
        self._events.append(JobDied(job.job, fault))
        self._forget_job(job)
        self._hand_over()

    def _forget_job(self, job: SimJob) -> None:
        """Forget a job and its commands."""
        self._gpu.drop(job.job, self._clock())
        self._collectives = [one for one in self._collectives if one.job != job.job]
        for launch in job.running:
            del self._launches[launch.launch]
        for command in job.waiting:
            if isinstance(command, SimTransfer):
                os.close(command.fd)
            elif isinstance(command, Launch):
                del self._ages[command.launch]
        self._checks.forget(job.job)
        del self._jobs[job.job]

    def _emit(self, *events: DeviceEvent) -> None:
        self._events.extend(events)
        self._wake()

    def _wake(self) -> None:
        """Make the descriptor readable, so that the caller polls."""
        self._readable = True
        os.eventfd_write(self._wakeup, 1)


def _profiled(job: SimJob, ask: ProfileRequest) -> ProgramProfiled:
    program = job.programs.get(ask.program)
    if program is None:
        fault = Fault("program", f"no program {ask.program}", "load it first")
        return ProgramProfiled(job.job, ask.program, b"", fault)
    if program.newest == 0:
        fault = Fault("program", "no step of the program has run yet", "run one of it first")
        return ProgramProfiled(job.job, ask.program, b"", fault)
    return ProgramProfiled(job.job, ask.program, program.profile())
