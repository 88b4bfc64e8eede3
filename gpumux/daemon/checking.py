"""Whose Program is checked next: users in turn, and each user's sessions in turn.

A check runs for seconds, minutes if somebody means harm, and a device runs few at once. So users take
turns, and no user has all places: whoever comes next finds one free, or soon free.
"""

from __future__ import annotations

from collections import deque

from gpumux.daemon.books import JobRecord, ProgramRecord
from gpumux.device.contract import Device
from gpumux.model import JobId, ProgramId, SessionId

_Line = deque[tuple[JobId, ProgramRecord]]


class CheckQueue:
    """Hands checks to the device, `at_once` at a time at most."""

    def __init__(self, device: Device, at_once: int) -> None:
        self._device = device
        self._at_once = max(1, at_once)
        self._share = max(1, at_once - max(1, at_once // 4))  # of one user
        self._waiting: dict[int, dict[SessionId, _Line]] = {}  # by uid; in both, whose turn is next comes first
        self._running: dict[tuple[JobId, ProgramId], int] = {}  # whose they are

    def submit(self, job: JobRecord, program: ProgramRecord) -> None:
        """Have a Program checked when it is its turn."""
        lines = self._waiting.setdefault(job.session.peer.uid, {})
        lines.setdefault(job.session.id, deque()).append((job.id, program))
        self._start()

    def ended(self, job: JobId, program: ProgramId) -> None:
        """The device has said what it found. Nothing happens when it was not asked."""
        if self._running.pop((job, program), None) is not None:
            self._start()

    def forget(self, job: JobId) -> None:
        """The device is told to unload this job, and its checks go with it."""
        for uid, lines in list(self._waiting.items()):
            left = {name: deque(item for item in line if item[0] != job) for name, line in lines.items()}
            self._waiting[uid] = {name: line for name, line in left.items() if line}
            if not self._waiting[uid]:
                del self._waiting[uid]
        for key in [key for key in self._running if key[0] == job]:
            del self._running[key]
        self._start()

    def _start(self) -> None:
        while len(self._running) < self._at_once and (uid := self._next()) is not None:
            lines = self._waiting.pop(uid)
            session = next(iter(lines))
            line = lines.pop(session)
            job, program = line.popleft()
            if line:
                lines[session] = line  # behind all others
            if lines:
                self._waiting[uid] = lines
            self._running[job, program.id] = uid
            self._device.check(job, program.id, program.encoded)

    def _next(self) -> int | None:
        busy = list(self._running.values())
        return next((uid for uid in self._waiting if busy.count(uid) < self._share), None)
