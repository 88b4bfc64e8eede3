"""A discrete-event GPU on a virtual clock.

    launch -> host thread, one bounded in-order queue -> a stream a job -> blocks

The multiprocessors are one pool of block slots. Blocks are never preempted. When room frees, the pending
blocks of the highest-priority stream get it first; within one priority those of the kernel that became
ready first. Streams are in order, so a job has one kernel on the device at a time.

Nothing is random: the same calls give the same answers. What costs time is events, so there are few: waves
that change nothing for others are none, and a stream alone on the device has one a launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, lcm
from typing import NamedTuple

from gpumux.device.sim.cost import MAX_PER_SM, GpuSpec, Kernel, checked, solo_seconds, wave
from gpumux.errors import ConfigError

# ---- A launch made ready: each kernel's figures on one GPU, and when each starts and ends when nothing disturbs it.


EPS = 1e-9  # seconds; what is nearer than this happens at the same time
# Blocks that start within this part of their block time become one cohort, which ends at their mean time. Without
# it the blocks of two jobs that share the device spread out until each ends by itself: 5 times the events, and
# times that differ by less than 1 %.
GRAIN = 0.1
SM_UNITS = lcm(*range(1, MAX_PER_SM + 1))  # one multiprocessor: any block takes a whole number of them


class Shape:
    """One kernel on one GPU, under one share of it."""

    __slots__ = ("at_once", "beside", "block_bytes", "block_s", "blocks", "bound", "demand", "grain_s", "name", "nbytes",
                 "size", "solo_s", "wave_s")  # fmt: skip

    def __init__(self, kernel: Kernel, spec: GpuSpec, share: float) -> None:
        checked(kernel)
        self.name = kernel.name
        self.blocks = kernel.blocks
        self.block_s = kernel.block_s
        self.nbytes = kernel.nbytes
        self.beside = 1.0 / kernel.sensitivity  # how fast it runs beside another job
        self.grain_s = max(EPS, GRAIN * kernel.block_s)
        self.size = SM_UNITS // kernel.per_sm  # units a resident block takes
        self.block_bytes = kernel.nbytes / kernel.blocks
        self.demand = self.block_bytes / kernel.block_s  # bytes a second of one block at full speed
        widest, _ = wave(kernel, spec)
        self.bound = min(1.0, widest * self.demand / spec.bandwidth)
        self.at_once, self.wave_s = wave(kernel, spec, share)  # blocks of a full wave alone, and its seconds
        self.solo_s = solo_seconds(kernel, spec, share)


class Work:
    """The kernels of one launch, in order, and their timeline alone on the device: kernel i is ready
    `starts[i]` seconds after the launch's start and ends at `ends[i]`; `busy[i]`, `area[i]` (unit-seconds)
    and `moved[i]` (bytes) are sums over the kernels before i."""

    __slots__ = ("area", "busy", "cap", "count", "ends", "moved", "shapes", "starts")

    def __init__(self, shapes: Sequence[Shape], cap: int, launch_gap_s: float, node_gap_s: float) -> None:
        self.shapes = tuple(shapes)
        self.cap = cap  # units it may take at once
        self.count = len(self.shapes)
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.busy, self.area, self.moved = [0.0], [0.0], [0]
        at, gap = 0.0, launch_gap_s
        for shape in self.shapes:
            at += gap
            self.starts.append(at)
            at += shape.solo_s
            self.ends.append(at)
            self.busy.append(self.busy[-1] + shape.solo_s)
            waves, rest = divmod(shape.blocks, shape.at_once)
            tail = shape.solo_s - waves * shape.wave_s
            held = waves * shape.at_once * shape.wave_s + rest * tail
            self.area.append(self.area[-1] + held * shape.size)
            self.moved.append(self.moved[-1] + shape.nbytes)
            gap = node_gap_s


class Workshop:
    """Makes Works, each once."""

    MOST = 20_000  # kept at once; a stray caller that makes new kernels for every launch must not fill memory

    def __init__(self, spec: GpuSpec) -> None:
        self._spec = spec
        self._full = spec.sms * SM_UNITS
        self._shapes: dict[tuple[Kernel, float], Shape] = {}
        self._works: dict[tuple[int, float], tuple[Sequence[Kernel], Work]] = {}

    def work(self, kernels: Sequence[Kernel], share: float) -> Work:
        """The Work of these kernels. The same tuple again is found by its identity."""
        key = (id(kernels), share)
        found = self._works.get(key)
        if found is not None and found[0] is kernels:
            return found[1]
        work = self._make(kernels, share)
        if type(kernels) is tuple:  # it can't change, and keeping it keeps its identity taken
            if len(self._works) >= self.MOST:
                self._works.clear()
            self._works[key] = (kernels, work)
        return work

    def single_calls(self, kernels: Sequence[Kernel], share: float) -> list[Work]:
        """One Work a kernel: what launching them one by one hands over."""
        return [self.work(_alone(kernel), share) for kernel in kernels]

    def _make(self, kernels: Sequence[Kernel], share: float) -> Work:
        cap = self._spec.share_sms(share) * SM_UNITS
        return Work(
            [self._shape(kernel, share) for kernel in kernels], cap, self._spec.launch_gap_s, self._spec.node_gap_s
        )

    def _shape(self, kernel: Kernel, share: float) -> Shape:
        key = (kernel, share)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= self.MOST:
                self._shapes.clear()
            shape = self._shapes[key] = Shape(kernel, self._spec, share)
        return shape


_singles: dict[Kernel, tuple[Kernel, ...]] = {}


def _alone(kernel: Kernel) -> tuple[Kernel, ...]:
    """(kernel,), the same tuple every time."""
    if len(_singles) >= Workshop.MOST:
        _singles.clear()
    return _singles.setdefault(kernel, (kernel,))


# ---- From the host to the device: one thread that launches, and one in-order queue that all priorities share.
#
# The queue's head leaves it only when its own stream has room on the device. Until then everything behind it
# waits, whatever its priority: the head-of-line blocking that launch pacing avoids (DeepPool, section 5).


Accept = Callable[["Entry", float], bool]


class Entry:
    """One call of the host: a graph, or a single kernel. `last` marks a launch's last one; `began` is
    where the launch's start is noted, shared by its entries."""

    __slots__ = ("arrived", "began", "cost", "job", "last", "launch", "priority", "work")

    def __init__(
        self, launch: int, job: str, priority: int, work: Work, cost: float, last: bool, began: list[float]
    ) -> None:
        self.launch = launch
        self.job = job
        self.priority = priority
        self.work = work
        self.cost = cost  # host seconds
        self.last = last
        self.began = began
        self.arrived = inf  # when its stream can see it


class LaunchPath:
    """`accept(entry, now)` puts an entry on its stream if that has room, and says whether it had."""

    def __init__(self, length: int, transmit_s: float, accept: Accept) -> None:
        self._length = length
        self._transmit_s = transmit_s
        self._accept = accept
        self._waiting: deque[Entry] = deque()  # the host is at the first of them
        self._queue: deque[Entry] = deque()
        self._free_at = 0.0  # when the host is done with all it was told before
        self._done_at = inf  # when it is done with the first of `_waiting`
        self.launching_s = 0.0  # host seconds spent so far
        self.holds = False  # whether anything is on its way
        self.next_at = inf  # when an entry moves without any launch ending first

    def submit(self, entry: Entry, now: float) -> None:
        """The host is told to launch `entry`."""
        if not self._waiting:
            start = max(now, self._free_at)
            done = start + entry.cost
            entry.arrived = done + self._transmit_s
            # Nothing is ahead of it, so room on its stream now is room when it gets there.
            if not self._queue and self._accept(entry, now):
                self._free_at = done
                self.launching_s += entry.cost
                return
            self._done_at = done
        self._waiting.append(entry)
        self._look()

    def move(self, now: float) -> None:
        """Move what can move at `now`."""
        queue, waiting = self._queue, self._waiting
        while True:
            while queue and self._accept(queue[0], now):
                queue.popleft()
            if not waiting or self._done_at > now or len(queue) >= self._length:
                self._look()
                return
            entry = waiting.popleft()
            entry.arrived = max(now, self._done_at + self._transmit_s)
            self.launching_s += entry.cost
            queue.append(entry)
            self._free_at = now
            self._done_at = now + waiting[0].cost if waiting else inf

    def drop(self, job: str, now: float) -> None:
        """Forget what is on its way for `job`."""
        at_it = self._waiting[0] if self._waiting else None
        for held in (self._waiting, self._queue):
            kept = [entry for entry in held if entry.job != job]
            held.clear()
            held.extend(kept)
        if at_it is not None and at_it.job == job:
            self._free_at = now
            self._done_at = now + self._waiting[0].cost if self._waiting else inf
        self._look()

    def _look(self) -> None:
        self.holds = bool(self._waiting or self._queue)
        self.next_at = self._done_at if len(self._queue) < self._length else inf


# ---- One job's stream on the device: its launches in order, and the kernel that runs.
#
# Blocks that started together are a *cohort*. A kernel's own clock `v` counts seconds of block time at full
# speed and advances at `rate`, so that a change of rate moves no cohort: a cohort started at `v` ends when
# the clock shows `v + block_s`. Cohorts are therefore kept in the order they end.
#
# A stream *cycles* while every block that ends is followed at once by one of the same kernel. Such waves
# change nothing for anybody, so none of them is an event: `catch_up` accounts for all of them.


class Stream:
    """`entries[0]` runs; `index` is its kernel that runs or is next. `cohorts` hold [v_end, blocks]."""

    __slots__ = ("area", "cohorts", "cycling", "entries", "index", "job", "moved", "next_at", "pending", "priority",
                 "rate", "ready_at", "resident", "shape", "size", "solo_base", "solo_from", "v0", "work")  # fmt: skip

    work: Work
    shape: Shape

    def __init__(self, job: str) -> None:
        self.job = job
        self.entries: deque[Entry] = deque()
        self.priority = 0
        self.index = 0
        self.ready_at = inf  # when its next kernel may start
        self.next_at = inf  # when its running kernel next changes what others get
        self.pending = 0  # blocks not started
        self.resident = 0  # blocks running
        self.size = 0  # units each takes
        self.cohorts: list[list[float]] = []
        self.cycling = False
        self.rate = 1.0
        self.v0 = 0.0  # what its clock shows
        self.solo_base = 0.0  # see go_solo
        self.solo_from = 0
        self.area = 0.0  # unit-seconds held so far
        self.moved = 0.0  # bytes moved so far

    # ---- launches

    def begin_launch(self, now: float) -> None:
        """The first of `entries` is next; it starts when it has arrived, not before `now`."""
        entry = self.entries[0]
        start = max(now, entry.arrived)
        if not entry.began:
            entry.began.append(start)
        self.work, self.index, self.priority = entry.work, 0, entry.priority
        self.ready_at = start + self.work.starts[0]

    def begin_kernel(self) -> None:
        self.shape = shape = self.work.shapes[self.index]
        self.pending, self.size = shape.blocks, shape.size
        self.rate, self.v0 = 1.0, 0.0

    # ---- blocks

    def start_blocks(self, blocks: int) -> None:
        """Start some of the pending ones, now (the stream is settled)."""
        shape = self.shape
        v_end = self.v0 + shape.block_s
        cohorts = self.cohorts
        if cohorts and v_end - cohorts[-1][0] < shape.grain_s:
            last = cohorts[-1]
            last[1] += blocks
            last[0] += (v_end - last[0]) * blocks / last[1]
        else:
            cohorts.append([v_end, blocks])
        self.pending -= blocks
        self.resident += blocks

    def catch_up(self, v: float) -> None:
        """Account for the waves that ended, and were followed, before its clock showed `v`."""
        cohorts = self.cohorts
        block_s = self.shape.block_s
        for cohort in cohorts:
            if cohort[0] < v:
                waves = ceil((v - cohort[0]) / block_s)
                cohort[0] += waves * block_s
                self.pending -= waves * int(cohort[1])
        if len(cohorts) > 1:
            cohorts.sort()

    # ---- alone on the device: the rest of the launch is one event

    def go_solo(self) -> None:
        """Its next kernel starts at `ready_at` and nothing disturbs what follows."""
        self.solo_from = self.index
        self.solo_base = self.ready_at - self.work.starts[self.index]
        self.next_at = self.solo_base + self.work.ends[-1]

    def solo_seconds(self, upto: int) -> float:
        """Account for kernels that ran alone, up to but without `upto`; the seconds they had blocks resident."""
        work, start = self.work, self.solo_from
        self.area += work.area[upto] - work.area[start]
        self.moved += work.moved[upto] - work.moved[start]
        return work.busy[upto] - work.busy[start]

    def end_solo(self, now: float) -> float:
        """Back to kernels and cohorts as they are at `now`, before anything that starts or ends at `now` has:
        afterwards it either waits for its next kernel (`resident` is 0) or runs one. The seconds it had
        blocks resident."""
        work, at = self.work, now - self.solo_base
        begun = bisect_left(work.starts, at - EPS) - 1
        if begun < self.solo_from or at > work.ends[begun] + EPS:
            self.index = max(begun + 1, self.solo_from)
            self.ready_at = self.solo_base + work.starts[self.index]
            return self.solo_seconds(self.index)
        self.index = begun
        since = at - work.starts[begun]
        busy = self.solo_seconds(begun)
        self.begin_kernel()
        self._into_kernel(since)
        return busy + since

    def _into_kernel(self, since: float) -> None:
        """The kernel has run alone for `since` seconds: waves that ended, and the one that runs."""
        shape = self.shape
        waves = max(ceil((since - EPS) / shape.wave_s) - 1, 0)
        waves = min(waves, (shape.blocks - 1) // shape.at_once)
        before = waves * shape.at_once
        running = min(shape.at_once, shape.blocks - before)
        into = max(since - waves * shape.wave_s, 0.0)
        # A block here takes what moving the wave's bytes takes, if that is longer than it takes itself.
        whole = shape.wave_s if running == shape.at_once else shape.solo_s - waves * shape.wave_s
        self.rate = shape.block_s / whole
        self.v0 = into * self.rate
        self.pending, self.resident = shape.blocks - before - running, running
        self.cohorts = [[shape.block_s, running]]
        self.area += (before * shape.wave_s + running * into) * shape.size

    # ---- endings

    def kernel_over(self, now: float, node_gap_s: float) -> bool:
        """Its kernel's last block has ended; whether the launch is over too."""
        self.moved += self.shape.nbytes
        self.index += 1
        if self.index < self.work.count:
            self.ready_at = now + node_gap_s
            return False
        return True

    def abandon(self, running: bool) -> None:
        """Nothing of it starts any more; what is resident runs out. It is settled."""
        if running:
            self.moved += (self.shape.blocks - self.pending) * self.shape.block_bytes
        self.entries.clear()
        self.pending = 0
        self.cycling = False


# ---- Memory bandwidth, shared: how fast groups of resident blocks run when they ask for more than there is.
#
# A kernel that by itself would use the part m of the bandwidth (1 when it would use more than all) spends
# that part of its block time waiting for memory. When all groups together ask for more than there is,
# each gets the same part f of what it asks for, and only the memory-bound part of its time stretches:
#
#     rate = 1 / ((1 - m) + m / f),   f the largest at which the rates move no more than the bandwidth
#
# Alone, a group with m = 1 so takes bytes / bandwidth, and one with m < 1 is not slowed at all.


_NEAR = 1e-9  # relative; what is left unused of the bandwidth
_MOST_ROUNDS = 64


def granted(groups: Sequence[tuple[float, float]], bandwidth: float) -> float:
    """The part f of what they ask for that `groups` get. A group is (bytes a second its blocks move at
    full speed, its memory-bound part m). 1.0 when they ask for no more than `bandwidth`."""
    if sum(demand for demand, _ in groups) <= bandwidth:
        return 1.0
    # What moves is concave in f and at most f * sum(demand / m): Newton's steps from where that bound meets
    # the bandwidth rise to the answer from below, so no step moves too much.
    f = bandwidth / sum(demand / bound for demand, bound in groups if demand > 0.0)
    for _ in range(_MOST_ROUNDS):
        moved = slope = 0.0
        for demand, bound in groups:
            if demand > 0.0:
                under = (1.0 - bound) * f + bound
                moved += demand * f / under
                slope += demand * bound / (under * under)
        if bandwidth - moved <= _NEAR * bandwidth:
            break
        f += (bandwidth - moved) / slope
    return min(f, 1.0)


def rate(bound: float, f: float) -> float:
    """How fast a group with memory-bound part `bound` runs when it gets the part `f` of its demand."""
    return f / ((1.0 - bound) * f + bound)


# ---- The multiprocessors: one pool of room for blocks, who gets it, and how fast what is resident runs.
#
# Most of a simulation's time goes here, in `settle` and `dispatch`: they are long so that an event costs two calls.


class Multiprocessors:
    """`running` are the streams with a kernel on the device, most preferred first. All show the same moment: the last
    one that `settle` or `begin` was called for."""

    def __init__(self, units: int, bandwidth: float) -> None:
        self._units = units
        self._bandwidth = bandwidth
        self._room = units
        self._last = 0.0  # that moment
        self._occupied = False
        self.running: list[Stream] = []
        self.next_at = inf
        self.busy_s = 0.0  # with any block resident

    def begin(self, stream: Stream, now: float) -> None:
        """Its next kernel is ready: behind those of its priority, before those of lower ones."""
        stream.begin_kernel()
        self._insert(stream)
        self._last = now

    def adopt(self, stream: Stream, now: float) -> None:
        """Take over a kernel that ran alone until `now`, with the blocks it has resident. Nothing else runs."""
        self._insert(stream)
        self._room -= stream.resident * stream.size
        self._last, self._occupied = now, True

    def remove(self, stream: Stream) -> None:
        """It has no blocks resident and none pending."""
        self.running.remove(stream)
        self._occupied = bool(self.running)  # unless those wait for room too: `dispatch` looks

    def settle(self, now: float) -> list[Stream]:
        """Bring all up to `now`, let blocks that end at this instant end; the streams whose kernel is over,
        which run no more."""
        passed = now - self._last
        self._last = now
        if self._occupied:
            self.busy_s += passed
        over: list[Stream] = []
        for stream in self.running:
            resident = stream.resident
            if resident:
                stream.v0 = v = stream.v0 + passed * stream.rate
                stream.area += resident * passed * stream.size
                cohorts = stream.cohorts
                if stream.cycling:
                    stream.cycling = False
                    if cohorts[0][0] < v - EPS:
                        stream.catch_up(v - EPS)
                v += EPS
                if cohorts[0][0] <= v:
                    ended = cohorts.pop(0)[1]
                    while cohorts and cohorts[0][0] <= v:
                        ended += cohorts.pop(0)[1]
                    stream.resident = resident = resident - int(ended)
                    self._room += int(ended) * stream.size
                    if not resident and not stream.pending:
                        over.append(stream)
        for stream in over:
            self.remove(stream)
        return over

    def dispatch(self) -> None:
        """Give what room there is to pending blocks, the most preferred first, and say what comes next: when the next
        blocks end whose room another stream could take, or that end a kernel. All are settled."""
        running, free, units = self.running, self._room, self._units
        resident = []
        for stream in running:
            pending = stream.pending
            if pending and free:
                size = stream.size
                room = free if stream.work.cap == units else self._room_in_share(stream, free)
                if room >= size:
                    blocks = room // size
                    if blocks > pending:
                        blocks = pending
                    stream.start_blocks(blocks)
                    free -= blocks * size
            if stream.resident:
                resident.append(stream)
        self._room = free
        self._occupied = True
        if len(resident) == 1:
            stream = resident[0]
            demand = stream.resident * stream.shape.demand
            stream.rate = 1.0 if demand <= self._bandwidth else self._bandwidth / demand
        elif resident:
            self._share_bandwidth(resident)
        else:
            self._occupied = False
        now, next_at, may_cycle = self._last, inf, True
        for stream in running:
            pending, blocks = stream.pending, stream.resident
            if blocks:
                v_end = stream.cohorts[0][0]
                if may_cycle and pending >= blocks:
                    stream.cycling = True
                    v_end += pending // blocks * stream.shape.block_s
                at = now + (v_end - stream.v0) / stream.rate
                if at < next_at:
                    next_at = at
            # One that waits for room takes whatever those after it leave, unless its own blocks fill its share.
            if pending and may_cycle:
                cap = stream.work.cap
                may_cycle = cap < units and (blocks + 1) * stream.size > cap
        self.next_at = next_at

    def _room_in_share(self, stream: Stream, free: int) -> int:
        """Units of those `free` that it may take now. Launches confined to a share have that part of the
        multiprocessors in common, as partitions of one device do."""
        room = cap = stream.work.cap
        for other in self.running:
            if other.resident and other.work.cap <= cap:
                room -= other.resident * other.size
        return min(free, room)

    def _share_bandwidth(self, resident: list[Stream]) -> None:
        """Rates for the blocks of several streams that are resident now."""
        bandwidth = self._bandwidth
        total = 0.0
        for stream in resident:
            shape = stream.shape
            stream.rate = shape.beside
            total += stream.resident * shape.demand * shape.beside
        if total > bandwidth:
            groups = [(s.resident * s.shape.demand * s.rate, s.shape.bound) for s in resident]
            f = granted(groups, bandwidth)
            for stream in resident:
                stream.rate *= rate(stream.shape.bound, f)

    def _insert(self, stream: Stream) -> None:
        at = len(self.running)
        while at and self.running[at - 1].priority < stream.priority:
            at -= 1
        self.running.insert(at, stream)


# ----


class Finished(NamedTuple):
    """`started`: when its stream reached the launch, as an event recorded before it would show; waiting
    for room on the multiprocessors counts as running. `ended`: when its last block ended."""

    launch: int
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Busy:
    """Sums since the beginning."""

    device_s: float  # with any block resident
    sm_seconds: dict[str, float]  # multiprocessor-seconds held, by job
    moved_bytes: float
    launching_s: float  # of the host's launching thread


class Gpu:
    """`graphs`: a launch is one call of the host, otherwise each of its kernels is one. `priorities`: the
    device prefers the higher stream, otherwise all are equal. Times given must not decrease."""

    def __init__(self, spec: GpuSpec, *, graphs: bool = True, priorities: bool = True) -> None:
        self.spec = spec
        self.now = 0.0
        self._graphs, self._priorities = graphs, priorities
        self._workshop = Workshop(spec)
        self._path = LaunchPath(spec.queue_length, spec.transmit_s, self._accept)
        self._sms = Multiprocessors(spec.sms * SM_UNITS, spec.bandwidth)
        self._streams: dict[str, Stream] = {}
        self._dropped: list[Stream] = []  # their resident blocks run out
        self._waiting: list[Stream] = []  # between kernels: `ready_at` says when the next may start
        self._solo: Stream | None = None  # alone on the device
        self._next = inf  # the next event inside
        self._ended: deque[tuple[float, str, Finished]] = deque()  # (when the host knows, job, what)
        self._past: dict[str, tuple[float, float]] = {}  # unit-seconds and bytes of streams that are gone

    # ---- from outside

    def launch(
        self, launch: int, job: str, stream: int, kernels: Sequence[Kernel], now: float, share: float = 1.0
    ) -> None:
        """Have the host launch `kernels` for `job`, in order after what it launched before. `stream` is the
        priority, larger runs first. A tuple that is launched again and again is prepared once. Raises
        ConfigError for figures that can't be, no kernels, or a share outside (0, 1]."""
        if not kernels:
            raise ConfigError("a launch without kernels", "launch at least one")
        spec = self.spec
        while self._next < now - EPS:  # what happens at `now` itself waits for all that is launched then
            self._step(self._next)
        self.now = max(self.now, now)
        priority = stream if self._priorities else 0
        began: list[float] = []
        if self._graphs:
            work = self._workshop.work(kernels, share)
            cost = spec.graph_s + work.count * spec.graph_node_s
            self._path.submit(Entry(launch, job, priority, work, cost, True, began), self.now)
        else:
            *others, final = self._workshop.single_calls(kernels, share)
            for work in others:
                self._path.submit(Entry(launch, job, priority, work, spec.call_s, False, began), self.now)
            self._path.submit(Entry(launch, job, priority, final, spec.call_s, True, began), self.now)
        self._foresee()

    def next_event(self) -> float:
        """A time before which the host learns of nothing; inf when nothing will happen."""
        return min(self._next, self._ended[0][0]) if self._ended else self._next

    def advance(self, until: float) -> list[Finished]:
        """Let time pass to `until`: what the host has learned by then, in the order it ended. inf: until
        nothing is left to happen."""
        self._run_to(until)
        if until == inf and self._ended:
            self.now = max(self.now, self._ended[-1][0])
        return self._learned()

    def advance_to_finish(self, until: float = inf) -> list[Finished]:
        """Let time pass until the host learns of something, or to `until` if that is earlier. `now` says
        how far it went; with nothing left to happen and no `until` it stays where it is."""
        ended, at = self._ended, self._next
        while at <= until and at < inf and not (ended and ended[0][0] <= at):
            self._step(at)
            at = self._next
        if ended and ended[0][0] < until:
            until = ended[0][0]
        if self.now < until < inf:
            self.now = until
        return self._learned() if ended and ended[0][0] <= self.now else []

    def drop(self, job: str, now: float) -> None:
        """Forget a job's launches and say nothing more of them; its resident blocks run out."""
        self._run_to(now)
        self._bring_up()
        self._path.drop(job, self.now)
        self._ended = deque(each for each in self._ended if each[1] != job)
        stream = self._streams.pop(job, None)
        if stream is not None:
            running = stream in self._sms.running
            stream.abandon(running)
            if stream in self._waiting:
                self._waiting.remove(stream)
            if stream.resident:
                self._dropped.append(stream)
            else:
                if running:
                    self._sms.remove(stream)
                self._bury(stream)
        self._step(self.now)

    def busy(self) -> Busy:
        """What was used so far."""
        self._bring_up()
        area = {job: area for job, (area, _) in self._past.items()}
        moved = sum(moved for _, moved in self._past.values())
        for stream in (*self._streams.values(), *self._dropped):
            area[stream.job] = area.get(stream.job, 0.0) + stream.area
            moved += stream.moved
        by_job = {job: units / SM_UNITS for job, units in area.items()}
        return Busy(self._sms.busy_s, by_job, moved, self._path.launching_s)

    # ---- events

    def _run_to(self, until: float) -> None:
        while inf > self._next <= until:
            self._step(self._next)
        if inf > until > self.now:
            self.now = until

    def _step(self, now: float) -> None:
        """All that happens at `now`: blocks end before new ones start, so whoever is preferred at this
        instant gets the room, also if it became ready only now."""
        sms, waiting = self._sms, self._waiting
        solo = self._solo
        if solo is not None:
            if solo.next_at <= now + EPS:
                self._solo = None
                sms.busy_s += solo.solo_seconds(solo.work.count)
                self._launch_over(solo, now)
            elif waiting and any(stream.ready_at <= now + EPS for stream in waiting):
                self._end_solo(now)
        if sms.running:
            for stream in sms.settle(now):
                self._kernel_over(stream, now)
        if self._path.holds:
            self._path.move(now)
        if waiting:
            self._begin_kernels(now)
        if sms.running:
            sms.dispatch()
            if not waiting:
                at = self._path.next_at
                self._next = sms.next_at if sms.next_at < at else at
                return
        self._foresee()

    def _begin_kernels(self, now: float) -> None:
        """Those whose time has come, unless one would be alone: then `_foresee` makes it the solo one."""
        waiting, sms = self._waiting, self._sms
        if self._solo is not None or (len(waiting) == 1 and not sms.running):
            return
        now_too = now + EPS
        ready = [stream for stream in waiting if stream.ready_at <= now_too]
        if len(ready) > 1:
            ready.sort(key=_job)  # some order, but always the same
        for stream in ready:
            waiting.remove(stream)
            sms.begin(stream, now)

    def _foresee(self) -> None:
        """When the next event is. A stream that is alone on the device becomes the solo one."""
        waiting, sms = self._waiting, self._sms
        if not sms.running and self._solo is None and len(waiting) == 1:
            self._solo = waiting.pop()
            self._solo.go_solo()
        at = self._path.next_at
        if sms.running:
            if sms.next_at < at:
                at = sms.next_at
        elif self._solo is not None and self._solo.next_at < at:
            at = self._solo.next_at
        for stream in waiting:
            if stream.ready_at < at:
                at = stream.ready_at
        self._next = at

    def _kernel_over(self, stream: Stream, now: float) -> None:
        if self._streams.get(stream.job) is not stream:
            self._dropped.remove(stream)
            self._bury(stream)
        elif stream.kernel_over(now, self.spec.node_gap_s):
            self._launch_over(stream, now)
        else:
            self._waiting.append(stream)

    def _launch_over(self, stream: Stream, now: float) -> None:
        entry = stream.entries.popleft()
        if entry.last:
            ended = Finished(entry.launch, entry.began[0], now)
            self._ended.append((now + self.spec.completion_s, stream.job, ended))
        if stream.entries:
            stream.begin_launch(now)
            self._waiting.append(stream)
        if self._path.holds:
            self._path.move(now)

    def _accept(self, entry: Entry, now: float) -> bool:
        """Put `entry` on its stream if that has room."""
        stream = self._streams.get(entry.job)
        if stream is None:
            stream = self._streams[entry.job] = Stream(entry.job)
        if len(stream.entries) >= self.spec.stream_depth:
            return False
        stream.entries.append(entry)
        if len(stream.entries) == 1:
            stream.begin_launch(now)
            self._waiting.append(stream)
        return True

    def _end_solo(self, now: float) -> None:
        stream = self._solo
        assert stream is not None
        self._solo = None
        self._sms.busy_s += stream.end_solo(now)
        if stream.resident:
            self._sms.adopt(stream, now)
        else:
            self._waiting.append(stream)

    def _bring_up(self) -> None:
        """Make every figure true at `now`."""
        if self._solo is not None:
            self._end_solo(self.now)
        self._step(self.now)

    def _bury(self, stream: Stream) -> None:
        area, moved = self._past.get(stream.job, (0.0, 0.0))
        self._past[stream.job] = (area + stream.area, moved + stream.moved)

    def _learned(self) -> list[Finished]:
        learned = []
        while self._ended and self._ended[0][0] <= self.now:
            learned.append(self._ended.popleft()[2])
        return learned


def _job(stream: Stream) -> str:
    return stream.job
