"""Bugs: an exception that no handler expects ends what it is about, and not the daemon.

    about one job               the job ends (`internal`), its snapshots are kept, and its client may recover it
    about a message of no job   its session ends
    about the wire              the session ends that was looked after
    about a report              the report is left out
    about none of them, or if   all jobs of the device end in the same way
    ending one did not help

Each is counted (gpumux_inconsistencies_total), logged, and written to crash.log with the job's history. The daemon ends
only if all jobs had to end twice within DEVICE_AGAIN_S, or the wire failed twice and no session was to blame: then
starting anew is the better remedy.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpumux import __version__
from gpumux.daemon.context import DaemonContext, log
from gpumux.daemon.records import JobRecord, SessionRecord
from gpumux.errors import DaemonGone, DeviceLost, InternalError
from gpumux.scheduler.events import Command
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import Fault, JobDied, JobId, SessionId

MAX_REPORTS = 100  # of one daemon, in crash.log
STORY_LINES = 60  # newest lines of a job's history in a report
DEVICE_AGAIN_S = 10.0
REMEDY: Final = "its snapshots are kept; please report this as a bug, with crash.log of the daemon's state directory"

Handle = Callable[[Any, float], Sequence[Command]]


class CrashReports:
    """Appends reports to a descriptor, which stays its owner's; None: to none."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._left = MAX_REPORTS

    def write(self, title: str, error: BaseException, story: Sequence[str]) -> None:
        """Append a report. Does nothing after MAX_REPORTS of them, or if the disk is full: the log has it, too."""
        if self._fd is None or not self._left:
            return
        self._left -= 1
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines = [f"---- {when} gpumux {__version__}: {title}", "".join(traceback.format_exception(error)).rstrip()]
        lines += ["History of the job:", *story] if story else []
        try:
            os.write(self._fd, ("\n".join(lines) + "\n").encode())
        except OSError as failed:
            log.error("crash.log can't be written to: %s", failed.strerror)


class Inconsistencies:
    """Ends what a bug is about. Methods return the commands that follow, for the loop to carry out. `handle` passes an
    event to the scheduler."""

    def __init__(self, context: DaemonContext, reports: CrashReports, handle: Handle) -> None:
        self._context = context
        self._reports = reports
        self._handle = handle
        self._device_at = self._wire_at = float("-inf")

    @property
    def _scheduler(self) -> Scheduler:
        return self._context.scheduler

    def in_event(self, error: Exception, now: float) -> list[Command]:
        """The scheduler raised. What it decided before is among the commands."""
        jobs, commands = self._scheduler.interrupted()
        return [*commands, *self._end(jobs, error, now)]

    def about(self, job: JobId | None, error: Exception, now: float) -> list[Command]:
        """End this job; None: all jobs. Raises `error` if that was so a short time before, and if it says that the
        device is lost."""
        return self._end([] if job is None else [job], error, now)

    def _end(self, jobs: Sequence[JobId], error: Exception, now: float) -> list[Command]:
        """End these jobs, and those that turn out to contradict themselves meanwhile; all, if that does not help."""
        if isinstance(error, DeviceLost):
            raise error
        commands: list[Command] = []
        left, ended = list(jobs), set[JobId]()
        while left and not ended.intersection(left):
            ended.add(job := left.pop())
            record = self._context.records.jobs.get(job)
            name = record.short if record is not None else job
            self._report("job", f"job {name} ends", error, job)
            if not self._scheduler.knows(job):
                self._context.records.forget_job(job)
                if not left:
                    return commands
                continue
            try:
                commands += self._handle(JobDied(job, _fault(f"job {name}", error)), now)
            except Exception as again:  # noqa: BLE001
                error = again
                more, made = self._scheduler.interrupted()
                commands += made
                left += more
                continue
            if left:
                continue
            try:
                self._scheduler.check_invariants()
            except Exception as again:  # noqa: BLE001
                error = again
                left += self._scheduler.contradicting()
            else:
                return commands
        return [*commands, *self._end_all(error, now)]

    def in_message(self, session: SessionRecord, job: JobRecord | None, error: Exception, now: float) -> list[Command]:
        """The handler of a session's message raised: end the job that it is about, if that is the session's own, else
        the session."""
        if job is not None and job.session is session:
            return self.about(job.id, error, now)
        if isinstance(error, DeviceLost):
            raise error
        self.in_session(session.id, error)
        return []

    def in_session(self, session: SessionId, error: Exception) -> None:
        """Something about this session raised: end it."""
        record = self._context.records.sessions.get(session)
        whose = f" of uid {record.peer.uid}" if record is not None else ""
        self._report("session", f"session {session}{whose} ends", error, None)
        gone = DaemonGone("the daemon failed at a message of this session", "connect again")
        self._context.router.close_session(session, gone)

    def in_router(self, error: Exception, now: float) -> None:
        """The router raised. Raises `error` if no session was to blame, here and a short time before: it would raise
        again and again."""
        session = self._context.router.at
        if session is not None:
            self.in_session(session, error)
            return
        if now - self._wire_at < DEVICE_AGAIN_S:
            raise error
        self._wire_at = now
        self._report("report", "what has just arrived is left out", error, None)

    def in_report(self, what: str, error: Exception) -> None:
        """A report for operators could not be made."""
        self._report("report", f"{what} is left out", error, None)

    def _end_all(self, error: Exception, now: float) -> list[Command]:
        if now - self._device_at < DEVICE_AGAIN_S:
            raise error
        self._device_at = now
        self._report("device", "all jobs end", error, None)
        commands = self._scheduler.end_all(_fault("this job among others", error), now)
        self._scheduler.check_invariants()
        return commands

    def _report(self, scope: str, title: str, error: Exception, job: JobId | None) -> None:
        self._context.metrics.inconsistencies.labels(scope).inc()
        log.critical("a bug, the daemon goes on: %s", title, exc_info=error)
        story: list[str] = []
        if job is not None:
            try:
                story = self._scheduler.story(job, newest=STORY_LINES)
            except Exception:  # noqa: BLE001 - what is inconsistent may not be readable
                story = ["(can't be read)"]
        self._reports.write(title, error, story)


def _fault(what: str, error: Exception) -> Fault:
    return Fault(InternalError.code, f"gpumux contradicted itself about {what} ({type(error).__name__})", REMEDY)
