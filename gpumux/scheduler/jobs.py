"""Jobs and their virtual queues: what a job has been asked to do and has not answered yet.

A virtual queue costs the device nothing: steps wait here, not in a device queue, until the policy
lets their pieces out. Order within a job is strict. `queue` holds what is not fully launched yet,
oldest first; its head may have pieces out already. `running` holds steps all of whose pieces are
launched. A transfer leaves the queue only when nothing of the job runs, and everything behind it
waits until it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from sys import intern
from typing import TYPE_CHECKING, TypeAlias

from gpumux.types import Footprint, JobId, JobSpec, Peer, Priority, ProgramId, SessionId, StepId, TransferId

if TYPE_CHECKING:
    from gpumux.scheduler.guard.answers import Answer, Hold
    from gpumux.scheduler.guard.costs import HighModel
    from gpumux.scheduler.guard.high_job import Track


class JobState(Enum):
    OPEN = "open"
    DRAINING = "draining"  # answers what was submitted, takes no more
    CLOSING = "closing"  # all is answered; the device is letting go of it


class PairKey:
    """One low program (by content, so that equal ones are one) on one share of the device."""

    __slots__ = ("low", "share")

    def __init__(self, low: str, share: float) -> None:
        self.low, self.share = low, share

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PairKey) and self.low == other.low and self.share == other.share

    def __hash__(self) -> int:
        return hash(self.low)


# The operators of a program's piece, whatever cut it belongs to: what is known of a launch is known by them. A word, as
# no key of a dict is found faster: it is there once, and so is its hash.
Span: TypeAlias = str


def spans(program: str, bounds: Sequence[int]) -> tuple[Span, ...]:
    """Those of each piece of the program with this key."""
    return tuple([intern(f"{start}-{end} of {program}") for start, end in pairwise(bounds)])


class Piece:
    """A low piece that the guard is asked about: operators of a program that take so many `seconds` alone. The same one
    as long as it is."""

    __slots__ = ("program", "seconds", "span")

    def __init__(self, program: Program, span: Span, seconds: float) -> None:
        self.program, self.span, self.seconds = program, span, seconds


@dataclass(slots=True, eq=False)
class Program:
    """One loaded (or loading) program of a job. `pieces` are predicted seconds under cut `cut`, and
    piece i is operators [bounds[i], bounds[i + 1]), which `spans[i]` stands for."""

    id: ProgramId
    footprint: Footprint
    content_hash: str = ""
    cut: int = -1
    pieces: tuple[float, ...] = ()
    bounds: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    asked_s: float | None = (
        None  # how long the device was asked to make its pieces; None: as long as it makes them itself
    )
    operators: tuple[str, ...] = ()
    key: str = ""  # equal programs of any job have equal ones, where the device says so
    asked: dict[Span, Piece] = field(default_factory=dict)
    whole: PairKey = field(init=False)  # what the guard knows it by, as a low program on all of the device
    shares: list[PairKey] = field(default_factory=list)  # the same on parts of it

    def __post_init__(self) -> None:
        self.whole = PairKey(self.key, 1.0)

    @property
    def ready(self) -> bool:
        return self.cut >= 0

    def on(self, share: float) -> PairKey:
        """What the guard knows it by, as a low program on a share of the device."""
        if share == 1.0:
            return self.whole
        for known in self.shares:  # a few at most
            if known.share == share:
                return known
        made = PairKey(self.key, share)
        self.shares.append(made)
        return made

    def piece(self, span: Span, seconds: float) -> Piece:
        """The piece by its operators; predictions differ from cut to cut."""
        found = self.asked.get(span)
        if found is None or found.seconds != seconds:
            found = self.asked[span] = Piece(self, span, seconds)
        return found


class Step:
    """`cut`, `pieces`, `bounds` and `spans` are fixed when the first piece is launched; a later cut is for later
    steps."""

    # Until then, and until it runs:
    cut = -1
    pieces: tuple[float, ...] = ()
    bounds: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    launched = 0
    done = 0
    started = 0.0
    device_s = 0.0
    # Of a high job's:
    from_idle = False  # there was no other one when it came
    waited = 0.0  # seconds for which it then had lain unseen
    charged = 0.0  # of these, what low work's events are taken to have kept it for
    noted = ""  # the last reason for waiting that the story was told
    model: HighModel | None = None  # what the guard knows of its program, under its cut

    def __init__(self, id: StepId, program: Program, submitted: float, arrival: int) -> None:  # noqa: A002
        self.id, self.program, self.submitted, self.arrival = id, program, submitted, arrival


@dataclass(slots=True, eq=False)
class Transfer:
    id: TransferId
    into_device: bool


@dataclass(slots=True, eq=False)
class Session:
    id: SessionId
    peer: Peer
    jobs: set[JobId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Job:
    """A job and its virtual queue. `served` and `pending` are virtual seconds (device seconds over
    weight): measured so far, and predicted for what is out. `entry` is the number of its place among the ready (0: it
    is not), `entry_key` what that place is by."""

    id: JobId
    session: SessionId
    peer: Peer
    spec: JobSpec
    opened: float
    priority: Priority
    weight: float
    # What every decision reads first: it lies together where this is compiled.
    queue: deque[Step | Transfer] = field(default_factory=deque)
    held: Answer | None = None  # why the guard holds its next piece, as of when it was last asked about it
    hold: Hold | None = None  # since when and why it is held, for people
    track: Track | None = None  # what the guard knows of it, as a high one
    awaited_by: list[Track] | None = (
        None  # high jobs that get no step before one of this low job's is answered (awaited.py)
    )
    inflight: int = 0  # steps in queue and running
    outstanding: int = 0
    served: float = 0.0
    pending: float = 0.0
    entry: int = 0
    entry_key: float = 0.0
    active: bool = False  # counted in its class's active jobs
    state: JobState = JobState.OPEN
    paused: bool = False
    told: bool = False  # CloseJob was sent
    wanted: Priority | None = None  # the class it is to change to, once nothing of it is out
    programs: dict[ProgramId, Program] = field(default_factory=dict)
    running: dict[StepId, Step] = field(default_factory=dict)
    transfer: Transfer | None = None
    transfers: int = 0  # transfers in queue and under way
    last_step: int = -1
    steps_done: int = 0
    steps_failed: int = 0
    device_s: float = 0.0
    suspended_s: float = 0.0  # for which its pieces stood still on the device, which is not in device_s
    held_s: dict[str, float] = field(default_factory=dict)  # by reason, of holds that are over

    def busy(self) -> bool:
        """Something submitted is not answered yet."""
        return bool(self.queue or self.running) or self.transfer is not None

    def blocked(self) -> str:
        """Why the head of the queue can't be launched whatever room there is; "" when it can."""
        if self.state is JobState.CLOSING:
            return "closing"
        if self.paused:
            return "paused"
        if self.wanted is not None:
            return "changing"
        if self.transfer is not None:
            return "transfer"
        if not self.queue:
            return "empty"
        head = self.queue[0]
        if type(head) is Step:
            return "" if head.program.cut >= 0 else "program"
        return "transfer"

    def head_step(self) -> Step:
        """The step whose piece is next. Only for a job that is not blocked."""
        head = self.queue[0]
        assert type(head) is Step
        return head

    def next_seconds(self) -> float:
        """Predicted seconds of the next piece. Only for a job that is not blocked."""
        step = self.head_step()
        return step.pieces[step.launched] if step.launched else step.program.pieces[0]

    def steps(self) -> Iterator[Step]:
        """Every unanswered step, in submission order."""
        yield from self.running.values()
        yield from (item for item in self.queue if isinstance(item, Step))

    def all_transfers(self) -> list[Transfer]:
        """Every unanswered transfer, in order."""
        waiting = [item for item in self.queue if isinstance(item, Transfer)]
        return [self.transfer, *waiting] if self.transfer is not None else waiting

    def remove_steps_of(self, program: Program) -> list[Step]:
        """Take out the steps that wait for a program that will never be ready."""
        gone = [item for item in self.queue if isinstance(item, Step) and item.program is program]
        if gone:
            self.queue = deque(i for i in self.queue if not (isinstance(i, Step) and i.program is program))
            self.inflight -= len(gone)
        return gone

    def empty(self) -> None:
        """Drop all that was submitted; it has been answered."""
        self.queue.clear()
        self.running.clear()
        self.transfer, self.inflight, self.transfers = None, 0, 0
