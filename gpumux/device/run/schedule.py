"""Which command of which job is carried out next, and the commands that devices have in common. No torch.

At most `parallel` pieces run at once, over all jobs. A job's commands (launches, loads, transfers) keep their order. A
free slot goes to the oldest launch of the highest-priority stream among the jobs that run no piece.

With `preempts` the kernel lets processes of more important jobs run before those of less important ones, so pieces of
lower streams take no slot from a launch: it starts beside them, and they continue when it has ended. At most `parallel`
pieces of each stream are under way then.

Handing ahead: the next piece of a job that runs one may be handed over already, so that no round trip through the
daemon lies between its pieces. That is done for one piece only, and only while no launch of the same or a higher
priority of an idle job waits for a slot: a piece handed ahead takes over its job's slot, and would pass that launch. A
launch that arrives later waits for two pieces at most; the scheduler bounds how many low launches are in flight while a
high job is active.

Loads and transfers need no slot, since they are not pieces. They are handed over only when their job has nothing else
handed over, and nothing is handed over behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from gpumux.device.workers.channel import Descriptors
from gpumux.types import JobId, ProgramId, TransferId

T = TypeVar("T")


class MemberLoad(NamedTuple):
    """A program to load for one member of a group of jobs (base.Fusing): on part `place` of the state of `fused`."""

    fused: ProgramId
    place: int


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """A program to load, as Device.load_program was given it. `fusion`: of a fused program, how its steps are made of
    its members'. `member`: set for the own program of a member."""

    program: ProgramId
    encoded: bytes
    new_buffers: tuple[int, ...]
    binding: tuple[int, ...]
    held: Descriptors  # the data segment
    nbytes: int
    slots: int
    charge: int  # bytes of buffers and blocks it was admitted with
    transient: int  # bytes of temporaries it was admitted with
    room: int  # bytes of temporaries it could have been admitted with
    fusion: bytes = b""
    member: MemberLoad | None = None


@dataclass(frozen=True, slots=True)
class TransferCommand:
    """A transfer to carry out, as Device.transfer was given it."""

    transfer: TransferId
    buffers: tuple[int, ...]
    held: Descriptors  # the segment
    nbytes: int
    into_device: bool


@dataclass(frozen=True, slots=True)
class ProfileCommand:
    """A request for a program's operator times."""

    program: ProgramId


@dataclass(slots=True)
class QueuedCommand(Generic[T]):
    """A command of a job. `stream` None: it is no piece and needs no slot."""

    what: T
    stream: int | None
    age: int = 0


@dataclass(slots=True)
class CommandQueue(Generic[T]):
    """One job's commands, oldest first: `waiting`, and `handed` over."""

    waiting: deque[QueuedCommand[T]] = field(default_factory=deque)
    handed: deque[QueuedCommand[T]] = field(default_factory=deque)

    @property
    def runs_piece(self) -> bool:
        return bool(self.handed) and self.handed[0].stream is not None

    @property
    def next_stream(self) -> int | None:
        """The stream of the next waiting command; None if there is none or it is no launch."""
        return self.waiting[0].stream if self.waiting else None


class Schedule(Generic[T]):
    """The commands of all jobs. `T`: the device's own type of commands."""

    def __init__(self, parallel: int, *, preempts: bool = False) -> None:
        self.parallel = parallel
        self._preempts = preempts
        self._running: dict[int, int] = {}  # pieces by stream; one entry for all without preemption
        self._queues: dict[JobId, CommandQueue[T]] = {}
        self._busy: dict[JobId, CommandQueue[T]] = {}  # those with something waiting
        self._age = 0

    @property
    def waiting(self) -> bool:
        """Whether anything waits to be handed over."""
        return bool(self._busy)

    @property
    def pieces_running(self) -> int:
        return sum(self._running.values())

    def _room(self, stream: int) -> int:
        """How many more launches of the stream may start."""
        return self.parallel - sum(n for other, n in self._running.items() if not self._preempts or other >= stream)

    def _count(self, queue: CommandQueue[T], change: int) -> None:
        """Count the command at the head, if it is a piece: it starts (1) or has stopped running (-1)."""
        stream = queue.handed[0].stream if queue.handed else None
        if stream is not None:
            self._running[stream] = self._running.get(stream, 0) + change

    def _takes_ahead(self, queue: CommandQueue[T], stream: int) -> bool:
        """Whether a launch of `stream` may take over the slot of the piece that runs. With preemption it has to be of
        the same stream: other pieces count against another."""
        runs = queue.handed[0].stream if len(queue.handed) == 1 else None
        return runs is not None and (runs == stream or not self._preempts)

    def open(self, job: JobId) -> None:
        self._queues[job] = CommandQueue()

    def drop(self, job: JobId) -> list[T]:
        """Forget a job; its unfinished commands, oldest first. Its slot is free."""
        queue = self._queues.pop(job, None)
        self._busy.pop(job, None)
        if queue is None:
            return []
        self._count(queue, -1)
        return [command.what for command in (*queue.handed, *queue.waiting)]

    def submit(self, job: JobId, what: T, stream: int | None) -> None:
        self._age += 1
        queue = self._busy[job] = self._queues[job]
        queue.waiting.append(QueuedCommand(what, stream, self._age))

    def claim(self, job: JobId, what: T, stream: int) -> bool:
        """Hand a launch over at once if no other command waits: as `submit` and `hand_over` would, but faster. Returns
        False if that is not possible; then it was not submitted."""
        queue = self._queues[job]
        if self._busy or queue.handed or self._room(stream) < 1:
            return False
        self._age += 1
        queue.handed.append(QueuedCommand(what, stream, self._age))
        self._count(queue, 1)
        return True

    def done(self, job: JobId) -> T | None:
        """The oldest command handed over has ended. Returns it."""
        queue = self._queues.get(job)
        if queue is None or not queue.handed:
            return None
        self._count(queue, -1)
        what = queue.handed.popleft().what
        self._count(queue, 1)
        return what

    def running(self, job: JobId) -> T | None:
        """The oldest command handed over that has not ended."""
        queue = self._queues.get(job)
        return queue.handed[0].what if queue and queue.handed else None

    def hand_over(self) -> Iterator[tuple[JobId, T]]:
        """Commands to send now, in order. Each is counted as handed when it is yielded."""
        if len(self._busy) < 2:
            for job, queue in list(self._busy.items()):
                yield from self._hand_over_alone(job, queue)
            return
        busy = list(self._busy.items())
        for job, queue in busy:
            if not queue.handed and queue.next_stream is None:
                yield self._hand(job, queue)
        candidates = [(job, queue) for job, queue in busy if not queue.handed and queue.next_stream is not None]
        candidates.sort(key=lambda item: (-(item[1].next_stream or 0), item[1].waiting[0].age))
        highest_left: int | None = None
        for job, queue in candidates:
            wanted = queue.next_stream or 0
            if self._room(wanted) < 1:
                highest_left = wanted  # no later candidate has a higher priority
                break
            yield self._hand(job, queue)
        for job, queue in busy:
            stream = queue.next_stream  # also None if its last command was just handed over
            if stream is None or not self._takes_ahead(queue, stream):
                continue
            if highest_left is None or stream > highest_left:
                yield self._hand(job, queue)

    def _hand_over_alone(self, job: JobId, queue: CommandQueue[T]) -> Iterator[tuple[JobId, T]]:
        """`hand_over` when only one job has commands waiting."""
        if not queue.handed:
            if queue.next_stream is not None and self._room(queue.next_stream) < 1:
                return
            yield self._hand(job, queue)
        if queue.next_stream is not None and self._takes_ahead(queue, queue.next_stream):
            yield self._hand(job, queue)

    def _hand(self, job: JobId, queue: CommandQueue[T]) -> tuple[JobId, T]:
        command = queue.waiting.popleft()
        if not queue.waiting:
            del self._busy[job]
        queue.handed.append(command)
        if len(queue.handed) == 1:
            self._count(queue, 1)
        return job, command.what
