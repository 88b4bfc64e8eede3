"""A coordinator for tests, which decides nothing by itself and says what the test tells it to, or has told it before;
and daemons."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from gpumux.types import SessionId
from gpumux.wire import messages as m
from gpumux.wire.limits import Limits
from gpumux.wire.router import Closed, Incoming, Router
from microbench.kills import Phoenix

T = TypeVar("T")
WAIT_S = 120.0  # for what must come; only a failing test waits so long
ASKS = (m.PlaceJob, m.PlacedJobEnded, m.ExplainJob)
WAITS = "Its turn has come, and no device has room."


class FakeCoordinator:
    """One job's coordinator, in a thread of its own. `heard`: all messages of the client, oldest first. `places`: what
    the job is given each time that it waits, oldest first; then it waits until `place` is called. What it could not be
    opened on it is given again, since a busy daemon may not answer in time."""

    def __init__(self, directory: Path, kind: str = "cluster") -> None:
        self.endpoint = f"ipc://{directory}/cluster.sock"
        self.heard: list[Any] = []
        self.places: list[str | Sequence[str]] = []
        self.attempt = 0
        self._given: str | Sequence[str] = ""
        self.sessions_ended = 0
        self.silent = False  # it does not answer jobs
        self.nodes: list[dict[str, str]] = []  # of its status
        self._directory = directory
        self._kind = kind
        self._changed = threading.Condition()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._session: SessionId | None = None
        self._refusal: m.Refusal | None = None
        self._over = False
        self._router = self._listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _listen(self) -> Router:
        router = Router([self.endpoint], self._directory, Limits())
        router.device = {"kind": self._kind, "name": "a cluster", "gang_sizes": True}
        return router

    def _run(self) -> None:
        while not self._over:
            poller = zmq.Poller()
            if self._router is not None:
                for fd in self._router.fds():
                    poller.register(fd, zmq.POLLIN)
            poller.poll(10)
            if self._router is not None:
                now = time.monotonic()
                for arrival in [*self._router.receive(now), *self._router.expire(now)]:
                    self._take(arrival)
            while not self._orders.empty():
                self._orders.get()()
        if self._router is not None:
            self._router.close()

    def _take(self, arrival: Any) -> None:
        if isinstance(arrival, Closed):
            with self._changed:
                self.sessions_ended += 1
                self._changed.notify_all()
        if not isinstance(arrival, Incoming):
            return
        message = arrival.message
        if isinstance(message, m.GetStatus):
            self._router.send(arrival.session, m.Report(message.ref, {"nodes": self.nodes}))
        elif isinstance(message, m.ExplainJob):
            self._router.send(arrival.session, m.Report(message.ref, {"job": message.job, "sentences": [WAITS]}))
        elif isinstance(message, ASKS):
            self._session = arrival.session if isinstance(message, m.PlaceJob) else self._session
            refusal = self._refusal if isinstance(message, m.PlaceJob) else None
            answer = (
                m.Done(message.ref)
                if refusal is None
                else m.Refusal(message.ref, refusal.code, refusal.message, refusal.remedy)
            )
            if not self.silent:
                self._router.send(arrival.session, answer)
        with self._changed:
            self.heard.append(message)
            self._changed.notify_all()
        waits = isinstance(message, (m.PlaceJob, m.JobNotStarted, m.DevicesVacated))
        runs = isinstance(message, m.PlaceJob) and message.attempt
        late = message.attempt not in (0, self.attempt) if waits else False
        if waits and not runs and not late and self._refusal is None and not self.silent:
            if not self.places and isinstance(message, m.JobNotStarted):
                self.places.append(self._given)
            if self.places:
                self.place(self.places.pop(0))

    # ---- what a test calls

    def hear(self, kind: type[T], count: int = 1) -> T:
        """Wait for the client's message number `count` of a kind, and return it."""
        with self._changed:
            found = self._changed.wait_for(lambda: len(self.all(kind)) >= count, WAIT_S)
            assert found, f"{count} {kind.__name__} were expected: {self.heard}"
        return self.all(kind)[count - 1]

    def all(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def hear_session_end(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.sessions_ended > 0, WAIT_S)

    def say(self, message: Any) -> None:
        """Send to the client's newest session."""
        self._orders.put(lambda: self._say(message))

    def _say(self, message: Any) -> None:
        assert self._session is not None
        self._router.send(self._session, message)

    def place(self, endpoints: str | Sequence[str], *, attempt: int | None = None) -> int:
        """Give the job devices. Returns the attempt."""
        self.attempt = self.attempt + 1 if attempt is None else attempt
        self._given = endpoints
        where = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        nodes = [f"node-{i}" for i in range(len(where))]
        self.say(m.JobPlaced(self.job, self.attempt, where, nodes, self.attempt > 1))
        return self.attempt

    def vacate(self, *, keep: bool = True, reason: str = "node-0 drains", attempt: int | None = None) -> None:
        self.say(m.VacateDevices(self.job, self.attempt if attempt is None else attempt, keep, reason))

    def vacate_for_sure(self) -> None:
        """Ask until the job has left the devices, since what is said to a session that has ended is lost."""
        attempt = self.attempt
        with self._changed:
            while all(left.attempt != attempt for left in self.all(m.DevicesVacated)):
                self.vacate(attempt=attempt)
                self._changed.wait(0.2)

    def answer(self, outcome: str, reason: str) -> None:
        self.say(m.JobAnswered(self.job, outcome, reason))

    @property
    def job(self) -> str:
        self.hear(m.PlaceJob)
        return self.all(m.PlaceJob)[-1].job

    def refuse(self, code: str, message: str) -> None:
        """Answer PlaceJob with this from now on."""
        self._refusal = m.Refusal(0, code, message, "ask somebody")

    def _do(self, order: Callable[[], None]) -> None:
        done = threading.Event()
        self._orders.put(lambda: (order(), done.set()))  # type: ignore[func-returns-value]
        assert done.wait(WAIT_S)

    def die(self) -> None:
        """Leave without a word: the sockets are closed."""

        def leave() -> None:
            self._router.sockets.close()
            self._router = None  # type: ignore[assignment]

        self._do(leave)

    def come_back(self) -> None:
        """Listen again, with nothing of the sessions before."""

        def listen() -> None:
            self._router = self._listen()

        self._do(listen)

    def close(self) -> None:
        self._over = True
        self._thread.join()


@contextmanager
def coordinating(directory: Path, kind: str = "cluster") -> Iterator[FakeCoordinator]:
    made = FakeCoordinator(directory, kind)
    try:
        yield made
    finally:
        made.close()


def serving(stack: ExitStack, directory: Path, count: int) -> list[Phoenix]:
    """So many daemons, which end in order with the stack."""
    made = []
    for number in range(count):
        place = directory / str(number)
        place.mkdir()
        made.append(Phoenix(place))
        stack.callback(made[-1].close)
    for daemon in made:
        daemon.wait_until_ready()
    return made
