"""What a submit is doing, shown on a terminal once it takes longer than two seconds, in one line that is erased at the
end. Where standard error is no terminal, one line is logged instead (logger "gpumux.client", level INFO)."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import TextIO

FIRST_S = 2.0  # before anything is shown
AGAIN_S = 0.5  # between two lines
_ERASE = "\r\x1b[K"

log = logging.getLogger("gpumux.client")


class Progress:
    """The progress of one job's captures. `stage` begins to show, `end` ends; both may be called at any time, from the
    thread that captures. `wait(event, seconds)`: whether the event was set meanwhile."""

    def __init__(
        self, name: str, out: TextIO | None = None,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:  # fmt: skip
        self._name = name
        self._out = out
        self._wait = wait
        self._text: Callable[[], str] = str
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def stage(self, text: Callable[[], str]) -> None:
        """From now on, `text()` is what the job is doing. It is called in another thread."""
        self._text = text
        if self._thread is None:
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._show, args=(self._ended,), name="gpumux-progress", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Idempotent."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _show(self, ended: threading.Event) -> None:
        if self._wait(ended, FIRST_S):
            return
        out = self._out or sys.stderr
        if not out.isatty():
            log.info("%s: %s", self._name, self._text())
            return
        shown = FIRST_S
        while True:
            out.write(f"{_ERASE}gpumux: {self._name}: {self._text()} ({shown:.0f} s)")
            out.flush()
            if self._wait(ended, AGAIN_S):
                break
            shown += AGAIN_S
        out.write(_ERASE)
        out.flush()
