"""A client that is about to die: submits steps that take seconds, says so, and waits for ever."""

from __future__ import annotations

import sys
import threading

from gpumux.client.session import Session
from tests.daemon.live import LiveJob, slow

if __name__ == "__main__":
    session = Session.connect(sys.argv[1])
    job = LiveJob(session, slow(), name="victim")
    job.post(bytes(4 * 1024 * 1024), slot=0)
    job.post(bytes(4 * 1024 * 1024), slot=1)
    print("submitted", flush=True)
    threading.Event().wait()
