"""A discrete-event GPU on a virtual clock.

    launch -> path.py: host thread, one bounded in-order queue -> a stream a job (stream.py) -> blocks

The multiprocessors are one pool of block slots. Blocks are never preempted. When room frees, the pending
blocks of the highest-priority stream get it first; within one priority those of the kernel that became
ready first. Streams are in order, so a job has one kernel on the device at a time.

Nothing is random: the same calls give the same answers. What costs time is events, so there are few: waves
that change nothing for others are none (stream.py), and a stream alone on the device has one a launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from gpumux.device.sim.kernel import Kernel
from gpumux.device.sim.path import Entry, LaunchPath
from gpumux.device.sim.sms import Multiprocessors
from gpumux.device.sim.spec import GpuSpec
from gpumux.device.sim.stream import Stream
from gpumux.device.sim.work import EPS, SM_UNITS, Workshop
from gpumux.errors import ConfigError


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
