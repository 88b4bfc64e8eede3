"""A program that goes on with a job whose client is gone: find what was kept, and open the job under its id."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpumux.client.keepsake import Keepsake
from gpumux.client.recovering import snapshot_bytes
from gpumux.client.session import Session
from gpumux.errors import AdmissionRefused, JobClosed, NotOwner
from gpumux.wire import messages as m
from gpumux.wire.keeping import MAX_ASKED, FindKept, ReadSnapshot

PUT_AWAY_S = 10.0  # how long the daemon may take to notice that the job's client is gone, and to let go of it
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class KeptJob:
    """`newest`: the number of its newest snapshot, whether or not that is the one that was whole."""

    job: str
    newest: int
    keepsake: Keepsake


def find_kept(session: Session, name: str) -> KeptJob:
    """Raises UnknownJob when nothing of that name was kept, AdmissionRefused when the job is still open."""
    give_up = time.monotonic() + PUT_AWAY_S
    while True:
        try:
            found, _ = session.call(FindKept(0, name))
            break
        except AdmissionRefused:
            if time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)
    read, frames = session.call(ReadSnapshot(0, found.job, found.snapshots[:MAX_ASKED]), timeout=None)
    data = snapshot_bytes(session, read, frames)
    keepsake = Keepsake(data, read.notes)
    del data
    session.release_segment(read.segment)
    return KeptJob(found.job, max(found.snapshots), keepsake)


def open_job(session: Session, message: m.OpenJob, returning: bool) -> None:
    """`returning`: the daemon may still be putting away what the job was before."""
    give_up = time.monotonic() + PUT_AWAY_S
    while True:
        try:
            session.call(message)
            return
        except (JobClosed, NotOwner):
            if not returning or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)
