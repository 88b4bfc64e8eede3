"""The thread for work that takes long: loading, operators one by one, captures, copies of state, releases.

The thread that launches never waits for it. Work of higher priority goes first. Long work is done in parts (`PENDING`),
so that a piece of another job can run between two captures.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from gpumux.errors import DeviceLost, GpumuxError

log = logging.getLogger(__name__)
PENDING = object()  # returned by a part of work that has more parts


@dataclass(order=True, slots=True)
class _Task:
    urgency: int  # smaller first
    number: int
    work: Callable[[], Any] = field(compare=False)
    done: Callable[[Any, BaseException | None], None] = field(compare=False)


class Worker:
    """The thread and its queue of work. `context`: made and entered by the thread, and left when it ends. `wake`:
    called by the thread when `finished` has something to do."""

    def __init__(self, context: Callable[[], AbstractContextManager[object]], wake: Callable[[], None]) -> None:
        self._context, self._wake = context, wake
        self._tasks: list[_Task] = []
        self._results: deque[tuple[_Task, Any, BaseException | None]] = deque()
        self._change = threading.Condition()
        self._number = 0
        self._stop = False
        self._broken: DeviceLost | None = None
        self._thread = threading.Thread(target=self._run, name="gpumux-cuda", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], priority: int) -> None:
        """Have the thread call `work`. A later `finished` calls `done` with what it returned and what it raised."""
        with self._change:
            self._number += 1
            heapq.heappush(self._tasks, _Task(-priority, self._number, work, done))
            self._change.notify()

    def finished(self) -> bool:
        """Call `done` of all work that has ended, on the thread that submits it; whether there was any. Raises
        DeviceLost if the worker's thread could not begin."""
        if self._broken is not None:
            raise self._broken
        found = False
        while self._results:
            task, value, error = self._results.popleft()
            task.done(value, error)
            found = True
        return found

    def close(self, wait_s: float) -> bool:
        """Let the thread finish its current part, and drop the rest. False: it did not end within `wait_s` seconds."""
        with self._change:
            self._stop = True
            self._tasks.clear()
            self._change.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._context())
            except BaseException as error:
                log.error("the GPU's worker can't begin", exc_info=error)
                self._broken = error if isinstance(error, DeviceLost) else _no_entry(error)
                self._wake()
                return
            self._serve()

    def _serve(self) -> None:
        while True:
            with self._change:
                while not self._tasks and not self._stop:
                    self._change.wait()
                if self._stop:
                    return
                task = heapq.heappop(self._tasks)
            value, error = None, None
            try:
                value = task.work()
            except BaseException as raised:  # noqa: BLE001  handled by `done`, which knows the job
                error = raised
            if value is PENDING:
                with self._change:
                    heapq.heappush(self._tasks, task)
                continue
            self._results.append((task, value, error))
            self._wake()


def _no_entry(error: BaseException) -> DeviceLost:
    if isinstance(error, GpumuxError):
        return DeviceLost(f"the GPU's worker can't begin: {error.message}", error.remedy)
    return DeviceLost(
        f"the GPU's worker can't begin: {type(error).__name__}: {error}"[:500],
        "see what nvidia-smi says, and start the daemon again",
    )
