"""The models of high programs: one for each program and cut, the newest of what was ever seen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from gpumux.core.estimates import Bounds, HighModel
from gpumux.core.track import Track
from gpumux.model import JobId

MOST_MODELS: Final = 1024 + 64  # high programs remembered: all that may be in use, and some that were
MOST_CUTS: Final = 4  # of each


class Models:
    def __init__(self) -> None:
        self._cuts: dict[str, dict[Bounds, HighModel]] = {}  # by program

    def of(self, key: str, bounds: Bounds, predicted: Sequence[float], tracks: Mapping[JobId, Track]) -> HighModel:
        """The program's under that cut. A new cut inherits from the newest; what no track runs makes room."""
        cuts = self._cuts.setdefault(key, {})
        model = cuts.get(bounds)
        if model is None:
            newest = next(reversed(cuts.values())) if cuts else None
            model = newest.recut(bounds, predicted) if newest else HighModel(key, bounds, predicted)
            cuts[bounds] = model
            if len(cuts) > MOST_CUTS:
                del cuts[next(iter(cuts))]
            if len(self._cuts) > MOST_MODELS:
                used = {track.model.key for track in tracks.values() if track.model is not None}
                del self._cuts[next(key for key in self._cuts if key not in used)]
        return model

    def cuts(self, key: str) -> Collection[HighModel]:
        """All of one program."""
        return self._cuts[key].values()

    def all(self) -> Iterator[HighModel]:
        for cuts in self._cuts.values():
            yield from cuts.values()
