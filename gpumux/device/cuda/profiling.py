"""Requests for operator times, from the request to its answer.

    request -> instrumented graphs are captured (cuts.py) -> STEPS steps run through them -> written and answered

One request at a time for each job, in their order. A job that runs no step for WAIT_S gets the times of its timed step
instead (cuts.py), and the profile's note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from gpumux.device import base as dev
from gpumux.device.base import DeviceEvent, Launch
from gpumux.device.cuda.cuts import InstrumentedCut
from gpumux.device.cuda.driver import as_fault
from gpumux.device.cuda.jobs import CudaJob, Instrument
from gpumux.errors import DeviceLost
from gpumux.types import Fault, JobId, ProgramId

if TYPE_CHECKING:
    from gpumux.device.cuda.program import CudaProgram


WAIT_S = 1.0  # for a step to begin
Done = Callable[[Any, BaseException | None], None]


class Profiles:
    """The requests of all jobs. `emit` takes events; `work` has the worker's thread do something; `advance` starts what
    can start of a job; `write` makes the text of a program's profile, on the worker's thread."""

    def __init__(
        self, *, clock: Callable[[], float], emit: Callable[[DeviceEvent], None],
        work: Callable[[CudaJob, Callable[[], Any], Done], None], advance: Callable[[CudaJob], None],
        write: Callable[[CudaProgram], bytes],
    ) -> None:  # fmt: skip
        self._clock, self._emit, self._work, self._advance, self._write = clock, emit, work, advance, write
        self._until: dict[JobId, float] = {}  # when a job's first request is answered at the latest
        self._jobs: dict[JobId, CudaJob] = {}

    def ask(self, job: CudaJob, program: ProgramId) -> None:
        job.profiling.append(program)
        if len(job.profiling) == 1:
            self._start(job)

    def capture_ended(self, job: CudaJob, program: ProgramId, instrumented: InstrumentedCut | None) -> None:
        """The capture for a request has ended; `instrumented` is None if it failed: answer with the timed step then."""
        wanted = bool(job.profiling) and job.profiling[0] == program
        usable = wanted and instrumented is not None and not job.programs[program].partly_captured
        if not usable:
            job.unused_graphs += [instrumented] if instrumented is not None else []
        if wanted and not usable:
            self._write_timed(job, program)
        elif usable:
            self._retire(job, program)
            job.programs[program].instrumented = instrumented
            self._jobs[job.id] = job
            self._until[job.id] = self._clock() + WAIT_S

    def recut(self, job: CudaJob, program: ProgramId) -> None:
        """The program has a new cut, so the instrumented graphs of the last one are dropped."""
        if self._retire(job, program) and job.profiling and job.profiling[0] == program:
            if job.programs[program].partly_captured:
                self._write_timed(job, program)
            else:
                job.backlog.append(Instrument(program))

    def step_ended(self, job: CudaJob, launch: Launch) -> None:
        """A step has ended."""
        loaded = job.programs[launch.program]
        job.unused_graphs += loaded.measured(launch.step)
        instrumented = loaded.instrumented
        if instrumented is None or instrumented.step != launch.step or launch.cut != instrumented.cut:
            return
        self._until[job.id] = self._clock() + WAIT_S

        def read() -> bytes | None:
            instrumented.read()
            return self._write(loaded) if instrumented.complete else None

        self._work(job, read, partial(self._written, job, launch.program, instrumented))

    def due(self) -> float:
        return min(self._until.values(), default=inf)

    def expire(self) -> None:
        """Answer requests that have waited for WAIT_S."""
        now = self._clock()
        for job in [self._jobs[found] for found, until in self._until.items() if until <= now]:
            loaded = job.programs[job.profiling[0]]
            instrumented = loaded.instrumented
            busy = instrumented is not None and instrumented.step is not None
            self._until[job.id] = now + WAIT_S if busy else inf
            if not busy:
                self._work(
                    job, partial(self._write, loaded), partial(self._written, job, job.profiling[0], instrumented)
                )

    def lost(self, job: CudaJob, fault: Fault | None) -> None:
        """The job has ended. With a fault its requests are answered."""
        if fault is not None:
            for program in job.profiling:
                self._emit(dev.ProgramProfiled(job.id, program, b"", fault))
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
        """Answer with the times of the steps that ran operator by operator."""
        loaded = job.programs[program]
        self._work(job, partial(self._write, loaded), partial(self._written, job, program, loaded.instrumented))

    def _written(
        self,
        job: CudaJob,
        program: ProgramId,
        instrumented: InstrumentedCut | None,
        text: bytes | None,
        error: BaseException | None,
    ) -> None:
        if isinstance(error, DeviceLost):
            raise error
        if error is not None and not job.ended and job.profiling:
            self._answer(job, program, b"", as_fault(error))
            self._advance(job)
            return
        if job.ended or text is None or job.programs[program].instrumented is not instrumented or not job.profiling:
            return
        self._answer(job, program, text, None)
        self._advance(job)

    def _answer(self, job: CudaJob, program: ProgramId, text: bytes, fault: Fault | None) -> None:
        self._emit(dev.ProgramProfiled(job.id, program, text, fault))
        self._until.pop(job.id, None)
        self._jobs.pop(job.id, None)
        self._retire(job, program)
        job.profiling.popleft()
        if job.profiling:
            self._start(job)

    def _retire(self, job: CudaJob, program: ProgramId) -> bool:
        """Drop the instrumented graphs once nothing of the job runs; whether there were any."""
        loaded = job.programs.get(program)
        if loaded is None or loaded.instrumented is None:
            return False
        job.unused_graphs += loaded.retire()
        return True
