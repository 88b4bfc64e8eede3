"""Whose jobs a session may change, and what it may know of the others'.

A job may be changed, and seen whole, by its own session, its user, root, and whom an access rule makes an operator.
Of other users' jobs everybody sees what sharing a device takes: a short id, the user id, priority, weight, state,
counts, device time and memory, how a high job's promise stands and for whom a low one is held. Not seen are names, job ids, process ids,
operators and messages. A job id is worth hiding although it opens nothing: whoever knew it could take it first, after a restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpumux.access import BUILT_IN, Access, Rule
from gpumux.daemon.books import Books, JobRecord, SessionRecord
from gpumux.errors import NotOwner, UnknownJob
from gpumux.model import JobId

UNKNOWN_UID = -1
NOBODYS = "another job"  # one that has ended: nobody knows any more whose it was
_JOB_ID = re.compile(r"\b[0-9a-f]{32}\b")
_HIDDEN = {"job": "", "name": "", "pid": 0}  # of an entry of GetStatus


class Sight:
    """`access` is asked anew each time, since it may be reloaded."""

    def __init__(self, books: Books, access: Callable[[], Access]) -> None:
        self._books = books
        self._access = access

    def operates(self, session: SessionRecord) -> bool:
        """Root, or somebody whom a rule makes an operator."""
        return self._access().may_operate(session.peer)

    def rule(self, session: SessionRecord) -> Rule:
        """What the session may give a job; an operator may give anything."""
        access = self._access()
        return BUILT_IN if access.may_operate(session.peer) else access.rule_for(session.peer)

    def governs(self, session: SessionRecord, job: JobRecord) -> bool:
        """Whether the session may change the job, and know all of it."""
        uid = session.peer.uid
        own = job.session is session or (uid != UNKNOWN_UID and uid == job.session.peer.uid)
        return own or self.operates(session)

    def governed(self, session: SessionRecord, job: str) -> JobRecord:
        """The job, for a session that may change it. Raises UnknownJob and NotOwner."""
        record = self._books.jobs.get(JobId(job))
        if record is None:
            raise UnknownJob(f"there is no job {job[:40]!r}", "`gpumux jobs` lists them")
        if self.governs(session, record):
            return record
        raise NotOwner(f"job {record.short} belongs to user {record.session.peer.uid}", "ask its owner, or an operator")

    def hidden(self, session: SessionRecord) -> Callable[[JobId], str | None]:
        """What to call a job towards the session: None where it may know its name."""

        def name(job_id: JobId) -> str | None:
            job = self._books.jobs.get(job_id)
            if job is None:
                return NOBODYS
            return None if self.governs(session, job) else job.short

        return name

    def redact(self, session: SessionRecord, text: str) -> str:
        """`text` without the ids of jobs the session may not know."""
        name = self.hidden(session)
        return _JOB_ID.sub(lambda found: name(JobId(found[0])) or found[0], text)

    def shown(self, session: SessionRecord, body: dict[str, Any]) -> dict[str, Any]:
        """A body of GetStatus as the session may see it; `mine` says of each job whether it may change it."""
        jobs = []
        for entry in body["jobs"]:
            record = self._books.jobs.get(JobId(entry["job"]))
            mine = record is not None and self.governs(session, record)
            jobs.append({**entry, **({} if mine else _HIDDEN), "mine": mine})
        return {**body, "jobs": jobs}
