"""The capture of a cut: its pieces in order, each for every share of the multiprocessors it may run on.

A piece that can't be captured (an operator of it waits for the GPU, or a library refuses) stays operator by operator:
it begins with what crosses into it and leaves what crosses out of it where the captured pieces behind it find it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gpumux.device.cuda.compute import Graph
from gpumux.device.cuda.execute import Frame
from gpumux.device.cuda.measuring import Twin
from gpumux.device.cuda.worker import PENDING
from gpumux.errors import DeviceLost, GpumuxError

if TYPE_CHECKING:
    from gpumux.device.cuda.loaded import LoadedProgram

WHOLE = 1.0


@dataclass(frozen=True, slots=True)
class Uncaptured:
    """A piece that is run operator by operator among captured ones. `before`: what crosses into it; `after`: what
    crosses out of it, at the places where the pieces behind it find it."""

    before: Frame
    after: Frame


@dataclass(slots=True)
class Captured:
    """The pieces of a cut, by share; None for a piece of nothing, and for one that is `uncaptured`. `left_out`: their
    operators, and why they could not be captured."""

    by_share: dict[float, list[Graph | None]] = field(default_factory=dict)
    uncaptured: dict[int, Uncaptured] = field(default_factory=dict)
    left_out: list[tuple[int, int, GpumuxError]] = field(default_factory=list)

    def drop(self) -> None:
        """Nothing of it may be running."""
        for graph in [graph for graphs in self.by_share.values() for graph in graphs]:
            if graph is not None:
                graph.drop()
        self.by_share.clear()
        self.uncaptured.clear()


class CaptureRun:
    """The capture of all pieces of a cut, in order, one a call of `part`. `confined`: further shares, and the stream to
    capture on for each. With `marked` as a twin of the newest cut, for the whole alone."""

    def __init__(
        self, loaded: LoadedProgram, bounds: Sequence[int], stream: int, pool: Any,
        confined: Mapping[float, int] | None = None, *, marked: bool = False,
    ) -> None:  # fmt: skip
        self._loaded, self._stream, self._pool = loaded, stream, pool
        self._confined = dict(confined or {})
        self._left = deque(
            (start, stop, share) for start, stop in pairwise(bounds) for share in (WHOLE, *self._confined)
        )
        self._frame = loaded.frame()
        self._before = self._frame  # what crossed into the piece; held, so that no capture of it takes that memory
        self.graphs = Captured({share: [] for share in (WHOLE, *self._confined)})
        self.marks: list[list[int]] | None = [] if marked else None

    def part(self) -> object | None:
        """Capture the next piece for one share; PENDING, or None when it was the last. Raises JobFailed, with nothing
        kept."""
        start, stop, share = self._left.popleft()
        try:
            self.graphs.by_share[share].append(self._capture(start, stop, share))
        except BaseException:
            self.stop()
            raise
        return PENDING if self._left else None

    def _capture(self, start: int, stop: int, share: float) -> Graph | None:
        loaded, pool = self._loaded, self._pool
        piece = len(self.graphs.by_share[share])
        if share != WHOLE:
            if piece in self.graphs.uncaptured:
                return None
            return loaded.recapture(self._before, self._frame, start, stop, self._confined[share], pool)
        self._before = self._frame.copy()
        if self.marks is None:
            try:
                return loaded.capture(self._frame, start, stop, self._stream, pool)
            except DeviceLost:
                raise
            except GpumuxError as error:
                self._leave_out(piece, start, stop, error)
                return None
        graph, marks = loaded.instrument(self._frame, start, stop, self._stream, pool)
        self.marks.append(marks)
        return graph

    def _leave_out(self, piece: int, start: int, stop: int, error: GpumuxError) -> None:
        """Have the piece run operator by operator. Raises `error` where that can't be among captured ones."""
        self._loaded.driver.idle(self._stream)  # raises DeviceLost when it was no matter of this capture
        after = self._loaded.places(self._before, start, stop, self._stream)
        if after is None:
            raise error
        self.graphs.uncaptured[piece] = Uncaptured(self._before, after)
        self.graphs.left_out.append((start, stop, error))
        self._frame = after.copy()

    def stop(self) -> None:
        """Give up, and drop what was captured."""
        self.graphs.drop()
        for event in [event for marks in self.marks or () for event in marks]:
            self._loaded.driver.destroy_event(event)
        self.marks = None

    def twin(self) -> Twin:
        """Of all its pieces, when `part` has said None."""
        assert self.marks is not None
        return Twin(self._loaded.cuts.newest, self.graphs.by_share[WHOLE], self.marks, self._loaded.driver)
