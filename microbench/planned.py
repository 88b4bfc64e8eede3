"""A scheduler that knows everything and follows a plan: what the guard is compared with.

One high and one low job. High pieces are launched as the daemon does it, two at a time. The plan says for each high piece, and so
for each moment of a step, how large a part of the GPU low work may have beside it (0: none); between high steps it may
have all. A low piece is launched when every high piece it will overlap allows it, on the largest part that all of them
allow. When pieces begin and end is known in advance: steps repeat, so it is what it was under this very plan in the steps
before. So a low piece is also launched ahead of time, to arrive just when it may run, and never wrongly into a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpumux.core import commands as cmd
from gpumux.core import events as ev
from gpumux.device.sim.pieces import TARGET_S, Pieces, piece_seconds
from gpumux.device.sim.spec import GpuSpec
from gpumux.model import JobId, LaunchId, Priority, ProgramId, StepId, StepTimes

HIGH_LAUNCHES = 2
IDLE_LAUNCHES = 4  # low launches outstanding while no high piece is
EWMA = 0.2
STEADY = 0.02  # a low piece may run this part of its time into a piece that forbids it: rounding, not harm
_PROGRAM = ProgramId(0)


@dataclass(frozen=True)
class Plan:
    """`shares[k][p]`: what low work may have beside high piece p, in the steps that use variant k; every `period` steps,
    `second` of them use variant 1. `depth`: low launches outstanding beside high work."""

    shares: tuple[tuple[float, ...], ...]
    depth: int = 1
    second: int = 0
    period: int = 1

    def of(self, step: int) -> tuple[float, ...]:
        if self.second == 0:
            return self.shares[0]
        # Spread evenly, as Bresenham draws a line.
        phase = step % self.period
        return self.shares[(phase + 1) * self.second // self.period - phase * self.second // self.period]


@dataclass(slots=True)
class Out:
    """A launch on the device. `due`: when it will have ended."""

    id: LaunchId
    step: int
    piece: int
    began: float
    due: float
    share: float = 1.0
    beside: int = -1  # the high piece that ran when it was launched, -1: none


class Planned:
    """Takes the core's events and gives its commands, for exactly one high and one low job, in this order of ids."""

    def __init__(self, plan: Plan, spec: GpuSpec, high: Pieces, low: Pieces, gap_s: float) -> None:
        """`gap_s`: from a high step's end to the next one's start, alone."""
        self._plan = plan
        self._shares = spec.shares
        self._ahead_s = spec.graph_s + spec.transmit_s
        self._gap_s = gap_s
        self._high_s = list(high.seconds)  # learned: what each takes under this plan
        self._low_s = {s: [piece_seconds(part, spec, s) for part in low.kernels] for s in spec.shares}
        self._took: dict[tuple[int, int, float], float] = {}  # low piece, beside which high one, share -> learned
        self._queue: dict[Priority, deque[int]] = {priority: deque() for priority in Priority}
        self._next = dict.fromkeys(Priority, 0)  # piece of the step at the queue's head
        self._out: dict[Priority, list[Out]] = {priority: [] for priority in Priority}
        self._counts = {Priority.HIGH: len(high.seconds), Priority.LOW: len(low.seconds)}
        self._launches = 0
        self._high_end = 0.0  # of the newest high piece that has ended
        self._newest_step = -1  # of the high job, begun
        self._commands: list[cmd.Command] = []

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        self._commands = []
        if isinstance(event, ev.PieceDone):
            self._done(event, now)
        elif isinstance(event, ev.StepSubmitted):
            self._queue[_priority(event.job)].append(event.step)
        elif isinstance(event, ev.JobRequested):
            return [cmd.AcceptJob(event.session, event.job, fresh=True)]
        elif isinstance(event, ev.ProgramOffered):
            return [cmd.AcceptProgram(event.job, event.program)]
        elif isinstance(event, ev.ProgramReady):
            return [cmd.AnnounceProgram(event.job, event.program)]
        self._launch_high(now)
        self._launch_low(now)
        return self._commands

    def snapshot(self) -> dict[str, Any]:
        return {"policy": "planned"}

    def explain(self, job: JobId) -> list[str]:
        return []

    # ---- what happened

    def _done(self, event: ev.PieceDone, now: float) -> None:
        for priority, outs in self._out.items():
            for index, out in enumerate(outs):
                if out.id == event.launch:
                    del outs[index]
                    self._learn(priority, out, event)
                    if out.piece == self._counts[priority] - 1:
                        self._commands.append(
                            cmd.FinishStep(_job(priority), StepId(out.step), StepTimes(0.0, 0.0, 0.0))
                        )
                    return

    def _learn(self, priority: Priority, out: Out, event: ev.PieceDone) -> None:
        if priority is Priority.HIGH:
            took = event.ended - max(self._high_end, out.began + self._ahead_s)
            self._high_s[out.piece] += EWMA * (took - self._high_s[out.piece])
            self._high_end = event.ended
            return
        key = (out.piece, out.beside, out.share)
        took = event.ended - event.started
        self._took[key] = took if key not in self._took else self._took[key] + EWMA * (took - self._took[key])

    # ---- what to do

    def _launch_high(self, now: float) -> None:
        outs = self._out[Priority.HIGH]
        while self._queue[Priority.HIGH] and len(outs) < HIGH_LAUNCHES:
            piece = self._next[Priority.HIGH]
            seconds = self._high_s[piece] + sum(self._high_s[out.piece] for out in outs)
            if outs and seconds > 2 * HIGH_LAUNCHES * TARGET_S[Priority.HIGH]:
                return
            self._launch(Priority.HIGH, now, now)

    def _launch_low(self, now: float) -> None:
        low, outs = self._queue[Priority.LOW], self._out[Priority.LOW]
        while low:
            coming = self._coming(now)
            running = self._out[Priority.HIGH]
            if len(outs) >= (self._plan.depth if running or self._queue[Priority.HIGH] else IDLE_LAUNCHES):
                return
            begins = max(now + self._ahead_s, max((out.due for out in outs), default=0.0))
            piece, beside = self._next[Priority.LOW], running[0].piece if running else -1
            for share in self._shares:
                ends = begins + self._took.get((piece, beside, share), self._low_s[share][piece])
                if all(allowed >= share for allowed in self._overlapped(coming, begins, ends)):
                    self._launch(Priority.LOW, now, ends, share, beside)
                    break
            else:
                self._sleep(coming, now)
                return

    def _coming(self, now: float) -> list[tuple[float, float, float]]:
        """(starts, ends, allowed share) of the high pieces from now on: those out, the rest of their step and the next one."""
        outs, queue = self._out[Priority.HIGH], self._queue[Priority.HIGH]
        first = outs[0] if outs else None
        step = first.step if first else queue[0] if queue else self._newest_step + 1
        piece = first.piece if first else self._next[Priority.HIGH] if queue else 0
        if first is not None:
            at = max(self._high_end, first.began + self._ahead_s)
        else:
            at = max(now, self._high_end + self._gap_s)
        found = []
        for _ in range(2):
            shares = self._plan.of(step)
            for p in range(piece, len(self._high_s)):
                ends = at + self._high_s[p]
                found.append((at, max(ends, now), shares[p]))
                at = ends
            step, piece = step + 1, 0
            at += self._gap_s
        return found

    def _overlapped(self, coming: Sequence[tuple[float, float, float]], begins: float, ends: float) -> list[float]:
        grace = STEADY * (ends - begins)
        return [share for start, end, share in coming if start < ends - grace and end > begins + grace]

    def _sleep(self, coming: Sequence[tuple[float, float, float]], now: float) -> None:
        """Wake when a low piece launched then would begin with the next high piece, or the gap, that allows more."""
        for (_, end, share), (_, _, after) in zip(coming, [*coming[1:], (0.0, 0.0, 1.0)], strict=True):
            when = end - self._ahead_s
            if when > now and after > share:
                self._commands.append(cmd.WakeAt(when))
                return

    def _launch(self, priority: Priority, now: float, due: float, share: float = 1.0, beside: int = -1) -> None:
        queue = self._queue[priority]
        piece, step = self._next[priority], queue[0]
        self._launches += 1
        launch = LaunchId(self._launches)
        self._out[priority].append(Out(launch, step, piece, now, due, share, beside))
        if piece == self._counts[priority] - 1:
            queue.popleft()
            self._next[priority] = 0
        else:
            self._next[priority] = piece + 1
        if priority is Priority.HIGH:
            self._newest_step = step
        command = cmd.LaunchPiece(launch, _job(priority), StepId(step), _PROGRAM, 0, piece, int(priority), share)
        self._commands.append(command)


def _job(priority: Priority) -> JobId:
    return JobId(f"{0 if priority is Priority.HIGH else 1:032x}")


def _priority(job: JobId) -> Priority:
    return Priority.HIGH if int(job, 16) == 0 else Priority.LOW
