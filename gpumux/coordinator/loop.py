"""The coordinator's loop: one thread that receives, decides, keeps, and then sends.

Clients' messages come by the router that daemons use too, with the same limits, keys and identities. News of daemons
come from the threads of `daemons.py`, by a queue.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import TypeVar

import zmq

from gpumux.coordinator.core import Coordinator, DaemonLeft, Happening, Note, Order, Tell
from gpumux.coordinator.daemons import DaemonAddress, DaemonLink, Links
from gpumux.coordinator.journal import Journal
from gpumux.daemon.loop import Wakeup
from gpumux.wire.router import Router

log = logging.getLogger("gpumux.coordinator")

LONGEST_WAIT_S = 1.0
ASK_S = 5.0
T = TypeVar("T")


class CoordinatorLoop:
    """`journal`: None keeps nothing over a restart. `clock`: seconds, of any monotonic clock. The coordinator's own
    clock goes on from what it was when it was kept. Daemons may come and go: `follow`; `daemons` are the
    first ones, None if `follow` will say which. Until then nodes that were kept have their time to be heard of."""

    def __init__(
        self, coordinator: Coordinator, router: Router, daemons: Sequence[DaemonAddress] | None, *,
        journal: Journal | None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.coordinator = coordinator
        self._router = router
        self._journal = journal
        self._clock = clock
        self._ahead = coordinator.placement.now - clock()
        self._questions: deque[tuple[float, Callable[[], None]]] = deque()  # when each was asked; the oldest first
        self._turning = False
        self._news: queue.SimpleQueue[tuple[DaemonLink, Happening]] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[Sequence[DaemonAddress]] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._stop_reason: str | None = None
        self._poller = zmq.Poller()
        for source in (*router.fds(), self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)
        self._links = Links(self._report)
        if daemons is not None:
            self._wanted.put(daemons)

    def stop(self, reason: str) -> None:
        """Have `run` return. From any thread, or a signal handler."""
        self._stop_reason = self._stop_reason or reason
        self._wakeup.set()

    @property
    def turning(self) -> bool:
        """Whether it has begun to serve, and has not ended."""
        return self._turning

    @property
    def leaving(self) -> str:
        """Why it ends; "" while it goes on."""
        return self._stop_reason or ""

    def silent_s(self) -> float:
        """For how long a question has not been answered; 0.0 if there is none. From any thread."""
        try:
            return max(0.0, self._clock() - self._questions[0][0])
        except IndexError:
            return 0.0

    def ask(self, question: Callable[[Coordinator], T], limit_s: float = ASK_S) -> T:
        """What the loop's thread finds for this question, for another thread. Raises TimeoutError after `limit_s`."""
        answer: Future[T] = Future()

        def find() -> None:
            try:
                answer.set_result(question(self.coordinator))
            except Exception as error:  # noqa: BLE001 - the asker gets it; no job hangs on it
                answer.set_exception(error)

        self._questions.append((self._clock(), find))
        self._wakeup.set()
        return answer.result(limit_s)

    def follow(self, daemons: Sequence[DaemonAddress]) -> None:
        """Have these be the cluster's daemons from now on, each node named once. From any thread. A node that is not
        among them is lost at once, and its jobs go elsewhere."""
        self._wanted.put(daemons)
        self._wakeup.set()

    def _report(self, link: DaemonLink, happening: Happening) -> None:
        self._news.put((link, happening))
        self._wakeup.set()

    def run(self) -> None:
        """Serve until `stop`. Raises StateNotKept if the state can no longer be kept."""
        self._join_and_leave()
        self._handle(None)
        self._turning = True
        while self._stop_reason is None:
            self._wait()
            self._wakeup.clear()
            now = self._clock()
            for arrival in (*self._router.receive(now), *self._router.expire(now)):
                self._handle(arrival)
            while not self._news.empty():
                link, happening = self._news.get()
                if self._links.current(link):  # one that has left may have found something just before
                    self._handle(happening)
            self._join_and_leave()
            self._answer_questions()
            if self.now() >= self.coordinator.due:
                self._handle(None)
        self._turning = False
        self._answer_questions()  # those that came before that are not left waiting
        if self._journal is not None:
            self._journal.keep(self.coordinator, last=True)

    def _answer_questions(self) -> None:
        while self._questions:
            self._questions[0][1]()
            self._questions.popleft()  # until now it has not been answered

    def close(self) -> None:
        """End the threads. Its owner closes the router and the journal."""
        self._links.close()
        self._wakeup.close()

    def _join_and_leave(self) -> None:
        """Take the daemons that are wanted, and lose the others: also those that were kept and are not named now."""
        while not self._wanted.empty():
            wanted = self._wanted.get()
            left = self._links.follow(wanted)
            nodes = {each.node for each in wanted}
            for node in [*left, *(node for node in self.coordinator.daemons if node not in nodes and node not in left)]:
                self._handle(DaemonLeft(node, "it is no longer one of the cluster's daemons"))

    def now(self) -> float:
        """Seconds, of the coordinator's clock. From any thread."""
        return max(self._clock() + self._ahead, self.coordinator.placement.now)

    def _wait(self) -> None:
        now = self._clock()
        due = self.coordinator.due
        until = min(self._router.next_deadline(now), now + LONGEST_WAIT_S, inf if due == inf else due - self._ahead)
        self._poller.poll(int(max(0.0, until - now) * 1000) + 1)

    def _handle(self, happening: Happening | None) -> None:
        waiting = deque([happening])
        while waiting:
            actions = self.coordinator.handle(waiting.popleft(), self.now())
            if self._journal is not None:
                self._journal.keep(self.coordinator)
            for action in actions:
                match action:
                    case Tell():
                        self._router.send(action.session, action.message)
                    case Order():
                        refused = self._links.order(action)
                        if refused is not None:
                            waiting.append(refused)
                    case Note():
                        log.info("%s", action.text)
