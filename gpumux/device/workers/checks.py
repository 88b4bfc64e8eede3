"""Runs checks of Programs in processes of their own. Their number is bounded; further checks are queued. No torch.

A process checks Programs of one user alone, one after another (of one job, where the user is not known). The Programs
of a job (its first step and the later ones, its batch shapes) have most operators in common, and a process computes an
operator's shapes once for equal operands. A Program that misled a checking process could mislead no check but those of
its own user, as if all were one Program. A user who opens job after job costs no process for each.

The result of a check depends only on the Program's bytes and the daemon's settings. Results of checks that passed are
therefore cached by a digest of the bytes: the jobs of a sweep have equal Programs, and come at the same moment. Each
user has results of its own, which a process that a Program of another user's has taken over did not make.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from sys import intern
from typing import Any

from gpumux.device.base import ProgramChecked, ProgramRefused
from gpumux.device.workers import channel as wire
from gpumux.device.workers.channel import (
    CHECK,
    CHECKED,
    REFUSED,
    Channel,
    MalformedMessage,
    fault,
    integers,
    listed,
    text,
    unpack,
)
from gpumux.device.workers.fork_server import ForkServer, ending
from gpumux.hostmemory import memory_file
from gpumux.program.ir import ProgramLimits
from gpumux.types import Fault, Footprint, JobId, ProgramId

CPU_S = 60  # limit of a check's CPU time: the largest number of operators that a Program may have takes 6 s
WALL_S = 240  # limit of a check's wall time, which is longer because checks run at a higher niceness than jobs
NICE = 10  # checks give way to jobs of the daemon's own niceness
IDLE_S = 10  # a process that has checked a Program waits this long for another one of its user
MOST_PROGRAMS = 256  # that a process checks: what torch remembers of their operators is freed with it
MAX_KNOWN = 1024  # cached results
MAX_KNOWN_OPERATORS = 1 << 20  # operators in all cached results, 8 bytes each
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Check:
    """One check."""

    job: JobId
    program: ProgramId
    encoded: bytes
    digest: bytes
    user: int | None
    again: bool = False  # a process ended while it had this one, perhaps of something else

    @property
    def owner(self) -> int | JobId:
        """The user, or the job where the user is not known, as over a network. A process checks Programs of one."""
        return self.job if self.user is None or self.user < 0 else self.user


@dataclass(slots=True)
class Checker:
    """A process that checks Programs of one owner. It answers on `channel`, which is None once the process is to end,
    or has ended. `check`: the one under way."""

    owner: int | JobId
    channel: Channel | None
    check: Check | None = None
    answered: bool = False  # it has checked a Program before
    cancelled: bool = False


def digest(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=32).digest()


class Checks:
    """Checks of all jobs. At most `at_once` processes check, and as many wait for another Program."""

    def __init__(
        self, at_once: int, limits: ProgramLimits, extra_ops: Sequence[str], confinement: dict[str, Any]
    ) -> None:
        self._at_once = at_once
        self._settings: dict[str, Any] = {
            "limits": asdict(limits), "extra_ops": list(extra_ops), "cpu_s": CPU_S, "wall_s": WALL_S,
            "idle_s": IDLE_S, "most_programs": MOST_PROGRAMS, "nice": NICE, "confinement": confinement,
        }  # fmt: skip
        self._waiting: deque[Check] = deque()
        self._checkers: dict[int, Checker] = {}  # by token; those that wait, in the order in which they began to
        self._passed: dict[tuple[JobId, ProgramId], tuple[bytes, Footprint]] = {}
        # by user and digest, in order of use: the least recently used is first
        self._known: dict[tuple[int | None, bytes], ProgramChecked] = {}
        self._known_operators = 0

    def submit(self, job: JobId, program: ProgramId, encoded: bytes, user: int | None) -> None:
        self._waiting.append(Check(job, program, encoded, digest(encoded), user))

    def known(self, job: JobId, program: ProgramId, encoded: bytes, user: int | None) -> ProgramChecked | None:
        """The cached result, if exactly these bytes of this user have passed a check before, from any client."""
        name = digest(encoded)
        found = self._known.pop((user, name), None)
        if found is None:
            return None
        self._known[user, name] = found
        self._passed[job, program] = (name, found.footprint)
        return replace(found, job=job, program=program)

    def _remember(self, check: Check, answer: ProgramChecked) -> None:
        size = len(answer.operators)
        name = (check.user, check.digest)
        if name in self._known or size > MAX_KNOWN_OPERATORS:
            return
        self._known[name] = answer
        self._known_operators += size
        while len(self._known) > MAX_KNOWN or self._known_operators > MAX_KNOWN_OPERATORS:
            self._known_operators -= len(self._known.pop(next(iter(self._known))).operators)

    def footprint(self, job: JobId, program: ProgramId, encoded: bytes) -> Footprint | None:
        """The memory that the check of exactly these bytes found; None if they were not checked."""
        found = self._passed.get((job, program))
        return found[1] if found and found[0] == digest(encoded) else None

    def start(self, server: ForkServer, epoll: select.epoll) -> list[ProgramRefused]:
        """Start queued checks, up to the bound. Call `hear` when `epoll` reports a channel of their processes. Returns
        those that could not be started: each costs its own Program, and not the one that was submitted last."""
        refused = []
        while self._waiting and len(self.running) < self._at_once:
            check = self._waiting.popleft()
            try:
                self._start(check, server, epoll)
            except OSError as error:
                _log.error("job %s, program %s: no check was started: %s", check.job, check.program, error)
                why = f"the check of the program could not be started: {error.strerror}"
                remedy = "free memory or descriptors of the daemon's machine, then submit it again"
                refused.append(ProgramRefused(check.job, check.program, Fault("admission_refused", why, remedy)))
        return refused

    def _start(self, check: Check, server: ForkServer, epoll: select.epoll) -> None:
        program = memory_file("gpumux-check", [check.encoded])
        try:
            if not any(self._give(checker, check, program) for checker in self._idle(check.owner)):
                ours, theirs = wire.pair()
                ours.setblocking(False)
                epoll.register(ours, select.EPOLLIN)
                checker = Checker(check.owner, Channel(ours, daemons=True))
                self._give(checker, check, program)  # the process reads it when it runs
                self._checkers[server.fork("checker", self._settings, (theirs.detach(),))] = checker
        finally:
            os.close(program)

    def _idle(self, owner: int | JobId) -> list[Checker]:
        """Processes that wait for another Program of the owner."""
        return [c for c in self._checkers.values() if c.owner == owner and c.channel is not None and c.check is None]

    def _give(self, checker: Checker, check: Check, program: int) -> bool:
        """Send a Program to a process. Returns False if the process is gone."""
        assert checker.channel is not None
        try:
            checker.channel.send(CHECK, [], (program,))
        except OSError:
            _dismiss(checker)
            return False
        checker.check = check
        return True

    def hear(self) -> list[ProgramChecked | ProgramRefused]:
        """The results that processes have sent."""
        found: list[ProgramChecked | ProgramRefused] = []
        for token in list(self._checkers):
            found += self._heard(token)
        return found

    def _heard(self, token: int) -> list[ProgramChecked | ProgramRefused]:
        checker = self._checkers[token]
        if checker.channel is None:
            return []
        try:
            tag, body, _ = checker.channel.receive()
        except BlockingIOError:
            return []
        except EOFError:
            _dismiss(checker)  # `exited` says how it ended
            return []
        except MalformedMessage as error:
            return self._distrust(checker, error)
        check = checker.check
        if check is None:
            _dismiss(checker)  # a sound process answers once for each Program
            return []
        try:
            answer = _answer(check, tag, body)
        except MalformedMessage as error:
            return self._distrust(checker, error)
        checker.check, checker.answered = None, True
        self._checkers[token] = self._checkers.pop(token)  # the last to wait
        for waiting in [c for c in self._checkers.values() if c.channel and c.check is None][: -self._at_once]:
            _dismiss(waiting)
        if isinstance(answer, ProgramChecked):
            self._passed[check.job, check.program] = (check.digest, answer.footprint)
            self._remember(check, answer)
        return [answer]

    def _distrust(self, checker: Checker, error: MalformedMessage) -> list[ProgramChecked | ProgramRefused]:
        """End a process that sent what no sound one sends, and refuse the Program it has."""
        check, checker.check = checker.check, None
        _dismiss(checker)
        if check is None:
            return []
        _log.error("job %s, program %s: its check sent a malformed message: %s", check.job, check.program, error)
        why = Fault("program", "the check of the program sent a malformed message", "report the step that made it")
        return [ProgramRefused(check.job, check.program, why)]

    def exited(self, token: int, status: int | str) -> list[ProgramChecked | ProgramRefused]:
        """Handle the end of a process. Returns the result of its check, or nothing if it had none to do, was cancelled,
        or is no process of these."""
        if token not in self._checkers:
            return []
        answers = self._heard(token)
        checker = self._checkers.pop(token)
        _dismiss(checker)
        check = checker.check
        if check is None or checker.cancelled:
            return answers
        # It may have ended of something else: it had waited long enough, or was killed while it waited; or there is a
        # reason in words, since a signal stopped it, or the fork server ended or had no process. A process of its own
        # decides.
        if (checker.answered or isinstance(status, str)) and not check.again:
            self._waiting.appendleft(replace(check, again=True))
            return []
        return [self._died(check, status)]

    @property
    def running(self) -> list[int]:
        """Tokens of processes that check a Program."""
        return [token for token, checker in self._checkers.items() if checker.check is not None]

    @property
    def processes(self) -> list[int]:
        """Tokens of all processes."""
        return list(self._checkers)

    def forget(self, job: JobId) -> list[int]:
        """Drop a job's checks. Returns the tokens of the processes to kill."""
        self._waiting = deque(check for check in self._waiting if check.job != job)
        for key in [key for key in self._passed if key[0] == job]:
            del self._passed[key]
        doomed = [
            token for token, checker in self._checkers.items()
            if checker.owner == job or (checker.check is not None and checker.check.job == job)
        ]  # fmt: skip
        for token in doomed:
            self._checkers[token].cancelled = True
            _dismiss(self._checkers[token])
        return doomed

    def close(self) -> None:
        """Drop all checks. Their processes have ended, or end with the fork server."""
        for checker in self._checkers.values():
            _dismiss(checker)
        self._checkers.clear()
        self._waiting.clear()

    def _died(self, check: Check, status: int | str) -> ProgramRefused:
        how = ending(status)
        if "SIGXCPU" in how or "SIGALRM" in how:
            how = f"took longer than {self._settings['cpu_s']} s"
        outside = isinstance(status, str)
        remedy = "submit it again, and see the daemon's log" if outside else "submit a smaller step"
        why = Fault("program", f"the check of the program {how}", remedy)
        return ProgramRefused(check.job, check.program, why)


def _dismiss(checker: Checker) -> None:
    """Close the channel of a process, which ends when it next reads from it. Idempotent."""
    channel, checker.channel = checker.channel, None
    if channel is not None:
        channel.close()


def _answer(check: Check, tag: int, body: memoryview) -> ProgramChecked | ProgramRefused:
    """What a process has said of a Program. Raises MalformedMessage."""
    said = unpack(body)
    if tag == REFUSED:
        return ProgramRefused(check.job, check.program, fault(said))
    if tag != CHECKED:
        raise MalformedMessage(f"a message {tag} of a checker")
    content_hash, sizes, targets, scalars, live = listed(said, 5)
    if not all(kind in ("float", "int") for kind in listed(scalars)):
        raise MalformedMessage("a kind of scalars that there is not")
    return ProgramChecked(
        check.job,
        check.program,
        Footprint(*integers(listed(sizes, len(fields(Footprint))))),
        text(content_hash),
        tuple([intern(text(target)) for target in listed(targets)]),  # thousands, of a few dozen kinds
        tuple(scalars),
        tuple(integers(live)),
    )
