"""Waits for a job's work that don't stay silent while nothing can happen."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpumux.client.session import Session
from gpumux.errors import GpumuxError
from gpumux.wire import messages as m

log = logging.getLogger("gpumux.client")
PATIENCE_S = 5.0  # how long a wait lasts before it asks why


def wait(session: Session, job: str, predicate: Callable[[], bool], timeout: float | None) -> bool:
    """`session.wait`. One that has lasted for PATIENCE_S logs a warning if the job is paused: the thread that
    waits may be the one that was to resume it."""
    if timeout is not None and timeout <= PATIENCE_S:
        return session.wait(predicate, timeout)
    if session.wait(predicate, PATIENCE_S):
        return True
    _explain(session, job)
    return session.wait(predicate, None if timeout is None else timeout - PATIENCE_S)


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
