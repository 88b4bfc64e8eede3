"""The simulated GPU behind the device contract. Steps take the time they would, and compute nothing: results are
zeros, and state is what was put there. No torch.

The clock is the caller's. With a real one (`gpumux serve --device sim`) simulated time passes as real time does,
and the daemon hears of each end when it next looks; on a virtual one (tests) nothing waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from math import inf

from gpumux import hostmemory
from gpumux.device.contract import (
    DeviceEvent,
    JobLost,
    JobUnloaded,
    Launch,
    LaunchDone,
    LaunchFailed,
    MemoryFigures,
    ProgramLoaded,
    ProgramProfiled,
    ProgramRefused,
    Recut,
    Segment,
    TransferDone,
)
from gpumux.device.sim.checks import Checks
from gpumux.device.sim.gpu import Gpu
from gpumux.device.sim.jobs import Ask, Command, Job, LoadedProgram, Move, Request
from gpumux.device.sim.pieces import TARGET_S
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.model import DeviceInfo, Fault, JobId, JobSpec, LaunchId, ProgramId, TransferId
from gpumux.program.limits import DEFAULT, Limits
from gpumux.program.profile import StepProfile

_UNKNOWN = Fault("unknown_job", "the device holds no such job", "open the job first")
_UNCHECKED = Fault("program", "the program was not checked", "check these bytes before loading them")


class SimDevice:
    """See gpumux.device.contract.Device. `known` are profiles whose times count more than the cost model's;
    `parallel` bounds how many pieces run at once, None leaves it to who launches."""

    def __init__(
        self,
        gpu: str | GpuSpec = "a100",
        *,
        clock: Callable[[], float] = time.monotonic,
        known: Sequence[StepProfile] = (),
        parallel: int | None = None,
        allow_ops: Collection[str] = (),
        limits: Limits = DEFAULT,
    ) -> None:
        self.spec = preset(gpu) if isinstance(gpu, str) else gpu
        self._clock = clock
        self._known = tuple(known)
        self._parallel = parallel
        self._checks = Checks(limits, allow_ops)
        self._gpu = Gpu(self.spec)
        self._jobs: dict[JobId, Job] = {}
        self._launches: dict[LaunchId, Launch] = {}  # handed to the GPU
        self._ages: dict[LaunchId, int] = {}  # of launches that wait
        self._age = 0
        self._events: list[DeviceEvent] = []
        self._bell = -1
        self._rung = False  # the bell is readable
        self._total = 0

    # ---- the contract

    def open(self) -> DeviceInfo:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # What jobs keep on this device lies in the host's memory, so that bounds it too.
        self._total = min(self.spec.memory_bytes, hostmemory.free_bytes())
        return DeviceInfo(
            kind="sim",
            name=f"simulated {self.spec.title}",
            memory_bytes=self._total,
            parallel=self._parallel,
            threads=0,
            torch_version="none",
            piece_target_s={priority.name.lower(): seconds for priority, seconds in TARGET_S.items()},
            shares=self.spec.shares,
        )

    def filenos(self) -> Sequence[int]:
        return () if self._bell < 0 else (self._bell,)

    def due(self) -> float:
        if self._bell < 0:
            return inf
        return self._clock() if self._rung else self._gpu.next_event()

    def poll(self) -> list[DeviceEvent]:
        if self._bell < 0:
            return []
        if self._rung:
            os.eventfd_read(self._bell)
            self._rung = False
        for job in [job for job in self._jobs.values() if job.fault is not None]:
            self._bury(job, job.fault or _UNKNOWN)
        for launch, started, ended in self._gpu.advance(self._clock()):
            self._done(self._launches.pop(LaunchId(launch)), started, ended)
        events, self._events = self._events, []
        return events

    def check(self, job: JobId, program: ProgramId, encoded: bytes) -> None:
        self._tell(self._checks.check(job, program, encoded))

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        self._jobs.setdefault(job, Job(job, spec))

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
        held = self._jobs.get(job)
        if held is None:
            self._tell(ProgramRefused(job, program, _UNKNOWN))
            return
        passed = self._checks.take(job, program, encoded)
        loaded: LoadedProgram | Fault = _UNCHECKED
        if passed is not None and passed.program.kind != "aten":
            loaded = Fault("program", "a simulated device compiles nothing", "submit it without compile=True")
        elif passed is not None:
            request = Request(program, passed, tuple(new_buffers), tuple(binding), data.nbytes, slots)
            loaded = held.load(request, self.memory().free_bytes, self.spec, self._known)
        if isinstance(loaded, Fault):
            self._tell(ProgramRefused(job, program, loaded))
        else:
            self._tell(ProgramLoaded(job, program, loaded.predicted.seconds, loaded.predicted.bounds))

    def launch(self, launch: Launch) -> None:
        job = self._jobs.get(launch.job)
        if job is None:
            self._tell(LaunchFailed(launch.launch, _UNKNOWN), JobLost(launch.job, _UNKNOWN))
            return
        program = job.programs.get(launch.program)
        fault = (
            program.refuses(launch) if program else Fault("program", f"no program {launch.program}", "load it first")
        )
        if fault is not None and job.fault is None:
            job.fault = fault
            self._ring()
        self._submit(job, launch)

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        held = self._jobs.get(job)
        if held is not None and program in held.programs:
            held.programs[program].target_s = target_s

    def transfer(
        self, job: JobId, transfer: TransferId, buffers: Sequence[int], segment: Segment, into_device: bool
    ) -> None:
        held = self._jobs.get(job)
        if held is None:
            self._tell(TransferDone(job, transfer, _UNKNOWN))
            return
        self._submit(held, Move(transfer, tuple(buffers), os.dup(segment.fd), segment.nbytes, into_device))

    def profile(self, job: JobId, program: ProgramId) -> None:
        held = self._jobs.get(job)
        if held is None:
            self._tell(ProgramProfiled(job, program, b"", _UNKNOWN))
            return
        self._submit(held, Ask(program))

    def unload(self, job: JobId) -> None:
        held = self._jobs.get(job)
        if held is not None:
            self._let_go(held)
            self._hand_over()
        self._checks.forget(job)
        self._events = [event for event in self._events if getattr(event, "job", None) != job]
        self._tell(JobUnloaded(job))

    def memory(self) -> MemoryFigures:
        by_job = {job.job: job.memory for job in self._jobs.values()}
        return MemoryFigures(self._total, max(0, self._total - sum(by_job.values())), by_job)

    def close(self) -> None:
        if self._bell < 0:
            return
        for job in list(self._jobs.values()):
            self._let_go(job)
        self._events.clear()
        os.close(self._bell)
        self._bell, self._rung, self._total = -1, False, 0

    # ---- commands

    def _submit(self, job: Job, command: Command) -> None:
        if isinstance(command, Launch):
            if self._parallel is None and not job.waiting and job.fault is None:
                self._start(job, command)
                return
            self._age += 1
            self._ages[command.launch] = self._age
        job.waiting.append(command)
        self._hand_over()

    def _hand_over(self) -> None:
        """Start all that can start."""
        while True:
            heads = []
            for job in self._jobs.values():
                if job.waiting and job.fault is None:
                    self._no_launches(job)
                    if job.waiting and isinstance(job.waiting[0], Launch) and self._may_start(job):
                        heads.append((-job.waiting[0].stream, self._ages[job.waiting[0].launch], job))
            if not heads:
                return
            _, _, job = min(heads, key=lambda head: head[:2])
            launch = job.waiting.popleft()
            assert isinstance(launch, Launch)
            self._start(job, launch)

    def _may_start(self, job: Job) -> bool:
        return self._parallel is None or (not job.running and len(self._launches) < self._parallel)

    def _no_launches(self, job: Job) -> None:
        """Carry out what waits at the head and is no launch, once all launches before it have ended."""
        while job.waiting and not job.running and not isinstance(job.waiting[0], Launch):
            command = job.waiting.popleft()
            assert not isinstance(command, Launch)
            self._tell(job.move(command) if isinstance(command, Move) else _profiled(job, command))

    def _start(self, job: Job, launch: Launch) -> None:
        program = job.programs[launch.program]
        self._ages.pop(launch.launch, None)
        self._launches[launch.launch] = launch
        job.running.append(launch)
        kernels = program.kernels(launch)
        self._gpu.launch(launch.launch, launch.job, launch.stream, kernels, self._clock(), launch.share)

    def _done(self, launch: Launch, started: float, ended: float) -> None:
        job = self._jobs[launch.job]
        job.running.popleft()
        self._events.append(LaunchDone(launch.launch, started, ended))
        program = job.programs[launch.program]
        pieces = program.done(launch)
        if pieces is not None:
            self._events.append(Recut(launch.job, launch.program, program.newest, pieces.seconds, pieces.bounds))
        self._hand_over()

    # ---- endings

    def _bury(self, job: Job, fault: Fault) -> None:
        """The job is lost, and everything outstanding with it."""
        for command in (*job.running, *job.waiting):
            if isinstance(command, Launch):
                self._events.append(LaunchFailed(command.launch, fault))
            elif isinstance(command, Move):
                self._events.append(TransferDone(job.job, command.transfer, fault))
            else:
                self._events.append(ProgramProfiled(job.job, command.program, b"", fault))
        self._events.append(JobLost(job.job, fault))
        self._let_go(job)
        self._hand_over()

    def _let_go(self, job: Job) -> None:
        """Forget a job and all that waits for it."""
        self._gpu.drop(job.job, self._clock())
        for launch in job.running:
            del self._launches[launch.launch]
        for command in job.waiting:
            if isinstance(command, Move):
                os.close(command.fd)
            elif isinstance(command, Launch):
                del self._ages[command.launch]
        self._checks.forget(job.job)
        del self._jobs[job.job]

    def _tell(self, *events: DeviceEvent) -> None:
        self._events.extend(events)
        self._ring()

    def _ring(self) -> None:
        """Have whoever waits on our descriptor look."""
        self._rung = True
        os.eventfd_write(self._bell, 1)


def _profiled(job: Job, ask: Ask) -> ProgramProfiled:
    program = job.programs.get(ask.program)
    if program is None:
        fault = Fault("program", f"no program {ask.program}", "load it first")
        return ProgramProfiled(job.job, ask.program, b"", fault)
    if program.newest == 0:
        fault = Fault("program", "no step of the program has run yet", "run one of it first")
        return ProgramProfiled(job.job, ask.program, b"", fault)
    return ProgramProfiled(job.job, ask.program, program.profile())
