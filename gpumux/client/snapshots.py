"""When a job's state is saved, from the client's side: it asks, since it knows what it can run again.

    idle --(it is time, or the log fills)--> preparing --(there is memory)--> taking --(saved or failed)--> idle

`tick` is called before each step and moves this on; no thread does. Only the moment at which the place of a snapshot
among the steps is fixed is waited for, a round trip. A step that finds the log full waits for the snapshot; if that
fails, the log is given up and training goes on without it (replay.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from gpumux.client.replay import ReplayLog
from gpumux.client.session import Asked, Session
from gpumux.errors import GpumuxError, from_code
from gpumux.wire import messages as m
from gpumux.wire.keeping import PrepareSnapshot, SnapshotSaved, SnapshotWanted, TakeSnapshot

log = logging.getLogger("gpumux.client")

FIRST_S = 1.0  # from a job's first step, or from coming back, to a snapshot
SHARE = 5  # at most one part in so many of the time is spent on writing


class Snapshots:
    """`notes()`: what a client that has only the snapshot needs besides. `last`: the number of the newest there is."""

    def __init__(
        self, job: str, name: str, replay: ReplayLog, interval_s: float, last: int,
        news: deque[SnapshotSaved | SnapshotWanted], notes: Callable[[], tuple[bytes, int]],
    ) -> None:  # fmt: skip
        self._job = job
        self._name = name
        self._log = replay
        self._interval_s = interval_s
        self._number = last
        self._news = news
        self._notes = notes
        self._asked: Asked | None = None
        self._taking = False
        self._failing = False
        self._waited = False
        self._not_before = 0.0  # after a failure
        self._due = time.monotonic() + min(interval_s, FIRST_S)

    @property
    def number(self) -> int:
        """Of the newest snapshot that was asked for."""
        return self._number

    def describe_by(self, notes: Callable[[], tuple[bytes, int]]) -> None:
        """From now on, these are the notes."""
        self._notes = notes

    def tick(self, session: Session) -> None:
        """Raises DaemonGone."""
        if self._news:
            self._hear()
        if self._asked is not None:
            if self._asked.reply() is not None:
                self._take(session)
        elif not self._taking:
            now = time.monotonic()
            if (now >= self._due or self._log.wants_point) and now >= self._not_before and self._log.has_news:
                self._asked = session.ask(PrepareSnapshot(0, self._job))
        if self._log.full:
            self._make_room(session)

    def take_now(self, session: Session) -> bool:
        """Save what there is, and wait for it; whether that went well. Raises DaemonGone."""
        while self._busy:
            self._advance(session)
        if not self._log.has_news and not self._failing:
            return True
        self._asked = session.ask(PrepareSnapshot(0, self._job))
        while self._busy:
            self._advance(session)
        return not self._failing

    def started_over(self) -> None:
        """The job came back: what was under way is not."""
        self._asked, self._taking = None, False
        self._news.clear()
        self._due = time.monotonic() + min(self._interval_s, FIRST_S)
        self._not_before = 0.0

    @property
    def _busy(self) -> bool:
        return self._asked is not None or self._taking

    def _advance(self, session: Session) -> None:
        """Wait for what comes next."""
        if self._asked is not None:
            asked = self._asked
            session.wait(lambda: asked.reply() is not None)
            self._take(session)
        elif self._taking:
            session.wait(lambda: bool(self._news))
            self._hear()

    def _make_room(self, session: Session) -> None:
        failed = False
        while self._log.full and not failed:
            # The one under way may have been taken so early that what followed it alone fills the log: one more, from here.
            if not self._busy:
                self._asked = session.ask(PrepareSnapshot(0, self._job))
            while self._busy and self._log.full:
                self._advance(session)
            failed = not self._busy and self._failing
        if self._log.full:
            self._log.give_up()
            log.warning(
                "job %r holds all it may keep to run again, and its state can't be saved: it goes on, but can't come back "
                "if the daemon ends before a snapshot succeeds",
                self._name,
            )  # fmt: skip
        elif not self._waited:
            self._waited = True
            log.warning(
                "job %r waited until its state was saved, as it holds all it may keep to run again: raise replay_bytes if its steps "
                "are to go on meanwhile",
                self._name,
            )  # fmt: skip

    def _take(self, session: Session) -> None:
        """There is memory, or there is none."""
        assert self._asked is not None
        reply, asked = self._asked.reply(), self._asked
        self._asked = None
        asked.forget()
        if isinstance(reply, m.Refusal):
            self._failed(from_code(reply.code, reply.message, reply.remedy))
            return
        notes, steps = self._notes()
        number = self._number = self._number + 1
        self._log.mark(number)
        try:
            session.call(TakeSnapshot(0, self._job, number, steps, 1), [notes], timeout=None)
        except GpumuxError as error:
            if session.dead is not None:
                raise  # it may be on the disk all the same
            self._log.failed(number)
            self._failed(error)
            return
        self._taking = True

    def _hear(self) -> None:
        while self._news:
            message = self._news.popleft()
            if isinstance(message, SnapshotWanted):
                self._due = 0.0
                continue
            if message.snapshot != self._number:
                continue
            self._taking = False
            if message.code:
                self._log.failed(message.snapshot)
                self._failed(from_code(message.code, message.message, message.remedy))
                continue
            self._log.saved(message.snapshot)
            self._not_before = 0.0
            self._due = time.monotonic() + max(self._interval_s, (SHARE - 1) * message.seconds)
            if self._failing:
                self._failing = False
                log.warning("job %r: its state is saved again", self._name)

    def _failed(self, error: GpumuxError) -> None:
        now = time.monotonic()
        self._due, self._not_before = now + self._interval_s, now + min(self._interval_s, 5.0)
        if not self._failing:
            log.warning("job %r: its state could not be saved, and will be tried again: %s", self._name, error)
        self._failing = True
