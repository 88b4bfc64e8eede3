"""The CPU as a device: each job runs in a process of its own, which the fork server starts. Imports no torch.

    CpuDevice --- ForkServer --- forks ---------+-- executor, one a job
        |                                       +-- checkers, of one job's Programs each
        +--------- a channel to each of them ---+

Launches go straight to the executors; the fork server only starts, kills and reaps processes. When an executor dies,
the device answers its open commands once both its channel and its process have ended.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import struct
from collections.abc import Sequence
from dataclasses import astuple, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from gpumux import hostmemory
from gpumux.device import base as dev
from gpumux.device.base import (
    DeviceEvent,
    FusedProgramRefused,
    Launch,
    ProgramProfiled,
    ProgramRefused,
    SegmentHandle,
)
from gpumux.device.cpu.jobs import (
    Answers,
    Command,
    Cut,
    ExecutorRecord,
    Join,
    Leave,
    Listing,
    Renice,
    UnscheduledCommand,
    forget_start,
    new_executor,
    start,
)
from gpumux.device.run.device_base import BAD_SEED, NO_FORK_SERVER, UNKNOWN_JOB, DeviceBase, is_seed
from gpumux.device.run.schedule import LoadCommand, MemberLoad, ProfileCommand, Schedule, TransferCommand
from gpumux.device.workers import memory_groups
from gpumux.device.workers.channel import (
    ANSWER,
    CUT,
    DESCRIPTORS,
    DONE,
    DONE_BODY,
    EXCHANGED,
    FAILED,
    JOIN,
    LAUNCH,
    LAUNCH_HEAD,
    LEAVE,
    LOAD,
    LOADED,
    NICE,
    PACKET,
    PROFILE,
    PROFILED,
    RECUT,
    REFUSED,
    STEP_FAILED,
    TRANSFER,
    TRANSFERRED,
    Channel,
    Descriptors,
    MalformedMessage,
    fault,
    integers,
    listed,
    number,
    pack,
    text,
    unpack,
)
from gpumux.device.workers.confinement import Confined, most_memory
from gpumux.device.workers.fork_server import ForkServer
from gpumux.device.workers.fusing import FusedPrograms
from gpumux.device.workers.memory_groups import MemoryGroups
from gpumux.errors import ConfigError
from gpumux.hostmemory import cpu_name, memory_file
from gpumux.program.ir import DEFAULT, ProgramLimits
from gpumux.types import (
    CollectiveEnded,
    DeviceInfo,
    Fault,
    Footprint,
    Gang,
    JobDied,
    JobId,
    JobReleased,
    JobSpec,
    LaunchId,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramId,
    ProgramReady,
    TransferEnded,
    WavePieces,
)

_CAP_SYS_NICE = 23
_NORMAL = 20  # RLIMIT_NICE that allows niceness 0
MOST_NICE = 19
PIECE_S = 0.002
RUN_S = 0.008  # of pieces that are one launch: each launch takes 0.1 to 0.2 ms of the daemon's processor time
OPEN_S = 120.0
CLOSE_S = 10.0
NO_FUSER = Fault("not_fusible", "this device was given nothing that fuses Programs", "let its jobs run by themselves")


class CpuDevice(DeviceBase[ExecutorRecord]):
    """See gpumux.device.base.Device. `threads` 0 means half the cores, so that two jobs fit;
    `cores` 0 means all this process may use. `low_nice` (0 to 19) is the niceness of low jobs' processes:
    above 0 the kernel stops them wherever a high job wants the core, as no GPU can. `fuser`: what makes fused Programs
    (workers/fusing.py); without it none is made."""

    def __init__(
        self,
        *,
        threads: int = 0,
        cores: int = 0,
        low_nice: int = 0,
        allow_ops: Sequence[str] = (),
        limits: ProgramLimits = DEFAULT,
        confined: Confined | None = None,
        fuser: str = "",
    ) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._threads = threads or max(1, self._cores // 2)
        self._parallel = max(1, self._cores // self._threads)
        super().__init__(
            parallel=self._parallel,
            checks_at_once=max(2, self._cores // 2),
            allow_ops=allow_ops,
            limits=limits,
            confined=confined,
            preempts=low_nice > 0,
        )
        self._low_nice = low_nice
        self._fused = (
            FusedPrograms(fuser, self._confined.of(None, most_bytes=hostmemory.free_bytes())) if fuser else None
        )
        self._groups: MemoryGroups | None = None
        self._to_start: dict[JobId, ExecutorRecord] = {}  # once there is a fork server that is ready
        self._by_token: dict[int, ExecutorRecord] = {}
        self._by_fd: dict[int, ExecutorRecord] = {}
        self._fds: tuple[int, ...] = ()

    # ---- the contract ----------------------------------------------------------------------------

    def open(self) -> DeviceInfo:
        if self._threads > self._cores:
            raise ConfigError(f"{self._threads} threads on {self._cores} cores", "use --threads with no more than that")
        self._total = hostmemory.free_bytes()
        if self._confined.groups:
            try:
                self._groups = MemoryGroups(memory_groups.find())
            except OSError as error:
                _log.warning("memory of jobs' processes is bounded by no control group: %s", error)
        self._open_epoll()
        self._fds = (self._epoll.fileno(),)
        self._start_supervisor()
        self._epoll.poll(OPEN_S)
        self._supervisor.hear()
        try:
            warm = self._require_fork_server("runs torch")
        except ConfigError:
            self.close()
            raise
        targets = {"low": PIECE_S, "high": PIECE_S}
        torch, width = str(warm["torch"]), self._parallel
        return DeviceInfo(
            "cpu", cpu_name(), self._total, width, self._threads, torch, targets, self._checks_at_once, run_s=RUN_S
        )

    def filenos(self) -> Sequence[int]:
        return self._fds

    def due(self) -> float:
        return self._supervisor.due if self._total else inf  # all other events make a descriptor readable

    def poll(self) -> list[DeviceEvent]:
        if self._total == 0:
            return []
        for fd, _ in self._epoll.poll(0):
            executor = self._by_fd.get(fd)
            if executor is not None:
                self._hear(executor)
            elif fd == self._wakeup:
                os.eventfd_read(self._wakeup)
            else:
                self._hear_workers()
        if self._supervisor.due < inf:
            self._supervisor.start_due()
        if self._schedule.waiting:
            self._hand_over()
        events, self._events = self._events, []
        return events

    def check(self, job: JobId, program: ProgramId, encoded: bytes, user: int | None = None) -> None:
        known = self._checks.known(job, program, encoded, user)
        if known is not None:
            self._emit(known)
            return
        super().check(job, program, encoded, user)

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        """See base.Device. The job's process is started with its first command: a fork takes milliseconds of a core,
        which a client could have the daemon spend for nothing by opening jobs."""
        if job in self._jobs:
            return None
        if not is_seed(spec.seed):
            return self._emit(JobDied(job, BAD_SEED))
        nice = self._low_nice if spec.priority is Priority.LOW else 0
        connects = spec.gang is not None and self._confined.calls
        settings: dict[str, Any] = {"threads": self._threads, "seed": spec.seed, "target_s": PIECE_S, "nice": nice}
        settings |= {"shares": spec.arena is not None, "connects": connects}
        settings["confinement"] = self._confined.of(spec.user, connects=connects, most_bytes=self._total)
        group = ""
        if self._groups is not None:
            try:
                group = self._groups.make(most_memory(0))
            except OSError as error:
                return self._emit(JobDied(job, no_group(error)))
            settings["confinement"]["memory_group"] = self._groups.entrance(group)
        try:
            executor = new_executor(job, settings, spec.arena)
        except OSError as error:
            if self._groups is not None:
                self._groups.remove(group)
            return self._emit(JobDied(job, no_process(error)))
        executor.memory_group = group
        fd = executor.channel.fileno()
        self._jobs[job] = self._by_fd[fd] = executor
        self._epoll.register(fd, select.EPOLLIN)
        return self._schedule.open(job)

    def launch(self, launch: Launch) -> None:
        executor = self._jobs.get(launch.job)
        if executor is None:
            self._emit(PieceFailed(launch.launch, UNKNOWN_JOB), JobDied(launch.job, UNKNOWN_JOB))
        elif not executor.unloading:
            if self._schedule.claim(launch.job, launch, launch.stream):
                self._carry_out(executor, launch)
            else:
                self._submit(launch.job, launch, launch.stream)

    def answer_on(self, job: JobId, channel: int, form: dev.AnswerForm) -> None:
        executor = self._live(job)
        if executor is not None:
            self._carry_out(executor, Answers(Descriptors((os.dup(channel),)), form))

    def catch_up(self, job: JobId) -> list[DeviceEvent]:
        executor = self._jobs.get(job)
        if executor is not None and not executor.unloading:
            while not executor.ended and self._hear(executor):
                pass  # messages that it sent before the answer come first
            self._events += unheard(executor, self._schedule)
        return self.poll()

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        executor = self._live(job)
        if executor is not None:
            self._carry_out(executor, Cut(program, target_s))

    def may_join(self, gang: Gang) -> Fault | None:
        """See base.ProcessGroups."""
        return None

    def join(self, job: JobId, gang: Gang) -> None:
        """See base.ProcessGroups."""
        executor = self._live(job)
        if executor is not None:
            self._carry_out(executor, Join(gang))

    def leave(self, job: JobId) -> None:
        """See base.ProcessGroups."""
        executor = self._live(job)
        if executor is not None:
            self._carry_out(executor, Leave())

    def abort(self, job: JobId, fault: Fault) -> None:
        """See base.ProcessGroups. Nothing else ends a wait for a message of gloo's."""
        executor = self._live(job)
        if executor is not None:
            executor.failure = executor.failure or fault
            self._end(executor)

    def make_fused(self, request: int, encoded: bytes, jobs: int) -> None:
        """See base.FusesJobs."""
        if self._fused is None or self._fork_server is None:
            self._emit(FusedProgramRefused(request, NO_FUSER if self._fused is None else NO_FORK_SERVER))
            return
        self._fused.make(request, encoded, jobs)
        self._start_fusing(self._fork_server)

    def prove_fused(self, request: int) -> None:
        """See base.FusesJobs."""
        if self._fused is not None:
            self._fused.prove(request)

    def drop_fused(self, request: int) -> None:
        """See base.FusesJobs."""
        if self._fused is not None:
            for token in self._fused.drop(request):
                self._supervisor.kill(token)
            if self._fork_server is not None:
                self._start_fusing(self._fork_server)

    def load_fused(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        fusion: bytes,
        state: Sequence[int],
        data: SegmentHandle,
    ) -> None:
        """See base.FusesJobs."""
        self._load(job, program, encoded, state, range(len(state)), data, 1, fusion=fusion)

    def load_member(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        fused: ProgramId,
        place: int,
        data: SegmentHandle,
        slots: int,
    ) -> None:
        """See base.FusesJobs."""
        self._load(job, program, encoded, (), (), data, slots, member=MemberLoad(fused, place))

    def _start_fusing(self, server: ForkServer) -> None:
        if self._fused is not None:
            self._fused.start(server, self._epoll)
            self._supervisor.watch()

    def may_regrade(self, priority: Priority) -> Fault | None:
        """See base.Regrading."""
        if priority is Priority.LOW or not self._low_nice or may_be_less_nice():
            return None
        return Fault(
            "refused",
            f"low jobs' processes run at niceness {self._low_nice}, and this daemon may not make one less nice",
            "submit the job anew with high priority, or give the daemon LimitNICE=+0 (or CAP_SYS_NICE), or"
            " low_nice = 0",
        )

    def regrade(self, job: JobId, priority: Priority) -> None:
        """See base.Regrading."""
        executor = self._live(job)
        if executor is not None and self._low_nice:
            more = self._low_nice if priority is Priority.LOW else 0
            if executor.unstarted is not None:
                executor.unstarted.settings["nice"] = more
                return
            nice = min(MOST_NICE, _own_niceness() + more)
            self._supervisor.renice(executor.token, nice)
            self._carry_out(executor, Renice(nice))

    def memory(self) -> dev.MemoryFigures:
        return replace(super().memory(), measured={job: executor.measured for job, executor in self._jobs.items()})

    def close(self) -> None:
        if self._total == 0:
            return
        for job in list(self._jobs):
            self.unload(job)
        self.poll()  # those without a process have ended
        waited = 0
        while self._jobs and self._fork_server is not None and self._fork_server.has_children and waited < CLOSE_S * 10:
            waited += not self._epoll.poll(0.1)
            self.poll()
        self._supervisor.close()
        if self._fused is not None:
            self._fused.close()
        for executor in list(self._jobs.values()):
            self._let_go(executor)
        if self._groups is not None:
            self._groups.close()
        self._checks.close()
        self._epoll.close()
        os.close(self._wakeup)
        self._events.clear()
        self._total = 0

    # ---- executors -------------------------------------------------------------------------------

    def _is_live(self, executor: ExecutorRecord) -> bool:
        return not executor.unloading

    def _data_charge(self, data: SegmentHandle, footprint: Footprint) -> int:
        return data.nbytes

    def _carry_out(self, executor: ExecutorRecord, command: Command | UnscheduledCommand) -> None:
        if isinstance(command, LoadCommand) and self._groups is not None:
            try:
                self._groups.allow(executor.memory_group, most_memory(executor.charged + executor.transient))
            except OSError as error:
                _log.error("job %s: its control group keeps its limit of memory: %s", executor.job, error)
        if executor.unstarted is not None:
            if isinstance(command, Cut):
                return  # of a program that is not loaded
            if self._ready_fork_server is None:
                self._to_start[executor.job] = executor
            else:
                self._start(executor, self._ready_fork_server)
        fault = send(executor.channel, command)
        if fault is not None:  # without an end of the process its job would wait, and hold its place, for ever
            executor.failure = fault
            self._end(executor)

    def _start(self, executor: ExecutorRecord, server: ForkServer) -> None:
        start(executor, server)
        self._by_token[executor.token] = executor
        self._supervisor.watch()

    def _end(self, executor: ExecutorRecord) -> None:
        """Kill a job's process, whose end is reported. If none was started, that its channel ends tells the same."""
        if executor.unstarted is None:
            self._supervisor.kill(executor.token)
        else:
            self._to_start.pop(executor.job, None)
            forget_start(executor)
            executor.status = "was never started"

    def _drop_job(self, executor: ExecutorRecord) -> None:
        executor.unloading = True
        self._end(executor)
        for command in self._schedule.drop(executor.job):
            release(command)
        self._hand_over()

    def _hear(self, executor: ExecutorRecord) -> bool:
        """Handle one message. Returns whether there was one. Reads no second one: epoll reports the channel again at
        less cost."""
        try:
            tag, body, _ = executor.channel.receive()
        except BlockingIOError:
            return False
        except EOFError:
            executor.ended = True
            del self._by_fd[executor.channel.fileno()]
            self._epoll.unregister(executor.channel.fileno())
            self._bury(executor)
            return False
        except MalformedMessage as error:
            self._distrust(executor, error)
            return False
        if not executor.unloading:
            try:
                self._events.extend(answer(executor, self._schedule, tag, body))
            except MalformedMessage as error:
                self._distrust(executor, error)
                return False
            if tag == DONE and executor.failure is not None:
                self._end(executor)
        return True

    def _distrust(self, executor: ExecutorRecord, error: MalformedMessage) -> None:
        """End a process that has sent what no sound one sends, and read no more from it: the job fails alone."""
        _log.error("job %s: its process sent a malformed message: %s", executor.job, error)
        executor.failure = executor.failure or Fault(
            "executor_crashed",
            "the process running the job sent a malformed message, and was ended",
            "report the operators of the step; other jobs are unharmed",
        )
        executor.ended = True
        fd = executor.channel.fileno()
        if self._by_fd.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        self._end(executor)
        self._bury(executor)

    def _bury(self, executor: ExecutorRecord) -> None:
        """Answer the open commands of an executor if both its channel and its process have ended."""
        if not executor.ended or executor.status is None or self._jobs.get(executor.job) is not executor:
            return
        job = executor.job
        if not executor.unloading:
            self._events += unheard(executor, self._schedule)
        unfinished = self._schedule.drop(job)
        if self._groups is not None:
            executor.exceeded = self._groups.exceeded(executor.memory_group)
        for token in self._checks.forget(job):
            self._supervisor.kill(token)
        self._events.extend(obituary(executor, unfinished))
        self._let_go(executor)

    def _let_go(self, executor: ExecutorRecord) -> None:
        del self._jobs[executor.job]
        self._by_token.pop(executor.token, None)  # there is none for one that was never started
        self._by_fd.pop(executor.channel.fileno(), None)
        executor.channel.close()
        executor.page.close()
        if self._groups is not None:
            self._groups.remove(executor.memory_group)

    # ---- the fork server -------------------------------------------------------------------------

    def _hear_workers(self) -> None:
        if self._fused is not None:
            self._events.extend(self._fused.hear())
        super()._hear_workers()

    def can_fork(self, server: ForkServer) -> None:
        super().can_fork(server)
        while self._to_start:
            self._start(self._to_start.popitem()[1], server)
        self._start_fusing(server)

    def child_exited(self, token: int, status: int | str) -> None:
        executor = self._by_token.get(token)
        if executor is None:
            super().child_exited(token, status)
            if self._fused is not None:
                self._events.extend(self._fused.exited(token, status))
            return
        executor.status = status
        if not executor.ended:
            while self._hear(executor):
                pass  # its last messages come before its end
        self._bury(executor)

    def fork_server_lost(self, how: str) -> None:
        for executor in list(self._jobs.values()):
            if executor.unstarted is None:
                executor.status = how
                self._bury(executor)
        if self._fused is not None:
            for token in self._fused.processes:
                self._events.extend(self._fused.exited(token, how))
        super().fork_server_lost(how)


# ---- Commands to executors.


_NO_SCALARS = pack(())


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
        launch, _, step, program, cut, piece, slot, _, _, _, submitted, pieces = command
        head = LAUNCH_HEAD.pack(
            LAUNCH, launch, step, program, cut, piece, pieces, slot, -1.0 if submitted is None else submitted
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
    if isinstance(command, Join):
        channel.send(JOIN, astuple(command.gang))
        return
    if isinstance(command, Leave):
        channel.send(LEAVE, [])
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
    sizes = {"data_bytes": load.nbytes, "transient_bytes": load.transient, "new_buffers": load.new_buffers}
    group = {"fusion": load.fusion, "member": load.member}
    description = pack({"program": load.program, "slots": load.slots, "binding": load.binding, **sizes, **group})
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


# ---- Device events from executors' messages, and for executors that died.


_FEW = "close jobs, or raise the daemon's limits (LimitNOFILE)"
MAX_LISTING = 16 << 20  # bytes of a message other than a profile: a program of 200,000 operators has 4 MB
_log = logging.getLogger(__name__)
_DONE = struct.Struct("<" + DONE_BODY.format[2:])  # without the tag


def no_process(error: OSError) -> Fault:
    """The fault of a job whose process can't be started: the daemon ran out of a resource."""
    return Fault("job_failed", f"its process can't be started: {error.strerror}", _FEW)


def no_group(error: OSError) -> Fault:
    """The fault of a job for whose memory no control group can be made, where the daemon could make some at its start.
    A job without a limit that others have would not be safe."""
    remedy = "restart the daemon, which then goes on without such groups and says so, or make its own group writable"
    return Fault("job_failed", f"the daemon can't make a control group for its memory: {error.strerror}", remedy)


def answer(executor: ExecutorRecord, schedule: Schedule[Command], tag: int, body: memoryview) -> list[DeviceEvent]:
    """Turn an executor's message into events. A command that it answers leaves the schedule. Raises MalformedMessage
    for one that a sound process does not send now; the schedule is as it was then."""
    if tag == DONE:
        return _done(executor, schedule, body)
    job, command = executor.job, schedule.running(executor.job)
    if len(body) > MAX_LISTING and not (tag == PROFILED and isinstance(command, ProfileCommand)):
        raise MalformedMessage(f"{len(body)} bytes in a message {tag}")
    said = unpack(body)
    if tag == RECUT:
        program, cut, pieces, bounds, through_python, gated, wave = listed(said, 7)
        listing = executor.programs.get(ProgramId(program)) if type(program) is int else None
        if listing is None or type(cut) is not int or cut < 1 or not isinstance(through_python, dict):
            raise MalformedMessage("a cut of no program")
        if cut == 1 and through_python:
            reasons = "; ".join(f"{text(target)}: {text(why)}" for target, why in through_python.items())
            _log.info("job %s, program %s: operators run through Python, slower: %s", job, program, reasons[:4000])
        ready = _ready(job, ProgramId(program), cut, len(listing.ops), pieces, bounds, gated, wave)
        listing.recut(cut, list(ready.bounds))
        return [ready]
    if tag == EXCHANGED:
        step, piece, started, ended, moved, exchange_s = listed(said, 6)
        integers([step, piece])
        exchanged = [integers(listed(entry, 3)) for entry in listed(moved)]
        if not is_possible(number(started), number(ended), number(exchange_s)):
            raise MalformedMessage("an exchange at an impossible time")
        moved = tuple(map(tuple, exchanged))
        return [CollectiveEnded(job, step, piece, started, ended, moved, exchange_s)]
    if tag == FAILED:
        executor.failure = fault(listed(said, 4)[1:])  # reported when the process has ended
        return []
    if tag == STEP_FAILED:
        launch, started, ended, suspended, *failure = listed(said, 7)
        if not isinstance(command, Launch) or command.launch != launch:
            raise MalformedMessage("the end of a launch that did not run")
        if not is_possible(number(started), number(ended), number(suspended)):
            raise MalformedMessage("the end of a launch at an impossible time")
        schedule.done(job)
        return [PieceDone(command.launch, started, ended, False, suspended, fault(failure))]
    found = _answered(executor, command, tag, said)
    schedule.done(job)
    return [found]


def _done(executor: ExecutorRecord, schedule: Schedule[Command], body: memoryview) -> list[DeviceEvent]:
    if len(body) != _DONE.size:
        raise MalformedMessage(f"the end of a launch in {len(body)} bytes")
    launch, started, ended, answered, suspended = _DONE.unpack(body)
    if launch == executor.reported:
        if not answered:  # sending failed after the page said that it was answered
            executor.failure = Fault("job_failed", "an answer was lost: the client does not read", "read answers")
        return []
    running = schedule.running(executor.job)
    if not isinstance(running, Launch) or running.launch != launch or not is_possible(started, ended, suspended):
        raise MalformedMessage("the end of a launch that did not run, or at an impossible time")
    schedule.done(executor.job)
    return [PieceDone(LaunchId(launch), started, ended, answered, suspended)]


def _answered(executor: ExecutorRecord, command: Command | None, tag: int, said: Any) -> DeviceEvent:
    """The event for an answer to the command that runs."""
    job = executor.job
    if tag == LOADED and isinstance(command, LoadCommand):
        _, pieces, bounds, table, ops, gated, wave = listed(said, 7)
        names = [text(name) for name in listed(table)]
        if any(op >= len(names) for op in integers(ops)):
            raise MalformedMessage("an operator without a name")
        ready = _ready(job, command.program, 0, len(ops), pieces, bounds, gated, wave)
        executor.programs[command.program] = Listing(names, ops, {0: list(ready.bounds)})
        return ready
    if tag == REFUSED and isinstance(command, LoadCommand):
        refused = ProgramRefused(job, command.program, fault(listed(said, 4)[1:]))
        executor.not_loaded(command)
        return refused
    if tag == TRANSFERRED and isinstance(command, TransferCommand):
        failed = fault(listed(said, 4)[1:])
        return TransferEnded(job, command.transfer, failed if failed.code else None)
    if tag == PROFILED and isinstance(command, ProfileCommand):
        profile, *failure = listed(said, 4)
        failed = fault(failure)
        if not isinstance(profile, bytes):
            raise MalformedMessage("a profile that is no bytes")
        return ProgramProfiled(job, command.program, profile, failed if failed.code else None)
    raise MalformedMessage(f"a message {tag} to a {type(command).__name__}")


def _ready(
    job: JobId, program: ProgramId, cut: int, ops: int, pieces: Any, bounds: Any, gated: Any, wave: Any
) -> ProgramReady:
    """The pieces of a program of `ops` operators. Raises MalformedMessage for what is no such division."""
    lengths = tuple([number(piece) for piece in listed(pieces)])
    starts, first = tuple(integers(bounds)), tuple(integers(gated, 1))
    if not lengths or min(lengths) < 0.0:
        raise MalformedMessage("no pieces, or one shorter than nothing")
    if starts and (len(starts) != len(lengths) + 1 or list(starts) != sorted(starts) or starts[-1] > ops):
        raise MalformedMessage("bounds that are none of the pieces")
    if first and (list(first) != sorted(set(first)) or first[-1] >= len(lengths)):
        raise MalformedMessage("collectives before no piece")
    part = None
    if wave is not None:
        lane, tail, heights = listed(wave, 3)
        integers([lane, tail])
        part = WavePieces(lane, tail, tuple(integers(listed(heights, len(lengths)))))
    return ProgramReady(job, program, cut, lengths, starts, first, part)


def is_possible(started: float, ended: float, part: float) -> bool:
    """Whether something can have run then, by the clock that all processes of a machine share. `part`: of that time."""
    return 0.0 < started <= ended <= monotonic() and 0.0 <= part < inf


def unheard(executor: ExecutorRecord, schedule: Schedule[Command]) -> list[DeviceEvent]:
    """The PieceDone of a launch whose step was answered, if the executor's message about it has not arrived yet."""
    running = schedule.running(executor.job)
    done = executor.answered(running) if isinstance(running, Launch) and not executor.unloading else None
    if done is None or not is_possible(done.started, done.ended, done.suspended):
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


# ---- Niceness. Every process may be made nicer; making it less nice takes CAP_SYS_NICE, or a limit (RLIMIT_NICE) that
# allows it.


def _own_niceness() -> int:
    """The daemon's own niceness, which high jobs' processes have."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def may_be_less_nice(status: Path = Path("/proc/self/status")) -> bool:
    """Whether a process of the daemon may go back to the daemon's own niceness."""
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _NORMAL - _own_niceness():
        return True
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    capable = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(capable >> _CAP_SYS_NICE & 1)
