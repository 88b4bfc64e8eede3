"""Jobs and their virtual queues: what a job was asked to do and has not answered yet.

A virtual queue costs the device nothing: steps wait here, and not in a device queue, until the policy launches their
pieces. Order within a job is strict. `queue` holds what is not fully launched yet, oldest first; the pieces of its head
may be out already. `running` holds steps all of whose pieces are launched. A transfer leaves the queue only when no
step of the job runs, and everything behind it waits until it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from sys import intern
from typing import TypeAlias

from gpumux.scheduler.leases import Lease, WaveLease
from gpumux.types import Footprint, JobId, JobSpec, Peer, Priority, ProgramId, SessionId, StepId, TransferId


class JobState(Enum):
    OPEN = "open"
    DRAINING = "draining"  # answers what was submitted, takes no more
    CLOSING = "closing"  # everything is answered; the device is releasing the job


class LowKey:
    """One low program on one share of the device. Programs are known by content, so equal ones share a key."""

    __slots__ = ("program", "share")

    def __init__(self, program: str, share: float) -> None:
        self.program, self.share = program, share

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LowKey) and self.program == other.program and self.share == other.share

    def __hash__(self) -> int:
        return hash(self.program)


# The operators of a program's piece, whatever cut it belongs to. What is known of a launch is stored under it. An
# interned string, since it is looked up in dictionaries all the time.
Span: TypeAlias = str


def spans(program: str, bounds: Sequence[int]) -> tuple[Span, ...]:
    """The span of each piece of the program with this key."""
    return tuple([intern(f"{start}-{end} of {program}") for start, end in pairwise(bounds)])


class LowPiece:
    """A low piece that the guard decides about: a span of a program that takes `seconds` alone. Compared by identity:
    JobProgram.low_piece returns the same object as long as its prediction stays."""

    __slots__ = ("program", "seconds", "span")

    def __init__(self, program: JobProgram, span: Span, seconds: float) -> None:
        self.program, self.span, self.seconds = program, span, seconds


@dataclass(slots=True, eq=False)
class JobProgram:
    """One program of a job, loaded or loading. `pieces` are predicted seconds under cut `cut`; piece i is operators
    [bounds[i], bounds[i + 1]), and `spans[i]` names it. Before each of `gated` the job waits for its peers."""

    id: ProgramId
    footprint: Footprint
    content_hash: str = ""
    cut: int = -1
    pieces: tuple[float, ...] = ()
    bounds: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    gated: tuple[int, ...] = ()
    wave: WaveLease | None = None  # of the newest cut, if it is for one of two waves
    live: tuple[int, ...] = ()  # of a job in a shared arena: bytes of temporaries alive at each operator
    lease: Lease | None = None  # of the newest cut, if the job is in a shared arena
    cut_target_s: float | None = None  # piece length the device was asked for; None: its own choice
    operators: tuple[str, ...] = ()
    key: str = ""  # equal programs of any job have equal ones, where the device gives a content hash
    low_pieces: dict[Span, LowPiece] = field(default_factory=dict)
    whole_key: LowKey = field(init=False)  # as a low program on the whole device
    share_keys: list[LowKey] = field(default_factory=list)  # as a low program on parts of it

    def __post_init__(self) -> None:
        self.whole_key = LowKey(self.key, 1.0)

    @property
    def ready(self) -> bool:
        return self.cut >= 0

    def low_key(self, share: float) -> LowKey:
        """Key of this program as a low one on a share of the device."""
        if share == 1.0:
            return self.whole_key
        for known in self.share_keys:  # a few at most
            if known.share == share:
                return known
        key = LowKey(self.key, share)
        self.share_keys.append(key)
        return key

    def low_piece(self, span: Span, seconds: float) -> LowPiece:
        """The piece with this span. Another cut may predict other seconds, which makes it another piece."""
        found = self.low_pieces.get(span)
        if found is None or found.seconds != seconds:
            found = self.low_pieces[span] = LowPiece(self, span, seconds)
        return found


class JobStep:
    """A submitted step. `cut`, `pieces`, `bounds`, `spans`, `gated`, `wave` and `lease` are fixed when the first piece
    is launched; a later cut applies to later steps."""

    # Set when the first piece is launched:
    cut = -1
    pieces: tuple[float, ...] = ()
    bounds: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    gated: tuple[int, ...] = ()
    wave: WaveLease | None = None
    lease: Lease | None = None
    met = 0  # collectives that have ended: the peers came to so many of the gated pieces
    launched = 0
    done = 0
    started = 0.0
    device_s = 0.0
    recorded_wait = ""  # the last reason for waiting that the history was given
    # Of a high job's step, for the guard:
    from_idle = False  # the job was idle when the step came
    arrival_delay = 0.0  # seconds from the step's arrival until the scheduler was given it
    delay_charged = 0.0  # of these, the seconds charged to low work

    def __init__(self, id: StepId, program: JobProgram, submitted: float, arrival: int) -> None:  # noqa: A002
        self.id, self.program, self.submitted, self.arrival = id, program, submitted, arrival

    def begin(self) -> None:
        """The first piece is launched."""
        program = self.program
        self.cut, self.pieces, self.bounds, self.spans = program.cut, program.pieces, program.bounds, program.spans
        self.gated, self.wave, self.lease = program.gated, program.wave, program.lease

    def waits_for_peers(self) -> bool:
        """Whether the next piece may not be launched before its collective has ended."""
        return self.met < len(self.gated) and self.gated[self.met] == self.launched


def _may_run_beside(younger: JobStep, older: JobStep) -> bool:
    """Whether the next piece of a wave's step may run while the step before it is not over."""
    ahead, lease = older.wave, younger.wave or younger.program.wave
    if ahead is None or lease is None or ahead.lane == lease.lane:
        return 0 < older.launched == len(older.pieces)  # one after the other, as the steps of any job
    if younger.launched >= lease.tail or not ahead.descends(older.launched):
        return False
    needs = lease.with_next(younger.launched, younger.done)
    return needs + ahead.held(older.launched, older.done) <= max(lease.arena, ahead.arena)


@dataclass(slots=True, eq=False)
class JobTransfer:
    id: TransferId
    into_device: bool


@dataclass(slots=True, eq=False)
class OpenSession:
    id: SessionId
    peer: Peer
    jobs: set[JobId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class ScheduledJob:
    """A job and its virtual queue. `served` and `pending` are virtual seconds (device seconds over weight): measured so
    far, and predicted for launches that are out. `ready_entry` numbers its entry in the ready queue (0: it has none),
    and `ready_key` is the key of that entry."""

    id: JobId
    session: SessionId
    peer: Peer
    spec: JobSpec
    opened: float
    priority: Priority
    weight: float
    queue: deque[JobStep | JobTransfer] = field(default_factory=deque)
    inflight: int = 0  # steps in queue and running
    outstanding: int = 0
    served: float = 0.0
    pending: float = 0.0
    ready_entry: int = 0
    ready_key: float = 0.0
    active: bool = False  # counted in its class's active jobs
    asked_weight: float = field(init=False)  # by its client; jobs of a grant divide the grant's weight by it
    state: JobState = JobState.OPEN
    paused: bool = False
    end_sent: bool = False  # EndJob was sent
    new_priority: Priority | None = None  # the class it is to change to, once none of its pieces is out
    programs: dict[ProgramId, JobProgram] = field(default_factory=dict)
    running: dict[StepId, JobStep] = field(default_factory=dict)
    transfer: JobTransfer | None = None
    transfers: int = 0  # transfers in queue and under way
    younger_last: bool = False  # of two waves under way, whether the younger one's piece was launched last
    last_step: int = -1
    steps_done: int = 0
    steps_failed: int = 0
    device_s: float = 0.0
    suspended_s: float = 0.0  # seconds its pieces stood still on the device, not counted in device_s
    peers_s: float = 0.0  # seconds between its pieces in which it waited for other ranks and their data
    sent_bytes: int = 0  # to other ranks
    received_bytes: int = 0
    held_s: dict[str, float] = field(default_factory=dict)  # by reason, of holds that are over
    arena: SharedArena | None = None  # in which its temporaries lie, if it shares one
    left_bytes: int = 0  # of that arena, held until the device has released the job

    def __post_init__(self) -> None:
        self.asked_weight = self.weight

    def busy(self) -> bool:
        """Whether something submitted is not answered yet."""
        return bool(self.queue or self.running) or self.transfer is not None

    def blocked(self) -> str:
        """Why the head of the queue can't be launched even if there were room; "" when it can."""
        if self.state is JobState.CLOSING:
            return "closing"
        if self.paused:
            return "paused"
        if self.new_priority is not None:
            return "changing"
        if self.transfer is not None:
            return "transfer"
        if not self.queue:
            return "empty"
        head = self.queue[0]
        if type(head) is JobStep:
            if head.gated and head.waits_for_peers():
                return "peers"
            if head.program.wave is not None:
                return "" if self._of_waves() is not None else "wave"
            if head.program.cut < 0:
                return "program"
            return "" if self.arena is None or self.arena.allows(self, head) else "memory"
        return "transfer"

    def parked(self) -> bool:
        """Whether the job waits for its peers, with nothing of it on the device."""
        head = self.queue[0] if self.queue and not self.outstanding else None
        return type(head) is JobStep and bool(head.gated) and head.waits_for_peers()

    def head_step(self) -> JobStep:
        """The step with the next piece. Only for a job that is not blocked."""
        head = self.queue[0]
        assert type(head) is JobStep
        if head.program.wave is not None:
            return self._of_waves() or head
        return head

    def oldest_arrival(self) -> int:
        """Arrival of the oldest step that has pieces left. Only for a job that is not blocked."""
        head = self.queue[0]
        assert type(head) is JobStep
        return head.arrival

    def _of_waves(self) -> JobStep | None:
        """Of the oldest step and the one behind it, of the other wave, the one with the next piece: where both could
        have it they take turns, as on a device that runs both at once. None: the younger one has to wait."""
        older = next(reversed(self.running.values()), None)
        head = self.queue[0]
        assert type(head) is JobStep
        if older is not None:
            return head if _may_run_beside(head, older) else None
        second = self.queue[1] if len(self.queue) > 1 else None
        younger = type(second) is JobStep and second.program.wave is not None and _may_run_beside(second, head)
        return second if younger and type(second) is JobStep and not self.younger_last else head

    def arena_bytes(self) -> int:
        """Bytes that it holds of the arena that it shares. Its steps run one after the other."""
        if self.state is JobState.CLOSING:
            return self.left_bytes
        held = [step.lease.held(step.launched, step.done) for step in self.steps() if step.lease is not None]
        return max(held, default=0)

    def ascends(self) -> bool:
        """Whether a step of it that has begun may need more of that arena than the job holds."""
        begun = [(step, step.lease) for step in self.steps() if step.lease is not None and step.launched]
        return any(not lease.descends(step.launched) for step, lease in begun)

    def next_seconds(self) -> float:
        """Predicted seconds of the next piece. Only for a job that is not blocked."""
        step = self.head_step()
        return step.pieces[step.launched] if step.launched else step.program.pieces[0]

    def steps(self) -> Iterator[JobStep]:
        """Every unanswered step, in submission order."""
        yield from self.running.values()
        yield from (item for item in self.queue if isinstance(item, JobStep))

    def all_transfers(self) -> list[JobTransfer]:
        """Every unanswered transfer, in order."""
        waiting = [item for item in self.queue if isinstance(item, JobTransfer)]
        return [self.transfer, *waiting] if self.transfer is not None else waiting

    def remove_steps_of(self, program: JobProgram) -> list[JobStep]:
        """Remove and return the steps of a program that will never be ready."""
        gone = [item for item in self.queue if isinstance(item, JobStep) and item.program is program]
        if gone:
            self.queue = deque(i for i in self.queue if not (isinstance(i, JobStep) and i.program is program))
            self.inflight -= len(gone)
        return gone

    def empty(self) -> None:
        """Drop everything that was submitted, after it has been answered."""
        self.queue.clear()
        self.running.clear()
        self.transfer, self.inflight, self.transfers = None, 0, 0


class SharedArena:
    """Memory for temporaries that low jobs of one user take in turns: one ascends at a time, while others may descend
    (leases.py). `nbytes`: what they are charged together."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, ScheduledJob] = {}
        self.nbytes = 0

    def held(self) -> int:
        return sum(job.arena_bytes() for job in self.jobs.values())

    def others(self, job: ScheduledJob) -> list[ScheduledJob]:
        return [other for other in self.jobs.values() if other is not job]

    def allows(self, job: ScheduledJob, step: JobStep) -> bool:
        """Whether the next piece of a job's step may be launched."""
        lease = step.lease if step.launched else step.program.lease
        others = self.others(job)
        if not others or lease is None or (step.launched and lease.descends(step.launched)):
            return True
        if not step.launched and job.running and any(other.busy() for other in others):
            return False  # its steps would follow each other without a gap, and never let another job begin
        if any(other.ascends() for other in others):
            return False
        needs = lease.with_next(step.launched, step.done)
        return needs + sum(other.arena_bytes() for other in others) <= self.nbytes
