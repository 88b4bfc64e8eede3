"""Whether jobs go when their clients have gone."""

from __future__ import annotations

import threading
import time

from microbench.daemon import RunningDaemon

GONE_S = 120.0


def jobs_left(daemon: RunningDaemon) -> list[str]:
    """Jobs that don't go. A client may leave before its job's executor, at the lowest priority, has died."""
    end = time.monotonic() + GONE_S
    while (left := [job["name"] for job in daemon.status()["jobs"]]) and time.monotonic() < end:
        threading.Event().wait(0.05)
    return left
