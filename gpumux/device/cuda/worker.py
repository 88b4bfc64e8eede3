"""The thread for everything that takes long: loading, operators one by one, captures, copies of state, letting go.

The thread that launches never waits for it. Work of more important jobs goes first; long work is done in parts
(`PENDING`), so that a piece of another job comes in between two captures.
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
PENDING = object()  # what a part of work returns that wants to be called again


@dataclass(order=True, slots=True)
class _Task:
    urgency: int  # smaller first
    number: int
    work: Callable[[], Any] = field(compare=False)
    done: Callable[[Any, BaseException | None], None] = field(compare=False)


class Worker:
    """`inside` is entered by the thread and left when it ends; `ring` is called, by the thread, when `finished` has
    something."""

    def __init__(self, inside: Callable[[], AbstractContextManager[object]], ring: Callable[[], None]) -> None:
        self._inside, self._ring = inside, ring
        self._tasks: list[_Task] = []
        self._results: deque[tuple[_Task, Any, BaseException | None]] = deque()
        self._change = threading.Condition()
        self._number = 0
        self._stop = False
        self._broken: DeviceLost | None = None
        self._thread = threading.Thread(target=self._run, name="gpumux-cuda", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], priority: int) -> None:
        """Have `work` called; afterwards `finished` has `done` called with what it returned, or raised."""
        with self._change:
            self._number += 1
            heapq.heappush(self._tasks, _Task(-priority, self._number, work, done))
            self._change.notify()

    def finished(self) -> bool:
        """Call `done` of everything that is; whether there was anything. On the thread that submits. Raises DeviceLost
        where the thread could not begin."""
        if self._broken is not None:
            raise self._broken
        found = False
        while self._results:
            task, value, error = self._results.popleft()
            task.done(value, error)
            found = True
        return found

    def close(self, wait_s: float) -> bool:
        """Let it finish what it is at, and drop the rest. False: it did not end in time."""
        with self._change:
            self._stop = True
            self._tasks.clear()
            self._change.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._inside())
            except BaseException as error:
                log.error("the GPU's worker can't begin", exc_info=error)
                self._broken = error if isinstance(error, DeviceLost) else _no_entry(error)
                self._ring()
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
            except BaseException as raised:  # noqa: BLE001  it is told where the job is known
                error = raised
            if value is PENDING:
                with self._change:
                    heapq.heappush(self._tasks, task)
                continue
            self._results.append((task, value, error))
            self._ring()


def _no_entry(error: BaseException) -> DeviceLost:
    if isinstance(error, GpumuxError):
        return DeviceLost(f"the GPU's worker can't begin: {error.message}", error.remedy)
    return DeviceLost(
        f"the GPU's worker can't begin: {type(error).__name__}: {error}"[:500],
        "see what nvidia-smi says, and start the daemon again",
    )
