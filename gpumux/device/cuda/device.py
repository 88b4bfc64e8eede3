"""One NVIDIA GPU as a device: all jobs in one context, captured pieces on streams of two priorities.

    the daemon's thread (here, dispatch.py)            the worker's thread (worker.py, engine.py)
    launches captured pieces, looks for their ends     loads, runs first steps, captures, copies state, lets go

Nothing here waits for the GPU or for the worker. Programs are checked in processes of their own, as on the CPU: they
were traced there, and retarget.py says what it takes to run them here. A failure of a job's work ends that job; one
that ends the GPU's context ends them all, and `poll` raises DeviceLost.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from gpumux.device import contract as dev
from gpumux.device.contract import DeviceEvent, Launch, Segment
from gpumux.device.cpu.answers import BAD_SEED, NO_WARM, UNKNOWN, of_job
from gpumux.device.cpu.checks import Checks
from gpumux.device.cpu.descriptors import Descriptors
from gpumux.device.cpu.jobs import Move, Profile
from gpumux.device.cpu.keeper import Keeper
from gpumux.device.cpu.warm import WarmProcess
from gpumux.device.cuda.cuts import HIGH_S, LOW_S
from gpumux.device.cuda.dispatch import Dispatch
from gpumux.device.cuda.driver import CudaDriver, Driver, Facts
from gpumux.device.cuda.flights import Flights
from gpumux.device.cuda.jobs import CudaJob, Load
from gpumux.device.cuda.partitions import Partitions
from gpumux.device.cuda.profiling import Profiles
from gpumux.device.cuda.running import Running
from gpumux.device.cuda.turns import Turns
from gpumux.device.cuda.worker import Worker
from gpumux.errors import ConfigError, DeviceLost, GpumuxError
from gpumux.model import DeviceInfo, Fault, JobId, JobSpec, Priority, ProgramId, TransferId
from gpumux.program.limits import DEFAULT, Limits

if TYPE_CHECKING:
    from gpumux.device.cuda.compute import Compute

OPEN_S, CLOSE_S = 120.0, 10.0
STREAMS = 4  # of each class, for all jobs
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
log = logging.getLogger(__name__)


def real_compute(driver: Driver, ordinal: int) -> Compute:
    from gpumux.device.cuda.compute import CudaCompute

    return CudaCompute(driver, ordinal)


class CudaDevice(Dispatch):
    """See gpumux.device.contract.Device. `ordinal`: which GPU, as the driver numbers those this process may use.
    `parallel`: pieces at once, None for as many as windows allow. `shares`: parts of the multiprocessors to which low
    work can be confined (partitions.py). `driver` and `compute` are what tests replace."""

    def __init__(
        self,
        ordinal: int = 0,
        *,
        parallel: int | None = None,
        shares: Sequence[float] = (),
        allow_ops: Sequence[str] = (),
        limits: Limits = DEFAULT,
        driver: Driver | None = None,
        compute: Callable[[Driver, int], Compute] = real_compute,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ordinal, self._parallel, self._allow_ops = ordinal, parallel, allow_ops
        self._wanted_shares = tuple(shares)
        self._driver: Driver = driver or CudaDriver()
        self._compute, self._clock = compute, clock
        self._checks_at_once = max(2, (os.cpu_count() or 2) // 4)
        super().__init__(Checks(self._checks_at_once, limits, allow_ops), parallel)
        self._parts: list[Callable[[], object]] = []  # how to give back what is open, in order of opening
        self._total = 0

    # ---- the contract ----------------------------------------------------------------------------

    def open(self) -> DeviceInfo:
        os.environ.setdefault(QUEUES, "32")  # read when the context is made
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # --gpu N is the N of nvidia-smi
        # torch refuses matrix products of programs that ask for deterministic algorithms without it. It is read once.
        os.environ.setdefault(WORKSPACES, ":4096:8")
        try:
            self._epoll = select.epoll()
            self._parts.append(self._epoll.close)
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._parts.append(partial(os.close, self._bell))
            self._epoll.register(self._bell, select.EPOLLIN)
            facts = self._open_gpu()
            self._open_keeper()
        except BaseException:
            self._give_back()
            raise
        self._name = facts.name
        self._total = self._driver.memory()[0]
        targets = {"low": LOW_S, "high": HIGH_S}
        version = self._engine.torch_version
        shares = self._partitions.shares
        return DeviceInfo(
            "cuda", facts.name, self._total, self._parallel, 0, version, targets, self._checks_at_once, shares
        )

    def filenos(self) -> Sequence[int]:
        return (self._epoll.fileno(),)

    def due(self) -> float:
        """Launches end without a word: while any is out, look again and again."""
        return min(self._flights.due(), self._profiles.due()) if self._total else inf

    def poll(self) -> list[DeviceEvent]:
        """Raises DeviceLost when nothing will ever run on this GPU again."""
        if self._total == 0:
            return []
        for fd, _ in self._epoll.poll(0):
            if fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self._keeper.hear()
                self._keeper.watch()
        try:
            self._worker.finished()
            for landed in self._flights.landed():
                self._landed(landed)
            self._profiles.expire()
            if self._schedule.waiting:
                self._hand_over()
            self._trim()
        except DeviceLost as lost:
            self._lost = lost
        if self._lost is not None:
            raise self._lost
        events, self._events = self._events, []
        return events

    def check(self, job: JobId, program: ProgramId, encoded: bytes) -> None:
        self._checks.submit(job, program, encoded)
        if self._warm is not None:
            self._checks.start(self._warm)
            self._keeper.watch()
        else:
            self._tell(dev.ProgramRefused(job, program, NO_WARM))

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        if job in self._jobs:
            return
        if not -(1 << 63) <= spec.seed < 1 << 64:
            self._tell(dev.JobLost(job, BAD_SEED))
            return
        self._jobs[job] = CudaJob(job, spec)
        self._schedule.open(job)
        self._part()

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
        held = self._live(job)
        if held is None:
            return self._tell(dev.ProgramRefused(job, program, UNKNOWN))
        footprint = self._checks.footprint(job, program, encoded)
        wanted = sum(new_buffers) + (3 * footprint.slot_bytes if footprint is not None else 0)
        free = self.memory().free_bytes
        fault = held.refuses(program, wanted, footprint, free)
        if fault is not None or footprint is None:
            return self._tell(dev.ProgramRefused(job, program, fault or UNKNOWN))
        held.charged += wanted
        held.transients[program] = footprint.transient_bytes
        duplicate = Descriptors((os.dup(data.fd),))
        transient = footprint.transient_bytes
        load = Load(
            program, encoded, tuple(new_buffers), tuple(binding), duplicate, data.nbytes, slots, wanted, transient,
            free - wanted,
        )  # fmt: skip
        return self._submit(job, load, None)

    def launch(self, launch: Launch) -> None:
        held = self._jobs.get(launch.job)
        if held is None:
            self._tell(dev.LaunchFailed(launch.launch, UNKNOWN), dev.JobLost(launch.job, UNKNOWN))
        elif held.fault is not None and not held.unloading:
            self._tell(dev.LaunchFailed(launch.launch, held.fault))
        elif not held.unloading:
            if self._schedule.claim(launch.job, launch, launch.stream):
                self._accept(held, launch)
            else:
                self._submit(launch.job, launch, launch.stream)

    def transfer(
        self, job: JobId, transfer: TransferId, buffers: Sequence[int], segment: Segment, into_device: bool
    ) -> None:
        held = self._live(job)
        if held is None:
            fault = self._jobs[job].fault if job in self._jobs else None
            self._tell(dev.TransferDone(job, transfer, fault or UNKNOWN))
            return
        duplicate = Descriptors((os.dup(segment.fd),))
        self._submit(job, Move(transfer, tuple(buffers), duplicate, segment.nbytes, into_device), None)

    def profile(self, job: JobId, program: ProgramId) -> None:
        held = self._live(job)
        if held is None:
            fault = self._jobs[job].fault if job in self._jobs else None
            self._tell(dev.ProgramProfiled(job, program, b"", fault or UNKNOWN))
            return
        self._submit(job, Profile(program), None)

    def unload(self, job: JobId) -> None:
        for token in self._checks.forget(job):
            self._keeper.kill(token)
        held = self._jobs.get(job)
        if held is None:
            self._tell(dev.JobUnloaded(job))
            return
        if held.unloading:
            return
        self._events = [event for event in self._events if not of_job(event, job)]
        self._drop(held)

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        """Graphs of the new cut are captured between two steps of the job."""
        held = self._live(job)
        if held is not None and program in held.programs:
            held.programs[program].cuts.aim(target_s)

    def may_regrade(self, priority: Priority) -> Fault | None:
        """See contract.Regrading."""
        return None

    def regrade(self, job: JobId, priority: Priority) -> None:
        """See contract.Regrading. Captured kernels keep the priority of the stream they were captured on, so the
        job's programs are captured anew, each after its next step."""
        held = self._live(job)
        if held is not None:
            held.spec = replace(held.spec, priority=priority)
            held.stale = {number for number, loaded in held.programs.items() if loaded.cuts.newest}

    def memory(self) -> dev.MemoryFigures:
        by_job = {job: held.memory for job, held in self._jobs.items()}
        return dev.MemoryFigures(self._total, max(0, self._total - sum(by_job.values())), by_job)

    def close(self) -> None:
        if self._total == 0:
            return
        if self._lost is None:
            for job in list(self._jobs):
                self.unload(job)
            end = monotonic() + CLOSE_S
            try:
                while self._jobs and monotonic() < end:
                    self._epoll.poll(0.01)
                    self.poll()
            except DeviceLost:
                pass  # it is being given back all the same
        self._total = 0
        self._give_back()
        self._abandon()
        self._events.clear()

    # ---- opening and closing ---------------------------------------------------------------------

    def _open_gpu(self) -> Facts:
        driver = self._driver
        facts = driver.open(self._ordinal)
        self._parts.append(driver.close)
        compute = self._compute(driver, self._ordinal)
        compute.enter()
        from gpumux.device.cuda.engine import Engine  # torch, which only who opens a GPU needs

        least, greatest = facts.priorities
        priorities = {int(Priority.LOW): least, int(Priority.HIGH): greatest}
        self._partitions = Partitions(driver, facts, self._wanted_shares, least)
        self._parts.append(self._partitions.close)
        streams = {number: [driver.stream(priorities[number]) for _ in range(STREAMS)] for number in priorities}
        self._parts += [partial(driver.destroy_stream, stream) for made in streams.values() for stream in made]
        beside = {stream: driver.stream(priorities[number]) for number, made in streams.items() for stream in made}
        beside |= {stream: driver.stream(least) for stream in self._partitions.run_streams}
        self._parts += [partial(driver.destroy_stream, stream) for stream in beside.values()]
        self._engine = Engine(driver, compute, priorities, self._partitions, copies=beside)
        self._parts.append(self._engine.close)
        self._running = Running(driver, Turns(streams), self._partitions)
        self._flights = Flights(driver, self._clock, greatest)
        self._parts.append(self._flights.close)
        self._worker = Worker(self._engine.inside, self._tell)
        self._parts.append(partial(self._worker.close, CLOSE_S))
        self._profiles = Profiles(
            self._clock,
            lambda event: self._events.append(event),
            lambda job, work, done: self._worker.submit(work, done, int(job.spec.priority)),
            self._advance,
            lambda loaded: self._engine.profile(loaded, self._name),
        )
        return facts

    def _open_keeper(self) -> None:
        self._keeper = Keeper(self._epoll, self, self._allow_ops)
        self._keeper.start()
        self._parts += [self._checks.close, self._keeper.close]
        end = monotonic() + OPEN_S
        while self._warm is not None and self._warm.facts is None and monotonic() < end:
            for fd, _ in self._epoll.poll(max(0.0, end - monotonic())):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                else:
                    self._keeper.hear()
            self._worker.finished()  # the likeliest failure on a new machine: its thread can't begin
        if self._warm is None or self._warm.facts is None:
            remedy = "see what it printed; try python -c 'import torch'"
            raise ConfigError("the process that checks programs did not start", remedy)
        unknown = self._warm.facts["unknown"]
        if unknown:
            raise ConfigError(
                f"allow_ops names {', '.join(unknown)}, which torch does not have", "mend [access] allow_ops"
            )

    def _give_back(self) -> None:
        """What is open, the last first. A GPU that is lost says so at every call; there is nothing left to give."""
        while self._parts:
            try:
                self._parts.pop()()
            except GpumuxError as error:
                log.warning("while closing: %s", error)

    # ---- the process that checks programs --------------------------------------------------------

    @property
    def _warm(self) -> WarmProcess | None:
        return self._keeper.warm

    def can_fork(self, warm: WarmProcess) -> None:
        self._checks.start(warm)

    def child_exited(self, token: int, status: int | str) -> None:
        self._events.extend(self._checks.exited(token, status))

    def warm_lost(self, how: str) -> None:
        for token in self._checks.running:
            self._events.extend(self._checks.exited(token, how))

    def _tell(self, *events: DeviceEvent) -> None:
        """Ring, so that whoever waits on our descriptors looks. Without events from any thread."""
        self._events.extend(events)
        os.eventfd_write(self._bell, 1)
