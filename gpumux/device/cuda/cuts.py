"""How a program is cut into pieces, and when to cut it again. `Cuts` reads no clock: callers pass the times.

    cut 0   guessed, and run operator by operator: the first step warms up, and both of two steps are timed
    cut 1   from the smaller of those times, as graphs. They include the gaps between operators launched one by one.
    cut 2   after SETTLE_STEPS steps, from the pieces' own times, if pieces are far from their target length

Another target length (`aim`) leads to further cuts, each after a step of the newest one. Steps keep the cut they began
with, so the cut before the newest stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from gpumux.device.cuda.driver import Driver
from gpumux.program.cut import Unit, cut, cut_units, cut_unmeasured, piece_seconds

if TYPE_CHECKING:
    from gpumux.device.cuda.compute import CapturedGraph


LOW_S, HIGH_S, HIGH_LEAST_S = 300e-6, 500e-6, 250e-6  # target length of pieces, by priority
GUESSED_OP_S = 20e-6
TIMED_STEPS = 2
SETTLE_STEPS = 8
FAR = 1.5  # pieces this many times longer or shorter than their target are cut again
LEAST_OP_S = 0.5e-6


class Cuts:
    """The cuts of one program. Pieces are about `target_s` seconds long; one shorter than `least_s` joins a neighbour.
    `gates`: operators at which a piece must begin. `units`: of a compiled program, which is cut between them only."""

    def __init__(
        self,
        operators: int,
        target_s: float,
        *,
        least_s: float | None = None,
        gates: Sequence[int] = (),
        units: Sequence[Unit] | None = None,
    ) -> None:
        self._own_s = self._target_s = self._wanted_s = target_s
        self._units, self._least_s, self._gates = units, least_s, tuple(gates)
        guessed = [GUESSED_OP_S] * operators
        self._bounds = {
            0: cut_unmeasured(operators, target_s, gates)
            if units is None
            else cut_units(units, guessed, target_s, None, gates)
        }
        self._steps = 0  # whole steps done under the newest cut
        self._pieces: list[list[float]] = []
        self.newest = 0
        self.op_s: tuple[float, ...] = ()
        self._timed = [inf] * operators
        self._predicted = {0: piece_seconds(guessed, self._bounds[0])}

    @property
    def stepped_through(self) -> bool:
        """Whether a whole step of the newest cut is done, so that none of an older one is under way."""
        return self._steps > 0

    @property
    def settled(self) -> bool:
        """Whether the newest cut will stay as it is, unless pieces of another length are wanted."""
        return self.newest > 1 or (self.newest == 1 and self._steps > SETTLE_STEPS)

    @property
    def whole(self) -> tuple[int, ...]:
        """Bounds of as few pieces as there can be: one, but for the gates."""
        return tuple(sorted({0, len(self._timed), *self._gates}))

    def aim(self, target_s: float | None) -> None:
        """Set the target length, None: that of the constructor. A later `wanted` returns the cut for it."""
        self._wanted_s = self._own_s if target_s is None else target_s

    def bounds(self, number: int) -> tuple[int, ...] | None:
        """Where the pieces of a cut start, then the number of operators; None if there is no such cut (any more)."""
        return self._bounds.get(number)

    def seconds(self, number: int) -> tuple[float, ...]:
        """Predicted seconds of each piece of a cut that is there."""
        return self._predicted[number]

    @property
    def warming(self) -> bool:
        """Whether the next step of cut 0 is the first."""
        return self.newest == 0 and self._steps == 0

    @property
    def timing(self) -> bool:
        """Whether the operators of the next step of cut 0 are to be timed."""
        return self.newest == 0 and self._steps < TIMED_STEPS

    def timed(self, start: int, op_s: Sequence[float]) -> None:
        """Take the times of operators from `start` on, while `timing`. The smallest time of each counts: another job's
        kernels may have run in between, and a piece with far too long a time would never run beside a high job."""
        for op, seconds in enumerate(op_s, start):
            self._timed[op] = max(min(self._timed[op], seconds), LEAST_OP_S)

    def ran(self, number: int, piece: int, seconds: float) -> None:
        """Take the time of a piece that ran as a graph."""
        if number == self.newest == 1 and self._steps < SETTLE_STEPS:
            self._pieces[piece].append(seconds)

    def stepped(self, number: int) -> None:
        """Count a whole step of a cut."""
        self._steps += number == self.newest

    def wanted(self) -> tuple[int, ...] | None:
        """Bounds of a new cut, if there is a reason for one. Call it after a whole step; `cut` makes it the newest."""
        if self.newest == 0:
            self._target_s = self._wanted_s
            if self._steps != TIMED_STEPS:
                return None
            self.op_s = tuple(self._timed)
            return self._cut(self.op_s)
        if self._wanted_s != self._target_s and self._steps:
            self._target_s, op_s = self._wanted_s, self._scaled()
            again = self._cut(op_s)
            if again != self._bounds[self.newest]:
                self.op_s = op_s
                return again
        if self.newest == 1 and self._steps == SETTLE_STEPS:
            op_s = self._scaled()
            real = piece_seconds(op_s, self._bounds[1])
            long = max(real, default=0.0) > FAR * self._target_s
            short = len(real) > 1 and sum(real) / len(real) < self._target_s / FAR
            again = self._cut(op_s)
            if (long or short) and again != self._bounds[1]:
                self.op_s = op_s
                return again
        return None

    def cut(self, bounds: tuple[int, ...]) -> None:
        """Make `bounds`, which are ready to run, the newest cut."""
        self._bounds.pop(self.newest - 1, None)
        self._predicted.pop(self.newest - 1, None)
        self.newest += 1
        self._bounds[self.newest], self._steps = bounds, 0
        self._predicted[self.newest] = piece_seconds(self.op_s, bounds)
        self._pieces = [[] for _ in bounds[1:]]

    def _cut(self, op_s: Sequence[float]) -> tuple[int, ...]:
        if self._units is not None:
            return cut_units(self._units, op_s, self._target_s, self._least_s, self._gates)
        return cut(op_s, self._target_s, self._least_s, self._gates)

    def _scaled(self) -> tuple[float, ...]:
        """Each operator's time, times its piece's measured time over the predicted one."""
        op_s = list(self.op_s)
        for (start, stop), samples in zip(pairwise(self._bounds[self.newest]), self._pieces, strict=True):
            predicted = sum(op_s[start:stop])
            if samples and predicted > 0:
                factor = median(samples) / predicted
                op_s[start:stop] = [max(seconds * factor, LEAST_OP_S) for seconds in op_s[start:stop]]
        return tuple(op_s)


# ---- Operator times from captured pieces.
#
# A program's pieces are captured once more, with events between the operators, and for a few steps these graphs run in
# place of the others: the same operators on the same state, in steps that the job runs anyway. The events stay between
# the kernels, so their own cost is measured at the head of each piece and subtracted.


STEPS = 5  # that are measured; an operator's time is their median


class InstrumentedCut:
    """The graphs of cut `cut` with events between operators. `graphs`: one for each piece, None for an empty piece.
    `marks`: for each piece its events in the order it passes them: two at its head with nothing between, then one
    behind each operator. The thread that launches calls `begins` and `runs`; the worker's thread calls `read` and
    `drop`, while no step runs through these graphs."""

    def __init__(
        self, cut: int, graphs: Sequence[CapturedGraph | None], marks: Sequence[Sequence[int]], driver: Driver
    ) -> None:
        self.cut, self.graphs = cut, list(graphs)
        self._marks = [list(events) for events in marks]
        self._driver = driver
        self._samples: list[list[float]] = []
        self.step: int | None = None  # the step that runs through it, or ran and is not read yet
        self.under_way = False  # a step that runs through it has not ended
        self._dropped = False

    @property
    def complete(self) -> bool:
        return len(self._samples) >= STEPS

    @property
    def steps(self) -> int:
        """How many steps it has measured."""
        return len(self._samples)

    def begins(self, step: int, cut: int) -> None:
        """A step begins. It runs through these graphs from its first piece to its last, or not at all."""
        if cut == self.cut and self.step is None and not self.complete:
            self.step, self.under_way = step, True

    def runs(self, step: int) -> bool:
        """Whether this step runs through these graphs."""
        return step == self.step

    def read(self) -> None:
        """Read the times of the step that has run."""
        if self._dropped or self.step is None:
            return
        sample: list[float] = []
        for marks in self._marks:
            times = [self._driver.elapsed(a, b) for a, b in pairwise(marks)]
            sample += [seconds - times[0] for seconds in times[1:]]
        self._samples.append(sample)
        self.step = None

    def op_s(self) -> tuple[float, ...]:
        """Seconds of each operator, in order. There is at least one sample."""
        return tuple(max(LEAST_OP_S, median(times)) for times in zip(*self._samples, strict=True))

    def drop(self) -> None:
        """Give graphs and events back. Nothing of them may be running."""
        self._dropped = True
        for graph in self.graphs:
            if graph is not None:
                graph.drop()
        for marks in self._marks:
            for event in marks:
                self._driver.destroy_event(event)
        self.graphs.clear()
        self._marks.clear()
