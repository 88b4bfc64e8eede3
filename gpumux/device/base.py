"""The contract of every device: cpu, cuda, sim.

No call blocks, but for `open` and `close`, and no argument is a torch object: calls carry plain data, encoded Programs
and file descriptors, so that a device may run in other processes. The results of a call come later as events from
`poll`, in the order they happened.

A *stream* is an in-order queue with a priority. The device runs at most `DeviceInfo.parallel` pieces at once. When it
can start one, it takes the oldest launch of the highest-priority stream. The launches of a job run in the order they
were made in.

Clock: `started` and `ended` are seconds on the clock that the device was opened with: CLOCK_MONOTONIC for real devices,
so that processes agree, and the virtual clock for sim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from gpumux.types import (
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
)

GENERATOR = -1  # in a transfer's list of buffers, last: the job's random generator, GENERATOR_BYTES of the segment


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """Shared memory by descriptor: a sealed memfd of exactly `nbytes`. The caller owns `fd` and may close it when the
    call returns; the device duplicates what it keeps."""

    fd: int
    nbytes: int


class AnswerForm(NamedTuple):
    """The answer to any step of one job, with holes: the step's number goes to `step_at` (8 bytes, unsigned), seconds
    to the other three (8 bytes each, IEEE double), all big-endian."""

    packet: bytes
    step_at: int
    queue_at: int
    device_at: int
    total_at: int


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """A device's memory. `by_job`: bytes charged to each job. `measured`: the most bytes that each job held in a recent
    step, if the device can measure that."""

    total_bytes: int
    free_bytes: int
    by_job: dict[JobId, int]
    measured: dict[JobId, int] = field(default_factory=dict)


def counted_twice(transients: Iterable[tuple[int | None, int]]) -> int:
    """Of jobs' bytes of temporaries, each with the arena in which they lie, those that another job's in the same arena
    count as well: the jobs take turns there."""
    by_arena: dict[int, list[int]] = {}
    for arena, nbytes in transients:
        if arena is not None:
            by_arena.setdefault(arena, []).append(nbytes)
    return sum(sum(found) - max(found) for found in by_arena.values())


class Launch(NamedTuple):
    """One piece of one step, or `pieces` that follow each other (DeviceInfo.run_s). `slot`: the step's slot in the
    program's data segment. `scalars`: the step's host scalars, as many as the Program declares, sent with every
    piece."""

    launch: LaunchId
    job: JobId
    step: StepId
    program: ProgramId
    cut: int
    piece: int
    slot: int
    scalars: tuple[float | int, ...]
    stream: int  # priority of the stream, larger runs first
    share: float = 1.0  # part of the multiprocessors it may use, one of DeviceInfo.shares
    submitted: float | None = None  # see Answering; only with the piece that ends its step
    pieces: int = 1


# ---- Events, from poll(): these, and those in gpumux/types.py, which the scheduler takes as they are.


@dataclass(frozen=True, slots=True)
class ProgramChecked:
    """`check` passed. `operators`: the names of the program's operators, in order; `scalars`: the kind of each host
    scalar of a step; `live`: bytes of temporaries alive at each operator, and of results after the last one."""

    job: JobId
    program: ProgramId
    footprint: Footprint
    content_hash: str
    operators: tuple[str, ...]
    scalars: tuple[Literal["float", "int"], ...]
    live: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramRefused:
    """`check` or `load_program` failed. The job goes on, and its memory is as it was."""

    job: JobId
    program: ProgramId
    fault: Fault


@dataclass(frozen=True, slots=True)
class ProgramProfiled:
    """The answer to `profile`: the text of a profile file (program/profile.py) with an empty name, or a fault. The
    device writes the text, since that takes too long for the daemon's thread if the Program is long."""

    job: JobId
    program: ProgramId
    text: bytes
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class FusedProgramMade:
    """A fused Program was made, and is not proven yet. `encoded` is to be checked as any Program is; `fusion` goes to
    `load_fused`, as `state` does: bytes of each state slot. `proof_bytes`: memory that its proof takes at most."""

    request: int
    encoded: bytes
    fusion: bytes
    state: tuple[int, ...]
    proof_bytes: int


@dataclass(frozen=True, slots=True)
class FusedProgramProven:
    """The fused Program of this request computes what its jobs' own Programs do."""

    request: int


@dataclass(frozen=True, slots=True)
class FusedProgramRefused:
    """`make_fused` or `prove_fused` failed: the jobs of this request can't be fused."""

    request: int
    fault: Fault


DeviceEvent = (
    ProgramChecked
    | ProgramRefused
    | ProgramReady
    | PieceDone
    | PieceFailed
    | CollectiveEnded
    | TransferEnded
    | ProgramProfiled
    | FusedProgramMade
    | FusedProgramProven
    | FusedProgramRefused
    | JobDied
    | JobReleased
)


class Device(Protocol):
    """What the daemon calls. Each method names the events that answer it."""

    def open(self) -> DeviceInfo:
        """Open the device. Raises ConfigError with the reason if it can't be used."""

    def filenos(self) -> Sequence[int]:
        """Descriptors that turn readable when poll() has events. The set may change after any call."""

    def due(self) -> float:
        """When to call poll() even if no descriptor has turned readable, on the device's clock; inf: never."""

    def poll(self) -> list[DeviceEvent]:
        """All events since the last call. Never waits. Raises DeviceLost when nothing will run on the device any more:
        no events follow then, and it can only be closed."""

    def check(self, job: JobId, program: ProgramId, encoded: bytes, user: int | None = None) -> None:
        """Check an encoded Program away from the hot path -> ProgramChecked or ProgramRefused. `user`: whose it is;
        results may be kept for equal Programs of the same user."""

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        """Open a job, which has no state yet. -> JobDied if that fails."""

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
        """Allocate `new_buffers` (bytes of each; zeroed, and appended to the job's list of buffers), bind the program's
        state slot i to buffer `binding[i]`, map `data` (slots x SlotLayout.nbytes bytes) and make the program ready
        -> ProgramReady or ProgramRefused."""

    def launch(self, launch: Launch) -> None:
        """Run a piece -> PieceDone, or PieceFailed then JobDied."""

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        """Make the program's pieces about `target_s` seconds long from now on; None: the device's own length.
        -> ProgramReady after a step of the newest cut, if the new cut differs. Nothing happens if there is no such
        program. May be called at any time; the last call counts."""

    def transfer(
        self, job: JobId, transfer: TransferId, buffers: Sequence[int], segment: SegmentHandle, into_device: bool
    ) -> None:
        """Copy the job's buffers to or from `segment`, end to end, each aligned to 64 bytes, in order with the job's
        launches -> TransferEnded. GENERATOR stands for the state of the job's random generator; a state of length 0
        leaves it as it is."""

    def profile(self, job: JobId, program: ProgramId) -> None:
        """Report the measured (by sim: computed) time of each operator of a loaded program, in order with the job's
        launches -> ProgramProfiled, with a fault if nothing is measured yet."""

    def unload(self, job: JobId) -> None:
        """Drop the job at once, even if a piece of it runs; idempotent -> JobReleased. No PieceDone or PieceFailed of
        the job comes after the call."""

    def memory(self) -> MemoryFigures:
        """Free memory, and the memory of each job."""

    def close(self) -> None:
        """Unload all jobs and give the device back. Idempotent."""


@runtime_checkable
class Answering(Protocol):
    """Optional: a device that answers steps itself, so that a client has its result before the caller
    knows of it. A device without these methods leaves every answer to its caller.

    A launch with `submitted` ends its step. If the device was given the client's channel it may then send the filled
    form, as one packet, before it reports PieceDone with `answered`: queue seconds from `submitted` to the start of
    the step's first piece, device seconds of all its pieces, total seconds from `submitted` to the end of the last. It
    never waits for room: what it can't send at once, and from then on every answer of that job, it leaves to the
    caller, whose PieceDone then says so. So each step is answered once, and the answers of a job keep their order.
    """

    def answer_on(self, job: JobId, channel: int, form: AnswerForm) -> None:
        """Answer the job's steps on `channel`, a SOCK_SEQPACKET socket. The caller keeps the descriptor."""

    def catch_up(self, job: JobId) -> list[DeviceEvent]:
        """All events since the last call, as from `poll`. PieceDone of every answered step of the job is among the
        events of this call or an earlier one, even if nothing has said so yet: a client may be faster than poll."""


UNGANGED = Fault(
    "refused",
    "this daemon's device runs no jobs on several devices: its collectives are not proven",
    "use daemons with --device cpu or sim, or submit without a plan",
)


@runtime_checkable
class ProcessGroups(Protocol):
    """Optional: a device whose jobs can be ranks of a gang, so that it takes Programs with collectives. A device
    without these methods refuses such Programs.

    Where a piece has ended and the next one is gated (ProgramReady), the device begins with the collectives between
    them at once and by itself, in order, and reports CollectiveEnded when they have ended; nothing of the job is
    launched meanwhile. Of a job's two waves (gpumux/waves), the later step's collectives begin when the earlier step
    has ended, so that all ranks meet them in one order. It waits without a core. If a peer is lost or sends something
    else, the job dies (`peers_lost`), at the latest after `timeout_s` of the gang.
    """

    def may_join(self, gang: Gang) -> Fault | None:
        """Why no job can be a rank of this gang, or None."""

    def join(self, job: JobId, gang: Gang) -> None:
        """Have the job find its peers; it may load and run programs meanwhile. Called once, right after `open_job`.
        -> JobDied if they are not found."""

    def leave(self, job: JobId) -> None:
        """Have the job leave its peers once its collectives under way have ended. Programs with collectives fail from
        then on."""

    def abort(self, job: JobId, fault: Fault) -> None:
        """End the job's collectives at once, and the job with this fault -> JobDied."""


@runtime_checkable
class Regrading(Protocol):
    """Optional: what a device does when a running job's priority changes, besides using the priority in later launches.
    A device without these methods has nothing to do."""

    def may_regrade(self, priority: Priority) -> Fault | None:
        """Why no job can be given this priority, or None."""

    def regrade(self, job: JobId, priority: Priority) -> None:
        """Give the job this priority from its next launch on."""


@runtime_checkable
class FusesJobs(Protocol):
    """Optional: a device that runs the steps of jobs with equal Programs as one step (gpumux/device/cpu/group.py).

    The group is a job of the device's like any other, which its caller opens. Its first Program is the fused one, whose
    state slot i is the members' slots i, one after another; then each member's own Program is loaded. All of them are
    checked first, as any Program is. A launch of the fused Program has as `scalars`, for each member in order, the slot
    of its step and the host scalars of its step. A launch of a member's own Program runs a step of that member alone,
    on its part of the state. State is brought in and out by `transfer`: loading a member's Program adds a buffer for
    each state slot of it to the job's, its part of the state.
    """

    def make_fused(self, request: int, encoded: bytes, jobs: int) -> None:
        """Make the Program that runs a step of this encoded one for each of `jobs` jobs. `request`: a number that was
        not used before. -> FusedProgramMade or FusedProgramRefused. Requests are carried out one after another: the
        next begins when this one is proven, refused or dropped."""

    def prove_fused(self, request: int) -> None:
        """Prove a Program that was made, once there is memory for the proof -> FusedProgramProven or
        FusedProgramRefused."""

    def drop_fused(self, request: int) -> None:
        """Give a request up, which is not answered any more. Idempotent."""

    def load_fused(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        fusion: bytes,
        state: Sequence[int],
        data: SegmentHandle,
    ) -> None:
        """Load a fused Program as `load_program` would, with a new buffer for each state slot, and one slot of data
        -> ProgramReady or ProgramRefused."""

    def load_member(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        fused: ProgramId,
        place: int,
        data: SegmentHandle,
        slots: int,
    ) -> None:
        """Load a member's own Program on part `place` of the state of program `fused`. `data`: the member's own
        segment of `slots` slots, which another job is charged for. -> ProgramReady or ProgramRefused."""
