"""A discrete-event GPU on a virtual clock.

    launch -> host thread -> a bounded queue for each stream -> a hardware channel -> blocks

A block needs room on one multiprocessor (placement.py), and is never preempted. Only one kernel places blocks at a
time: of those ready, the one of the highest priority, among equals the one that became ready first. While it waits for
room, nothing is placed of the others, whether it would fit or not (Amert et al., "GPU Scheduling on the NVIDIA TX2",
RTSS 2017, rules G2, X1 and A2; Gilman et al. 2021 for newer devices). Streams are in order, so a job has one kernel on
the device at a time.

Nothing is random: the same calls give the same results. Most time goes into events, so there are few of them: a wave of
blocks that changes nothing for other streams is none, and a stream alone on the device has one for each launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, lcm
from typing import NamedTuple

from gpumux.device.sim.contention import Demand, crowded, granted, speed
from gpumux.device.sim.cost import MAX_PER_SM, Kernel, checked, demands, issue_of_block, solo_seconds, wave
from gpumux.device.sim.placement import Runs, add, most, place, together, uniform
from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError

# ---- A prepared launch: the figures of each kernel on one GPU, and its start and end when nothing else runs.


EPS = 1e-9  # seconds; times nearer than this are one instant
# Blocks that start within this part of their block time become one cohort, which ends at their mean time. Otherwise the
# blocks of two jobs that share the device spread out until each ends by itself, with many more events and nearly the
# same times.
GRAIN = 0.1
SM_UNITS = lcm(*range(1, MAX_PER_SM + 1))  # one multiprocessor: any block takes a whole number of them


class Shape:
    """The figures of one kernel on one GPU, confined to one share."""

    __slots__ = (
        "at_once",
        "beside",
        "block_bytes",
        "block_s",
        "blocks",
        "cached",
        "grain_s",
        "l2",
        "memory",
        "missed",
        "name",
        "nbytes",
        "need",
        "size",
        "solo_s",
        "wave_s",
    )

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
        self.memory, self.l2, self.missed = demands(kernel, spec)
        self.cached = kernel.cached
        self.need = issue_of_block(kernel, spec)
        self.at_once, self.wave_s = wave(kernel, spec, share)  # blocks of a full wave alone, and its seconds
        self.solo_s = solo_seconds(kernel, spec, share)


class LaunchWork:
    """The kernels of one launch, in order, and their timeline alone on the device. Kernel i is ready `starts[i]`
    seconds after the launch's start and ends at `ends[i]`. `busy[i]` (seconds), `area[i]` (unit-seconds) and `moved[i]`
    (bytes) are sums over the kernels before i."""

    __slots__ = ("area", "busy", "count", "ends", "moved", "shapes", "sms", "starts")

    def __init__(self, shapes: Sequence[Shape], sms: int, launch_gap_s: float, node_gap_s: float) -> None:
        self.shapes = tuple(shapes)
        self.sms = sms  # multiprocessors it may use, the last ones: others fill the first ones first
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


class WorkCache:
    """Prepared launches, each made once."""

    MOST = 20_000  # kept at once: a caller that makes new kernels for every launch must not fill memory

    def __init__(self, spec: GpuSpec) -> None:
        self._spec = spec
        self._shapes: dict[tuple[Kernel, float], Shape] = {}
        self._works: dict[tuple[int, float], tuple[Sequence[Kernel], LaunchWork]] = {}

    def work(self, kernels: Sequence[Kernel], share: float) -> LaunchWork:
        """The LaunchWork of these kernels. A tuple that was given before is found by its identity."""
        key = (id(kernels), share)
        found = self._works.get(key)
        if found is not None and found[0] is kernels:
            return found[1]
        work = self._make(kernels, share)
        if type(kernels) is tuple:  # immutable, and kept here so that no other object gets its id
            if len(self._works) >= self.MOST:
                self._works.clear()
            self._works[key] = (kernels, work)
        return work

    def single_calls(self, kernels: Sequence[Kernel], share: float) -> list[LaunchWork]:
        """One LaunchWork for each kernel, to launch them one by one."""
        return [self.work(_alone(kernel), share) for kernel in kernels]

    def _make(self, kernels: Sequence[Kernel], share: float) -> LaunchWork:
        spec = self._spec
        shapes = [self._shape(kernel, share) for kernel in kernels]
        return LaunchWork(shapes, spec.share_sms(share), spec.launch_gap_s, spec.node_gap_s)

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
    """(kernel,), the same tuple in every call."""
    if len(_singles) >= WorkCache.MOST:
        _singles.clear()
    return _singles.setdefault(kernel, (kernel,))


# ---- From the host to the device: one thread that launches. Each stream has a queue; while that is full, the host
# waits with a launch for it, and with all launches behind it.
#
# On a device with one queue for all streams, its head leaves it only when the head's stream has room on the device.
# Until then all entries behind it wait, whatever their priority: the head-of-line blocking by which DeepPool (section
# 5) explains that stream priorities alone do little.


Accept = Callable[["HostCall", float], bool]


class HostCall:
    """One call of the host: a graph, or a single kernel. `last`: the last call of its launch. `began`: holds the
    launch's start once that is known; all calls of a launch share it. `holds`: its last kernel's blocks stay on the
    device, when they are done, until they are released."""

    __slots__ = ("arrived", "began", "cost", "holds", "job", "last", "launch", "priority", "work")

    def __init__(
        self,
        launch: int,
        job: str,
        priority: int,
        work: LaunchWork,
        *,
        cost: float,
        last: bool,
        began: list[float],
        holds: bool = False,
    ) -> None:
        self.launch = launch
        self.job = job
        self.priority = priority
        self.work = work
        self.cost = cost  # host seconds
        self.last = last
        self.began = began
        self.holds = holds
        self.arrived = inf  # when its stream can see it


class LaunchPath:
    """The host's thread and the queue that all streams share, of `length` entries; 1 where each has a queue of its own:
    the launch that the host waits with. `accept(entry, now)` puts an entry on its stream and returns True if that has
    room."""

    def __init__(self, length: int, transmit_s: float, accept: Accept) -> None:
        self._length = length
        self._transmit_s = transmit_s
        self._accept = accept
        self._waiting: deque[HostCall] = deque()  # the host makes the first of these calls now
        self._queue: deque[HostCall] = deque()
        self._free_at = 0.0  # when the host has made all calls given before
        self._done_at = inf  # when it has made the first of `_waiting`
        self.launching_s = 0.0  # host seconds spent so far
        self.holds = False  # whether it has any entry
        self.next_at = inf  # when an entry moves without a launch ending first

    def submit(self, entry: HostCall, now: float) -> None:
        """Have the host make this call."""
        if not self._waiting:
            start = max(now, self._free_at)
            done = start + entry.cost
            entry.arrived = done + self._transmit_s
            # No entry is ahead of it, so room on its stream now is room when it arrives.
            if not self._queue and self._accept(entry, now):
                self._free_at = done
                self.launching_s += entry.cost
                return
            self._done_at = done
        self._waiting.append(entry)
        self._update_next()

    def move(self, now: float) -> None:
        """Move the entries that can move at `now`."""
        queue, waiting = self._queue, self._waiting
        while True:
            while queue and self._accept(queue[0], now):
                queue.popleft()
            if not waiting or self._done_at > now or len(queue) >= self._length:
                self._update_next()
                return
            entry = waiting.popleft()
            entry.arrived = max(now, self._done_at + self._transmit_s)
            self.launching_s += entry.cost
            queue.append(entry)
            self._free_at = now
            self._done_at = now + waiting[0].cost if waiting else inf

    def drop(self, job: str, now: float) -> None:
        """Forget the entries of `job`."""
        at_it = self._waiting[0] if self._waiting else None
        for held in (self._waiting, self._queue):
            kept = [entry for entry in held if entry.job != job]
            held.clear()
            held.extend(kept)
        if at_it is not None and at_it.job == job:
            self._free_at = now
            self._done_at = now + self._waiting[0].cost if self._waiting else inf
        self._update_next()

    def _update_next(self) -> None:
        self.holds = bool(self._waiting or self._queue)
        self.next_at = self._done_at if len(self._queue) < self._length else inf


# ---- The hardware's channels: in-order queues that streams are spread over.


class HardwareChannel:
    """One hardware queue. Its head leaves it when all blocks of its last kernel are placed; what is behind waits until
    then, of whatever stream (Bakita and Anderson, RTAS 2024, rule R2), also while the head itself waits for what its
    stream runs before it (Paella, SOSP 2023)."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: deque[HostCall] = deque()

    def shared(self) -> bool:
        """Whether launches of several jobs are in it."""
        entries = self.entries
        return len(entries) > 1 and any(entry.job != entries[0].job for entry in entries)

    def drop(self, job: str) -> None:
        """Forget the entries of `job`."""
        self.entries = deque(entry for entry in self.entries if entry.job != job)


# ---- One job's stream on the device: its launches in order, and the kernel that runs.
#
# Blocks that started together are a *cohort*. A kernel's own clock `v` counts seconds of block time at full speed and
# advances at `rate`. A cohort started at `v` ends when the clock shows `v + block_s`, so a change of rate moves no
# cohort, and cohorts are kept in the order they end.
#
# A stream *cycles* while every block that ends is followed at once by another of the same kernel in its place. Such
# waves change nothing for other streams, so none of them is an event: `catch_up` accounts for all of them.


class Cohort:
    """Blocks that end together, when their stream's clock shows `v_end`. `places`: how many on each multiprocessor."""

    __slots__ = ("blocks", "places", "v_end")

    def __init__(self, v_end: float, blocks: int, places: Runs) -> None:
        self.v_end = v_end
        self.blocks = blocks
        self.places = places


class Stream:
    """One job's stream. `entries[0]` runs; `index`: its kernel that runs or is next. `places`: how many of its blocks
    each multiprocessor has."""

    __slots__ = ("area", "begun", "channel", "cohorts", "cycling", "entries", "index", "job", "moved", "next_at",
                 "pending", "places", "priority", "rate", "ready_at", "resident", "shape", "size", "solo_base",
                 "solo_from", "v0", "work")  # fmt: skip

    work: LaunchWork
    shape: Shape
    places: Runs

    def __init__(self, job: str, channel: HardwareChannel) -> None:
        self.job = job
        self.channel = channel
        self.entries: deque[HostCall] = deque()
        self.begun = False  # whether the first of them has left the channel's queue for the device
        self.priority = 0
        self.index = 0
        self.ready_at = inf  # when its next kernel may start
        self.next_at = inf  # when its running kernel next changes the room of others
        self.pending = 0  # blocks not started
        self.resident = 0  # blocks running
        self.size = 0  # units that each block takes
        self.cohorts: list[Cohort] = []
        self.cycling = False
        self.rate = 1.0
        self.v0 = 0.0  # what its clock shows
        self.solo_base = 0.0  # see go_solo
        self.solo_from = 0
        self.area = 0.0  # unit-seconds held so far
        self.moved = 0.0  # bytes moved so far

    # ---- launches

    def begin_launch(self, now: float) -> None:
        """The first of `entries` is next. It starts when it has arrived, not before `now`."""
        entry = self.entries[0]
        start = max(now, entry.arrived)
        if not entry.began:
            entry.began.append(start)
        self.work, self.index, self.priority, self.begun = entry.work, 0, entry.priority, True
        self.ready_at = start + self.work.starts[0]

    def begin_kernel(self) -> None:
        self.shape = shape = self.work.shapes[self.index]
        self.pending, self.size = shape.blocks, shape.size
        self.rate, self.v0 = 1.0, 0.0

    # ---- blocks

    def start_blocks(self, blocks: int, places: Runs) -> None:
        """Start `blocks` of the pending blocks, now. The stream is settled."""
        shape = self.shape
        v_end = self.v0 + shape.block_s
        cohorts = self.cohorts
        if cohorts and v_end - cohorts[-1].v_end < shape.grain_s:
            last = cohorts[-1]
            last.blocks += blocks
            last.v_end += (v_end - last.v_end) * blocks / last.blocks
            last.places = add(last.places, places)
        else:
            cohorts.append(Cohort(v_end, blocks, places))
        self.places = add(self.places, places) if self.resident else places
        self.pending -= blocks
        self.resident += blocks

    def end_blocks(self, v: float) -> Runs | None:
        """End the cohorts that end before its clock shows `v`. Returns where they were, None if there are none."""
        cohorts = self.cohorts
        if not cohorts or cohorts[0].v_end > v:
            return None
        first = cohorts.pop(0)
        ended, places = first.blocks, first.places
        while cohorts and cohorts[0].v_end <= v:
            more = cohorts.pop(0)
            ended += more.blocks
            places = add(places, more.places)
        self.resident -= ended
        if self.resident:
            self.places = add(self.places, places, -1)
        return places

    def catch_up(self, v: float) -> None:
        """Account for the waves that ended, and were followed by others, before its clock showed `v`."""
        cohorts = self.cohorts
        block_s = self.shape.block_s
        for cohort in cohorts:
            if cohort.v_end < v:
                waves = ceil((v - cohort.v_end) / block_s)
                cohort.v_end += waves * block_s
                self.pending -= waves * cohort.blocks
        if len(cohorts) > 1:
            cohorts.sort(key=_v_end)

    # ---- alone on the device: the rest of the launch is one event

    def go_solo(self) -> None:
        """Note that the launch runs alone: its next kernel starts at `ready_at`, and the rest of it follows its
        timeline."""
        self.solo_from = self.index
        self.solo_base = self.ready_at - self.work.starts[self.index]
        self.next_at = self.solo_base + self.work.ends[-1]

    def solo_seconds(self, upto: int) -> float:
        """Account for kernels that ran alone, before kernel `upto`. Returns the seconds they had blocks resident."""
        work, start = self.work, self.solo_from
        self.area += work.area[upto] - work.area[start]
        self.moved += work.moved[upto] - work.moved[start]
        return work.busy[upto] - work.busy[start]

    def end_solo(self, now: float, empty: Runs) -> float:
        """Set kernel and cohorts as they are at `now`, before what starts or ends at `now`. Afterwards the stream waits
        for its next kernel (`resident` is 0) or runs one. `empty`: the units of each multiprocessor. Returns the
        seconds it had blocks resident."""
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
        self._into_kernel(since, empty)
        return busy + since

    def _into_kernel(self, since: float, empty: Runs) -> None:
        """Set the waves that have ended and the wave that runs, of a kernel that has run alone for `since` seconds."""
        shape = self.shape
        waves = max(ceil((since - EPS) / shape.wave_s) - 1, 0)
        waves = min(waves, (shape.blocks - 1) // shape.at_once)
        before = waves * shape.at_once
        running = min(shape.at_once, shape.blocks - before)
        into = max(since - waves * shape.wave_s, 0.0)
        # A block takes the time of moving the wave's bytes, if that is longer than its own.
        whole = shape.wave_s if running == shape.at_once else shape.solo_s - waves * shape.wave_s
        self.rate = shape.block_s / whole
        self.v0 = into * self.rate
        self.pending, self.resident = shape.blocks - before - running, running
        self.places, _ = place(empty, shape.size, running, self.work.sms)
        self.cohorts = [Cohort(shape.block_s, running, self.places)]
        self.area += (before * shape.wave_s + running * into) * shape.size

    # ---- endings

    def kernel_over(self, now: float, node_gap_s: float) -> bool:
        """Its kernel's last block has ended. Returns whether the launch has ended, too."""
        self.moved += self.shape.nbytes
        self.index += 1
        if self.index < self.work.count:
            self.ready_at = now + node_gap_s
            return False
        return True

    def hold(self, free: Runs) -> None:
        """Its last kernel is done: as many of its blocks as fit into `free` stay, for no time of their own."""
        self.shape = shape = self.work.shapes[-1]
        self.pending, self.size = 0, shape.size
        at_once = min(shape.blocks, shape.at_once)
        self.places, self.resident = place(free, shape.size, at_once, self.work.sms)
        self.cohorts = [Cohort(inf, self.resident, self.places)]
        self.rate, self.v0 = 1.0, 0.0

    def abandon(self, running: bool) -> None:
        """Start nothing of it any more. Resident blocks run to their end. It is settled."""
        if running and self.cohorts and self.cohorts[0].v_end == inf:
            self.cohorts[0].v_end = self.v0  # held: it is done, and its traffic counted
        elif running:
            self.moved += (self.shape.blocks - self.pending) * self.shape.block_bytes
        self.entries.clear()
        self.pending = 0
        self.cycling = False


def _v_end(cohort: Cohort) -> float:
    return cohort.v_end


# ---- The multiprocessors: which blocks each has, and the speed of these.
#
# Most of a simulation's time is spent in `settle` and `dispatch`. They are long so that an event costs two calls.


class Multiprocessors:
    """All multiprocessors. `running`: the streams with a kernel on the device, most preferred first. All of them are
    settled at the same time: the last one that `settle` or `begin` was called for."""

    def __init__(self, spec: GpuSpec) -> None:
        self._spec = spec
        self.empty = uniform(spec.sms, SM_UNITS)
        self._free = self.empty
        self._last = 0.0  # that time
        self._occupied = False
        self.running: list[Stream] = []
        self.next_at = inf
        self.busy_s = 0.0  # with any block resident

    def begin(self, stream: Stream, now: float) -> None:
        """Its next kernel is ready. It comes behind those of its priority, before those of lower ones."""
        stream.begin_kernel()
        self._insert(stream)
        self._last = now

    def adopt(self, stream: Stream, now: float) -> None:
        """Take over a kernel with the blocks it has resident at `now`, to which all others are settled."""
        self._insert(stream)
        self._free = add(self._free, stream.places, -stream.size)
        self._last, self._occupied = now, True

    def hold(self, stream: Stream, now: float) -> None:
        """Keep a kernel on the device that is done: its blocks take the room again that they have just left."""
        stream.hold(self._free)
        self.adopt(stream, now)

    def release(self, stream: Stream) -> None:
        """End what `hold` keeps. It is settled."""
        self._free = add(self._free, stream.places, stream.size)
        stream.resident = 0
        stream.cohorts.clear()
        self.remove(stream)

    def remove(self, stream: Stream) -> None:
        """Take a stream away that has no blocks resident and none pending."""
        self.running.remove(stream)
        self._occupied = bool(self.running)  # `dispatch` finds out whether those have blocks resident

    def settle(self, now: float) -> list[Stream]:
        """Bring all streams up to `now` and end the blocks that end then. Returns the streams whose kernel has ended,
        which are no longer in `running`."""
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
                if stream.cycling:
                    stream.cycling = False
                    if stream.cohorts[0].v_end < v - EPS:
                        stream.catch_up(v - EPS)
                places = stream.end_blocks(v + EPS)
                if places is not None:
                    self._free = add(self._free, places, stream.size)
                    if not stream.resident and not stream.pending:
                        over.append(stream)
        for stream in over:
            self.remove(stream)
        return over

    def dispatch(self) -> None:
        """Place the pending blocks of the most preferred stream that has any, and then of the next, until one has to
        wait for room. Sets `next_at`: when the next blocks end whose room it could take, or that end a kernel. All
        streams are settled."""
        running = self.running
        resident: list[Stream] = []
        waits: Stream | None = None
        for stream in running:
            if stream.pending and waits is None:
                places, blocks = place(self._free, stream.size, stream.pending, stream.work.sms)
                if blocks:
                    stream.start_blocks(blocks, places)
                    self._free = add(self._free, places, -stream.size)
                if stream.pending:
                    waits = stream
            if stream.resident:
                resident.append(stream)
        self._occupied = bool(resident)
        if resident:
            self._set_rates(resident)
        now, next_at = self._last, inf
        for stream in resident:
            v_end = stream.cohorts[0].v_end
            if stream is waits and stream.pending >= stream.resident:
                stream.cycling = True
                rounds, rest = divmod(stream.pending, stream.resident)
                if not rest:  # its last block is placed when its last cohort ends for the last time but one
                    v_end, rounds = stream.cohorts[-1].v_end, rounds - 1
                v_end += rounds * stream.shape.block_s
            at = now + (v_end - stream.v0) / stream.rate
            if at < next_at:
                next_at = at
        self.next_at = next_at

    def _set_rates(self, resident: list[Stream]) -> None:
        """The speed of the blocks of each stream, by the rules of contention.py."""
        spec, alone = self._spec, len(resident) == 1
        for stream in resident:
            stream.rate = 1.0 if alone else stream.shape.beside
        missed = sum([stream.shape.cached for stream in resident]) > spec.l2_bytes
        memory: list[tuple[Stream, Demand]] = []
        l2: list[tuple[Stream, Demand]] = []
        for stream in resident:
            shape = stream.shape
            one = shape.missed if missed else shape.memory
            if one.rate:
                memory.append((stream, one))
            if shape.l2.rate and not missed:
                l2.append((stream, shape.l2))
        speeds: dict[Stream, float] = {}
        for demanding, bandwidth in ((memory, spec.bandwidth), (l2, spec.l2_bandwidth)):
            if demanding:
                f = granted([(stream.resident, one) for stream, one in demanding], bandwidth, spec.saturation)
                for stream, one in demanding:
                    speeds[stream] = min(speeds.get(stream, inf), speed(one, f))
        for stream, fast in speeds.items():
            stream.rate *= fast
        if sum([most(stream.places) * stream.shape.need for stream in resident]) > 1.0:
            self._crowd(resident)

    def _crowd(self, resident: list[Stream]) -> None:
        """Slow down what shares multiprocessors that have too little for all their blocks. The blocks of one stream all
        run at their mean speed."""
        sums = [0.0] * len(resident)
        for width, counts in together([stream.places for stream in resident]):
            fast = crowded([(stream.shape.need, count) for stream, count in zip(resident, counts, strict=True)])
            for number, count in enumerate(counts):
                sums[number] += width * count * fast
        for stream, sum_ in zip(resident, sums, strict=True):
            stream.rate *= sum_ / stream.resident

    def _insert(self, stream: Stream) -> None:
        at = len(self.running)
        while at and self.running[at - 1].priority < stream.priority:
            at -= 1
        self.running.insert(at, stream)


# ---- The GPU


class Finished(NamedTuple):
    """A launch that has ended. `started`: when its stream reached the launch, as an event recorded before it would
    show; waiting for room on the multiprocessors counts as running. `ended`: when its last block ended."""

    launch: int
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Busy:
    """What was used since the beginning, as sums."""

    device_s: float  # with any block resident
    sm_seconds: dict[str, float]  # multiprocessor-seconds held, by job
    moved_bytes: float
    launching_s: float  # of the host's launching thread


Held = Callable[[int, float], None]


class Gpu:
    """A GPU on a virtual clock. `graphs`: a launch is one call of the host; otherwise each of its kernels is one.
    `priorities`: the device prefers streams of higher priority; otherwise all are equal. `held`: called, with its
    number and the time, when a launch that holds the device is done and waits for `release`. Times that callers pass
    must not decrease."""

    def __init__(
        self, spec: GpuSpec, *, graphs: bool = True, priorities: bool = True, held: Held | None = None
    ) -> None:
        self.spec = spec
        self.now = 0.0
        self._graphs, self._priorities = graphs, priorities
        self._workshop = WorkCache(spec)
        shared = spec.launch_queue == "shared"
        self._depth = spec.stream_depth if shared else spec.queue_length
        self._path = LaunchPath(spec.queue_length if shared else 1, spec.transmit_s, self._accept)
        self._sms = Multiprocessors(spec)
        self._streams: dict[str, Stream] = {}
        self._channels = [HardwareChannel() for _ in range(spec.channels)]
        self._created = 0  # streams so far
        self._sharing = False  # whether launches of several jobs are in one channel
        self._dropped: list[Stream] = []  # their resident blocks run to their end
        self._waiting: list[Stream] = []  # between kernels: `ready_at` says when the next may start
        self._solo: Stream | None = None  # alone on the device
        self._next = inf  # the next event inside
        self._ended: deque[tuple[float, str, Finished]] = deque()  # (when the host knows, job, what)
        self._past: dict[str, tuple[float, float]] = {}  # unit-seconds and bytes of streams that were dropped
        self._held = held

    # ---- for callers

    def launch(
        self,
        launch: int,
        job: str,
        stream: int,
        kernels: Sequence[Kernel],
        now: float,
        share: float = 1.0,
        *,
        holds: bool = False,
    ) -> None:
        """Have the host launch `kernels` for `job`, behind its earlier launches. `stream`: the priority, larger runs
        first. A tuple that is launched again is prepared once. `holds`: its last kernel is one with those of other
        GPUs; it stays on the device until `release`. Raises ConfigError for impossible figures, no kernels, or a share
        outside (0, 1]."""
        if not kernels:
            raise ConfigError("a launch without kernels", "launch at least one")
        spec = self.spec
        while self._next < now - EPS:  # events at `now` wait for all launches at `now`
            self._step(self._next)
        self.now = max(self.now, now)
        priority = stream if self._priorities else 0
        began: list[float] = []
        if self._graphs:
            work = self._workshop.work(kernels, share)
            cost = spec.graph_s + work.count * spec.graph_node_s
            self._path.submit(
                HostCall(launch, job, priority, work, cost=cost, last=True, began=began, holds=holds), self.now
            )
        else:
            *others, final = self._workshop.single_calls(kernels, share)
            for work in others:
                call = HostCall(launch, job, priority, work, cost=spec.call_s, last=False, began=began)
                self._path.submit(call, self.now)
            call = HostCall(launch, job, priority, final, cost=spec.call_s, last=True, began=began, holds=holds)
            self._path.submit(call, self.now)
        self._find_next_event()

    def release(self, job: str, now: float) -> None:
        """End the launch of `job` that holds the device and is done."""
        self._run_to(now)
        self._settle_all()
        stream = self._streams[job]
        self._sms.release(stream)
        self._launch_ended(stream, self.now)
        self._step(self.now)

    def next_event(self) -> float:
        """A time before which the host learns of no end; inf if nothing will happen."""
        return min(self._next, self._ended[0][0]) if self._ended else self._next

    def advance(self, until: float) -> list[Finished]:
        """Let time pass to `until`, inf: until nothing is left to happen. Returns the launches whose end the host has
        learned of by then, in the order they ended."""
        self._run_to(until)
        if until == inf and self._ended:
            self.now = max(self.now, self._ended[-1][0])
        return self._known_to_host()

    def advance_to_finish(self, until: float = inf) -> list[Finished]:
        """Let time pass until the host learns of an end, or to `until` if that is earlier. `now` is the time reached;
        it stays as it is if nothing is left to happen and `until` is inf."""
        ended, at = self._ended, self._next
        while at <= until and at < inf and not (ended and ended[0][0] <= at):
            self._step(at)
            at = self._next
        if ended and ended[0][0] < until:
            until = ended[0][0]
        if self.now < until < inf:
            self.now = until
        return self._known_to_host() if ended and ended[0][0] <= self.now else []

    def drop(self, job: str, now: float) -> None:
        """Forget a job's launches and report none of them. Its resident blocks run to their end."""
        self._run_to(now)
        self._settle_all()
        self._path.drop(job, self.now)
        self._ended = deque(each for each in self._ended if each[1] != job)
        stream = self._streams.pop(job, None)
        if stream is not None:
            running = stream in self._sms.running
            stream.abandon(running)
            stream.channel.drop(job)
            self._begin_launch(stream.channel, self.now)
            if stream in self._waiting:
                self._waiting.remove(stream)
            if stream.resident:
                self._dropped.append(stream)
            else:
                if running:
                    self._sms.remove(stream)
                self._add_to_past(stream)
        self._step(self.now)

    def busy(self) -> Busy:
        """What was used until now."""
        self._settle_all()
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
        """Process all that happens at `now`. Blocks end before new ones start, so a preferred stream gets the room even
        if it became ready only now."""
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
            if self._sharing:
                self._leave_channels(now)
            if not waiting:
                at = self._path.next_at
                self._next = sms.next_at if sms.next_at < at else at
                return
        self._find_next_event()

    def _begin_kernels(self, now: float) -> None:
        """Begin kernels that are ready, unless a stream would be alone: `_find_next_event` makes that the solo one."""
        waiting, sms = self._waiting, self._sms
        if self._solo is not None or (len(waiting) == 1 and not sms.running and not self._sharing):
            return
        now_too = now + EPS
        ready = [stream for stream in waiting if stream.ready_at <= now_too]
        if len(ready) > 1:
            ready.sort(key=_job)  # any order will do that is always the same
        for stream in ready:
            waiting.remove(stream)
            sms.begin(stream, now)

    def _find_next_event(self) -> None:
        """Set the time of the next event. A stream that is alone on the device becomes the solo one."""
        waiting, sms = self._waiting, self._sms
        if not sms.running and self._solo is None and len(waiting) == 1 and not self._sharing:
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
            self._add_to_past(stream)
        elif stream.kernel_over(now, self.spec.node_gap_s):
            self._launch_over(stream, now)
        else:
            self._waiting.append(stream)

    def _launch_over(self, stream: Stream, now: float) -> None:
        if stream.entries[0].holds and self._held is not None:
            self._sms.hold(stream, now)
            self._held(stream.entries[0].launch, now)
        else:
            self._launch_ended(stream, now)

    def _launch_ended(self, stream: Stream, now: float) -> None:
        entry = stream.entries.popleft()
        stream.begun = False
        if entry.last:
            ended = Finished(entry.launch, entry.began[0], now)
            self._ended.append((now + self.spec.completion_s, stream.job, ended))
        if stream.channel.entries and stream.channel.entries[0] is entry:
            self._leave_channel(stream.channel, now)
        else:
            self._begin_launch(stream.channel, now)
        if self._path.holds:
            self._path.move(now)

    def _accept(self, entry: HostCall, now: float) -> bool:
        """Put `entry` on its stream; whether that had room."""
        stream = self._streams.get(entry.job)
        if stream is None:
            channel = self._channels[self._created % len(self._channels)]
            stream = self._streams[entry.job] = Stream(entry.job, channel)
            self._created += 1
        if len(stream.entries) >= self._depth:
            return False
        stream.entries.append(entry)
        stream.channel.entries.append(entry)
        if self._created > len(self._channels) and stream.channel.shared():
            self._sharing = True
            if self._solo is not None:
                self._end_solo(now)
                if self._sms.running:
                    self._sms.dispatch()
            self._leave_channels(now)
        self._begin_launch(stream.channel, now)
        return True

    def _begin_launch(self, channel: HardwareChannel, now: float) -> None:
        """Begin the launch at the head of `channel`, if its stream is free and it has not begun."""
        if channel.entries:
            entry = channel.entries[0]
            stream = self._streams[entry.job]
            if stream.entries[0] is entry and not stream.begun:
                stream.begin_launch(now)
                self._waiting.append(stream)

    def _leave_channel(self, channel: HardwareChannel, now: float) -> None:
        channel.entries.popleft()
        if self._sharing:
            self._sharing = any(each.shared() for each in self._channels)
        self._begin_launch(channel, now)

    def _leave_channels(self, now: float) -> None:
        """Let what waits behind them in a channel begin, of the launches whose last blocks are placed."""
        for stream in self._sms.running:
            if not stream.pending and stream.index == stream.work.count - 1 and stream.entries:
                channel = stream.channel
                if channel.entries and channel.entries[0] is stream.entries[0]:
                    self._leave_channel(channel, now)

    def _end_solo(self, now: float) -> None:
        stream = self._solo
        assert stream is not None
        self._solo = None
        self._sms.busy_s += stream.end_solo(now, self._sms.empty)
        if stream.resident:
            self._sms.adopt(stream, now)
        else:
            self._waiting.append(stream)

    def _settle_all(self) -> None:
        """Settle everything at `now`."""
        if self._solo is not None:
            self._end_solo(self.now)
        self._step(self.now)

    def _add_to_past(self, stream: Stream) -> None:
        area, moved = self._past.get(stream.job, (0.0, 0.0))
        self._past[stream.job] = (area + stream.area, moved + stream.moved)

    def _known_to_host(self) -> list[Finished]:
        learned = []
        while self._ended and self._ended[0][0] <= self.now:
            learned.append(self._ended.popleft()[2])
        return learned


def _job(stream: Stream) -> str:
    return stream.job
