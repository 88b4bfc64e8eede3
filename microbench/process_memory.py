"""What processes take of memory together: proportional sizes (PSS) by role, sampled while they work. Imports no
torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 0.05
SHARE = 10  # of the time at most one part in so many is spent on looking, which walks through all pages of a process
ROLES = {  # by the name of a process; all else is the client or the daemon
    "gpumux-executor": "executor",
    "gpumux-executo": "executor",
    "gpumux-checker": "checkers",
    "gpumux-zygote": "fork server",
}
SEGMENTS = "unmapped"  # of shared memory that processes hold by descriptor and none has mapped


def proportional(pid: int) -> dict[str, int]:
    """Bytes of the process by kind (Pss, Pss_Anon, Pss_File, Pss_Shmem); empty when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if line.startswith("Pss"))
    return {key: int(value.split()[0]) << 10 for key, _, value in pairs if value.split()}


def descendants(pid: int) -> list[int]:
    found = [pid]
    for known in found:
        try:
            tasks = list(Path(f"/proc/{known}/task").iterdir())
        except OSError:
            continue
        for task in tasks:
            try:
                found += map(int, (task / "children").read_text().split())
            except OSError:
                continue
    return found


def role_of(pid: int, default: str) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name in ROLES:
            return ROLES[name]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return default
    return "snapshot writer" if b"gpumux.daemon.snapshots.writer" in command else default


def shared_files(pids: Sequence[int]) -> int:
    """Bytes of memory files that the processes hold, each counted once."""
    seen: dict[int, int] = {}
    for pid in pids:
        try:
            descriptors = list(os.scandir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        for entry in descriptors:
            try:
                if os.readlink(entry.path).startswith("/memfd:"):
                    facts = os.stat(entry.path)
                    seen[facts.st_ino] = facts.st_blocks * 512
            except OSError:
                continue
    return sum(seen.values())


@dataclass
class Peaks:
    """The largest sum over a phase, what each role had of it at that moment, and each role's own largest."""

    total: int = 0
    then: dict[str, int] = field(default_factory=dict)
    by_role: dict[str, int] = field(default_factory=dict)

    def take(self, sample: dict[str, int]) -> None:
        total = sum(sample.values())
        if total > self.total:
            self.total, self.then = total, sample
        for role, nbytes in sample.items():
            self.by_role[role] = max(nbytes, self.by_role.get(role, 0))


class Sampler:
    """Samples a client and, if there is one, a daemon with all its processes, on a thread of its own."""

    def __init__(self, client: int, daemon: int = 0) -> None:
        self._client, self._daemon = client, daemon
        self._ended = threading.Event()
        self._taking = threading.Lock()
        self.phases: dict[str, Peaks] = {}
        self.last: dict[str, int] = {}
        self.checking_s = 0.0  # for how long there was a process that checks Programs
        self._phase = "start"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def enter(self, phase: str) -> None:
        """From now on samples are of this phase, which may be over before the next one: so one is taken now."""
        self._phase = phase
        self._take(phase, self.sample())

    def _take(self, phase: str, sample: dict[str, int]) -> None:
        with self._taking:
            self.phases.setdefault(phase, Peaks()).take(sample)

    def sample(self) -> dict[str, int]:
        roles = {self._client: "client"}
        for pid in descendants(self._daemon) if self._daemon else ():
            roles[pid] = role_of(pid, "daemon")
        found: dict[str, int] = {}
        mapped = 0
        for pid, role in roles.items():
            parts = proportional(pid)
            found[role] = found.get(role, 0) + parts.get("Pss", 0)
            mapped += parts.get("Pss_Shmem", 0)
        if self._daemon:
            found[SEGMENTS] = max(0, shared_files(list(roles)) - mapped)
        return found

    def _run(self) -> None:
        before, pause = time.monotonic(), EVERY_S
        while not self._ended.wait(pause):
            began, phase, sample = time.monotonic(), self._phase, self.sample()
            now = time.monotonic()
            pause = max(EVERY_S, SHARE * (now - began))
            if "checkers" in sample:
                self.checking_s += now - before
            before = now
            self.last = sample
            self._take(phase, sample)

    def peak(self, *phases: str) -> Peaks:
        """Of several phases together; of all, if none is named."""
        made = Peaks()
        for name, peaks in self.phases.items():
            if not phases or name in phases:
                if peaks.total > made.total:
                    made.total, made.then = peaks.total, peaks.then
                for role, nbytes in peaks.by_role.items():
                    made.by_role[role] = max(nbytes, made.by_role.get(role, 0))
        return made
