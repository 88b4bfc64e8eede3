"""What becomes of a job's commands: launched here, or given to the worker, each when its turn has come.

A job's commands keep their order. Those for the worker start when nothing of the job is in the air, and nothing of the
job is launched until they are over. A lost job's commands are all answered; what it holds is given back once the GPU
has done with it, and only then is the job said to be gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumux.device import contract as dev
from gpumux.device.contract import DeviceEvent, Launch
from gpumux.device.cpu.checks import Checks
from gpumux.device.cpu.jobs import Move, Profile
from gpumux.device.cpu.keeper import Keeper
from gpumux.device.cpu.schedule import Schedule
from gpumux.device.cuda.faults import as_fault
from gpumux.device.cuda.flights import Flights, Landed
from gpumux.device.cuda.jobs import Capture, Chore, Command, CudaJob, Instrument, Load, Sweep, release, unanswered
from gpumux.device.cuda.profiling import Profiles
from gpumux.device.cuda.running import Running
from gpumux.device.cuda.worker import Worker
from gpumux.errors import AdmissionRefused, DeviceLost, GpumuxError, JobFailed, ProgramError
from gpumux.model import Fault, JobId, Priority, ProgramId

if TYPE_CHECKING:
    from gpumux.device.cuda.capturing import Captured
    from gpumux.device.cuda.engine import Engine
    from gpumux.device.cuda.loaded import LoadedProgram

ANY_NUMBER = 1 << 20
log = logging.getLogger(__name__)
Flown = tuple[CudaJob, Launch, bool]  # the last: it ends its step


class Dispatch:
    """The jobs of a device and their commands. `_worker`, `_engine`, `_flights`, `_running`, `_keeper` and `_profiles` are
    there while it is open."""

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

    # A high job that has the device to itself runs its steps as one graph each: nothing could go between its pieces. Both
    # cuts stay captured, so that it is in pieces again from its next step when another job comes.

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
                # A capture under way makes a new cut as well. Two at once, and a step that was sent meanwhile would find
                # neither its cut nor the one before the newest.
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
