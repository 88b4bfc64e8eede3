"""One job's stream on the device: its launches in order, and the kernel that runs.

Blocks that started together are a *cohort*. A kernel's own clock `v` counts seconds of block time at full
speed and advances at `rate`, so that a change of rate moves no cohort: a cohort started at `v` ends when
the clock shows `v + block_s`. Cohorts are therefore kept in the order they end.

A stream *cycles* while every block that ends is followed at once by one of the same kernel. Such waves
change nothing for anybody, so none of them is an event: `catch_up` accounts for all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import ceil, inf

from gpumux.device.sim.path import Entry
from gpumux.device.sim.work import EPS, Shape, Work


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
