"""What executors say, and what is said for those that died, as events of the contract. No torch."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

from gpumux.device.contract import (
    DeviceEvent,
    JobLost,
    JobUnloaded,
    Launch,
    LaunchDone,
    LaunchFailed,
    ProgramLoaded,
    ProgramProfiled,
    ProgramRefused,
    Recut,
    TransferDone,
)
from gpumux.device.cpu.channel import (
    DONE,
    DONE_BODY,
    FAILED,
    LOADED,
    PROFILED,
    RAN,
    RECUT,
    REFUSED,
    RETURNED,
    TRANSFERRED,
    unpack,
)
from gpumux.device.cpu.jobs import Command, Executor, Listing, Load, Move, Profile, release
from gpumux.device.cpu.loans import returned
from gpumux.device.cpu.schedule import Schedule
from gpumux.model import Fault, JobId, LaunchId, ProgramId

UNKNOWN = Fault("unknown_job", "the device holds no such job", "open the job first")
BAD_SEED = Fault("program", "the seed is not a 64-bit integer", "choose another")
NO_WARM = Fault("executor_crashed", "the process that starts executors is gone", "restart the daemon; see its log")
_FEW = "close jobs, or raise the daemon's limits (LimitNOFILE)"
_log = logging.getLogger(__name__)
_DONE = struct.Struct("<" + DONE_BODY.format[2:])  # without the tag


def no_process(error: OSError) -> Fault:
    """Why a job has no process: the daemon ran out of something."""
    return Fault("job_failed", f"its process can't be started: {error.strerror}", _FEW)


def answer(executor: Executor, schedule: Schedule[Command], tag: int, body: memoryview) -> list[DeviceEvent]:
    """The events a message of an executor amounts to. Commands answered leave the schedule."""
    job = executor.job
    if tag == DONE:
        launch, started, ended, answered, suspended = _DONE.unpack(body)
        if launch == executor.told:
            if not answered:  # it had to give up after it had said that it would
                executor.failure = Fault("job_failed", "an answer was lost: the client does not read", "read answers")
            return []
        schedule.done(job)
        return [LaunchDone(LaunchId(launch), started, ended, answered, suspended)]
    if tag == RAN:
        return []  # what ran is on its page, for who asks; now somebody will
    said = unpack(body)
    if tag == RETURNED:
        return returned(executor, schedule, said)
    if tag == RECUT:
        program, cut, pieces, bounds, through_python = said
        if cut == 1 and through_python:
            reasons = "; ".join(f"{target}: {why}" for target, why in through_python.items())
            _log.info("job %s, program %s: operators run through Python, slower: %s", job, program, reasons)
        executor.programs[program].recut(cut, bounds)
        return [Recut(job, program, cut, tuple(pieces), tuple(bounds))]
    if tag == FAILED:
        executor.failure = Fault(*said[1:])  # told with the end of its process, when nothing is left of it
        return []
    command = schedule.done(job)
    if tag == LOADED:
        program, pieces, bounds, table, ops = said
        executor.programs[program] = Listing(table, ops, {0: bounds})
        return [ProgramLoaded(job, program, tuple(pieces), tuple(bounds))]
    if tag == REFUSED and isinstance(command, Load):
        executor.charged -= command.nbytes
        del executor.transients[command.program]
        return [ProgramRefused(job, command.program, Fault(*said[1:]))]
    if tag == TRANSFERRED and isinstance(command, Move):
        code, message, remedy = said[1:]
        return [TransferDone(job, command.transfer, Fault(code, message, remedy) if code else None)]
    if tag == PROFILED and isinstance(command, Profile):
        text, code, message, remedy = said
        return [ProgramProfiled(job, command.program, text, Fault(code, message, remedy) if code else None)]
    raise AssertionError(f"message {tag} to {command}")


def unheard(executor: Executor, schedule: Schedule[Command]) -> list[DeviceEvent]:
    """The end of a launch whose step was answered, if the executor has not come to tell yet."""
    running = schedule.running(executor.job)
    done = executor.answered(running) if isinstance(running, Launch) and not executor.unloading else None
    if done is None:
        return []
    executor.told = done.launch
    schedule.done(executor.job)
    return [done]


def obituary(executor: Executor, unfinished: Sequence[Command]) -> list[DeviceEvent]:
    """The events for an executor that has ended, with what it never answered, oldest first."""
    for command in unfinished:
        release(command)
    if executor.unloading:
        return [JobUnloaded(executor.job)]
    first = executor.at or (unfinished[0] if unfinished else None)
    fault = executor.failure or executor.crash(first if isinstance(first, Launch) else None)
    return [*(_unanswered(executor, command, fault) for command in unfinished), JobLost(executor.job, fault)]


def _unanswered(executor: Executor, command: Command, fault: Fault) -> DeviceEvent:
    if isinstance(command, Launch):
        return LaunchFailed(command.launch, fault)
    if isinstance(command, Load):
        return ProgramRefused(executor.job, ProgramId(command.program), fault)
    if isinstance(command, Profile):
        return ProgramProfiled(executor.job, command.program, b"", fault)
    return TransferDone(executor.job, command.transfer, fault)


def of_job(event: DeviceEvent, job: JobId) -> bool:
    return getattr(event, "job", None) == job
