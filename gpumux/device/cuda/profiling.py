"""Requests for operator times, from being asked to being answered.

    asked -> the twin is captured (cuts.py) -> STEPS steps run through it -> written and told

One at a time for each job, in the order they were asked in. A job that runs no step for WAIT_S is told the times of its
timed step instead (cuts.py), and the profile's note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from gpumux.device import base as dev
from gpumux.device.base import DeviceEvent, Launch
from gpumux.device.cuda.cuts import Twin
from gpumux.device.cuda.driver import as_fault
from gpumux.device.cuda.jobs import CudaJob, Instrument
from gpumux.errors import DeviceLost
from gpumux.types import Fault, JobId, ProgramId

if TYPE_CHECKING:
    from gpumux.device.cuda.program import LoadedProgram


WAIT_S = 1.0  # for a step to begin
Done = Callable[[Any, BaseException | None], None]


class Profiles:
    """`tell` takes events; `work` has something done by the worker's thread; `go_on` starts what can start of a job;
    `write` is work that makes a profile's text of a program, from its twin if that has measured something."""

    def __init__(
        self, clock: Callable[[], float], tell: Callable[[DeviceEvent], None],
        work: Callable[[CudaJob, Callable[[], Any], Done], None], go_on: Callable[[CudaJob], None],
        write: Callable[[LoadedProgram], bytes],
    ) -> None:  # fmt: skip
        self._clock, self._tell, self._work, self._go_on, self._write = clock, tell, work, go_on, write
        self._until: dict[JobId, float] = {}  # when a job's first request is answered whatever has run
        self._jobs: dict[JobId, CudaJob] = {}

    def ask(self, job: CudaJob, program: ProgramId) -> None:
        job.profiling.append(program)
        if len(job.profiling) == 1:
            self._start(job)

    def instrumented(self, job: CudaJob, program: ProgramId, twin: Twin | None) -> None:
        """The twin was captured, or could not be; then the times of the first steps are told."""
        wanted = bool(job.profiling) and job.profiling[0] == program
        usable = wanted and twin is not None and not job.programs[program].partly_captured
        if not usable:
            job.garbage += [twin] if twin is not None else []
        if wanted and not usable:
            self._write_timed(job, program)
        elif usable:
            self._retire(job, program)
            job.programs[program].twin = twin
            self._jobs[job.id] = job
            self._until[job.id] = self._clock() + WAIT_S

    def recut(self, job: CudaJob, program: ProgramId) -> None:
        """The program has a new cut, which its twin is none of."""
        if self._retire(job, program) and job.profiling and job.profiling[0] == program:
            if job.programs[program].partly_captured:
                self._write_timed(job, program)
            else:
                job.backlog.append(Instrument(program))

    def landed(self, job: CudaJob, launch: Launch) -> None:
        """A step has ended."""
        loaded = job.programs[launch.program]
        job.garbage += loaded.measured(launch.step)
        twin = loaded.twin
        if twin is None or twin.step != launch.step or launch.cut != twin.cut:
            return
        self._until[job.id] = self._clock() + WAIT_S

        def read() -> bytes | None:
            twin.read()
            return self._write(loaded) if twin.complete else None

        self._work(job, read, partial(self._written, job, launch.program, twin))

    def due(self) -> float:
        return min(self._until.values(), default=inf)

    def expire(self) -> None:
        """Answer those who have waited for long enough."""
        now = self._clock()
        for job in [self._jobs[found] for found, until in self._until.items() if until <= now]:
            loaded = job.programs[job.profiling[0]]
            twin = loaded.twin
            busy = twin is not None and twin.step is not None
            self._until[job.id] = now + WAIT_S if busy else inf
            if not busy:
                self._work(job, partial(self._write, loaded), partial(self._written, job, job.profiling[0], twin))

    def lost(self, job: CudaJob, fault: Fault | None) -> None:
        """The job is over; with a fault, whoever waits is told."""
        if fault is not None:
            for program in job.profiling:
                self._tell(dev.ProgramProfiled(job.id, program, b"", fault))
        job.profiling.clear()
        self._until.pop(job.id, None)
        self._jobs.pop(job.id, None)

    def _start(self, job: CudaJob) -> None:
        program = job.profiling[0]
        loaded = job.programs.get(program)
        if loaded is None:
            fault = Fault("program", f"no program {program} is loaded", "name one that is")
        elif not loaded.cuts.op_s:
            fault = Fault("program", "the program's operators are not measured yet", "run two steps of it first")
        elif not loaded.cuts.newest or loaded.partly_captured:
            self._write_timed(job, program)
            return
        else:
            job.backlog.append(Instrument(program))
            return
        self._answer(job, program, b"", fault)

    def _write_timed(self, job: CudaJob, program: ProgramId) -> None:
        """Answer with the times of the steps that ran operator by operator: the program has no twin."""
        loaded = job.programs[program]
        self._work(job, partial(self._write, loaded), partial(self._written, job, program, loaded.twin))

    def _written(
        self, job: CudaJob, program: ProgramId, twin: Twin | None, text: bytes | None, error: BaseException | None
    ) -> None:
        if isinstance(error, DeviceLost):
            raise error
        if error is not None and not job.over and job.profiling:
            self._answer(job, program, b"", as_fault(error))
            self._go_on(job)
            return
        if job.over or text is None or job.programs[program].twin is not twin or not job.profiling:
            return
        self._answer(job, program, text, None)
        self._go_on(job)

    def _answer(self, job: CudaJob, program: ProgramId, text: bytes, fault: Fault | None) -> None:
        self._tell(dev.ProgramProfiled(job.id, program, text, fault))
        self._until.pop(job.id, None)
        self._jobs.pop(job.id, None)
        self._retire(job, program)
        job.profiling.popleft()
        if job.profiling:
            self._start(job)

    def _retire(self, job: CudaJob, program: ProgramId) -> bool:
        """Whether there was a twin. The worker drops it when nothing of the job runs."""
        loaded = job.programs.get(program)
        if loaded is None or loaded.twin is None:
            return False
        job.garbage += loaded.retire()
        return True
