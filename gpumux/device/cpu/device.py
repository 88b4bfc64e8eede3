"""The CPU as a device: each job runs in a process of its own, which the fork server starts. Imports no torch.

    CpuDevice --- ForkServer --- forks ---------+-- executor, one a job
        |                                       +-- checker, one a check
        +--------- a channel to each executor --+

Launches go straight to the executors; the fork server only starts, kills and reaps processes. When an executor dies,
the device answers its open commands once both its channel and its process have ended.
"""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from gpumux import hostmemory
from gpumux.device import base as dev
from gpumux.device.base import DeviceEvent, Launch, SegmentHandle
from gpumux.device.cpu.jobs import (
    Answers,
    Command,
    Cut,
    ExecutorRecord,
    Renice,
    UnscheduledCommand,
    answer,
    no_process,
    obituary,
    release,
    send,
    start_executor,
    unheard,
)
from gpumux.device.run.device_base import BAD_SEED, NO_FORK_SERVER, UNKNOWN_JOB, DeviceBase, is_seed
from gpumux.device.workers.channel import DONE, Descriptors
from gpumux.errors import ConfigError
from gpumux.hostmemory import cpu_name
from gpumux.program.ir import DEFAULT, ProgramLimits
from gpumux.types import DeviceInfo, Fault, Footprint, JobDied, JobId, JobSpec, PieceFailed, Priority, ProgramId

_CAP_SYS_NICE = 23
_NORMAL = 20  # RLIMIT_NICE that allows niceness 0
MOST_NICE = 19
PIECE_S = 0.002
OPEN_S = 120.0
CLOSE_S = 10.0


class CpuDevice(DeviceBase[ExecutorRecord]):
    """See gpumux.device.base.Device. `threads` 0 means half the cores, so that two jobs fit;
    `cores` 0 means all this process may use. `low_nice` (0 to 19) is the niceness of low jobs' processes:
    above 0 the kernel stops them wherever a high job wants the core, as no GPU can."""

    def __init__(
        self,
        *,
        threads: int = 0,
        cores: int = 0,
        low_nice: int = 0,
        allow_ops: Sequence[str] = (),
        limits: ProgramLimits = DEFAULT,
    ) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._threads = threads or max(1, self._cores // 2)
        self._parallel = max(1, self._cores // self._threads)
        super().__init__(
            parallel=self._parallel,
            checks_at_once=max(2, self._cores // 2),
            allow_ops=allow_ops,
            limits=limits,
            preempts=low_nice > 0,
        )
        self._low_nice = low_nice
        self._by_token: dict[int, ExecutorRecord] = {}
        self._by_fd: dict[int, ExecutorRecord] = {}
        self._fds: tuple[int, ...] = ()

    # ---- the contract ----------------------------------------------------------------------------

    def open(self) -> DeviceInfo:
        if self._threads > self._cores:
            raise ConfigError(f"{self._threads} threads on {self._cores} cores", "use --threads with no more than that")
        self._total = hostmemory.free_bytes()
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
        return DeviceInfo("cpu", cpu_name(), self._total, width, self._threads, torch, targets, self._checks_at_once)

    def filenos(self) -> Sequence[int]:
        return self._fds

    def due(self) -> float:
        return inf  # every event makes a descriptor readable

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
                self._supervisor.hear()
                self._supervisor.watch()
        if self._schedule.waiting:
            self._hand_over()
        events, self._events = self._events, []
        return events

    def check(self, job: JobId, program: ProgramId, encoded: bytes) -> None:
        known = self._checks.known(job, program, encoded)
        if known is not None:
            self._emit(known)
            return
        super().check(job, program, encoded)

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        if job in self._jobs:
            return None
        if self._fork_server is None or not is_seed(spec.seed):
            return self._emit(JobDied(job, NO_FORK_SERVER if self._fork_server is None else BAD_SEED))
        nice = self._low_nice if spec.priority is Priority.LOW else 0
        settings = {"threads": self._threads, "seed": spec.seed, "target_s": PIECE_S, "nice": nice}
        try:
            executor = start_executor(self._fork_server, job, settings)
        except OSError as error:
            return self._emit(JobDied(job, no_process(error)))
        fd = executor.channel.fileno()
        self._jobs[job] = self._by_token[executor.token] = self._by_fd[fd] = executor
        self._epoll.register(fd, select.EPOLLIN)
        self._schedule.open(job)
        return self._supervisor.watch()

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
            self._carry_out(executor, Renice(min(MOST_NICE, _own_niceness() + more)))

    def memory(self) -> dev.MemoryFigures:
        return replace(super().memory(), measured={job: executor.measured for job, executor in self._jobs.items()})

    def close(self) -> None:
        if self._total == 0:
            return
        for job in list(self._jobs):
            self.unload(job)
        waited = 0
        while self._jobs and self._fork_server is not None and self._fork_server.has_children and waited < CLOSE_S * 10:
            waited += not self._epoll.poll(0.1)
            self.poll()
        self._supervisor.close()
        for executor in list(self._jobs.values()):
            self._let_go(executor)
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
        fault = send(executor.channel, command)
        if fault is not None:  # without an end of the process its job would wait, and hold its place, for ever
            executor.failure = fault
            self._supervisor.kill(executor.token)

    def _drop_job(self, executor: ExecutorRecord) -> None:
        executor.unloading = True
        self._supervisor.kill(executor.token)
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
        if not executor.unloading:
            self._events.extend(answer(executor, self._schedule, tag, body))
            if tag == DONE and executor.failure is not None:
                self._supervisor.kill(executor.token)
        return True

    def _bury(self, executor: ExecutorRecord) -> None:
        """Answer the open commands of an executor if both its channel and its process have ended."""
        if not executor.ended or executor.status is None or self._jobs.get(executor.job) is not executor:
            return
        job = executor.job
        if not executor.unloading:
            self._events += unheard(executor, self._schedule)
        unfinished = self._schedule.drop(job)
        for token in self._checks.forget(job):
            self._supervisor.kill(token)
        self._events.extend(obituary(executor, unfinished))
        self._let_go(executor)

    def _let_go(self, executor: ExecutorRecord) -> None:
        del self._jobs[executor.job]
        del self._by_token[executor.token]
        self._by_fd.pop(executor.channel.fileno(), None)
        executor.channel.close()
        executor.page.close()

    # ---- the fork server -------------------------------------------------------------------------

    def child_exited(self, token: int, status: int | str) -> None:
        executor = self._by_token.get(token)
        if executor is None:
            super().child_exited(token, status)
            return
        executor.status = status
        if not executor.ended:
            while self._hear(executor):
                pass  # its last messages come before its end
        self._bury(executor)

    def fork_server_lost(self, how: str) -> None:
        for executor in list(self._jobs.values()):
            executor.status = how
            self._bury(executor)
        super().fork_server_lost(how)


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
