"""The multiprocessors: one pool of room for blocks, who gets it, and how fast what is resident runs.

Most of a simulation's time goes here, in `settle` and `dispatch`: they are long so that an event costs two calls.
"""

from __future__ import annotations

from math import inf

from gpumux.device.sim.bandwidth import granted, rate
from gpumux.device.sim.stream import Stream
from gpumux.device.sim.work import EPS


class Multiprocessors:
    """`running` are the streams with a kernel on the device, most preferred first. All show the same moment: the last one that
    `settle` or `begin` was called for."""

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
        """Give what room there is to pending blocks, the most preferred first, and say what comes next: when the next blocks
        end whose room another stream could take, or that end a kernel. All are settled."""
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
        """Units of those `free` that it may take now. Launches confined to a share have that part of the multiprocessors in
        common, as partitions of one device do."""
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
