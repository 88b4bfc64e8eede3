"""Waits for a job's work that neither hinder it nor stay silent while nothing can happen.

A wait that lasts tells the daemon what it waits for, where the same thread steps other jobs (turns.py). One that
lasts long, or many that do together, ask the daemon why, and log it if there is something to be done about it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from gpumux.client.session import Session
from gpumux.client.turns import Turns, is_high
from gpumux.errors import GpumuxError
from gpumux.wire import messages as m

log = logging.getLogger("gpumux.client")
PATIENCE_S = 5.0  # how long a wait lasts before it asks why, and long ones together
LONG_S = 0.05  # a wait that counts among those
MOSTLY: Final = 0.5  # of the time waited: a job that was held for other jobs' next steps for so much of it is told so
# How long a wait lasts before the daemon is told that other jobs get no step meanwhile, by whether it is for a high
# job: its steps are held for none, unless an operator made it a low one.
SAY_AFTER_S: Final = {False: 2e-3, True: 50e-3}
AT_ONCE: Final = 64  # waits for a low job after one that had to be told of: these are told of before they last
LOADING_S = 15.0  # ordinary Programs take a second or two
AGAIN_S = 60.0


class Waits:
    """Waits for one job's steps and transfers. `high`: it was submitted as a high job."""

    def __init__(self, job: str, high: bool) -> None:
        self.turns = Turns(job, high)
        self._job = job
        self._high = high
        self._at_once = 0  # waits left that are told of before they last
        self._long_s = 0.0  # of long waits since the daemon was asked why,
        self._enough_s = PATIENCE_S  # and how many make it ask again
        self._held_s = 0.0  # for which the job had been held for other jobs' next steps, when it was asked
        self._told: set[str] = set()  # jobs for which it was held that were named

    def wait(
        self, session: Session, predicate: Callable[[], bool], timeout: float | None, step: int | None = None
    ) -> bool:
        """`session.wait` for what is there once `step` is answered (default: the newest step)."""
        until: float | None = None
        if timeout is not None:
            if timeout <= 0.0:
                return session.wait(predicate, timeout)
            until = time.monotonic() + timeout
        if session.holds_low_work and self.turns.others():
            return self._in_turn(session, predicate, until, self.turns.newest if step is None else step)
        return self._patiently(session, predicate, until, step)

    def _in_turn(self, session: Session, predicate: Callable[[], bool], until: float | None, step: int) -> bool:
        """The thread steps other jobs, too. Tell the daemon so, unless the answer is there soon."""
        first = SAY_AFTER_S[self._high]
        if self._at_once:
            first, self._at_once = 0.0, self._at_once - 1
        if session.wait(predicate, _at_most(first, until)):
            return True
        if until is not None and until <= time.monotonic():
            return False
        others = self.turns.names()
        session.post(m.StepAwaited(0, self._job, step, others, False))
        answered = False
        try:
            answered = self._patiently(session, predicate, until, step)
        finally:
            if not answered:  # the others may get a step before it is
                with suppress(GpumuxError):
                    session.post(m.StepAwaited(0, self._job, step, others, True))
            elif first and not self._high:
                self._at_once = AT_ONCE
        return answered

    def _patiently(
        self, session: Session, predicate: Callable[[], bool], until: float | None, step: int | None
    ) -> bool:
        if session.wait(predicate, LONG_S if until is None else _at_most(LONG_S, until)):
            return True
        began = time.monotonic() - LONG_S
        step = self.turns.newest if step is None else step
        try:
            if self._long_s >= self._enough_s:
                self._ask(session, step, 0.0)
            if session.wait(predicate, _at_most(PATIENCE_S - LONG_S, until)):
                return True
            if until is not None and until <= time.monotonic():
                return False
            self._ask(session, step, PATIENCE_S)
            return session.wait(predicate, None if until is None else max(0.0, until - time.monotonic()))
        finally:
            self._long_s += time.monotonic() - began

    def _ask(self, session: Session, step: int, lasted: float) -> None:
        """Why the step waits; `lasted`: the wait's seconds so far, where it is long by itself."""
        waited, self._long_s = self._long_s + lasted, -lasted
        self._enough_s *= 2.0
        try:
            body = session.call(m.JobStats(0, self._job), timeout=PATIENCE_S)[0].body
        except GpumuxError:
            return  # it ended, or the daemon did: the wait will say so
        if body["paused"]:
            log.warning(
                "job %r is paused, and a thread has waited for it for %.3g s: job.resume() in another thread, or "
                "`gpumux jobs resume`, lets it go on",
                body["name"], lasted or waited,
            )  # fmt: skip
            return
        promise: dict[str, Any] = body["promise"] or {}
        seconds: dict[str, float] = promise.get("held_s", {})
        before, self._held_s = self._held_s, seconds.get("gap", 0.0) + seconds.get("calibration", 0.0)
        held, by = self._held_s - before, promise.get("held_by_name") or promise.get("held_by", "")
        if is_high(promise.get("held_by_job", "")):
            return  # the daemon is told of it from the next wait on
        if by and by not in self._told and held >= MOSTLY * waited:
            self._told.add(by)
            log.warning(
                "step %d of job %r waits for job %r: while %.1f s were waited, the job's steps were held for %.1f s "
                "for the sake of that one's next step, which did not come. If it comes only after this one, step both "
                "jobs in one thread, which the daemon then knows, or give both one priority;"
                " `gpumux jobs explain` says more",
                step, body["name"], by, waited, held,
            )  # fmt: skip


def _at_most(seconds: float, until: float | None) -> float:
    return seconds if until is None else max(0.0, min(seconds, until - time.monotonic()))


class Loading:
    """Says now and then that the daemon is still at a Program. Called whenever there was no answer so far; returns
    for how many seconds to wait until then."""

    def __init__(self, operators: int, compiled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        doing = "checking, compiling and loading" if compiled else "checking and loading"
        self._what = f"{doing} a program of {operators} operator{'' if operators == 1 else 's'}"
        self._clock = clock
        self._since: float | None = None

    def __call__(self) -> float:
        if self._since is None:
            self._since = self._clock()
            return LOADING_S
        log.warning(
            "the daemon has been %s for %.0f s; `gpumux status` says how it is", self._what, self._clock() - self._since
        )
        return AGAIN_S
