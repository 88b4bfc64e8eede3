"""The coordinator's loop: one thread that receives, decides, keeps, and then sends.

Clients' messages come by the router that daemons use too, with the same limits, keys and identities. News of daemons
come from the threads of `daemons.py`, by a queue.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import TypeVar

import zmq

from gpumux.coordinator.core import Action, Coordinator, Happening, Note, Order, Tell
from gpumux.coordinator.daemons import DaemonAddress, DaemonLink, DaemonLinks
from gpumux.coordinator.journal import Journal
from gpumux.daemon.loop import Wakeup
from gpumux.wire.router import Router

log = logging.getLogger("gpumux.coordinator")

LONGEST_WAIT_S = 1.0
ASK_S = 5.0
T = TypeVar("T")


class CoordinatorLoop:
    """`journal`: None keeps nothing over a restart. `clock`: seconds, of any monotonic clock. The coordinator's own
    clock goes on from what it was when it was kept."""

    def __init__(
        self, coordinator: Coordinator, router: Router, daemons: Sequence[DaemonAddress], *, journal: Journal | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.coordinator = coordinator
        self._router = router
        self._journal = journal
        self._clock = clock
        self._ahead = coordinator.placement.now - clock()
        self._questions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._stop_reason: str | None = None
        self._poller = zmq.Poller()
        for source in (*router.fds(), self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)
        self._links = DaemonLinks({each.node: DaemonLink(each, self._report) for each in daemons})

    def stop(self, reason: str) -> None:
        """Have `run` return. From any thread, or a signal handler."""
        self._stop_reason = self._stop_reason or reason
        self._wakeup.set()

    def ask(self, question: Callable[[Coordinator], T]) -> T:
        """What the loop's thread finds for this question, for another thread. Raises TimeoutError after ASK_S."""
        answer: Future[T] = Future()
        self._questions.put(lambda: answer.set_result(question(self.coordinator)))
        self._wakeup.set()
        return answer.result(ASK_S)

    def _report(self, happening: Happening) -> None:
        self._news.put(happening)
        self._wakeup.set()

    def run(self) -> None:
        """Serve until `stop`. Raises ConfigError if the state can no longer be kept."""
        self._handle(None)
        while self._stop_reason is None:
            self._wait()
            self._wakeup.clear()
            now = self._clock()
            for arrival in (*self._router.receive(now), *self._router.expire(now)):
                self._handle(arrival)
            while not self._news.empty():
                self._handle(self._news.get())
            while not self._questions.empty():
                self._questions.get()()
            if self._now() >= self.coordinator.due:
                self._handle(None)

    def close(self) -> None:
        """End the threads. Its owner closes the router and the journal."""
        self._links.close()
        self._wakeup.close()

    def _now(self) -> float:
        return max(self._clock() + self._ahead, self.coordinator.placement.now)

    def _wait(self) -> None:
        now = self._clock()
        due = self.coordinator.due
        until = min(self._router.next_deadline(now), now + LONGEST_WAIT_S, inf if due == inf else due - self._ahead)
        self._poller.poll(int(max(0.0, until - now) * 1000) + 1)

    def _handle(self, happening: Happening | None) -> None:
        actions = self.coordinator.handle(happening, self._now())
        if self._journal is not None:
            self._journal.keep(self.coordinator)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Tell():
                self._router.send(action.session, action.message)
            case Order():
                self._links.order(action)
            case Note():
                log.info("%s", action.text)
