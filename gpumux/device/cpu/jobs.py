"""The daemon's records of each job and process of the CPU device, and the commands to a process. No torch."""

from __future__ import annotations

import mmap
import os
import signal
from dataclasses import dataclass, field
from typing import Any

from gpumux.device.base import AnswerForm, Launch
from gpumux.device.run.device_base import DeviceJob
from gpumux.device.run.schedule import LoadCommand, ProfileCommand, TransferCommand
from gpumux.device.workers.channel import (
    PAGE_LAUNCH,
    PAGE_LAUNCH_AT,
    PAGE_MEMORY,
    PAGE_MEMORY_AT,
    PAGE_TIMES,
    PAGE_TIMES_AT,
    Channel,
    Descriptors,
    pair,
)
from gpumux.device.workers.fork_server import ForkServer, ending
from gpumux.hostmemory import memory_file
from gpumux.types import (
    Fault,
    Gang,
    JobId,
    LaunchId,
    PieceDone,
    ProgramId,
)

MOST_BYTES = 1 << 46  # no process holds more; the page may have any number
OWN_BYTES = 48 << 20  # of a process beside its tensors: its graphs, scratch memory of kernels


@dataclass(frozen=True, slots=True)
class Answers:
    """A command to answer steps on a copy of the client's channel, and the form of an answer."""

    held: Descriptors
    form: AnswerForm


@dataclass(frozen=True, slots=True)
class Renice:
    """A command to change the process's niceness."""

    nice: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A command to aim at another length of a program's pieces, in seconds; None: the process's own default."""

    program: ProgramId
    target_s: float | None


@dataclass(frozen=True, slots=True)
class Join:
    """A command to find the job's peers."""

    gang: Gang


@dataclass(frozen=True, slots=True)
class Leave:
    """A command to leave them."""


Command = Launch | LoadCommand | TransferCommand | ProfileCommand  # what is scheduled
UnscheduledCommand = Answers | Renice | Cut | Join | Leave  # what is not


@dataclass(slots=True)
class Listing:
    """The operators of a loaded program and its newest cuts, for crash reports."""

    table: list[str]
    ops: list[int]  # indices into table
    bounds: dict[int, list[int]] = field(default_factory=dict)

    def recut(self, cut: int, bounds: list[int]) -> None:
        """Keep the newest cut and the one before it."""
        self.bounds[cut] = bounds
        self.bounds.pop(cut - 2, None)

    def describe(self, launch: Launch, last_op: int | None) -> str:
        """The operators that the process was running when it died; `last_op` is the one that it named last."""
        bounds = self.bounds.get(launch.cut)
        if bounds is None or not 0 <= launch.piece <= len(bounds) - 1 - launch.pieces:
            return f"piece {launch.piece} of cut {launch.cut}"
        start, stop = bounds[launch.piece], bounds[launch.piece + launch.pieces]
        if last_op is not None and start <= last_op < stop:
            return f"operator {last_op} ({self.table[self.ops[last_op]]})"
        distinct = list(dict.fromkeys(self.table[i] for i in self.ops[start:stop]))
        more = f" and {len(distinct) - 6} more" if len(distinct) > 6 else ""
        return f"one of operators {start} to {stop - 1} ({', '.join(distinct[:6])}{more})"


@dataclass(frozen=True, slots=True)
class Unstarted:
    """What a job's process will get when it is started: its settings, and its ends of the channel and of the page."""

    settings: dict[str, Any]
    channel: int
    page: int


@dataclass(slots=True)
class ExecutorRecord(DeviceJob):
    """The daemon's record of one job's process. `page` is memory shared with it: while the process runs operators one
    by one, the page holds the operator's index plus one. `failure` is the fault that it reported before it ended."""

    job: JobId
    channel: Channel
    page: mmap.mmap
    unstarted: Unstarted | None = None  # None once it is started
    token: int = 0  # then
    programs: dict[ProgramId, Listing] = field(default_factory=dict)
    ended: bool = False  # its end of the channel is closed
    status: int | str | None = None  # how it ended: a wait status, or words
    failure: Fault | None = None
    memory_group: str = ""  # its control group (workers/memory_groups.py)
    exceeded: int = 0  # bytes that the group may have, if a process of it was killed for taking more
    reported: LaunchId | None = None  # the launch whose end was found on the page before the process reported it

    @property
    def measured(self) -> int:
        """Bytes the process held for the job at most in the newest step it looked at; 0 before the first."""
        return min(int(PAGE_MEMORY.unpack_from(self.page, PAGE_MEMORY_AT)[0]), MOST_BYTES)

    @property
    def memory(self) -> int:
        """Bytes the job is charged: what its programs declare, or what its process was measured to hold if that is more
        (gaps in its heap count, too). OWN_BYTES, which every process has beside its tensors, are not charged."""
        return max(self.charged + self.transient, self.measured - OWN_BYTES)

    def answered(self, launch: Launch) -> PieceDone | None:
        """The end of a launch whose step the process has answered, before its message about it has arrived."""
        if launch.submitted is None or PAGE_LAUNCH.unpack_from(self.page, PAGE_LAUNCH_AT)[0] != launch.launch:
            return None
        started, ended, suspended = PAGE_TIMES.unpack_from(self.page, PAGE_TIMES_AT)
        return PieceDone(launch.launch, started, ended, True, suspended)

    def crash(self, launch: Launch | None) -> Fault:
        """The fault of a job whose process reported none before it ended."""
        if not isinstance(self.status, int):  # the process did not cause its end
            return Fault(
                "executor_crashed",
                f"the process running the job {ending(self.status)}",
                "submit it again; if it happens again, look at the daemon's log and at the machine's memory",
            )
        doing = ""
        if launch is not None:
            listing = self.programs.get(launch.program)
            named = int.from_bytes(self.page[:4], "little") - 1
            last_op = named if named >= 0 and launch.cut == 0 else None
            doing = f" while running {listing.describe(launch, last_op)} of program {launch.program}" if listing else ""
        remedy = "look for values the operator can't take (indices out of range, division by zero)"
        if self.exceeded and self.status == signal.SIGKILL:
            message = f"the process running the job took more memory than the {self.exceeded} bytes it may have{doing}"
            remedy = "look for an operator that takes far more memory than its results"
            return Fault("executor_crashed", message, f"{remedy}; other jobs are unharmed")
        if self.status == signal.SIGKILL:
            remedy = "look whether the machine, or the daemon's control group, ran out of memory, or somebody killed it"
        message = f"the process running the job {ending(self.status)}{doing}"
        return Fault("executor_crashed", message, f"{remedy}; other jobs are unharmed")


def new_executor(job: JobId, settings: dict[str, Any], arena: int | None) -> ExecutorRecord:
    """The record of a job's process, which is started later (`start`). `arena`: that of its temporaries, if it shares
    one. Raises OSError."""
    ours, theirs = pair()
    ours.setblocking(False)
    try:
        page = memory_file("gpumux-page", [bytes(mmap.PAGESIZE)])
    except OSError:
        ours.close()
        theirs.close()
        raise
    unstarted = Unstarted(settings, theirs.detach(), page)
    return ExecutorRecord(job, Channel(ours, daemons=True), mmap.mmap(page, mmap.PAGESIZE), unstarted, arena=arena)


def start(executor: ExecutorRecord, server: ForkServer) -> None:
    """Ask the fork server for a job's process. Messages sent before it runs wait in its channel."""
    what, executor.unstarted = executor.unstarted, None
    assert what is not None
    executor.token = server.fork("executor", what.settings, (what.channel, what.page))


def forget_start(executor: ExecutorRecord) -> None:
    """Close what an executor that is never started would have got."""
    what, executor.unstarted = executor.unstarted, None
    assert what is not None
    os.close(what.channel)
    os.close(what.page)
