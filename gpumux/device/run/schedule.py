"""Which launch goes to which executor next. Pure: no processes, no clock.

At most `parallel` pieces run at once, over all jobs. A job's commands (launches, loads, transfers)
keep their order. When a slot is free it goes to the oldest launch of the highest-priority stream
among the jobs that are not running one.

With `preempts` the processes of less important jobs give way to those of more important ones by
themselves (the kernel sees to it), so pieces of lower streams take no slot from a launch: it starts
beside them, and they go on where they were when it is done. At most `parallel` pieces of each stream
are under way then.

Handing ahead: the next piece of a job that is running one may be handed to its executor already, so
that no round trip through the daemon lies between its pieces. That is done for one piece only, and
only while no idle job's launch of the same or a higher priority waits for a slot: a piece handed
ahead takes over its job's slot, so it would pass that launch by. What arrives later waits for two
pieces at most; how many low launches may be out while a high job is active is the core's to bound.

Loads and transfers need no slot (they are not pieces), but are handed over only when the job's
executor has nothing else to do, and nothing is handed behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpumux.types import JobId

T = TypeVar("T")


@dataclass(slots=True)
class Command(Generic[T]):
    """`stream` None: not a piece, needs no slot."""

    what: T
    stream: int | None
    age: int = 0


@dataclass(slots=True)
class Lane(Generic[T]):
    """One job's commands: waiting here, and handed to its executor (oldest first)."""

    waiting: deque[Command[T]] = field(default_factory=deque)
    handed: deque[Command[T]] = field(default_factory=deque)

    @property
    def runs_piece(self) -> bool:
        return bool(self.handed) and self.handed[0].stream is not None

    @property
    def next_stream(self) -> int | None:
        """The stream of the launch that is next in line, None when it is no launch."""
        return self.waiting[0].stream if self.waiting else None


class Schedule(Generic[T]):
    def __init__(self, parallel: int, *, preempts: bool = False) -> None:
        self.parallel = parallel
        self._preempts = preempts
        self._running: dict[int, int] = {}  # pieces by stream; one entry for all without preemption
        self._lanes: dict[JobId, Lane[T]] = {}
        self._busy: dict[JobId, Lane[T]] = {}  # those with something waiting: the only ones worth a look
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

    def _count(self, lane: Lane[T], change: int) -> None:
        """The piece at the head of the lane, if it is one, starts (1) or no longer runs (-1)."""
        stream = lane.handed[0].stream if lane.handed else None
        if stream is not None:
            self._running[stream] = self._running.get(stream, 0) + change

    def _takes_ahead(self, lane: Lane[T], stream: int) -> bool:
        """Whether a launch of the stream may follow the piece that runs in its slot: one of another stream
        has other pieces in its way."""
        runs = lane.handed[0].stream if len(lane.handed) == 1 else None
        return runs is not None and (runs == stream or not self._preempts)

    def open(self, job: JobId) -> None:
        self._lanes[job] = Lane()

    def drop(self, job: JobId) -> list[T]:
        """Forget a job; its unfinished commands, oldest first. Its slot is free."""
        lane = self._lanes.pop(job, None)
        self._busy.pop(job, None)
        if lane is None:
            return []
        self._count(lane, -1)
        return [command.what for command in (*lane.handed, *lane.waiting)]

    def submit(self, job: JobId, what: T, stream: int | None) -> None:
        self._age += 1
        lane = self._busy[job] = self._lanes[job]
        lane.waiting.append(Command(what, stream, self._age))

    def claim(self, job: JobId, what: T, stream: int) -> bool:
        """Hand a launch over at once if nothing else is in its way: the same as `submit` and `hand_over`,
        without asking anybody's turn. False: it has not been submitted."""
        lane = self._lanes[job]
        if self._busy or lane.handed or self._room(stream) < 1:
            return False
        self._age += 1
        lane.handed.append(Command(what, stream, self._age))
        self._count(lane, 1)
        return True

    def adopt(self, job: JobId, what: T, stream: int) -> None:
        """A launch began without us, at the head of its job; it counts until it is `done`, room or not."""
        self._age += 1
        lane = self._lanes[job]
        assert not lane.handed, "a launch began behind others"
        lane.handed.append(Command(what, stream, self._age))
        self._count(lane, 1)

    def done(self, job: JobId) -> T | None:
        """The job's executor has finished the oldest command handed to it."""
        lane = self._lanes.get(job)
        if lane is None or not lane.handed:
            return None
        self._count(lane, -1)
        what = lane.handed.popleft().what
        self._count(lane, 1)
        return what

    def running(self, job: JobId) -> T | None:
        """What the job's executor is busy with."""
        lane = self._lanes.get(job)
        return lane.handed[0].what if lane and lane.handed else None

    def hand_over(self) -> Iterator[tuple[JobId, T]]:
        """Commands to send now, in order. Each is counted as handed when it is yielded."""
        if len(self._busy) < 2:
            for job, lane in list(self._busy.items()):
                yield from self._hand_over_alone(job, lane)
            return
        busy = list(self._busy.items())
        for job, lane in busy:
            if not lane.handed and lane.next_stream is None:
                yield self._hand(job, lane)
        candidates = [(job, lane) for job, lane in busy if not lane.handed and lane.next_stream is not None]
        candidates.sort(key=lambda item: (-(item[1].next_stream or 0), item[1].waiting[0].age))
        highest_left: int | None = None
        for job, lane in candidates:
            wanted = lane.next_stream or 0
            if self._room(wanted) < 1:
                highest_left = wanted  # those after it are no more urgent
                break
            yield self._hand(job, lane)
        for job, lane in busy:
            stream = lane.next_stream  # None, too, when all it had has just been handed over
            if stream is None or not self._takes_ahead(lane, stream):
                continue
            if highest_left is None or stream > highest_left:
                yield self._hand(job, lane)

    def _hand_over_alone(self, job: JobId, lane: Lane[T]) -> Iterator[tuple[JobId, T]]:
        """The same when no other job has anything waiting."""
        if not lane.handed:
            if lane.next_stream is not None and self._room(lane.next_stream) < 1:
                return
            yield self._hand(job, lane)
        if lane.next_stream is not None and self._takes_ahead(lane, lane.next_stream):
            yield self._hand(job, lane)

    def _hand(self, job: JobId, lane: Lane[T]) -> tuple[JobId, T]:
        command = lane.waiting.popleft()
        if not lane.waiting:
            del self._busy[job]
        lane.handed.append(command)
        if len(lane.handed) == 1:
            self._count(lane, 1)
        return job, command.what
