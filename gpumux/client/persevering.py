"""Something that is begun again where the daemon is killed before it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from gpumux.client.session import Session
from gpumux.errors import DaemonGone

log = logging.getLogger("gpumux.client")

T = TypeVar("T")
TRIES = 5  # so that what kills every daemon is not tried for ever
CONNECT_S = 10.0  # one attempt
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


def through(attempt: Callable[[Session], T], endpoint: str | None, reconnect_s: float) -> T:
    """What `attempt` makes on a session. When the daemon goes amid one, another follows as soon as there is one again; `reconnect_s`
    seconds are waited for it at most (0: there is no second attempt). `attempt` must leave nothing behind when it fails.

    Raises DaemonGone where there is no daemon to begin with, and whatever `attempt` raises on a session that lives."""
    session = Session.connect(endpoint)
    for left in range(TRIES - 1, -1, -1):
        try:
            return attempt(session)
        except BaseException as error:
            gone = error if isinstance(error, DaemonGone) and session.dead is not None else None
            session.close()
            if gone is None or not left or not reconnect_s:
                raise
        session = _another(endpoint, gone, reconnect_s)
    raise AssertionError("unreachable")


def _another(endpoint: str | None, gone: DaemonGone, reconnect_s: float) -> Session:
    log.warning("%s; waiting for it to come back, to submit again", gone.message)
    started, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            session = Session.connect(endpoint, CONNECT_S)
        except DaemonGone as error:
            if time.monotonic() - started > reconnect_s:
                raise DaemonGone(
                    f"{gone.message}, and could not be had back within {reconnect_s:g} s: {error.message}", error.remedy
                ) from gone
        else:
            log.warning("the daemon is back after %.1f s", time.monotonic() - started)
            return session
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_S)
