"""Runs checks of Programs in short-lived processes. Their number is bounded; further checks are queued. No torch.

The result of a check depends only on the Program's bytes and the daemon's settings. Results of checks that passed are
therefore cached by a digest of the bytes: the jobs of a sweep have equal Programs, and come at the same moment.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from sys import intern
from typing import Any

from gpumux.device.base import ProgramChecked, ProgramRefused
from gpumux.device.workers import channel as wire
from gpumux.device.workers.channel import CHECKED, REFUSED, Channel, unpack
from gpumux.device.workers.fork_server import ForkServer, ending
from gpumux.hostmemory import memory_file
from gpumux.program.ir import ProgramLimits
from gpumux.types import Fault, Footprint, JobId, ProgramId

CPU_S = 60  # limit of a check's CPU time: the largest number of operators that a Program may have takes 6 s
WALL_S = 240  # limit of a check's wall time, which is longer because checks run at a higher niceness than jobs
MAX_KNOWN = 1024  # cached results
MAX_KNOWN_OPERATORS = 1 << 20  # operators in all cached results, 8 bytes each


@dataclass(slots=True)
class Check:
    """One check. Its process answers on `channel` just before it ends."""

    job: JobId
    program: ProgramId
    encoded: bytes
    digest: bytes
    channel: Channel | None = None
    token: int = -1
    cancelled: bool = False


def digest(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=32).digest()


class Checks:
    """Checks of all jobs. At most `at_once` processes."""

    def __init__(self, at_once: int, limits: ProgramLimits, extra_ops: Sequence[str]) -> None:
        self._at_once = at_once
        self._settings: dict[str, Any] = {
            "limits": asdict(limits), "extra_ops": list(extra_ops), "cpu_s": CPU_S, "wall_s": WALL_S,
        }  # fmt: skip
        self._waiting: deque[Check] = deque()
        self._running: dict[int, Check] = {}  # by token
        self._passed: dict[tuple[JobId, ProgramId], tuple[bytes, Footprint]] = {}
        self._known: dict[bytes, ProgramChecked] = {}  # by digest, in order of use: the least recently used is first
        self._known_operators = 0

    def submit(self, job: JobId, program: ProgramId, encoded: bytes) -> None:
        self._waiting.append(Check(job, program, encoded, digest(encoded)))

    def known(self, job: JobId, program: ProgramId, encoded: bytes) -> ProgramChecked | None:
        """The cached result, if exactly these bytes have passed a check before, from any client."""
        name = digest(encoded)
        found = self._known.pop(name, None)
        if found is None:
            return None
        self._known[name] = found
        self._passed[job, program] = (name, found.footprint)
        return replace(found, job=job, program=program)

    def _remember(self, name: bytes, answer: ProgramChecked) -> None:
        size = len(answer.operators)
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

    def start(self, server: ForkServer) -> None:
        """Start queued checks, up to the bound."""
        while self._waiting and len(self._running) < self._at_once:
            check = self._waiting.popleft()
            ours, theirs = wire.pair()
            ours.setblocking(False)
            check.channel = Channel(ours)
            program = memory_file("gpumux-check", [check.encoded])
            check.token = server.fork("checker", self._settings, (theirs.detach(), program))
            check.encoded = b""
            self._running[check.token] = check

    def exited(self, token: int, status: int | str) -> list[ProgramChecked | ProgramRefused]:
        """Handle the end of a process. Returns the result of its check, or nothing if it was no check of these or was
        cancelled."""
        check = self._running.pop(token, None)
        if check is None or check.channel is None:
            return []
        answer = self._read(check.channel, check) or self._died(check, status)
        check.channel.close()
        if check.cancelled:
            return []
        if isinstance(answer, ProgramChecked):
            self._passed[check.job, check.program] = (check.digest, answer.footprint)
            self._remember(check.digest, answer)
        return [answer]

    @property
    def running(self) -> list[int]:
        """Tokens of the checks under way."""
        return list(self._running)

    def forget(self, job: JobId) -> list[int]:
        """Drop a job's checks. Returns the tokens of the processes to kill."""
        self._waiting = deque(check for check in self._waiting if check.job != job)
        for key in [key for key in self._passed if key[0] == job]:
            del self._passed[key]
        doomed = [check for check in self._running.values() if check.job == job]
        for check in doomed:
            check.cancelled = True
        return [check.token for check in doomed]

    def close(self) -> None:
        """Drop all checks. Their processes have ended, or end with the fork server."""
        for check in self._running.values():
            if check.channel is not None:
                check.channel.close()
        self._running.clear()
        self._waiting.clear()

    def _read(self, channel: Channel, check: Check) -> ProgramChecked | ProgramRefused | None:
        try:
            tag, body, _ = channel.receive()
        except (EOFError, BlockingIOError):
            return None
        said = unpack(body)
        if tag == REFUSED:
            return ProgramRefused(check.job, check.program, Fault(*said))
        assert tag == CHECKED
        content_hash, sizes, targets, scalars = said
        operators = tuple([intern(target) for target in targets])  # thousands, of a few dozen kinds
        return ProgramChecked(check.job, check.program, Footprint(*sizes), content_hash, operators, tuple(scalars))

    def _died(self, check: Check, status: int | str) -> ProgramRefused:
        how = ending(status)
        if "SIGXCPU" in how or "SIGALRM" in how:
            how = f"took longer than {self._settings['cpu_s']} s"
        fault = Fault("program", f"the check of the program {how}", "submit a smaller step")
        return ProgramRefused(check.job, check.program, fault)
