"""What torch logs of an error of a fake operator, with its whole traceback, before that error comes to us."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")
_SAID = ("failed while attempting to run meta for", "fake tensor raised TypeError")


class _SaidTwice(logging.Filter):
    """Drops those lines, of one thread: another may be compiling something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread or not str(record.msg).startswith(_SAID)


@contextmanager
def told_once() -> Iterator[None]:
    """A block whose errors of fake operators are raised, or handled, by gpumux: torch need not log them as well."""
    dropped = _SaidTwice()
    _LOGGER.addFilter(dropped)
    try:
        yield
    finally:
        _LOGGER.removeFilter(dropped)
