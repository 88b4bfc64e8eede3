"""A job's processes give way to others' or don't, and may be told otherwise while they run. No torch.

Anybody may make a process nicer; making it less nice takes CAP_SYS_NICE, or a limit (RLIMIT_NICE) that allows it.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from gpumux.device.cpu.jobs import Errand, Executor, Renice
from gpumux.types import Fault, JobId, Priority

_CAP_SYS_NICE = 23
_NORMAL = 20  # RLIMIT_NICE that allows niceness 0
MOST = 19


class Niceness:
    """The part of the CPU device that is contract.Regrading."""

    _low_nice: int
    _jobs: dict[JobId, Executor]

    def _live(self, job: JobId) -> Executor | None:
        raise NotImplementedError

    def _send(self, executor: Executor, command: Errand) -> None:
        raise NotImplementedError

    def may_regrade(self, priority: Priority) -> Fault | None:
        """See contract.Regrading."""
        if priority is Priority.LOW or not self._low_nice or may_be_less_nice():
            return None
        return Fault(
            "refused",
            f"low jobs' processes run at niceness {self._low_nice}, and this daemon may not make one less nice",
            "submit the job anew with high priority, or give the daemon LimitNICE=+0 (or CAP_SYS_NICE), or"
            " low_nice = 0",
        )

    def regrade(self, job: JobId, priority: Priority) -> None:
        """See contract.Regrading."""
        executor = self._live(job)
        if executor is not None and self._low_nice:
            more = self._low_nice if priority is Priority.LOW else 0
            self._send(executor, Renice(min(MOST, own() + more)))


def own() -> int:
    """The daemon's own niceness, which high jobs' processes have."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def may_be_less_nice(status: Path = Path("/proc/self/status")) -> bool:
    """Whether a process of ours may go back to the daemon's own niceness."""
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _NORMAL - own():
        return True
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    capable = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(capable >> _CAP_SYS_NICE & 1)


def renice(nice: int) -> None:
    """This process, with all its threads. Raises PermissionError."""
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        except ProcessLookupError:
            pass  # it ended meanwhile
