"""Operator times from captured pieces: an instrumented twin of a program's graphs.

A program's pieces are captured once more, with events between the operators, and for a few steps the twin runs in their
place: the same operators on the same state, in a step that somebody wanted. Nothing is run for the measurement's sake.
The events stay between the kernels, so what they cost is measured at the head of each piece and taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from gpumux.device.cuda.cuts import LEAST_OP_S
from gpumux.device.cuda.driver import Driver

if TYPE_CHECKING:
    from gpumux.device.cuda.compute import Graph

STEPS = 5  # that a twin runs; each operator's time is the median


class Twin:
    """`graphs` are the pieces of cut `cut`, None for pieces of nothing. `marks`: for each piece the events in the order it
    passes them: two at its head with nothing between, then one behind each operator. `runs` is for the thread that
    launches, `read` and `drop` for the worker's, while no step runs through it."""

    def __init__(
        self, cut: int, graphs: Sequence[Graph | None], marks: Sequence[Sequence[int]], driver: Driver
    ) -> None:
        self.cut, self.graphs = cut, list(graphs)
        self._marks = [list(of) for of in marks]
        self._driver = driver
        self._samples: list[list[float]] = []
        self.step: int | None = None  # that runs through it, or ran and is not read yet
        self.under_way = False  # a step that runs through it has not ended
        self._dropped = False

    @property
    def complete(self) -> bool:
        return len(self._samples) >= STEPS

    @property
    def steps(self) -> int:
        """How many it has measured."""
        return len(self._samples)

    def begins(self, step: int, cut: int) -> None:
        """A step begins, which runs through the twin from its first piece to its last, or not at all."""
        if cut == self.cut and self.step is None and not self.complete:
            self.step, self.under_way = step, True

    def runs(self, step: int) -> bool:
        """Whether this step's launches are to run through the twin."""
        return step == self.step

    def read(self) -> None:
        """Take the times of the step that has run."""
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
        """Give it all back. Nothing of it may be running."""
        self._dropped = True
        for graph in self.graphs:
            if graph is not None:
                graph.drop()
        for marks in self._marks:
            for event in marks:
                self._driver.destroy_event(event)
        self.graphs.clear()
        self._marks.clear()
