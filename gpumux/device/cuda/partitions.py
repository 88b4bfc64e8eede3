"""Parts of the multiprocessors that low work can be confined to (green contexts, CUDA 12.4).

Off unless asked for: what they buy has not been seen on a card yet (docs/gpu-notes.md, `green`). Each share has streams
of its own, on which a low job's pieces for that share are captured and launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from gpumux.device.cuda.driver import GREEN_SINCE, Driver, Facts
from gpumux.device.cuda.turns import Turns
from gpumux.errors import DeviceLost, GpumuxError
from gpumux.model import Priority

WANTED = (0.5, 0.25)  # beside the whole
RUN_STREAMS = 2  # of each share, for all jobs
log = logging.getLogger(__name__)


class Partitions:
    """`wanted`: parts of the GPU, as fractions. `shares` are those there are, largest first, 1.0 always; hardware rounds
    them up. Where driver or card have no such thing, that is logged and there is the whole alone."""

    def __init__(self, driver: Driver, facts: Facts, wanted: Sequence[float], priority: int) -> None:
        self._driver, self._priority = driver, priority
        self._handles: dict[float, int] = {}
        self.turns: dict[float, Turns] = {}
        self._undo: list[Callable[[], None]] = []
        try:
            if wanted and facts.driver_version < GREEN_SINCE:
                log.warning("low jobs can't be confined to parts of the GPU: that takes a driver of CUDA 12.4 or newer")
                return
            for fraction in sorted(wanted, reverse=True):
                self._add(max(1, round(fraction * facts.multiprocessors)), facts.multiprocessors)
        except DeviceLost:
            raise
        except GpumuxError as error:
            self.close()
            log.warning("low jobs can't be confined to parts of the GPU: %s", error)

    @property
    def shares(self) -> tuple[float, ...]:
        return (1.0, *sorted(self._handles, reverse=True))

    @property
    def run_streams(self) -> list[int]:
        """Of all shares, but for the whole."""
        return [stream for turns in self.turns.values() for stream in turns.streams]

    def stream(self, share: float) -> int:
        """A new stream of a share, to capture on. Raises JobFailed for one there is not."""
        made = self._driver.confined_stream(self._handles[share], self._priority)
        self._undo.append(partial(self._driver.destroy_stream, made))
        return made

    def close(self) -> None:
        """Nothing runs there any more."""
        while self._undo:
            self._undo.pop()()
        self._handles.clear()
        self.turns.clear()

    def _add(self, multiprocessors: int, whole: int) -> None:
        handle, has = self._driver.partition(multiprocessors)
        self._undo.append(partial(self._driver.destroy_partition, handle))
        share = has / whole
        if share >= 1.0 or share in self._handles:
            self._undo.pop()()
            return
        self._handles[share] = handle
        self.turns[share] = Turns({int(Priority.LOW): [self.stream(share) for _ in range(RUN_STREAMS)]})
