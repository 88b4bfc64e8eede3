"""A scheduler that knows everything and follows a plan: what the guard is compared with.

One high and one low job. High pieces are launched as the daemon does it, two at a time. The plan says for each low piece, and for
each high piece beside which it would begin, on which part of the GPU it may be launched (0: not there), and what that is known to cost
the high step; what a step has cost so far may be bounded. Between high steps a low piece that ends before the next step
begins is always launched. When pieces begin and end is known in advance: steps repeat. So a low piece is also launched ahead of
time, to arrive just when it may run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from gpumux.core import commands as cmd
from gpumux.core import events as ev
from gpumux.device.sim.pieces import TARGET_S, Pieces, piece_seconds
from gpumux.device.sim.spec import GpuSpec
from gpumux.model import JobId, LaunchId, Priority, ProgramId, StepId, StepTimes

HIGH_LAUNCHES = 2
IDLE_LAUNCHES = 4  # low launches outstanding while no high piece is
EWMA = 0.2
_PROGRAM = ProgramId(0)


Entry = tuple[int, int, float]  # low piece, high piece, share
Cost = tuple[float, float]  # seconds of the step it begins in, and of the next
FREE: Cost = (0.0, 0.0)
GAP = -1  # in the place of a high piece: between two steps
SAVED_STEPS = 20  # steps whose credit may be saved up


@dataclass(frozen=True)
class Plan:
    """`shares[(j, p)]`: on which part of the GPU low piece j may begin beside high piece p (or in the gap, where it does not fit
    any more), nowhere if it is not there. A launch
    adds `costs` (high seconds) to its step and to the next one, neither of which is to pass `step_limit`, and takes
    both from an account that every high step adds `credit` to. `depth`: low launches outstanding beside high work;
    `most`: low launches beside one high step; `every`: only each so-many-th step gets any."""

    shares: Mapping[tuple[int, int], float]
    costs: Mapping[Entry, Cost] = field(default_factory=dict)
    step_limit: float = inf
    credit: float = inf
    depth: int = 1
    most: int = 1 << 30
    every: int = 1


class Slot(NamedTuple):
    """A high piece that runs or will: when it starts and ends."""

    step: int
    piece: int
    starts: float
    ends: float


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
        self._launched: dict[int, int] = {}  # low launches beside each high step
        self._cost: dict[int, float] = {}  # what they cost it, as the plan has it
        self._account = 0.0
        self.begun: list[tuple[int, int, int, float]] = []  # (high step, its piece, low piece, share) of each of those
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
            busy = bool(self._out[Priority.HIGH] or self._queue[Priority.HIGH])
            if len(outs) >= (self._plan.depth if busy else IDLE_LAUNCHES):
                return
            begins = max(now + self._ahead_s, max((out.due for out in outs), default=0.0))
            share, slot = self._place(coming, begins)
            if not share:
                self._sleep(coming, now)
                return
            if slot is not None:
                self._charge(slot, share)
            beside = GAP if slot is None else slot.piece
            ends = begins + self._seconds(self._next[Priority.LOW], beside, share)
            self._launch(Priority.LOW, now, ends, share, beside)

    def _place(self, coming: Sequence[Slot], begins: float) -> tuple[float, Slot | None]:
        """Where the next low piece would begin, and its share there, 0 if it may not; None: in a gap that it fits into."""
        piece = self._next[Priority.LOW]
        slot = next((slot for slot in coming if slot.ends > begins), None)
        if slot is None or slot.starts >= begins:
            if slot is None or begins + self._seconds(piece, GAP, 1.0) <= slot.starts:
                return 1.0, None
            slot = slot._replace(piece=GAP)  # it would reach into the step
        share = self._plan.shares.get((piece, slot.piece), 0.0)
        return (share if share and self._bears(slot, piece, share) else 0.0), slot

    def _bears(self, slot: Slot, piece: int, share: float) -> bool:
        """Whether the step may bear this launch, too."""
        if slot.step % self._plan.every:
            return False
        here, after = self._plan.costs.get((piece, slot.piece, share), FREE)
        limit, cost = self._plan.step_limit, self._cost
        return (
            self._launched.get(slot.step, 0) < self._plan.most
            and cost.get(slot.step, 0.0) + here <= limit
            and cost.get(slot.step + 1, 0.0) + after <= limit
            and here + after <= self._account
        )

    def _charge(self, slot: Slot, share: float) -> None:
        here, after = self._plan.costs.get((self._next[Priority.LOW], slot.piece, share), FREE)
        self._launched[slot.step] = self._launched.get(slot.step, 0) + 1
        for step, cost in ((slot.step, here), (slot.step + 1, after)):
            self._cost[step] = self._cost.get(step, 0.0) + cost
        self._account -= here + after
        self.begun.append((slot.step, slot.piece, self._next[Priority.LOW], share))

    def _seconds(self, piece: int, beside: int, share: float) -> float:
        return self._took.get((piece, beside, share), self._low_s[share][piece])

    def _coming(self, now: float) -> list[Slot]:
        """The high pieces from now on: those out, the rest of their step and the next one."""
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
            for p in range(piece, len(self._high_s)):
                ends = at + self._high_s[p]
                found.append(Slot(step, p, at, max(ends, now)))
                at = ends
            step, piece = step + 1, 0
            at += self._gap_s
        return found

    def _sleep(self, coming: Sequence[Slot], now: float) -> None:
        """Wake when a low piece launched then would begin with the next high piece that allows it, or with the gap."""
        for slot, after in pairwise(coming):
            when = slot.ends - self._ahead_s
            next_step = after.step != slot.step
            if when > now and (next_step or self._plan.shares.get((self._next[Priority.LOW], after.piece))):
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
            if step != self._newest_step:
                self._account = min(self._account + self._plan.credit, SAVED_STEPS * self._plan.credit)
                self._launched.pop(step - 3, None)
                self._cost.pop(step - 3, None)
            self._newest_step = step
        command = cmd.LaunchPiece(launch, _job(priority), StepId(step), _PROGRAM, 0, piece, int(priority), share)
        self._commands.append(command)


def _job(priority: Priority) -> JobId:
    return JobId(f"{0 if priority is Priority.HIGH else 1:032x}")


def _priority(job: JobId) -> Priority:
    return Priority.HIGH if int(job, 16) == 0 else Priority.LOW
