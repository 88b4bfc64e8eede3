"""The process that checks one Program. Fake execution holds Python's global lock for long, so it needs its own process.

It runs at a higher niceness than jobs. The kernel ends it if it takes too long, which the daemon learns from its exit
status.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
from dataclasses import replace
from typing import Any

from gpumux.device.workers.channel import CHECKED, REFUSED, Channel
from gpumux.errors import GpumuxError, ProgramError
from gpumux.program.check import check
from gpumux.program.codec import encode
from gpumux.program.ir import Op, Program, ProgramLimits, Storage, TensorRef, View

_NICE = 10


def warm() -> None:
    """Check a small Program in the fork server: torch imports hundreds of modules at its first fake operator, and no
    check should wait for that. Nothing is computed."""
    x = View(0, "float32", (1,), (1,))
    op = Op("aten.add.Tensor", (TensorRef(0), TensorRef(0)), outs=(1,))
    storages = (Storage("input", 4, 0), Storage("temp", 4))
    check(encode(Program(storages, (x, replace(x, storage=1)), (op,), (0,), (1,))))


def main(settings: dict[str, Any], fds: list[int]) -> None:
    """Check one Program, in a new fork. `fds`: the channel's descriptor, and one with the encoded Program."""
    os.nice(_NICE)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(settings["wall_s"])
    # Counted from the fork: a child starts with no time of its parent's.
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))
    channel = Channel(socket.socket(fileno=fds[0]))
    with mmap.mmap(fds[1], 0, prot=mmap.PROT_READ) as memory:
        encoded = bytes(memory[:])
    os.close(fds[1])
    try:
        report = check(encoded, ProgramLimits(**settings["limits"]), tuple(settings["extra_ops"]))
    except GpumuxError as error:
        channel.send(REFUSED, [error.code, error.message, error.remedy])
        return
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
        fault = ProgramError(f"the check of the program failed: {error}"[:500], "report the step that made it")
        channel.send(REFUSED, [fault.code, fault.message, fault.remedy])
        return
    footprint = report.footprint
    sizes = [footprint.state_bytes, footprint.transient_bytes, footprint.slot_bytes]
    operators = [op.target for op in report.program.ops]
    channel.send(CHECKED, [report.content_hash, sizes, operators, report.program.scalars])
