"""The capture of a cut: its pieces in order, each for every share of the multiprocessors it may run on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from gpumux.device.cuda.compute import Graph
from gpumux.device.cuda.execute import Frame
from gpumux.device.cuda.measuring import Twin
from gpumux.device.cuda.worker import PENDING

if TYPE_CHECKING:
    from gpumux.device.cuda.loaded import LoadedProgram

WHOLE = 1.0


@dataclass(slots=True)
class Captured:
    """The pieces of a cut, by share; None for a piece of nothing."""

    by_share: dict[float, list[Graph | None]] = field(default_factory=dict)

    def drop(self) -> None:
        """Nothing of it may be running."""
        for graph in [graph for graphs in self.by_share.values() for graph in graphs]:
            if graph is not None:
                graph.drop()
        self.by_share.clear()


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
        if share != WHOLE:
            return loaded.recapture(self._before, self._frame, start, stop, self._confined[share], pool)
        if self._confined:
            self._before = Frame([*self._frame.temps], dict(self._frame.drawn))
        if self.marks is None:
            return loaded.capture(self._frame, start, stop, self._stream, pool)
        graph, marks = loaded.instrument(self._frame, start, stop, self._stream, pool)
        self.marks.append(marks)
        return graph

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


def whole_bytes(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first bytes of the storage a tensor lies on."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage(), 0, (nbytes,), (1,))
