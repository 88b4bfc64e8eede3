"""Waits for a job's work that don't stay silent while nothing can happen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gpumux.client.session import Session
from gpumux.errors import GpumuxError
from gpumux.wire import messages as m

log = logging.getLogger("gpumux.client")
PATIENCE_S = 5.0  # how long a wait lasts before it asks why
LOADING_S = 15.0  # ordinary Programs take a second or two
AGAIN_S = 60.0


def wait(session: Session, job: str, predicate: Callable[[], bool], timeout: float | None) -> bool:
    """`session.wait`. One that has lasted for PATIENCE_S logs a warning if the job is paused: the thread that
    waits may be the one that was to resume it."""
    if timeout is not None and timeout <= PATIENCE_S:
        return session.wait(predicate, timeout)
    if session.wait(predicate, PATIENCE_S):
        return True
    _explain(session, job)
    return session.wait(predicate, None if timeout is None else timeout - PATIENCE_S)


class Loading:
    """Says now and then that the daemon is still at a Program. Called whenever there was no answer so far; returns for how
    many seconds to wait until then."""

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


def _explain(session: Session, job: str) -> None:
    try:
        body = session.call(m.JobStats(0, job), timeout=PATIENCE_S)[0].body
    except GpumuxError:
        return  # it ended, or the daemon did: the wait will say so
    if body["paused"]:
        log.warning(
            "job %r is paused, and a thread has waited for it for %g s: job.resume() in another thread, or `gpumux jobs "
            "resume`, lets it go on",
            body["name"], PATIENCE_S,
        )  # fmt: skip
