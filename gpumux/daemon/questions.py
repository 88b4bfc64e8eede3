"""Messages that ask and change nothing: status, explanations, profiles, recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpumux.daemon.books import SessionRecord
from gpumux.daemon.desk import Desk
from gpumux.daemon.report import job_stats
from gpumux.daemon.tracing import Tracing
from gpumux.errors import AdmissionRefused, JobClosed, ProgramError, UnknownJob
from gpumux.model import JobId, ProgramId
from gpumux.wire import messages as msg

MAX_PROFILES = 4  # of one job, asked for and not answered
STORY_LINES = 60  # the newest, of a job that is explained


class Questions:
    """`report` is the body of GetStatus, with everything in it; what a session sees of it `desk.sight` decides."""

    def __init__(self, desk: Desk, report: Callable[[], dict[str, Any]], tracing: Tracing) -> None:
        self._desk = desk
        self._books = desk.books
        self._report = report
        self._tracing = tracing
        self._governed = desk.sight.governed
        self.handlers: dict[type, Callable[[SessionRecord, Any, Sequence[bytes]], None]] = {
            msg.JobStats: self._stats,
            msg.GetStatus: self._status,
            msg.ExplainJob: self._explain,
            msg.ProfileJob: self._profile,
            msg.RecordTrace: self._trace,
        }

    def _stats(self, session: SessionRecord, m: msg.JobStats, frames: Sequence[bytes]) -> None:
        job = self._books.jobs.get(JobId(m.job))
        if job is None:  # anybody may look
            raise UnknownJob(f"there is no job {m.job[:40]!r}", "`gpumux jobs` lists them")
        body = self._desk.sight.shown(session, self._report())
        self._desk.reply(session, msg.Report(m.ref, job_stats(body, job.short)))

    def _status(self, session: SessionRecord, m: msg.GetStatus, frames: Sequence[bytes]) -> None:
        self._desk.reply(session, msg.Report(m.ref, self._desk.sight.shown(session, self._report())))

    def _explain(self, session: SessionRecord, m: msg.ExplainJob, frames: Sequence[bytes]) -> None:
        """What a job runs, and beside whom, is for those who may change it."""
        job = self._governed(session, m.job)
        core, sight = self._desk.core, self._desk.sight
        hidden = sight.hidden(session)
        sentences = [sight.redact(session, line) for line in core.explain(job.id, hidden)]
        story = [sight.redact(session, line) for line in core.story(job.id, newest=STORY_LINES, hidden=hidden)]
        body = {"job": job.id, "short": job.short, "sentences": sentences, "story": story}
        self._desk.reply(session, msg.Report(m.ref, body))

    def _profile(self, session: SessionRecord, m: msg.ProfileJob, frames: Sequence[bytes]) -> None:
        """Shapes and operators tell what a job is, so only those who may change it may ask."""
        job = self._governed(session, m.job)
        loaded = {program.id: program for program in job.programs.values() if program.announced}
        if job.unloading or not loaded:
            raise JobClosed(f"job {job.short} runs no program", "profile a job that has run two steps")
        if len(job.profiles) >= MAX_PROFILES:
            raise AdmissionRefused(f"{len(job.profiles)} profiles of it are under way", "wait for one to end")
        most = max(loaded.values(), key=lambda program: (program.steps, -program.id)).id
        number = most if m.program is None else ProgramId(m.program)
        if number not in loaded:
            raise ProgramError(f"job {job.short} has no program {m.program}", f"it has {sorted(loaded)}")
        self._desk.recall()
        job.profiles.append((session, m.ref))
        self._desk.device.profile(job.id, number)

    def _trace(self, session: SessionRecord, m: msg.RecordTrace, frames: Sequence[bytes]) -> None:
        """Anybody may see when the device runs whose work; which operators these are, only those who may change the job."""
        self._tracing.ask(session, m.ref, m.seconds, lambda job: self._desk.sight.governs(session, job))
