"""Work that would hold the loop up, on one thread of its own; what follows runs on the loop again."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_Job = tuple[Callable[[], Any], Callable[[Any], None]]


class Offload:
    """`wake` must make the loop call `collect` soon and be callable from any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[Callable[[Any], None], Any, BaseException | None]] = deque()
        self._thread = threading.Thread(target=self._work, name="gpumux-offload", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run `work` on the thread, then `then(result)` on the loop's. In the order submitted."""
        self._jobs.put((work, then))

    def collect(self) -> None:
        """Run what follows finished work. An exception in `work` is a bug and ends the loop here."""
        while self._done:
            then, result, error = self._done.popleft()
            if error is not None:
                raise error
            then(result)

    def close(self) -> None:
        """Finish what was submitted and end the thread. Results nobody collected yet are collected,
        so that whoever owns them gets to release them."""
        self._jobs.put(None)
        self._thread.join()
        self.collect()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, then = job
            try:
                result, error = work(), None
            except BaseException as caught:  # noqa: BLE001 - carried to the loop, which raises it
                result, error = None, caught
            self._done.append((then, result, error))
            self._wake()
