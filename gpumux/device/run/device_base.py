"""What devices repeat that check Programs in processes of their own and keep a schedule of commands. No torch."""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from gpumux.device import base as dev
from gpumux.device.base import DeviceEvent, SegmentHandle
from gpumux.device.run.schedule import LoadCommand, MemberLoad, ProfileCommand, Schedule, TransferCommand
from gpumux.device.workers.channel import Descriptors
from gpumux.device.workers.checks import Checks
from gpumux.device.workers.confinement import Confined
from gpumux.device.workers.fork_server import ForkServer, ForkServerSupervisor
from gpumux.errors import ConfigError
from gpumux.program.ir import ProgramLimits
from gpumux.types import (
    Fault,
    Footprint,
    JobId,
    JobReleased,
    ProgramId,
    TransferEnded,
    TransferId,
)

CHECK_BYTES = 2 << 30  # of private memory for a check, beside SPARE_BYTES: the most operators allowed take 0.3 GiB
UNKNOWN_JOB = Fault("unknown_job", "the device holds no such job", "open the job first")
BAD_SEED = Fault("program", "the seed is not a 64-bit integer", "choose another")
UNCHECKED = Fault("program", "the program was not checked", "check these bytes before loading them")
NO_FORK_SERVER = Fault(
    "executor_crashed",
    "the process that starts executors is gone",
    "wait: another one is started; see the daemon's log",
)


@dataclass(slots=True, kw_only=True)
class DeviceJob:
    """What every device keeps of a job; its own record extends it. `WHERE`: follows the free bytes in refusals."""

    WHERE: ClassVar[str] = ""
    arena: int | None = None  # which it shares with other jobs (JobSpec)
    charged: int = 0  # bytes of its buffers and data
    unloading: bool = False
    transients: dict[ProgramId, int] = field(default_factory=dict)  # bytes of temporaries, by program loaded or loading

    @property
    def transient(self) -> int:
        """Bytes of temporaries of the program that needs most: they never run at once."""
        return max(self.transients.values(), default=0)

    @property
    def memory(self) -> int:
        """Bytes charged to the job."""
        return self.charged + self.transient

    def refuses(self, program: ProgramId, wanted: int, free: int) -> Fault | None:
        """Why a program that needs `wanted` bytes is refused where `free` are left, or None."""
        if program in self.transients:
            return Fault("program", f"program {program} is loaded already", "choose another number")
        if wanted <= free:
            return None
        message = f"the program needs {wanted} bytes and {free} are free{self.WHERE}"
        return Fault("admission_refused", message, "use smaller batches, or wait for other jobs to end")

    def not_loaded(self, load: LoadCommand) -> None:
        """Give back what a program was charged that could not be loaded."""
        self.charged -= load.charge
        del self.transients[load.program]


J = TypeVar("J", bound=DeviceJob)


class DeviceBase(ABC, Generic[J]):
    """Jobs, their schedule, the checks of their Programs and the events of a device. `J`: its record of a job.
    `parallel`: pieces that run at once; `preempts`: as Schedule takes it; `checks_at_once`: processes that check;
    `confined`: what its processes give up, None for all that is possible."""

    def __init__(
        self,
        *,
        parallel: int,
        checks_at_once: int,
        allow_ops: Sequence[str],
        limits: ProgramLimits,
        confined: Confined | None = None,
        preempts: bool = False,
    ) -> None:
        self._allow_ops = allow_ops
        self._checks_at_once = checks_at_once
        self._confined = confined or Confined.choose("auto")
        self._checks = Checks(checks_at_once, limits, allow_ops, self._confined.of(None, most_bytes=CHECK_BYTES))
        self._schedule: Schedule[Any] = Schedule(parallel, preempts=preempts)
        self._jobs: dict[JobId, J] = {}
        self._events: list[DeviceEvent] = []
        self._total = 0  # bytes of memory; 0 while the device is not open

    # ---- what each device does in its own way

    @abstractmethod
    def _is_live(self, job: J) -> bool:
        """Whether commands of the job are carried out: it is neither lost nor being unloaded."""

    @abstractmethod
    def _carry_out(self, job: J, command: Any) -> None:
        """Begin a command, whose turn has come."""

    @abstractmethod
    def _drop_job(self, job: J) -> None:
        """Unload a job, whose commands are not answered."""

    @abstractmethod
    def _data_charge(self, data: SegmentHandle, footprint: Footprint) -> int:
        """Bytes that a program is charged for its slots of data."""

    def _fault_of(self, job: JobId) -> Fault:
        """Why a command of a job that is not live is refused."""
        return UNKNOWN_JOB

    # ---- the contract (base.Device)

    def check(self, job: JobId, program: ProgramId, encoded: bytes, user: int | None = None) -> None:
        self._checks.submit(job, program, encoded, user)
        if self._ready_fork_server is not None:  # else once it is ready
            self._start_checks(self._ready_fork_server)
            self._supervisor.watch()

    def load_program(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        new_buffers: Sequence[int],
        binding: Sequence[int],
        data: SegmentHandle,
        slots: int,
    ) -> None:
        self._load(job, program, encoded, new_buffers, binding, data, slots)

    def _load(
        self,
        job: JobId,
        program: ProgramId,
        encoded: bytes,
        new_buffers: Sequence[int],
        binding: Sequence[int],
        data: SegmentHandle,
        slots: int,
        *,
        fusion: bytes = b"",
        member: MemberLoad | None = None,
    ) -> None:
        """Load a program. That of a member lies on state and data that others are charged for."""
        held, footprint = self._live(job), self._checks.footprint(job, program, encoded)
        if held is None or footprint is None:
            self._emit(dev.ProgramRefused(job, program, self._fault_of(job) if held is None else UNCHECKED))
            return
        charge, transient = sum(new_buffers), footprint.transient_bytes
        if member is None:
            charge += self._data_charge(data, footprint)
        free = self.memory().free_bytes
        there = 0  # bytes of the arena in which the temporaries lie
        if held.arena is not None:
            there = max(other.transient for other in self._jobs.values() if other.arena == held.arena)
        fault = held.refuses(program, charge + max(0, transient - there), free)
        if fault is not None:
            self._emit(dev.ProgramRefused(job, program, fault))
            return
        held.charged += charge
        held.transients[program] = transient
        load = LoadCommand(
            program=program,
            encoded=encoded,
            new_buffers=tuple(new_buffers),
            binding=tuple(binding),
            held=Descriptors((os.dup(data.fd),)),
            nbytes=data.nbytes,
            slots=slots,
            charge=charge,
            transient=transient,
            room=free - charge,
            fusion=fusion,
            member=member,
        )
        self._submit(job, load, None)

    def transfer(
        self, job: JobId, transfer: TransferId, buffers: Sequence[int], segment: SegmentHandle, into_device: bool
    ) -> None:
        if self._live(job) is None:
            self._emit(TransferEnded(job, transfer, self._fault_of(job)))
            return
        held = Descriptors((os.dup(segment.fd),))
        self._submit(job, TransferCommand(transfer, tuple(buffers), held, segment.nbytes, into_device), None)

    def profile(self, job: JobId, program: ProgramId) -> None:
        if self._live(job) is None:
            self._emit(dev.ProgramProfiled(job, program, b"", self._fault_of(job)))
            return
        self._submit(job, ProfileCommand(program), None)

    def unload(self, job: JobId) -> None:
        for token in self._checks.forget(job):
            self._supervisor.kill(token)
        held = self._jobs.get(job)
        if held is None:
            self._emit(JobReleased(job))
            return
        if held.unloading:
            return
        self._events = [event for event in self._events if not _names(event, job)]
        self._drop_job(held)

    def memory(self) -> dev.MemoryFigures:
        by_job = {job: held.memory for job, held in self._jobs.items()}
        used = sum(by_job.values()) - dev.counted_twice((held.arena, held.transient) for held in self._jobs.values())
        return dev.MemoryFigures(self._total, max(0, self._total - used), by_job)

    # ---- opening

    def _open_epoll(self) -> None:
        """Make the epoll instance that the caller waits on, and the descriptor that wakes it."""
        self._epoll = select.epoll()
        try:
            self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        self._epoll.register(self._wakeup, select.EPOLLIN)

    def _start_supervisor(self) -> None:
        """Start the process that forks others."""
        self._supervisor = ForkServerSupervisor(self._epoll, self, self._allow_ops)
        self._supervisor.start()

    def _require_fork_server(self, purpose: str) -> dict[str, Any]:
        """What the process that forks others reported of torch. Raises ConfigError if that process is not ready, or
        torch lacks operators that `allow_ops` names."""
        if self._fork_server is None or self._fork_server.facts is None:
            remedy = "see what it printed; try python -c 'import torch'"
            raise ConfigError(f"the process that {purpose} did not start", remedy)
        unknown = self._fork_server.facts["unknown"]
        if unknown:
            raise ConfigError(
                f"allow_ops names {', '.join(unknown)}, which torch does not have", "mend [access] allow_ops"
            )
        return self._fork_server.facts

    # ---- jobs and their commands

    def _live(self, job: JobId) -> J | None:
        held = self._jobs.get(job)
        return held if held is not None and self._is_live(held) else None

    def _submit(self, job: JobId, command: Any, stream: int | None) -> None:
        self._schedule.submit(job, command, stream)
        self._hand_over()

    def _hand_over(self) -> None:
        for job, command in self._schedule.hand_over():
            self._carry_out(self._jobs[job], command)

    def _emit(self, *events: DeviceEvent) -> None:
        """Add events, and make the descriptor readable. Without events it may be called by any thread."""
        self._events.extend(events)
        os.eventfd_write(self._wakeup, 1)

    # ---- the process that forks others (fork_server.Owner)

    @property
    def _fork_server(self) -> ForkServer | None:
        return self._supervisor.server

    @property
    def _ready_fork_server(self) -> ForkServer | None:
        """None while there is none that forks: another one is started then, and what is to be forked waits. One that
        is not ready yet is asked for nothing, since what it was asked for ends with it."""
        server = self._supervisor.server
        return None if server is None or server.facts is None else server

    def _hear_workers(self) -> None:
        """Handle what the fork server and the checkers have sent."""
        self._events.extend(self._checks.hear())
        self._supervisor.hear()
        self._supervisor.watch()

    def can_fork(self, server: ForkServer) -> None:
        self._start_checks(server)

    def _start_checks(self, server: ForkServer) -> None:
        refused = self._checks.start(server, self._epoll)
        if refused:
            self._emit(*refused)

    def child_exited(self, token: int, status: int | str) -> None:
        self._events.extend(self._checks.exited(token, status))

    def fork_server_lost(self, how: str) -> None:
        for token in self._checks.processes:
            self._events.extend(self._checks.exited(token, how))


def is_seed(seed: int) -> bool:
    """Whether torch's generators take it: an integer of 64 bits, signed or not."""
    return -(1 << 63) <= seed < 1 << 64


def _names(event: DeviceEvent, job: JobId) -> bool:
    """Whether an event names the job. PieceDone and PieceFailed name none."""
    return getattr(event, "job", None) == job
