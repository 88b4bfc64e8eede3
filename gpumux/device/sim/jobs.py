"""What the simulated device keeps of each job: programs with their cuts, buffers, and commands in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpumux import __version__
from gpumux.device.contract import GENERATOR, Launch, TransferDone
from gpumux.device.sim.checks import Passed
from gpumux.device.sim.cost import kernels_of, op_profiles
from gpumux.device.sim.kernel import MIN_BLOCK_S, Kernel
from gpumux.device.sim.pieces import Pieces, cut_kernels, recut
from gpumux.device.sim.spec import GpuSpec
from gpumux.model import GENERATOR_BYTES, Fault, JobId, JobSpec, ProgramId, TransferId
from gpumux.program.ir import aligned, slot_layout
from gpumux.program.layers import labels
from gpumux.program.profile import StepProfile, batch_size, dumps, of_layer
from gpumux.program.validate import state_slots

NOTHING = (Kernel("nothing", 1, MIN_BLOCK_S, 1, 0),)  # what a piece without operators launches
COPY_BYTES = 16 << 20  # at a time
_BUG = "this is a bug in the daemon: report it"


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer on its way. It owns `fd`."""

    transfer: TransferId
    buffers: tuple[int, ...]
    fd: int
    nbytes: int
    into_device: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A profile asked for."""

    program: ProgramId


Command = Launch | Move | Ask


@dataclass(frozen=True, slots=True)
class Request:
    """A program to load, as Device.load_program says it."""

    program: ProgramId
    passed: Passed
    new_buffers: tuple[int, ...]
    binding: tuple[int, ...]
    data_bytes: int
    slots: int


class LoadedProgram:
    """Cut 0 is by the roofline alone; after one step follows cut 1, by what the kernels really take here, which
    is something else where a profile says so; later ones by `target_s`. Steps keep the cut they began with, so the one before
    the newest stays."""

    def __init__(self, passed: Passed, slots: int, spec: GpuSpec, job: JobSpec, known: Iterable[StepProfile]) -> None:
        program = passed.program
        self.slots = slots
        self.scalars = len(program.scalars)
        self.newest = 0
        self.target_s: float | None = None  # how long pieces are to be; None: as the priority wants them
        self._spec = spec
        self._priority = job.priority
        self._gates = [gate.op for gate in program.gates]
        self._batch, self._labels = batch_size(program), labels(program)
        self._ops = op_profiles(program, spec, known)
        self._kernels = kernels_of(self._ops, spec)
        predicted = cut_kernels(kernels_of(op_profiles(program, spec), spec), spec, job.priority, gates=self._gates)
        self.predicted = predicted
        self.cuts: dict[int, Pieces] = {0: recut(self._kernels, predicted.bounds, spec)}
        self._made_for: float | None = None  # the newest of them

    def refuses(self, launch: Launch) -> Fault | None:
        """Why a launch can't be, if it can't."""
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

    def kernels(self, launch: Launch) -> tuple[Kernel, ...]:
        return self.cuts[launch.cut].kernels[launch.piece] or NOTHING

    def done(self, launch: Launch) -> Pieces | None:
        """A piece has ended: the new cut it leads to, if it does."""
        newest = self.cuts[self.newest]
        if launch.cut != self.newest or launch.piece + 1 < len(newest.seconds):
            return None
        if self.newest and self.target_s == self._made_for:
            return None
        self._made_for = self.target_s
        made = cut_kernels(self._kernels, self._spec, self._priority, self.target_s, self._gates)
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
class Job:
    """`running` are launches handed to the GPU, oldest first; `waiting` what comes after them; `fault` is set
    from when the job is lost until that was told."""

    job: JobId
    spec: JobSpec
    sizes: list[int] = field(default_factory=list)  # of its buffers
    pushed: dict[int, bytes] = field(default_factory=dict)  # by buffer; all others are zeros
    programs: dict[ProgramId, LoadedProgram] = field(default_factory=dict)
    charged: int = 0  # bytes of its buffers and data segments
    transient: int = 0  # of the program that needs most; they never run at once
    running: deque[Launch] = field(default_factory=deque)
    waiting: deque[Command] = field(default_factory=deque)
    fault: Fault | None = None

    @property
    def memory(self) -> int:
        return self.charged + self.transient

    def load(
        self, request: Request, free_bytes: int, spec: GpuSpec, known: Iterable[StepProfile]
    ) -> LoadedProgram | Fault:
        """Take a program in, or say why not."""
        passed = request.passed
        transient = max(self.transient, passed.footprint.transient_bytes)
        charge = sum(request.new_buffers) + request.data_bytes
        wanted = charge + transient - self.transient
        fault = self._refuses(request)
        if fault is None and wanted > free_bytes:
            message = f"the program needs {wanted} bytes and {free_bytes} are free"
            fault = Fault("admission_refused", message, "use smaller batches, or wait for other jobs to end")
        if fault is not None:
            return fault
        loaded = self.programs[request.program] = LoadedProgram(passed, request.slots, spec, self.spec, known)
        self.sizes.extend(request.new_buffers)
        self.charged += charge
        self.transient = transient
        return loaded

    def _refuses(self, request: Request) -> Fault | None:
        """What is wrong with a request, whatever memory there is."""
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

    def move(self, move: Move) -> TransferDone:
        """Carry a transfer out, and let go of its descriptor."""
        try:
            return TransferDone(self.job, move.transfer, self._copy(move))
        finally:
            os.close(move.fd)

    def _copy(self, move: Move) -> Fault | None:
        numbers = [buffer for buffer in move.buffers if buffer != GENERATOR]
        if any(not 0 <= buffer < len(self.sizes) for buffer in numbers):
            return Fault("program", f"no such buffer among {numbers[:8]}", "name buffers of the job")
        wanted = sum(aligned(self.sizes[buffer]) for buffer in numbers)
        wanted += GENERATOR_BYTES if GENERATOR in move.buffers else 0
        if wanted > move.nbytes:
            return Fault("program", f"{wanted} bytes do not fit a segment of {move.nbytes}", "send a larger one")
        at = 0
        try:
            for buffer in numbers:  # nothing here draws random numbers: a segment is zeros where a generator would be
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
