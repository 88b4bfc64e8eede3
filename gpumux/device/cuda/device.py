"""One NVIDIA GPU as a device: all jobs in one context, captured pieces on streams of two priorities.

    the daemon's thread (here)                         the worker's thread (worker.py, engine.py)
    launches captured pieces, looks for their ends     loads, runs first steps, captures, copies state, lets go

Nothing here waits for the GPU or for the worker. Programs are checked in processes of their own, as on the CPU: they
were traced there, and operators.py says what it takes to run them here. A failure of a job's work ends that job; one
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
from typing import TYPE_CHECKING, Any

from gpumux.device import base as dev
from gpumux.device.base import DeviceEvent, Launch, Segment
from gpumux.device.cpu.jobs import BAD_SEED, NO_WARM, UNKNOWN, Move, Profile, of_job
from gpumux.device.cuda.cuts import HIGH_S, LOW_S
from gpumux.device.cuda.driver import CudaDriver, Driver, Facts, as_fault
from gpumux.device.cuda.jobs import Capture, Chore, Command, CudaJob, Instrument, Load, Sweep, release, unanswered
from gpumux.device.cuda.launches import Flights, Landed
from gpumux.device.cuda.profiling import Profiles
from gpumux.device.cuda.streams import Partitions, Running, Turns
from gpumux.device.cuda.worker import Worker
from gpumux.device.run.schedule import Schedule
from gpumux.device.workers.channel import Descriptors
from gpumux.device.workers.checks import Checks
from gpumux.device.workers.fork_server import Keeper, WarmProcess
from gpumux.errors import AdmissionRefused, ConfigError, DeviceLost, GpumuxError, JobFailed, ProgramError
from gpumux.program.ir import DEFAULT, Limits
from gpumux.types import DeviceInfo, Fault, JobId, JobSpec, Priority, ProgramId, TransferId

if TYPE_CHECKING:
    from gpumux.device.cuda.compute import Compute
    from gpumux.device.cuda.engine import Engine
    from gpumux.device.cuda.program import Captured, LoadedProgram


# ---- What becomes of a job's commands: launched here, or given to the worker, each when its turn has come.
#
# A job's commands keep their order. Those for the worker start when nothing of the job is in the air, and nothing of
# the job is launched until they are over. A lost job's commands are all answered; what it holds is given back once the
# GPU has done with it, and only then is the job said to be gone.


ANY_NUMBER = 1 << 20
log = logging.getLogger(__name__)
Flown = tuple[CudaJob, Launch, bool]  # the last: it ends its step


class Dispatch:
    """The jobs of a device and their commands. `_worker`, `_engine`, `_flights`, `_running`, `_keeper` and `_profiles`
    are there while it is open."""

    _worker: Worker
    _engine: Engine
    _flights: Flights[Flown]
    _running: Running
    _keeper: Keeper
    _profiles: Profiles
    _name = ""

    def __init__(self, checks: Checks, parallel: int | None) -> None:
        self._checks = checks
        self._schedule: Schedule[Command] = Schedule(parallel or ANY_NUMBER)
        self._jobs: dict[JobId, CudaJob] = {}
        self._events: list[DeviceEvent] = []
        self._lost: DeviceLost | None = None
        self._untrimmed = False
        self._answers: dict[type, Callable[[CudaJob, Any, Any, Fault | None], None]] = {
            Launch: self._ran, Load: self._loaded, Move: self._moved, Profile: self._told_profile,
            Capture: self._captured, Instrument: self._instrumented, Sweep: self._swept,
        }  # fmt: skip

    def _tell(self, *events: DeviceEvent) -> None:
        raise NotImplementedError

    def _live(self, job: JobId) -> CudaJob | None:
        held = self._jobs.get(job)
        return None if held is None or held.over else held

    def _submit(self, job: JobId, command: Command, stream: int | None) -> None:
        self._schedule.submit(job, command, stream)
        self._hand_over()

    def _hand_over(self) -> None:
        for job, command in self._schedule.hand_over():
            self._accept(self._jobs[job], command)

    def _accept(self, job: CudaJob, command: Command) -> None:
        job.backlog.append(command)
        self._advance(job)

    def _advance(self, job: CudaJob) -> None:
        """Start what can start of a job, in order."""
        while job.backlog and not job.busy and not job.over:
            command = job.backlog[0]
            try:
                if isinstance(command, Launch):
                    loaded = self._program(job, command)
                    if loaded.is_captured(command.cut, command.piece):
                        self._fly(job, command, loaded)
                        job.backlog.popleft()
                        continue
                if job.airborne:
                    return
                job.backlog.popleft()
                self._work(job, command)
            except DeviceLost as lost:
                self._lost = lost
                self._tell()
                return
            except GpumuxError as error:
                assert isinstance(command, Launch)
                self._log(job, command, error)
                self._lose(job, as_fault(error), command)

    def _program(self, job: CudaJob, launch: Launch) -> LoadedProgram:
        loaded = job.programs.get(launch.program)
        if loaded is None:
            fault = "load a program before launching it"
            raise ProgramError(f"no program {launch.program} is loaded", fault)
        return loaded

    def _fly(self, job: CudaJob, launch: Launch, loaded: LoadedProgram) -> None:
        """Launch a captured piece. Raises GpumuxError."""
        last = loaded.check(launch.step, launch.cut, launch.piece)
        share = loaded.share(launch.step, launch.cut, launch.piece, launch.share)
        before, stream = job.stream, self._running.take(job, launch.stream, share)
        operands = loaded.operands
        if launch.piece == 0:
            operands.feed(launch.slot, launch.scalars, stream)

        def work() -> None:
            loaded.replay(launch.step, launch.cut, launch.piece, share, stream)
            if last:
                operands.collect(launch.slot, stream)

        waits = launch.piece == 0 or stream != before  # for the batch, or for the piece before on another stream
        expected = loaded.expected(launch.cut, launch.piece)
        self._flights.launch((job, launch, last), stream, expected, work, waits=waits)
        job.airborne += 1

    def _landed(self, landed: Landed[tuple[CudaJob, Launch, bool]]) -> None:
        job, launch, last = landed.what
        job.airborne -= 1
        if job.over:
            return
        if landed.error is not None:
            self._log(job, launch, landed.error)
            self._lose(job, as_fault(landed.error), launch)
            return
        self._schedule.done(job.id)
        self._events.append(dev.LaunchDone(launch.launch, landed.started, landed.ended))
        cuts = job.programs[launch.program].cuts
        cuts.ran(launch.cut, launch.piece, landed.ended - landed.started)
        if last:
            cuts.stepped(launch.cut)
            self._profiles.landed(job, launch)
        self._after(job, launch if last else None)

    def _work(self, job: CudaJob, command: Command | Chore) -> None:
        """Give a command to the worker. Raises GpumuxError for a launch that can't be."""
        engine = self._engine
        work: Callable[[], Any]
        if isinstance(command, Launch):
            loaded = self._program(job, command)
            last = loaded.check(command.step, command.cut, command.piece)
            stream = self._running.take(job, command.stream, command.share)
            work = partial(engine.run, job, command, loaded, stream, last=last)
        elif isinstance(command, Load):
            work = engine.loading(job, command)
        elif isinstance(command, Move):
            work = partial(engine.move, job, command, self._running.take(job, int(job.spec.priority)))
        elif isinstance(command, Capture):
            work = engine.capturing(job, command, job.programs[command.program])
        elif isinstance(command, Instrument):
            work = engine.instrumenting(job, job.programs[command.program])
        elif isinstance(command, Sweep):
            work = partial(engine.sweep, job)
        else:
            work = _nothing  # its turn has come; what follows is no command of the caller's (profiling.py)
        job.busy, job.at = True, command
        self._worker.submit(work, partial(self._worked, job, command), int(job.spec.priority))

    def _worked(self, job: CudaJob, command: Command | Chore, value: Any, error: BaseException | None) -> None:
        """The worker has finished a command."""
        job.busy = False
        if isinstance(error, DeviceLost):
            raise error
        if job.over:
            if isinstance(command, Load) and value is not None:
                job.programs[command.program] = value  # to be let go of with the rest
            if isinstance(command, Capture | Instrument) and value is not None:
                job.garbage.append(value[0])
            self._let_go(job)
            return
        if not isinstance(command, Capture | Instrument | Sweep):
            self._schedule.done(job.id)
        if error is not None:
            self._log(job, command, error)
        fault = None if error is None else as_fault(error)
        self._answers[type(command)](job, command, value, fault)

    # ---- what the worker's answers come to -------------------------------------------------------

    def _ran(self, job: CudaJob, launch: Launch, value: Any, fault: Fault | None) -> None:
        if fault is not None:
            self._lose(job, fault, launch)
            return
        self._events.append(dev.LaunchDone(launch.launch, *value))
        cuts = job.programs[launch.program].cuts
        bounds = cuts.bounds(launch.cut)
        last = bounds is not None and launch.piece == len(bounds) - 2
        if last:
            cuts.stepped(launch.cut)
        self._after(job, launch if last else None)

    def _loaded(self, job: CudaJob, load: Load, value: Any, fault: Fault | None) -> None:
        if fault is not None:
            job.charged -= load.charge
            del job.transients[load.program]
            self._events.append(dev.ProgramRefused(job.id, load.program, fault))
        else:
            job.programs[load.program] = value
            job.charged += sum(load.new_buffers) + value.operands.held_bytes - load.charge
            job.transients[load.program] = max(job.transients[load.program], value.transient)
            bounds = value.cuts.bounds(0)
            self._events.append(dev.ProgramLoaded(job.id, load.program, value.cuts.seconds(0), bounds))
        self._after(job, None)

    def _moved(self, job: CudaJob, move: Move, value: Any, fault: Fault | None) -> None:
        self._events.append(dev.TransferDone(job.id, move.transfer, fault))
        self._after(job, None)

    def _told_profile(self, job: CudaJob, asked: Profile, value: Any, fault: Fault | None) -> None:
        self._profiles.ask(job, asked.program)
        self._after(job, None)

    def _instrumented(self, job: CudaJob, chore: Instrument, value: Any, fault: Fault | None) -> None:
        twin, grown = value or (None, 0)
        job.transients[chore.program] = max(job.transients[chore.program], grown)
        self._profiles.instrumented(job, chore.program, twin)
        self._after(job, None)

    def _swept(self, job: CudaJob, chore: Sweep, value: Any, fault: Fault | None) -> None:
        self._untrimmed = True
        self._after(job, None)

    def _captured(self, job: CudaJob, capture: Capture, value: Any, fault: Fault | None) -> None:
        if fault is not None and capture.whole:
            job.unmerged.add(capture.program)
            self._after(job, None)
            return
        if fault is not None:  # its steps go on as they did: under the cut before, or operator by operator
            self._say_uncaptured(job, f"program {capture.program} stays as it is: {fault.message}")
            self._after(job, None)
            return
        graphs, grown = value
        job.transients[capture.program] = max(job.transients[capture.program], grown)
        if capture.whole and (graphs.left_out or not self._alone(job)):
            job.unmerged |= {capture.program} if graphs.left_out else set()
            job.garbage.append(graphs)
            self._untrimmed = True
            self._after(job, None)
            return
        for start, stop, error in graphs.left_out:
            where = f"operators {start} to {stop - 1} of program {capture.program} stay operator by operator"
            self._say_uncaptured(job, f"{where}: {error}", error)
        loaded = job.programs[capture.program]
        self._untrimmed = True
        self._recut(job, capture.program, loaded.accept(capture.bounds, graphs, whole=capture.whole))
        self._after(job, None)

    def _recut(self, job: CudaJob, program: ProgramId, gone: Sequence[Captured]) -> None:
        """The program has a new cut, ready to run. `gone`: graphs that no step can use any more."""
        job.garbage += gone
        cuts = job.programs[program].cuts
        bounds = cuts.bounds(cuts.newest)
        assert bounds is not None
        self._profiles.recut(job, program)
        self._events.append(dev.Recut(job.id, program, cuts.newest, cuts.seconds(cuts.newest), bounds))

    # A high job that has the device to itself runs its steps as one graph each: nothing could go between its pieces.
    # Both cuts stay captured, so that it is in pieces again from its next step when another job comes.

    def _alone(self, job: CudaJob) -> bool:
        others = (other for other in self._jobs.values() if other is not job and not other.over)
        return job.spec.priority is Priority.HIGH and next(others, None) is None

    def _merge(self, job: CudaJob, program: ProgramId) -> None:
        """A step of the newest cut has ended, and pieces of another length are not wanted."""
        if job.captures(program):
            return
        loaded = job.programs[program]
        cuts, alone = loaded.cuts, self._alone(job)
        if loaded.has_whole and cuts.stepped_through:
            if loaded.merged is not alone:
                self._recut(job, program, loaded.switch(alone))
            return
        wanted = alone and not loaded.has_whole and cuts.settled and program not in job.unmerged
        if wanted and cuts.whole != cuts.bounds(cuts.newest):
            job.backlog.appendleft(Capture(program, cuts.whole, whole=True))

    def _part(self) -> None:
        """A job has come: others run in pieces from their next steps on."""
        before = len(self._events)
        for job in self._jobs.values():
            for program, loaded in job.programs.items():
                # A capture under way makes a new cut as well. Two at once, and a step that was sent meanwhile would
                # find neither its cut nor the one before the newest.
                switching = loaded.merged and loaded.cuts.stepped_through and not job.over
                if switching and not job.captures(program):
                    self._recut(job, program, loaded.switch(False))
        if len(self._events) > before:
            self._tell()

    def _after(self, job: CudaJob, ended: Launch | None) -> None:
        """Something of a job is over: cut a program whose step it ended if it is time, and go on."""
        if ended is not None:
            number, cuts = ended.program, job.programs[ended.program].cuts
            bounds = cuts.wanted()
            # A step of an older cut may be under way until one of the newest has ended.
            if bounds is None and number in job.stale and ended.cut == cuts.newest:
                bounds = job.programs[number].parted_bounds
            if bounds is not None:
                job.stale.discard(number)
                job.backlog.appendleft(Capture(number, bounds))
            elif ended.cut == cuts.newest and number not in job.stale:
                self._merge(job, number)
            if job.garbage and not any(isinstance(waiting, Capture | Sweep) for waiting in job.backlog):
                job.backlog.appendleft(Sweep())  # as a capture does
        self._advance(job)
        self._hand_over()
        self._running.rest(job)

    def _say_uncaptured(self, job: CudaJob, what: str, error: GpumuxError | None = None) -> None:
        """Once a job: every cut of every program of it may meet the same."""
        if not job.warned:
            job.warned = True
            text = "a piece of job %s can't be captured, which makes its steps slower; %s"
            log.warning(text, job.id, what, exc_info=error)

    def _log(self, job: CudaJob, command: Command | Chore, error: BaseException) -> None:
        """With its traceback, which says more than the job is told. Once a job, and no refusal of its Programs."""
        if job.logged or (isinstance(error, ProgramError | AdmissionRefused) and error.__cause__ is None):
            return
        job.logged = True
        log.error("%s of job %s failed: %s", type(command).__name__, job.id, error, exc_info=error)

    # ---- ends ------------------------------------------------------------------------------------

    def _lose(self, job: CudaJob, fault: Fault, launch: Launch | None) -> None:
        """A job's work failed, in `launch` if it is known: nothing of it will run any more."""
        job.fault = fault
        for token in self._checks.forget(job.id):
            self._keeper.kill(token)
        unfinished = self._schedule.drop(job.id)
        job.backlog.clear()
        if launch is not None:
            self._events.append(dev.LaunchFailed(launch.launch, fault))
        self._profiles.lost(job, fault)
        for command in unfinished:
            if command is not launch:
                self._events += unanswered(job.id, command, fault)
        self._let_go(job)
        self._hand_over()
        self._tell()

    def _drop(self, job: CudaJob) -> None:
        """Somebody wants a job gone: what it was asked is not answered."""
        job.unloading = True
        self._profiles.lost(job, None)
        for command in self._schedule.drop(job.id):
            if not (job.busy and command is job.at):  # the worker closes what it has
                release(command)
        job.backlog.clear()
        self._let_go(job)
        self._hand_over()

    def _abandon(self) -> None:
        """The GPU is lost: nothing can be given back but what is ours."""
        for job in self._jobs.values():
            for command in self._schedule.drop(job.id):
                release(command)
            for loaded in job.programs.values():
                loaded.operands.abandon()
        self._jobs.clear()

    def _let_go(self, job: CudaJob) -> None:
        """Give back what a job that is over holds, after what the worker does for it."""
        if job.busy or job.releasing:
            return
        job.releasing = True
        self._worker.submit(partial(self._engine.release, job, job.stream), partial(self._released, job), Priority.HIGH)

    def _released(self, job: CudaJob, value: None, error: BaseException | None) -> None:
        if isinstance(error, DeviceLost):
            raise error
        if error is not None:  # what it held may be lost to other jobs, and that is all
            log.error("what job %s held can't all be given back: %s", job.id, error, exc_info=error)
        self._running.leave(job)
        del self._jobs[job.id]
        self._untrimmed = True
        assert job.fault is not None or job.unloading
        self._events.append(
            dev.JobUnloaded(job.id) if job.fault is None or job.unloading else dev.JobLost(job.id, job.fault)
        )

    def _trim(self) -> None:
        """Have memory that nobody uses given back while nothing runs: that makes the GPU stop for a moment."""
        if (
            self._untrimmed
            and not len(self._flights)
            and not any(job.busy or job.releasing for job in self._jobs.values())
        ):
            self._untrimmed = False
            self._worker.submit(self._engine.trim, _trimmed, -1)


def _nothing() -> None:
    pass


def _trimmed(value: None, error: BaseException | None) -> None:
    if isinstance(error, JobFailed):  # nobody asked for it, and it is tried again after the next job
        log.warning("%s", error)
    elif error is not None:
        raise error


# ----


OPEN_S, CLOSE_S = 120.0, 10.0
STREAMS = 4  # of each class, for all jobs
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"


def real_compute(driver: Driver, ordinal: int) -> Compute:
    from gpumux.device.cuda.compute import CudaCompute

    return CudaCompute(driver, ordinal)


class CudaDevice(Dispatch):
    """See gpumux.device.base.Device. `ordinal`: which GPU, as the driver numbers those this process may use.
    `parallel`: pieces at once, None for as many as windows allow. `shares`: parts of the multiprocessors to which low
    work can be confined (streams.py). `driver` and `compute` are what tests replace."""

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
