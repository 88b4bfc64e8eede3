"""Niceness of the daemon's processes. Every process may be made nicer; making it less nice takes CAP_SYS_NICE, or a
limit (RLIMIT_NICE) that allows it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CAP_SYS_NICE = 23
_NORMAL = 20  # RLIMIT_NICE that allows niceness 0
MOST_NICE = 19


def own_niceness() -> int:
    """The daemon's own niceness, which high jobs' processes have."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def may_be_less_nice(status: Path = Path("/proc/self/status")) -> bool:
    """Whether a process of the daemon may go back to the daemon's own niceness."""
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _NORMAL - own_niceness():
        return True
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    capable = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(capable >> _CAP_SYS_NICE & 1)
