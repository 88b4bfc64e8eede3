"""A scheduler that knows everything and follows a plan: what the guard is compared with.

One high and one low job. High pieces are launched as the daemon does it, two at a time. The plan says for each low
piece, and for each high piece beside which it would begin, on which part of the GPU it may be launched (0: not there),
and what that is known to cost the high step; what a step has cost so far may be bounded. Between high steps a low piece
that ends before the next step begins is always launched. When pieces begin and end is known in advance: steps repeat.
So a low piece is also launched ahead of time, to arrive just when it may run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from gpumux.device.sim.device import TARGET_S, Pieces, piece_seconds
from gpumux.device.sim.spec import GpuSpec
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.types import JobId, LaunchId, PieceDone, Priority, ProgramId, ProgramReady, StepId, StepTimes

HIGH_LAUNCHES = 2
IDLE_LAUNCHES = 4  # low launches outstanding while no high piece is
EWMA = 0.2
_PROGRAM = ProgramId(0)


Entry = tuple[int, int, float]  # low piece, high piece, share
Cost = tuple[float, float]  # seconds of the step it begins in, and of the next
FREE: Cost = (0.0, 0.0)
GAP = -1  # in the place of a high piece: between two steps
SAVED_STEPS = 20  # steps whose credit may be saved up
NO_TIMES = StepTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Plan:
    """`shares[(j, p)]`: on which part of the GPU low piece j may begin beside high piece p (or in the gap, where it
    does not fit any more), nowhere if it is not there. A launch adds `costs` (high seconds) to its step and to the next
    one, neither of which is to pass `step_limit`, and takes both from an account that every high step adds `credit` to.
    `depth`: low launches outstanding beside high work; `most`: low launches beside one high step; `every`: only each
    so-many-th step gets any."""

    shares: Mapping[tuple[int, int], float]
    costs: Mapping[Entry, Cost] = field(default_factory=dict)
    step_limit: float = inf
    credit: float = inf
    depth: int = 1
    most: int = 1 << 30
    every: int = 1


class Coming:
    """The high pieces from some moment on: those out, the rest of their step and the next one. `seconds`: what each
    takes; piece `first` of `step` begins at `begins`, and `gap_s` lie between the steps."""

    __slots__ = ("_edges", "_first", "_gap_s", "_seconds", "_step")

    def __init__(self, seconds: Sequence[float], gap_s: float, step: int, first: int, begins: float) -> None:
        self._seconds, self._gap_s, self._step, self._first = seconds, gap_s, step, first
        self._edges = list(
            accumulate(seconds[first:] if first else seconds, initial=begins)
        )  # ends, the beginning before them

    def after(self, when: float) -> tuple[int, int, float] | None:
        """The first of them that ends after `when`: its step, which piece it is, and when it begins."""
        edges, step, first = self._edges, self._step, self._first
        at = bisect_right(edges, when, 1)
        if at == len(edges):
            edges, step, first = self._next_edges(), step + 1, 0
            at = bisect_right(edges, when, 1)
            if at == len(edges):
                return None
        return step, first + at - 1, edges[at - 1]

    def wake(self, now: float, ahead_s: float, low: int, shares: Mapping[tuple[int, int], float]) -> float | None:
        """The first moment after `now` that lies `ahead_s` before a high piece which low piece `low` may begin beside,
        or before the end of this step; None where there is none."""
        edges, first = self._edges, self._first
        last = len(edges) - 1
        for at in range(bisect_right(edges, now, 1), last):
            if (when := edges[at] - ahead_s) > now and shares.get((low, first + at)):
                return when
        if (when := edges[last] - ahead_s) > now:
            return when
        edges = self._next_edges()
        for at in range(bisect_right(edges, now, 1), len(edges) - 1):
            if (when := edges[at] - ahead_s) > now and shares.get((low, at)):
                return when
        return None

    def _next_edges(self) -> list[float]:
        return list(accumulate(self._seconds, initial=self._edges[-1] + self._gap_s))


class Out(NamedTuple):
    """A launch on the device. `due`: when it will have ended."""

    id: LaunchId
    step: int
    piece: int
    began: float
    due: float
    share: float
    beside: int  # the high piece that ran when it was launched, -1: none


class Line:
    """One job's steps and launches."""

    __slots__ = ("job", "last", "out", "piece", "priority", "steps")

    def __init__(self, job: int, priority: Priority, pieces: int) -> None:
        self.job = JobId(f"{job:032x}")
        self.priority = int(priority)
        self.last = pieces - 1
        self.steps: deque[int] = deque()  # not all launched
        self.piece = 0  # the next one of the first of those
        self.out: list[Out] = []


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
        self._high = Line(0, Priority.HIGH, len(high.seconds))
        self._low = Line(1, Priority.LOW, len(low.seconds))
        self._launches = 0
        self._high_end = 0.0  # of the newest high piece that has ended
        self._newest_step = -1  # of the high job, begun
        self._launched: dict[int, int] = {}  # low launches beside each high step
        self._cost: dict[int, float] = {}  # what they cost it, as the plan has it
        self._account = 0.0
        self.short = False  # whether the account alone has kept a launch back
        self.begun: list[tuple[int, int, int, float]] = []  # (high step, its piece, low piece, share) of each of those
        self._commands: list[cmd.Command] = []

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        commands: list[cmd.Command] = []
        self._commands = commands
        if isinstance(event, PieceDone):
            self._done(event)
        elif isinstance(event, ev.StepSubmitted):
            self._line(event.job).steps.append(event.step)
        elif isinstance(event, ev.JobRequested):
            return [cmd.AcceptJob(event.session, event.job, fresh=True)]
        elif isinstance(event, ev.ProgramOffered):
            return [cmd.AcceptProgram(event.job, event.program)]
        elif isinstance(event, ProgramReady):
            return [cmd.AnnounceProgram(event.job, event.program)]
        self._launch_high(now)
        self._launch_low(now)
        return commands

    def snapshot(self) -> dict[str, Any]:
        return {"policy": "planned"}

    def explain(self, job: JobId) -> list[str]:
        return []

    def _line(self, job: JobId) -> Line:
        return self._high if job == self._high.job else self._low

    # ---- what happened

    def _done(self, event: PieceDone) -> None:
        for line in (self._high, self._low):
            for index, out in enumerate(line.out):
                if out.id == event.launch:
                    del line.out[index]
                    if line is self._high:
                        self._learn_high(out, event)
                    else:
                        self._learn_low(out, event)
                    if out.piece == line.last:
                        self._commands.append(cmd.FinishStep(line.job, StepId(out.step), NO_TIMES))
                    return

    def _learn_high(self, out: Out, event: PieceDone) -> None:
        took = event.ended - max(self._high_end, out.began + self._ahead_s)
        self._high_s[out.piece] += EWMA * (took - self._high_s[out.piece])
        self._high_end = event.ended

    def _learn_low(self, out: Out, event: PieceDone) -> None:
        key = (out.piece, out.beside, out.share)
        took = event.ended - event.started
        known = self._took.get(key)
        self._took[key] = took if known is None else known + EWMA * (took - known)

    # ---- what to do

    def _launch_high(self, now: float) -> None:
        high = self._high
        while high.steps and len(high.out) < HIGH_LAUNCHES:
            if high.out:
                seconds = self._high_s[high.piece] + sum([self._high_s[out.piece] for out in high.out])
                if seconds > 2 * HIGH_LAUNCHES * TARGET_S[Priority.HIGH]:
                    return
            self._launch(high, now, now)

    def _launch_low(self, now: float) -> None:
        high, low = self._high, self._low
        while low.steps:
            if len(low.out) >= (self._plan.depth if high.out or high.steps else IDLE_LAUNCHES):
                return
            coming = self._coming(now)
            begins = now + self._ahead_s
            for out in low.out:
                if out.due > begins:
                    begins = out.due
            step, beside, share = self._place(coming, begins)
            if not share:
                when = coming.wake(now, self._ahead_s, low.piece, self._plan.shares)
                if when is not None:
                    self._commands.append(cmd.WakeAt(when))
                return
            if step is not None:
                self._charge(step, beside, share)
            ends = begins + self._seconds(low.piece, beside, share)
            self._launch(low, now, ends, share, beside)

    def _place(self, coming: Coming, begins: float) -> tuple[int | None, int, float]:
        """Where the next low piece would begin: in which high step (None: in a gap that it fits into), beside which
        piece of it, and its share there, 0 if it may not."""
        piece = self._low.piece
        slot = coming.after(begins)
        if slot is None:
            return None, GAP, 1.0
        step, beside, starts = slot
        if starts >= begins:
            if begins + self._seconds(piece, GAP, 1.0) <= starts:
                return None, GAP, 1.0
            beside = GAP  # it would reach into the step
        share = self._plan.shares.get((piece, beside), 0.0)
        return step, beside, (share if share and self._bears(step, beside, share) else 0.0)

    def _bears(self, step: int, beside: int, share: float) -> bool:
        """Whether the step may bear this launch, too."""
        plan = self._plan
        if step % plan.every:
            return False
        here, after = plan.costs.get((self._low.piece, beside, share), FREE)
        limit, cost = plan.step_limit, self._cost
        if (
            self._launched.get(step, 0) >= plan.most
            or cost.get(step, 0.0) + here > limit
            or cost.get(step + 1, 0.0) + after > limit
        ):
            return False
        if here + after <= self._account:
            return True
        self.short = True
        return False

    def _charge(self, step: int, beside: int, share: float) -> None:
        piece, cost = self._low.piece, self._cost
        here, after = self._plan.costs.get((piece, beside, share), FREE)
        self._launched[step] = self._launched.get(step, 0) + 1
        cost[step] = cost.get(step, 0.0) + here
        cost[step + 1] = cost.get(step + 1, 0.0) + after
        self._account -= here + after
        self.begun.append((step, beside, piece, share))

    def _seconds(self, piece: int, beside: int, share: float) -> float:
        took = self._took.get((piece, beside, share))
        return self._low_s[share][piece] if took is None else took

    def _coming(self, now: float) -> Coming:
        high = self._high
        if high.out:
            first = high.out[0]
            step, piece = first.step, first.piece
            begins = max(self._high_end, first.began + self._ahead_s)
        else:
            step, piece = (high.steps[0], high.piece) if high.steps else (self._newest_step + 1, 0)
            begins = max(now, self._high_end + self._gap_s)
        return Coming(self._high_s, self._gap_s, step, piece, begins)

    def _launch(self, line: Line, now: float, due: float, share: float = 1.0, beside: int = -1) -> None:
        piece, step = line.piece, line.steps[0]
        self._launches += 1
        launch = LaunchId(self._launches)
        line.out.append(Out(launch, step, piece, now, due, share, beside))
        if piece == line.last:
            line.steps.popleft()
            line.piece = 0
        else:
            line.piece = piece + 1
        if line is self._high:
            if step != self._newest_step:
                credit = self._plan.credit
                self._account = min(self._account + credit, SAVED_STEPS * credit)
                self._launched.pop(step - 3, None)
                self._cost.pop(step - 3, None)
            self._newest_step = step
        self._commands.append(cmd.LaunchPiece(launch, line.job, StepId(step), _PROGRAM, 0, piece, line.priority, share))
