"""The daemon's records of each job and process of the CPU device. No torch."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumux.device.base import AnswerForm, DeviceEvent, Launch, ProgramProfiled, ProgramRefused
from gpumux.device.run.device_base import DeviceJob
from gpumux.device.run.schedule import LoadCommand, ProfileCommand, Schedule, TransferCommand
from gpumux.device.workers.channel import (
    ANSWER,
    CUT,
    DESCRIPTORS,
    DONE,
    DONE_BODY,
    FAILED,
    LAUNCH,
    LAUNCH_HEAD,
    LOAD,
    LOADED,
    NICE,
    PACKET,
    PAGE_LAUNCH,
    PAGE_LAUNCH_AT,
    PAGE_MEMORY,
    PAGE_MEMORY_AT,
    PAGE_TIMES,
    PAGE_TIMES_AT,
    PROFILE,
    PROFILED,
    RECUT,
    REFUSED,
    TRANSFER,
    TRANSFERRED,
    Channel,
    Descriptors,
    pack,
    pair,
    unpack,
)
from gpumux.device.workers.fork_server import ForkServer, ending
from gpumux.hostmemory import memory_file
from gpumux.types import (
    Fault,
    JobDied,
    JobId,
    JobReleased,
    LaunchId,
    PieceDone,
    PieceFailed,
    ProgramId,
    ProgramReady,
    TransferEnded,
)

OWN_BYTES = 48 << 20  # of a process beside its tensors: its graphs, scratch memory of kernels
_NO_SCALARS = pack(())


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


Command = Launch | LoadCommand | TransferCommand | ProfileCommand  # what is scheduled
UnscheduledCommand = Answers | Renice | Cut  # what is not


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
        if bounds is None or not 0 <= launch.piece < len(bounds) - 1:
            return f"piece {launch.piece} of cut {launch.cut}"
        start, stop = bounds[launch.piece], bounds[launch.piece + 1]
        if last_op is not None and start <= last_op < stop:
            return f"operator {last_op} ({self.table[self.ops[last_op]]})"
        distinct = list(dict.fromkeys(self.table[i] for i in self.ops[start:stop]))
        more = f" and {len(distinct) - 6} more" if len(distinct) > 6 else ""
        return f"one of operators {start} to {stop - 1} ({', '.join(distinct[:6])}{more})"


@dataclass(slots=True)
class ExecutorRecord(DeviceJob):
    """The daemon's record of one job's process. `page` is memory shared with it: while the process runs operators one
    by one, the page holds the operator's index plus one. `failure` is the fault that it reported before it ended."""

    job: JobId
    token: int
    channel: Channel
    page: mmap.mmap
    programs: dict[ProgramId, Listing] = field(default_factory=dict)
    ended: bool = False  # its end of the channel is closed
    status: int | str | None = None  # how it ended: a wait status, or words
    failure: Fault | None = None
    reported: LaunchId | None = None  # the launch whose end was found on the page before the process reported it

    @property
    def measured(self) -> int:
        """Bytes the process held for the job at most in the newest step it looked at; 0 before the first."""
        return int(PAGE_MEMORY.unpack_from(self.page, PAGE_MEMORY_AT)[0])

    @property
    def memory(self) -> int:
        """Bytes the job is charged: what its programs declare, or what its process was measured to hold if that is more
        (gaps in its heap count, too). OWN_BYTES, which every process has beside its tensors, are not charged."""
        return max(self.charged + max(self.transients.values(), default=0), self.measured - OWN_BYTES)

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
        if self.status == signal.SIGKILL:
            remedy = "look whether the machine ran out of memory, or somebody killed it"
        message = f"the process running the job {ending(self.status)}{doing}"
        return Fault("executor_crashed", message, f"{remedy}; other jobs are unharmed")


def start_executor(server: ForkServer, job: JobId, settings: dict[str, Any]) -> ExecutorRecord:
    """Ask the fork server for a job's process. Messages sent before the process runs wait in its channel. Raises
    OSError."""
    ours, theirs = pair()
    ours.setblocking(False)
    try:
        page_fd = memory_file("gpumux-page", [bytes(mmap.PAGESIZE)])
    except OSError:
        ours.close()
        theirs.close()
        raise
    page = mmap.mmap(page_fd, mmap.PAGESIZE)
    token = server.fork("executor", settings, (theirs.detach(), page_fd))
    return ExecutorRecord(job, token, Channel(ours), page)


def send(channel: Channel, command: Command | UnscheduledCommand) -> Fault | None:
    """Send a command to an executor. Returns the fault if the command can't be sent. An executor that is gone is no
    fault: the end of its channel reports that."""
    try:
        _send(channel, command)
    except (BrokenPipeError, ConnectionResetError):
        pass
    except (struct.error, OverflowError, ValueError, TypeError, OSError) as error:
        return Fault("job_failed", f"can't be sent: {error}", "send numbers of 64 bits")
    return None


def _send(channel: Channel, command: Command | UnscheduledCommand) -> None:
    if isinstance(command, Launch):
        launch, _, step, program, cut, piece, slot, _, _, _, submitted = command
        head = LAUNCH_HEAD.pack(
            LAUNCH, launch, step, program, cut, piece, slot, -1.0 if submitted is None else submitted
        )
        # The executor keeps a step's scalars: they go with its first piece only.
        if command.piece == 0:
            scalars = pack(command.scalars) if command.scalars else _NO_SCALARS
            if len(head) + len(scalars) > PACKET:
                _send_unscheduled(channel, head, scalars)
                return
            head += scalars
        channel.sock.send(head)
        return
    if isinstance(command, ProfileCommand):
        channel.send(PROFILE, [command.program])
        return
    if isinstance(command, Renice):
        channel.send(NICE, [command.nice])
        return
    if isinstance(command, Cut):
        channel.send(CUT, [command.program, command.target_s])
        return
    try:
        if isinstance(command, Answers):
            channel.send(ANSWER, command.form, command.held.fds)
        elif isinstance(command, LoadCommand):
            _send_load(channel, command)
        else:
            body = [command.transfer, command.buffers, command.nbytes, command.into_device]
            channel.send(TRANSFER, body, command.held.fds)
    finally:
        command.held.close()


def _send_load(channel: Channel, load: LoadCommand) -> None:
    """Send a load as its executor reads it. It may be larger than a packet, so it is passed by descriptor."""
    lists = {"new_buffers": load.new_buffers, "binding": load.binding}
    description = pack({"program": load.program, "slots": load.slots, "data_bytes": load.nbytes, **lists})
    fd = memory_file("gpumux-load", [len(description).to_bytes(8, "little"), description, load.encoded])
    try:
        channel.send(LOAD, [], (fd, *load.held.fds))
    finally:
        os.close(fd)


def _send_unscheduled(channel: Channel, head: bytes, scalars: bytes) -> None:
    """Send a launch with more scalars than a packet holds: they are passed by descriptor."""
    fd = memory_file("gpumux-scalars", [scalars])
    try:
        channel.send_packet(bytes((DESCRIPTORS,)))
        channel.send_packet(head, (fd,))
    finally:
        os.close(fd)


def release(command: Command) -> None:
    """Close what a command that will never be sent holds."""
    if isinstance(command, LoadCommand | TransferCommand):
        command.held.close()


# ---- Device events from executors' messages, and for executors that died. No torch.


_FEW = "close jobs, or raise the daemon's limits (LimitNOFILE)"
_log = logging.getLogger(__name__)
_DONE = struct.Struct("<" + DONE_BODY.format[2:])  # without the tag


def no_process(error: OSError) -> Fault:
    """The fault of a job whose process can't be started: the daemon ran out of a resource."""
    return Fault("job_failed", f"its process can't be started: {error.strerror}", _FEW)


def answer(executor: ExecutorRecord, schedule: Schedule[Command], tag: int, body: memoryview) -> list[DeviceEvent]:
    """Turn an executor's message into events. A command that it answers leaves the schedule."""
    job = executor.job
    if tag == DONE:
        launch, started, ended, answered, suspended = _DONE.unpack(body)
        if launch == executor.reported:
            if not answered:  # sending failed after the page said that it was answered
                executor.failure = Fault("job_failed", "an answer was lost: the client does not read", "read answers")
            return []
        schedule.done(job)
        return [PieceDone(LaunchId(launch), started, ended, answered, suspended)]
    said = unpack(body)
    if tag == RECUT:
        program, cut, pieces, bounds, through_python = said
        if cut == 1 and through_python:
            reasons = "; ".join(f"{target}: {why}" for target, why in through_python.items())
            _log.info("job %s, program %s: operators run through Python, slower: %s", job, program, reasons)
        executor.programs[program].recut(cut, bounds)
        return [ProgramReady(job, program, cut, tuple(pieces), tuple(bounds))]
    if tag == FAILED:
        executor.failure = Fault(*said[1:])  # reported when the process has ended
        return []
    command = schedule.done(job)
    if tag == LOADED:
        program, pieces, bounds, table, ops = said
        executor.programs[program] = Listing(table, ops, {0: bounds})
        return [ProgramReady(job, program, 0, tuple(pieces), tuple(bounds))]
    if tag == REFUSED and isinstance(command, LoadCommand):
        executor.not_loaded(command)
        return [ProgramRefused(job, command.program, Fault(*said[1:]))]
    if tag == TRANSFERRED and isinstance(command, TransferCommand):
        code, message, remedy = said[1:]
        return [TransferEnded(job, command.transfer, Fault(code, message, remedy) if code else None)]
    if tag == PROFILED and isinstance(command, ProfileCommand):
        text, code, message, remedy = said
        return [ProgramProfiled(job, command.program, text, Fault(code, message, remedy) if code else None)]
    raise AssertionError(f"message {tag} to {command}")


def unheard(executor: ExecutorRecord, schedule: Schedule[Command]) -> list[DeviceEvent]:
    """The PieceDone of a launch whose step was answered, if the executor's message about it has not arrived yet."""
    running = schedule.running(executor.job)
    done = executor.answered(running) if isinstance(running, Launch) and not executor.unloading else None
    if done is None:
        return []
    executor.reported = done.launch
    schedule.done(executor.job)
    return [done]


def obituary(executor: ExecutorRecord, unfinished: Sequence[Command]) -> list[DeviceEvent]:
    """The events for an executor that has ended: a failure for each unanswered command, oldest first, then its end."""
    for command in unfinished:
        release(command)
    if executor.unloading:
        return [JobReleased(executor.job)]
    first = unfinished[0] if unfinished else None
    fault = executor.failure or executor.crash(first if isinstance(first, Launch) else None)
    return [*(_unanswered(executor, command, fault) for command in unfinished), JobDied(executor.job, fault)]


def _unanswered(executor: ExecutorRecord, command: Command, fault: Fault) -> DeviceEvent:
    if isinstance(command, Launch):
        return PieceFailed(command.launch, fault)
    if isinstance(command, LoadCommand):
        return ProgramRefused(executor.job, ProgramId(command.program), fault)
    if isinstance(command, ProfileCommand):
        return ProgramProfiled(executor.job, command.program, b"", fault)
    return TransferEnded(executor.job, command.transfer, fault)
