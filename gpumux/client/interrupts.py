"""Hold Ctrl-C back for the microseconds in which it would tear something apart.

pyzmq looks for signals inside its calls: an interrupt there can lose a message that was already
taken from the queue, cut a multipart message in half, or vanish in a destructor. A session therefore
sends and receives under a shield; the interrupt is raised when the shield ends.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# The C functions below `signal.signal` and `signal.getsignal`: the conversions to enum members that
# those add cost 20 us a pair, half a step's round trip.
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal
_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident


class Shield:
    """`with Shield(): ...` runs its block without KeyboardInterrupt. Python runs signal handlers in
    the main thread only, so in any other this does nothing. May be nested."""

    __slots__ = ("_hit", "_old")

    def __enter__(self) -> None:
        self._old: Any = None
        self._hit = False
        if threading.get_ident() == _MAIN:
            old = _get(_SIGINT)
            if callable(old):  # neither ignored, nor left to the system, nor set by other C code
                self._old = old
                _set(_SIGINT, self._defer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._old is not None:
            _set(_SIGINT, self._old)
            if self._hit:
                self._old(_SIGINT, None)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._hit = True
