"""Set-up of a process of the CPU device right after the fork. No torch."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_OOM_SCORE = 500  # the kernel takes these processes before the daemon
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, even one that is gone already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(0)


def name_process(name: str) -> None:
    """The name shown by ps and top, at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def settle(parent: int, name: str, keep: Iterable[int]) -> None:
    """Give this process its own process group, no core dumps, and no descriptors but `keep` and the standard ones. It
    ignores interrupts at the daemon's terminal, which the daemon handles. It gets no session of its own: the kernel
    would give each session an equal part of the cores (autogroup), and niceness would have no effect between jobs."""
    die_with(parent)
    os.setpgid(0, 0)
    name_process(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    except OSError:
        pass  # a hardened container may forbid it, and nothing depends on it
    wanted = {0, 1, 2, *keep}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in wanted:
            try:
                os.close(fd)
            except OSError:
                pass  # the descriptor that listdir itself used
