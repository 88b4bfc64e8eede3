"""The thread of `gpumux top` that asks the daemon: for its status at every interval, and for what the user wants done.

It connects again for as long as the daemon is away. All that it hears goes, in its own thread, to the function that
`start` was given.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol

from gpumux.cli.control import Control
from gpumux.errors import DaemonGone, GpumuxError

RETRY_S = 1.0
CLOSE_S = 1.0  # a daemon that hangs keeps the thread for longer; the process need not wait for that


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """The body of GetStatus. early: asked for before the interval was over, because a question was put."""

    body: dict[str, Any]
    early: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The daemon is away, or refuses: the thread tries again after RETRY_S."""

    error: GpumuxError


@dataclass(frozen=True, slots=True)
class Broke:
    """A bug ended the thread."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Question:
    """Something to ask the daemon: `put` does, and its result goes to `answered`; an error that the daemon gives goes
    to `refused`."""

    put: Callable[[Control], Any]
    answered: Callable[[Any], object]
    refused: Callable[[GpumuxError], object]


Heard = StatusAnswer | Lost | Broke


class StatusSource(Protocol):
    """What the screen asks: a Feed, or answers that were recorded."""

    def start(self, tell: Callable[[Heard], object]) -> None: ...

    def ask(self, question: Question) -> None: ...

    def close(self) -> None: ...


class Feed:
    """Asks a daemon every `interval_s` seconds. connect: opens a connection. Errors are passed on, never raised."""

    def __init__(self, connect: Callable[[], Control], interval_s: float) -> None:
        self._connect, self._interval_s = connect, interval_s
        self._questions: SimpleQueue[Question] = SimpleQueue()
        self._stopped = Event()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: Thread | None = None

    def start(self, tell: Callable[[Heard], object]) -> None:
        """Begin; `tell` is called in the feed's thread."""
        self._thread = Thread(target=self._run, args=(tell,), name="gpumux-top", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Put a question as soon as the daemon answers; its functions are called in the feed's thread. While the daemon
        is away it is refused."""
        self._questions.put(question)
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """End the thread, or leave it behind if the daemon keeps it for longer than CLOSE_S. Idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        os.eventfd_write(self._woken, 1)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._thread is None or not self._thread.is_alive():
            os.close(self._woken)

    def _run(self, tell: Callable[[Heard], object]) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    with self._connect() as control:
                        self._follow(control, tell)
                except GpumuxError as error:
                    tell(Lost(error))
                    self._wait_until_retry(error)
        except BaseException as error:  # noqa: BLE001 — the screen ends, and says it
            tell(Broke(error))

    def _follow(self, control: Control, tell: Callable[[Heard], object]) -> None:
        """Until the feed is closed. Raises what ends the connection."""
        early = False
        while not self._stopped.is_set():
            tell(StatusAnswer(control.status(), early))
            early = control.wait(self._interval_s, self._woken)
            if early:
                self._put_questions(control)

    def _put_questions(self, control: Control) -> None:
        self._sleep_again()
        for question in self._taken():
            try:
                answer = question.put(control)
            except DaemonGone as error:
                question.refused(error)
                raise
            except GpumuxError as error:
                question.refused(error)
            else:
                question.answered(answer)

    def _wait_until_retry(self, error: GpumuxError) -> None:
        """For RETRY_S, in which questions are refused."""
        select.select([self._woken], [], [], RETRY_S)
        self._sleep_again()
        for question in self._taken():
            question.refused(error)

    def _sleep_again(self) -> None:
        try:
            os.eventfd_read(self._woken)
        except BlockingIOError:
            pass

    def _taken(self) -> list[Question]:
        found = []
        while True:
            try:
                found.append(self._questions.get_nowait())
            except Empty:
                return found
