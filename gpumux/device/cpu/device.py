"""The CPU as a device: jobs run in processes of their own, forked from a warm one. No torch here.

    CpuDevice --- WarmProcess (zygote) --- forks --+-- executor, one a job
        |                                          +-- checker, one a check
        +------------ a channel to each executor --+

Launches go straight to the executors; the zygote only starts, kills and reaps. What an executor
leaves unanswered when it dies is answered here, once both its channel and its process have ended.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from math import inf

from gpumux import hostmemory
from gpumux.device import base as dev
from gpumux.device.base import DeviceEvent, Launch, Segment
from gpumux.device.cpu.jobs import (
    BAD_SEED,
    NO_WARM,
    UNKNOWN,
    Answers,
    Command,
    Cut,
    Errand,
    Executor,
    Move,
    Profile,
    answer,
    load_command,
    no_process,
    obituary,
    of_job,
    release,
    send,
    start_executor,
    unheard,
)
from gpumux.device.cpu.lending import Lender, returned
from gpumux.device.cpu.niceness import Niceness
from gpumux.device.run.schedule import Schedule
from gpumux.device.workers.channel import DONE, Descriptors
from gpumux.device.workers.checks import Checks
from gpumux.device.workers.fork_server import Keeper, WarmProcess
from gpumux.errors import ConfigError
from gpumux.hostmemory import cpu_name
from gpumux.program.ir import DEFAULT, Limits
from gpumux.types import DeviceInfo, JobId, JobSpec, Priority, ProgramId, TransferId

# ---- How long pieces are to be, handed on to the process that cuts them. No torch.


class Aims:
    """The part of the CPU device that is contract.Device.cut."""

    def _live(self, job: JobId) -> Executor | None:
        raise NotImplementedError

    def _send(self, executor: Executor, command: Errand) -> None:
        raise NotImplementedError

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        """See contract.Device."""
        executor = self._live(job)
        if executor is not None:
            self._send(executor, Cut(program, target_s))


# ----


PIECE_S = 0.002
OPEN_S = 120.0
CLOSE_S = 10.0


class CpuDevice(Lender, Niceness, Aims):
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
        limits: Limits = DEFAULT,
    ) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._threads = threads or max(1, self._cores // 2)
        self._parallel = max(1, self._cores // self._threads)
        self._checks_at_once = max(2, self._cores // 2)
        self._checks = Checks(self._checks_at_once, limits, allow_ops)
        self._low_nice = low_nice
        self._allow_ops = allow_ops
        self._schedule: Schedule[Command] = Schedule(self._parallel, preempts=low_nice > 0)
        self._jobs: dict[JobId, Executor] = {}
        self._by_token: dict[int, Executor] = {}
        self._by_fd: dict[int, Executor] = {}
        self._events: list[DeviceEvent] = []
        self._fds: tuple[int, ...] = ()
        self._total = 0

    # ---- the contract ----------------------------------------------------------------------------

    def open(self) -> DeviceInfo:
        if self._threads > self._cores:
            raise ConfigError(f"{self._threads} threads on {self._cores} cores", "use --threads with no more than that")
        self._total = hostmemory.free_bytes()
        self._epoll = select.epoll()
        self._fds = (self._epoll.fileno(),)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._keeper = Keeper(self._epoll, self, self._allow_ops)
        self._keeper.start()
        self._epoll.poll(OPEN_S)
        self._keeper.hear()
        if self._warm is None or self._warm.facts is None:
            self.close()
            remedy = "see what it printed; try python -c 'import torch'"
            raise ConfigError("the process that runs torch did not start", remedy)
        unknown = self._warm.facts["unknown"]
        if unknown:
            self.close()
            raise ConfigError(
                f"allow_ops names {', '.join(unknown)}, which torch does not have", "mend [access] allow_ops"
            )
        targets = {"low": PIECE_S, "high": PIECE_S}
        torch, width = str(self._warm.facts["torch"]), self._parallel
        return DeviceInfo("cpu", cpu_name(), self._total, width, self._threads, torch, targets, self._checks_at_once)

    def filenos(self) -> Sequence[int]:
        return self._fds

    def due(self) -> float:
        return inf  # its processes speak up

    def poll(self) -> list[DeviceEvent]:
        if self._total == 0:
            return []
        for fd, _ in self._epoll.poll(0):
            executor = self._by_fd.get(fd)
            if executor is not None:
                self._hear(executor)
            elif fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self._keeper.hear()
                self._keeper.watch()
        if self._schedule.waiting:
            self._hand_over()
        events, self._events = self._events, []
        return events

    def check(self, job: JobId, program: ProgramId, encoded: bytes) -> None:
        known = self._checks.known(job, program, encoded)
        if known is not None:
            self._tell(known)
            return
        self._checks.submit(job, program, encoded)
        if self._warm is not None:
            self._checks.start(self._warm)
            self._keeper.watch()
        else:
            self._tell(dev.ProgramRefused(job, program, NO_WARM))

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        if job in self._jobs:
            return None
        if self._warm is None or not -(1 << 63) <= spec.seed < 1 << 64:
            return self._tell(dev.JobLost(job, NO_WARM if self._warm is None else BAD_SEED))
        nice = self._low_nice if spec.priority is Priority.LOW else 0
        settings = {"threads": self._threads, "seed": spec.seed, "target_s": PIECE_S, "nice": nice}
        try:
            executor = start_executor(self._warm, job, settings)
        except OSError as error:
            return self._tell(dev.JobLost(job, no_process(error)))
        fd = executor.channel.fileno()
        self._jobs[job] = self._by_token[executor.token] = self._by_fd[fd] = executor
        self._epoll.register(fd, select.EPOLLIN)
        self._schedule.open(job)
        return self._keeper.watch()

    def load_program(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        new_buffers: Sequence[int],
        binding: Sequence[int],
        data: Segment,
        slots: int,
    ) -> None:
        executor = self._live(job)
        if executor is None:
            return self._tell(dev.ProgramRefused(job, program, UNKNOWN))
        footprint = self._checks.footprint(job, program, encoded)
        wanted = sum(new_buffers) + data.nbytes
        fault = executor.refuses(program, wanted, footprint, self.memory().free_bytes)
        if fault is not None or footprint is None:
            return self._tell(dev.ProgramRefused(job, program, fault or UNKNOWN))
        executor.charged += wanted
        executor.transients[program] = footprint.transient_bytes
        return self._submit(job, load_command(program, encoded, new_buffers, binding, data, slots), None)

    def launch(self, launch: Launch) -> None:
        executor = self._jobs.get(launch.job)
        if executor is None:
            self._tell(dev.LaunchFailed(launch.launch, UNKNOWN), dev.JobLost(launch.job, UNKNOWN))
        elif not executor.unloading:
            if self._schedule.claim(launch.job, launch, launch.stream):
                self._send(executor, launch)
            else:
                self._submit(launch.job, launch, launch.stream)

    def answer_on(self, job: JobId, lane: int, form: dev.AnswerForm) -> None:
        executor = self._live(job)
        if executor is not None:
            self._send(executor, Answers(Descriptors((os.dup(lane),)), form))

    def catch_up(self, job: JobId) -> list[DeviceEvent]:
        executor = self._live(job)
        if executor is not None:
            while not executor.ended and self._hear(executor):
                pass  # what it said before it answered comes first
            self._events += unheard(executor, self._schedule)
        return self.poll()

    def transfer(
        self, job: JobId, transfer: TransferId, buffers: Sequence[int], segment: Segment, into_device: bool
    ) -> None:
        if self._live(job) is None:
            self._tell(dev.TransferDone(job, transfer, UNKNOWN))
            return
        held = Descriptors((os.dup(segment.fd),))
        self._submit(job, Move(transfer, tuple(buffers), held, segment.nbytes, into_device), None)

    def profile(self, job: JobId, program: ProgramId) -> None:
        if self._live(job) is None:
            self._tell(dev.ProgramProfiled(job, program, b"", UNKNOWN))
            return
        self._submit(job, Profile(program), None)

    def unload(self, job: JobId) -> None:
        for token in self._checks.forget(job):
            self._keeper.kill(token)
        executor = self._jobs.get(job)
        if executor is None:
            self._tell(dev.JobUnloaded(job))
            return
        if executor.unloading:
            return
        executor.unloading = True
        self._keeper.kill(executor.token)
        for command in self._schedule.drop(job):
            release(command)
        self._events = [event for event in self._events if not of_job(event, job)]
        self._hand_over()

    def memory(self) -> dev.MemoryFigures:
        by_job = {job: executor.memory for job, executor in self._jobs.items()}
        measured = {job: executor.measured for job, executor in self._jobs.items()}
        return dev.MemoryFigures(self._total, max(0, self._total - sum(by_job.values())), by_job, measured)

    def close(self) -> None:
        if self._total == 0:
            return
        for job in list(self._jobs):
            self.unload(job)
        waited = 0
        while self._jobs and self._warm is not None and self._warm.has_children and waited < CLOSE_S * 10:
            waited += not self._epoll.poll(0.1)
            self.poll()
        self._keeper.close()
        for executor in list(self._jobs.values()):
            self._let_go(executor)
        self._checks.close()
        self._epoll.close()
        os.close(self._bell)
        self._events.clear()
        self._total = 0

    # ---- executors -------------------------------------------------------------------------------

    def _live(self, job: JobId) -> Executor | None:
        executor = self._jobs.get(job)
        return None if executor is None or executor.unloading else executor

    def _submit(self, job: JobId, command: Command, stream: int | None) -> None:
        self._schedule.submit(job, command, stream)
        self._hand_over()

    def _hand_over(self) -> None:
        for job, command in self._schedule.hand_over():
            self._send(self._jobs[job], command)

    def _send(self, executor: Executor, command: Command | Errand) -> None:
        fault = send(executor.channel, command)
        if fault is not None:  # else its job would wait, and its place be taken, for ever
            executor.failure = fault
            self._keeper.kill(executor.token)

    def _hear(self, executor: Executor) -> bool:
        """One message; whether there was one. Asking a second time costs more than being told again."""
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
                self._keeper.kill(executor.token)
        return True

    def _bury(self, executor: Executor) -> None:
        """Once its channel and its process have both ended, answer for it."""
        if not executor.ended or executor.status is None or self._jobs.get(executor.job) is not executor:
            return
        job = executor.job
        if not executor.unloading:
            self._events += [*unheard(executor, self._schedule), *returned(executor, self._schedule, b"")]
        unfinished = self._schedule.drop(job)
        for token in self._checks.forget(job):
            self._keeper.kill(token)
        self._events.extend(obituary(executor, unfinished))
        self._let_go(executor)

    def _let_go(self, executor: Executor) -> None:
        del self._jobs[executor.job]
        del self._by_token[executor.token]
        self._by_fd.pop(executor.channel.fileno(), None)
        executor.channel.close()
        executor.page.close()
        if executor.loan is not None:
            executor.loan.close()

    # ---- the warm process ------------------------------------------------------------------------

    @property
    def _warm(self) -> WarmProcess | None:
        return self._keeper.warm

    def can_fork(self, warm: WarmProcess) -> None:
        self._checks.start(warm)

    def child_exited(self, token: int, status: int | str) -> None:
        executor = self._by_token.get(token)
        if executor is None:
            self._events.extend(self._checks.exited(token, status))
            return
        executor.status = status
        if not executor.ended:
            while self._hear(executor):
                pass  # what it said last comes before its end
        self._bury(executor)

    def warm_lost(self, how: str) -> None:
        for executor in list(self._jobs.values()):
            executor.status = how
            self._bury(executor)
        for token in self._checks.running:
            self._events.extend(self._checks.exited(token, how))

    def _tell(self, *events: DeviceEvent) -> None:
        """Events nobody sent: ring, so that whoever waits on our descriptors looks."""
        self._events.extend(events)
        os.eventfd_write(self._bell, 1)
