"""The contract every device keeps: cpu, cuda, sim (DESIGN 6).

Nothing here blocks and nothing here is a torch object: calls carry plain data, encoded Programs
and file descriptors, so that a device may live in other processes. What a call leads to comes back
later as events from `poll`, in the order it happened. `open` and `close` alone may wait.

A *stream* is an in-order queue with a priority. The device runs at most `DeviceInfo.parallel`
pieces at once and, when it can start one, takes the oldest launch of the highest-priority stream.
Launches of one job must be handed over in order; they run in order.

Clock: `started` and `ended` are on the clock the device was opened with (CLOCK_MONOTONIC for real
devices, so that processes agree; the virtual clock for sim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from gpumux.types import DeviceInfo, Fault, Footprint, JobId, JobSpec, LaunchId, Priority, ProgramId, StepId, TransferId

GENERATOR = -1  # in a transfer's list of buffers, last: the job's random generator, GENERATOR_BYTES of the segment


@dataclass(frozen=True, slots=True)
class Segment:
    """Shared memory by descriptor: a sealed memfd of exactly `nbytes`. The caller owns `fd` and may
    close it when the call returns; the device duplicates what it keeps."""

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


class LoanTerms(NamedTuple):
    """A program whose steps a device may take from the lane (Lending): each runs as one piece of `cut`."""

    program: ProgramId
    cut: int
    slots: int
    scalars: tuple[Literal["float", "int"], ...]


class StepRan(NamedTuple):
    """A step the device took from the lane. `submitted` is when it came; `ended` is 0 while it runs."""

    step: StepId
    program: ProgramId
    slot: int
    submitted: float
    started: float
    ended: float
    answered: bool


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """`by_job`: bytes charged to each job. `measured`: what jobs really held at most in a recent step, where the device
    can say."""

    total_bytes: int
    free_bytes: int
    by_job: dict[JobId, int]
    measured: dict[JobId, int] = field(default_factory=dict)


class Launch(NamedTuple):
    """One piece of one step. `slot` is the step's slot in the program's data segment; `scalars` are
    the step's host scalars (as many floats and ints as the Program declares), sent with every piece."""

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


# ---- events, from poll() -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProgramChecked:
    """`check` passed: what the program would add, the index inputs' and results' layout bytes, its operators'
    names in order, and the kind of each host scalar a step brings."""

    job: JobId
    program: ProgramId
    footprint: Footprint
    content_hash: str
    operators: tuple[str, ...]
    scalars: tuple[Literal["float", "int"], ...]


@dataclass(frozen=True, slots=True)
class ProgramLoaded:
    """The program can be launched. `cut` 0 holds unmeasured guesses; see Recut. Piece i is operators
    [bounds[i], bounds[i + 1]) of the Program, so that what is learned of operators outlives a cut."""

    job: JobId
    program: ProgramId
    pieces: tuple[float, ...]  # predicted seconds of each piece, at least one piece
    bounds: tuple[int, ...]  # one more than pieces


@dataclass(frozen=True, slots=True)
class Recut:
    """The device measured the program, or was told how long its pieces are to be (`cut`), and cut it anew. Steps that
    start after this event use cut `cut`; steps already begun finish under the cut they began with."""

    job: JobId
    program: ProgramId
    cut: int
    pieces: tuple[float, ...]
    bounds: tuple[int, ...]


class LaunchDone(NamedTuple):
    """`answered`: it ended its step, and the device has sent the step's answer itself (Answering). `suspended`: seconds
    between start and end in which it stood still and the device did something else, where a device can do that."""

    launch: LaunchId
    started: float
    ended: float
    answered: bool = False
    suspended: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """This launch failed; the job's state is lost. A JobLost for its job follows."""

    launch: LaunchId
    fault: Fault


@dataclass(frozen=True, slots=True)
class LaneReturned:
    """The device reads the job's lane no more (Lending). `packet` is what it took there and did not act on, b"" when
    there is nothing; `ran` are the steps nobody was told of, of which the last may not have ended if the job is
    lost."""

    job: JobId
    packet: bytes
    ran: tuple[StepRan, ...]


@dataclass(frozen=True, slots=True)
class TransferDone:
    job: JobId
    transfer: TransferId
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class ProgramRefused:
    """`check` or `load_program` failed; the job lives on and its memory is as it was."""

    job: JobId
    program: ProgramId
    fault: Fault


@dataclass(frozen=True, slots=True)
class ProgramProfiled:
    """`profile` is over: the text of a profile file (program/profile.py) whose name is empty, or why there is none.
    It is text already because a long Program's would take too long to write on the daemon's thread."""

    job: JobId
    program: ProgramId
    text: bytes
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class JobLost:
    """Whatever ran the job is gone. Nothing of it is left on the device."""

    job: JobId
    fault: Fault


@dataclass(frozen=True, slots=True)
class JobUnloaded:
    """`unload` has finished: the job's memory is free."""

    job: JobId


DeviceEvent = (
    ProgramChecked
    | ProgramLoaded
    | ProgramRefused
    | Recut
    | LaunchDone
    | LaunchFailed
    | LaneReturned
    | TransferDone
    | ProgramProfiled
    | JobLost
    | JobUnloaded
)


class Device(Protocol):
    def open(self) -> DeviceInfo:
        """Take the device. Raises ConfigError when it can't be had, saying why."""

    def filenos(self) -> Sequence[int]:
        """Descriptors that turn readable when poll() has something. The set may change after any call."""

    def due(self) -> float:
        """When to call poll() even if no descriptor turned readable, on the device's clock; inf: never."""

    def poll(self) -> list[DeviceEvent]:
        """All events so far. Never waits. Raises DeviceLost when nothing will run on the device any more: there are
        no further events then, and it can only be closed."""

    def check(self, job: JobId, program: ProgramId, encoded: bytes) -> None:
        """Check an encoded Program away from the hot path -> ProgramChecked or ProgramRefused."""

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        """Make room for a job with no state yet. Failure comes as JobLost."""

    def load_program(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        new_buffers: Sequence[int],
        binding: Sequence[int],
        data: Segment,
        slots: int,
    ) -> None:
        """Allocate `new_buffers` (bytes each, zeroed, appended to the job's buffer list), bind the
        program's state slot i to buffer `binding[i]`, map `data` (slots x SlotLayout.nbytes) and
        make the program ready -> ProgramLoaded or ProgramRefused."""

    def launch(self, launch: Launch) -> None:
        """-> LaunchDone, or LaunchFailed then JobLost."""

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        """Make the program's pieces about `target_s` seconds long from now on, None: as long as the device makes them
        by itself. -> Recut after a step of the newest cut, where that is another one; else nothing, nor for what is not
        there. It may be said at any time, and the newest word counts."""

    def transfer(
        self, job: JobId, transfer: TransferId, buffers: Sequence[int], segment: Segment, into_device: bool
    ) -> None:
        """Copy the job's buffers to or from `segment`, laid end to end, each on 64 bytes, in order
        with the job's launches -> TransferDone. GENERATOR is the state of the job's random generator; one of length 0
        leaves it as it is."""

    def profile(self, job: JobId, program: ProgramId) -> None:
        """What each operator of a loaded program was measured (or, by sim, computed) to cost, in order with
        the job's launches -> ProgramProfiled, with a fault if nothing is measured yet."""

    def unload(self, job: JobId) -> None:
        """Drop the job at once, whatever it is doing; idempotent -> JobUnloaded. No LaunchDone or
        LaunchFailed of the job comes after it."""

    def memory(self) -> MemoryFigures:
        """What is free now, and what each job holds."""

    def close(self) -> None:
        """Unload everything and give the device back. Idempotent."""


@runtime_checkable
class Answering(Protocol):
    """What a device may be able to do besides: answer steps itself, so that a client hears of its result
    before the caller does. A device without these methods leaves every answer to its caller.

    A launch with `submitted` ends its step. If the device holds the job's lane it may then send the filled form,
    as one packet, before it reports LaunchDone with `answered`: queue seconds from `submitted` to the start of the
    step's first piece, device seconds of all its pieces, total seconds from `submitted` to the end of the last. It
    never waits for room: what it can't send at once, and from then on every answer of that job, it leaves to the
    caller, whose LaunchDone then says so. So each step is answered once, and the answers of a job keep their order.
    """

    def answer_on(self, job: JobId, lane: int, form: AnswerForm) -> None:
        """Answer the job's steps on `lane`, a SOCK_SEQPACKET socket. The caller keeps the descriptor."""

    def catch_up(self, job: JobId) -> list[DeviceEvent]:
        """Like poll, but LaunchDone of every step of the job that was answered is among the events of this
        call or an earlier one, even if nothing has said so yet: a client may be quicker than poll."""


@runtime_checkable
class Regrading(Protocol):
    """What a device may have to do when a job's priority changes while it runs, beside what launches say. A device
    without these methods has nothing to do."""

    def may_regrade(self, priority: Priority) -> Fault | None:
        """Why no job can be given this priority, or None."""

    def regrade(self, job: JobId, priority: Priority) -> None:
        """The job has this priority from its next launch on."""


@runtime_checkable
class Lending(Answering, Protocol):
    """What an Answering device may be able to do besides: take a job's steps from its lane, run and answer them, and
    say so afterwards.

    From `lend` on the device alone reads the lane, until LaneReturned. It runs a step only if it is a Step as its form
    says, of `terms`, with nothing out of order; with anything else, and whenever it likes, it returns the lane,
    together with the packet it did not act on. After `recall` no further step starts: what started is known exactly
    when it returns. LaneReturned follows at the end of the step that runs, at the latest; no JobLost or JobUnloaded
    comes before the lane is out of the device's hands. Between `lend` and `recall` or LaneReturned the device is asked
    for nothing else of the job but to unload it, or to cut it otherwise.
    """

    def lend(self, job: JobId, head: bytes, last: int, terms: Sequence[LoanTerms], first: bytes) -> None:
        """Let the device read the lane it answers the job on, where nothing of the job is outstanding. `first` was read
        from it already and is to be acted on first. A Step begins with `head`; steps are numbered upwards from
        `last`."""

    def ran(self, job: JobId) -> list[StepRan]:
        """Steps taken from the lane that have ended, oldest first, each told once."""

    def recall(self, job: JobId) -> StepRan | None:
        """Take no further step. The step that runs now, if one does: that one is to be adopted, and `ran` won't tell it
        however soon it ends. What ended before is told by `ran`, which is to be asked next."""

    def adopt(self, launch: Launch) -> None:
        """The step that `recall` named is this launch -> LaunchDone, like any other. After `recall`, once."""


# ---- What a job holds of a device's memory, and whether another program fits.


class Charges:
    """The part of a device's record of a job that counts its memory. Needs the rest of it."""

    __slots__ = ()
    WHERE: ClassVar[str] = ""  # is what is free, for those who are refused
    charged: int  # bytes of its buffers and data
    transients: dict[ProgramId, int]  # of its programs, loaded or loading

    @property
    def memory(self) -> int:
        """Bytes it holds. Its programs never run at once, so they share the transient part."""
        return self.charged + max(self.transients.values(), default=0)

    def refuses(self, program: ProgramId, wanted: int, footprint: Footprint | None, free: int) -> Fault | None:
        """Why a program that adds `wanted` bytes of buffers and data can't be loaded, if it can't."""
        if footprint is None:
            return Fault("program", "the program was not checked", "check these bytes before loading them")
        if program in self.transients:
            return Fault("program", f"program {program} is loaded already", "choose another number")
        wanted += footprint.transient_bytes
        if wanted <= free:
            return None
        message = f"the program needs {wanted} bytes and {free} are free{self.WHERE}"
        return Fault("admission_refused", message, "use smaller batches, or wait for other jobs to end")
