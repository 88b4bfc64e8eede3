"""One NVIDIA GPU as a device: all jobs in one context, captured pieces on streams of two priorities.

    the daemon's thread (here)                         the worker's thread (worker.py, engine.py)
    launches captured pieces, looks for their ends     loads, runs first steps, captures, copies state, releases

Nothing here waits for the GPU or for the worker. Programs are checked in processes of their own, as for the CPU: they
were traced there, and operators.py holds what it takes to run them on a GPU. A failure of a job's work ends that job.
A failure that ends the GPU's context ends all jobs, and `poll` raises DeviceLost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from gpumux.device import base as dev
from gpumux.device.base import UNGANGED, DeviceEvent, Launch, SegmentHandle
from gpumux.device.cuda.cuts import HIGH_S, LOW_S
from gpumux.device.cuda.driver import CudaDriver, Driver, GpuProperties, as_fault
from gpumux.device.cuda.jobs import (
    Capture,
    Command,
    CudaJob,
    DropUnused,
    Instrument,
    InternalCommand,
    release,
    unanswered,
)
from gpumux.device.cuda.launches import CompletedLaunch, LaunchTracker
from gpumux.device.cuda.profiling import Profiles
from gpumux.device.cuda.streams import Partitions, StreamAssigner, StreamPool
from gpumux.device.cuda.worker import Worker
from gpumux.device.run.device_base import BAD_SEED, UNKNOWN_JOB, DeviceBase, is_seed
from gpumux.device.run.schedule import LoadCommand, ProfileCommand, TransferCommand
from gpumux.device.workers.confinement import Confined
from gpumux.errors import AdmissionRefused, DeviceLost, GpumuxError, JobFailed, ProgramError
from gpumux.program.ir import DEFAULT, ProgramLimits
from gpumux.types import (
    DeviceInfo,
    Fault,
    Footprint,
    Gang,
    JobDied,
    JobId,
    JobReleased,
    JobSpec,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramId,
    ProgramReady,
    TransferEnded,
)

if TYPE_CHECKING:
    from gpumux.device.cuda.compute import Compute
    from gpumux.device.cuda.program import CapturedCut, CudaProgram


ANY_NUMBER = 1 << 20
log = logging.getLogger(__name__)
Launched = tuple[CudaJob, Launch, bool]  # the last: it ends its step
OPEN_S, CLOSE_S = 120.0, 10.0
STREAMS = 4  # of each class, for all jobs
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"


def real_compute(driver: Driver, ordinal: int) -> Compute:
    from gpumux.device.cuda.compute import CudaCompute

    return CudaCompute(driver, ordinal)


class CudaDevice(DeviceBase[CudaJob]):
    """See gpumux.device.base.Device. `ordinal`: which GPU, as the driver numbers those this process may use.
    `parallel`: pieces at once, None for as many as windows allow. `shares`: parts of the multiprocessors that low
    jobs can be confined to (streams.py). Tests pass a `driver` and a `compute` of their own."""

    def __init__(
        self,
        ordinal: int = 0,
        *,
        parallel: int | None = None,
        shares: Sequence[float] = (),
        allow_ops: Sequence[str] = (),
        limits: ProgramLimits = DEFAULT,
        driver: Driver | None = None,
        compute: Callable[[Driver, int], Compute] = real_compute,
        clock: Callable[[], float] = monotonic,
        confined: Confined | None = None,
    ) -> None:
        super().__init__(
            parallel=parallel or ANY_NUMBER,
            checks_at_once=max(2, (os.cpu_count() or 2) // 4),
            allow_ops=allow_ops,
            limits=limits,
            confined=confined,
        )
        self._ordinal, self._parallel = ordinal, parallel
        self._wanted_shares = tuple(shares)
        self._driver: Driver = driver or CudaDriver()
        self._compute, self._clock = compute, clock
        self._lost: DeviceLost | None = None
        self._untrimmed = False  # torch may hold memory that no job uses
        self._closers: list[Callable[[], object]] = []  # of what is open, in order of opening
        self._name = ""
        self._handlers: dict[type, Callable[[CudaJob, Any, Any, Fault | None], None]] = {
            Launch: self._eager_piece_done,
            LoadCommand: self._loaded,
            TransferCommand: self._moved,
            ProfileCommand: self._profile_requested,
            Capture: self._captured,
            Instrument: self._instrumented,
            DropUnused: self._unused_dropped,
        }

    # ---- the contract ----------------------------------------------------------------------------

    def open(self) -> DeviceInfo:
        os.environ.setdefault(QUEUES, "32")  # read when the context is made
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # --gpu N is the N of nvidia-smi
        # torch refuses matrix products of programs that ask for deterministic algorithms without it. It is read once.
        os.environ.setdefault(WORKSPACES, ":4096:8")
        try:
            self._open_epoll()
            self._closers += [self._epoll.close, partial(os.close, self._wakeup)]
            facts = self._open_gpu()
            self._start_checker()
        except BaseException:
            self._close_all()
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
        """No descriptor turns readable when a launch ends: while any is in flight, poll again and again."""
        return min(self._tracker.due(), self._profiles.due(), self._supervisor.due) if self._total else inf

    def poll(self) -> list[DeviceEvent]:
        """See base.Device. Raises DeviceLost once the GPU's context has ended."""
        if self._total == 0:
            return []
        for fd, _ in self._epoll.poll(0):
            if fd == self._wakeup:
                os.eventfd_read(self._wakeup)
            else:
                self._hear_workers()
        if self._supervisor.due < inf:
            self._supervisor.start_due()
        try:
            self._worker.finished()
            for completed in self._tracker.completed():
                self._launch_completed(completed)
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

    def open_job(self, job: JobId, spec: JobSpec) -> None:
        if job in self._jobs:
            return
        if not is_seed(spec.seed):
            self._emit(JobDied(job, BAD_SEED))
            return
        self._jobs[job] = CudaJob(job, spec)
        self._schedule.open(job)
        self._split_merged()

    def launch(self, launch: Launch) -> None:
        held = self._jobs.get(launch.job)
        if held is None:
            self._emit(PieceFailed(launch.launch, UNKNOWN_JOB), JobDied(launch.job, UNKNOWN_JOB))
        elif held.fault is not None and not held.unloading:
            self._emit(PieceFailed(launch.launch, held.fault))
        elif not held.unloading:
            if self._schedule.claim(launch.job, launch, launch.stream):
                self._carry_out(held, launch)
            else:
                self._submit(launch.job, launch, launch.stream)

    def cut(self, job: JobId, program: ProgramId, target_s: float | None) -> None:
        """Graphs of the new cut are captured between two steps of the job."""
        held = self._live(job)
        if held is not None and program in held.programs:
            held.programs[program].cuts.aim(target_s)

    def may_regrade(self, priority: Priority) -> Fault | None:
        """See base.Regrading."""
        return None

    def regrade(self, job: JobId, priority: Priority) -> None:
        """See base.Regrading. CapturedCut kernels keep the priority of the stream they were captured on, so the
        job's programs are captured anew, each after its next step."""
        held = self._live(job)
        if held is not None:
            held.spec = replace(held.spec, priority=priority)
            held.stale = {number for number, loaded in held.programs.items() if loaded.cuts.newest}

    def may_join(self, gang: Gang) -> Fault | None:
        """See base.ProcessGroups. A gang of one has no collectives; NCCL between captured pieces is not proven."""
        return UNGANGED if gang.ranks > 1 else None

    def join(self, job: JobId, gang: Gang) -> None:
        """See base.ProcessGroups. There are no peers to find."""

    def leave(self, job: JobId) -> None:
        """See base.ProcessGroups."""

    def abort(self, job: JobId, fault: Fault) -> None:
        """See base.ProcessGroups."""
        held = self._live(job)
        if held is not None:
            self._fail_job(held, fault, None)

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
                pass  # it is closed all the same
        self._total = 0
        self._close_all()
        self._abandon_all()
        self._events.clear()

    # ---- opening and closing ---------------------------------------------------------------------

    def _open_gpu(self) -> GpuProperties:
        driver = self._driver
        facts = driver.open(self._ordinal)
        self._closers.append(driver.close)
        compute = self._compute(driver, self._ordinal)
        compute.enter()
        from gpumux.device.cuda.engine import Engine  # imports torch, which is not needed before a GPU is opened

        least, greatest = facts.priorities
        priorities = {int(Priority.LOW): least, int(Priority.HIGH): greatest}
        self._partitions = Partitions(driver, facts, self._wanted_shares, least)
        self._closers.append(self._partitions.close)
        streams = {number: [driver.stream(priorities[number]) for _ in range(STREAMS)] for number in priorities}
        self._closers += [partial(driver.destroy_stream, stream) for made in streams.values() for stream in made]
        beside = {stream: driver.stream(priorities[number]) for number, made in streams.items() for stream in made}
        beside |= {stream: driver.stream(least) for stream in self._partitions.run_streams}
        self._closers += [partial(driver.destroy_stream, stream) for stream in beside.values()]
        self._engine = Engine(driver, compute, priorities, self._partitions, copies=beside)
        self._closers.append(self._engine.close)
        self._assigner = StreamAssigner(driver, StreamPool(streams), self._partitions)
        self._tracker: LaunchTracker[Launched] = LaunchTracker(driver, self._clock, greatest)
        self._closers.append(self._tracker.close)
        self._worker = Worker(self._engine.thread_context, self._emit)
        self._closers.append(partial(self._worker.close, CLOSE_S))
        self._profiles = Profiles(
            clock=self._clock,
            emit=lambda event: self._events.append(event),
            work=lambda job, work, done: self._worker.submit(work, done, int(job.spec.priority)),
            advance=self._advance,
            write=lambda loaded: self._engine.profile(loaded, self._name),
        )
        return facts

    def _start_checker(self) -> None:
        self._start_supervisor()
        self._closers += [self._checks.close, self._supervisor.close]
        end = monotonic() + OPEN_S
        while self._fork_server is not None and self._fork_server.facts is None and monotonic() < end:
            for fd, _ in self._epoll.poll(max(0.0, end - monotonic())):
                if fd == self._wakeup:
                    os.eventfd_read(self._wakeup)
                else:
                    self._supervisor.hear()
            self._worker.finished()  # raises if its thread can't begin: the likeliest failure on a new machine
        self._require_fork_server("checks programs")

    def _close_all(self) -> None:
        """Give back what is open, the last first. Every call fails on a GPU that is lost: that is logged."""
        while self._closers:
            try:
                self._closers.pop()()
            except GpumuxError as error:
                log.warning("while closing: %s", error)

    # ---- commands of jobs
    #
    # A job's commands keep their order. A command for the worker's thread starts when nothing of the job is in flight,
    # and nothing of the job is launched until it has ended. A lost job's commands are all answered; what the job holds
    # is given back once the GPU has done with it, and JobDied or JobReleased comes only then.

    def _is_live(self, job: CudaJob) -> bool:
        return not job.ended

    def _data_charge(self, data: SegmentHandle, footprint: Footprint) -> int:
        return 3 * footprint.slot_bytes

    def _fault_of(self, job: JobId) -> Fault:
        held = self._jobs.get(job)
        return held.fault if held is not None and held.fault is not None else UNKNOWN_JOB

    def _carry_out(self, job: CudaJob, command: Command) -> None:
        job.backlog.append(command)
        self._advance(job)

    def _advance(self, job: CudaJob) -> None:
        """Start what can start of a job, in order."""
        while job.backlog and not job.busy and not job.ended:
            command = job.backlog[0]
            try:
                if isinstance(command, Launch):
                    loaded = self._program(job, command)
                    if loaded.is_captured(command.cut, command.piece):
                        self._launch_captured(job, command, loaded)
                        job.backlog.popleft()
                        continue
                if job.in_flight:
                    return
                job.backlog.popleft()
                self._give_to_worker(job, command)
            except DeviceLost as lost:
                self._lost = lost
                self._emit()
                return
            except GpumuxError as error:
                assert isinstance(command, Launch)
                self._log(job, command, error)
                self._fail_job(job, as_fault(error), command)

    def _program(self, job: CudaJob, launch: Launch) -> CudaProgram:
        loaded = job.programs.get(launch.program)
        if loaded is None:
            fault = "load a program before launching it"
            raise ProgramError(f"no program {launch.program} is loaded", fault)
        return loaded

    def _launch_captured(self, job: CudaJob, launch: Launch, loaded: CudaProgram) -> None:
        """Launch a captured piece. Raises GpumuxError."""
        last = loaded.check(launch.step, launch.cut, launch.piece)
        share = loaded.share(launch.step, launch.cut, launch.piece, launch.share)
        before, stream = job.stream, self._assigner.acquire(job, launch.stream, share)
        operands = loaded.operands
        if launch.piece == 0:
            operands.copy_inputs(launch.slot, launch.scalars, stream)

        def work() -> None:
            loaded.replay(launch.step, launch.cut, launch.piece, share, stream)
            if last:
                operands.copy_results(launch.slot, stream)

        waits = launch.piece == 0 or stream != before  # for the batch, or for the last piece, on another stream
        expected = loaded.expected(launch.cut, launch.piece)
        self._tracker.launch((job, launch, last), stream, expected, work, waits=waits)
        job.in_flight += 1

    def _launch_completed(self, completed: CompletedLaunch[Launched]) -> None:
        job, launch, last = completed.what
        job.in_flight -= 1
        if job.ended:
            return
        if completed.error is not None:
            self._log(job, launch, completed.error)
            self._fail_job(job, as_fault(completed.error), launch)
            return
        self._schedule.done(job.id)
        self._events.append(PieceDone(launch.launch, completed.started, completed.ended))
        cuts = job.programs[launch.program].cuts
        cuts.ran(launch.cut, launch.piece, completed.ended - completed.started)
        if last:
            cuts.stepped(launch.cut)
            self._profiles.step_ended(job, launch)
        self._continue_job(job, launch if last else None)

    def _give_to_worker(self, job: CudaJob, command: Command | InternalCommand) -> None:
        """Give a command to the worker. Raises GpumuxError for a launch of what is not there."""
        engine = self._engine
        work: Callable[[], Any]
        if isinstance(command, Launch):
            loaded = self._program(job, command)
            last = loaded.check(command.step, command.cut, command.piece)
            stream = self._assigner.acquire(job, command.stream, command.share)
            work = partial(engine.run, job, command, loaded, stream, last=last)
        elif isinstance(command, LoadCommand):
            work = engine.load_work(job, command)
        elif isinstance(command, TransferCommand):
            work = partial(engine.move, job, command, self._assigner.acquire(job, int(job.spec.priority)))
        elif isinstance(command, Capture):
            work = engine.capture_work(job, command, job.programs[command.program])
        elif isinstance(command, Instrument):
            work = engine.instrument_work(job, job.programs[command.program])
        elif isinstance(command, DropUnused):
            work = partial(engine.drop_unused, job)
        else:
            work = _nothing  # commands before it have ended, which is all a ProfileCommand waits for (profiling.py)
        job.busy, job.current = True, command
        self._worker.submit(work, partial(self._worker_finished, job, command), int(job.spec.priority))

    def _worker_finished(
        self, job: CudaJob, command: Command | InternalCommand, value: Any, error: BaseException | None
    ) -> None:
        """The worker has finished a command."""
        job.busy = False
        if isinstance(error, DeviceLost):
            raise error
        if job.ended:
            if isinstance(command, LoadCommand) and value is not None:
                job.programs[command.program] = value  # released with the rest
            if isinstance(command, Capture | Instrument) and value is not None:
                job.unused_graphs.append(value[0])
            self._release_job(job)
            return
        if not isinstance(command, Capture | Instrument | DropUnused):
            self._schedule.done(job.id)
        if error is not None:
            self._log(job, command, error)
        fault = None if error is None else as_fault(error)
        self._handlers[type(command)](job, command, value, fault)

    # ---- results of the worker's thread ----------------------------------------------------------

    def _eager_piece_done(self, job: CudaJob, launch: Launch, value: Any, fault: Fault | None) -> None:
        if fault is not None:
            self._fail_job(job, fault, launch)
            return
        self._events.append(PieceDone(launch.launch, *value))
        cuts = job.programs[launch.program].cuts
        bounds = cuts.bounds(launch.cut)
        last = bounds is not None and launch.piece == len(bounds) - 2
        if last:
            cuts.stepped(launch.cut)
        self._continue_job(job, launch if last else None)

    def _loaded(self, job: CudaJob, load: LoadCommand, value: Any, fault: Fault | None) -> None:
        if fault is not None:
            job.not_loaded(load)
            self._events.append(dev.ProgramRefused(job.id, load.program, fault))
        else:
            job.programs[load.program] = value
            job.charged += sum(load.new_buffers) + value.operands.held_bytes - load.charge
            job.transients[load.program] = max(job.transients[load.program], value.transient)
            bounds = value.cuts.bounds(0)
            self._events.append(ProgramReady(job.id, load.program, 0, value.cuts.seconds(0), bounds))
        self._continue_job(job, None)

    def _moved(self, job: CudaJob, move: TransferCommand, value: Any, fault: Fault | None) -> None:
        self._events.append(TransferEnded(job.id, move.transfer, fault))
        self._continue_job(job, None)

    def _profile_requested(self, job: CudaJob, asked: ProfileCommand, value: Any, fault: Fault | None) -> None:
        self._profiles.ask(job, asked.program)
        self._continue_job(job, None)

    def _instrumented(self, job: CudaJob, chore: Instrument, value: Any, fault: Fault | None) -> None:
        instrumented, grown = value or (None, 0)
        job.transients[chore.program] = max(job.transients[chore.program], grown)
        self._profiles.capture_ended(job, chore.program, instrumented)
        self._continue_job(job, None)

    def _unused_dropped(self, job: CudaJob, chore: DropUnused, value: Any, fault: Fault | None) -> None:
        self._untrimmed = True
        self._continue_job(job, None)

    def _captured(self, job: CudaJob, capture: Capture, value: Any, fault: Fault | None) -> None:
        if fault is not None and capture.whole:
            job.unmerged.add(capture.program)
            self._continue_job(job, None)
            return
        if fault is not None:  # its steps run as before: under the last cut, or operator by operator
            self._warn_uncaptured(job, f"program {capture.program} stays as it is: {fault.message}")
            self._continue_job(job, None)
            return
        graphs, grown = value
        job.transients[capture.program] = max(job.transients[capture.program], grown)
        if capture.whole and (graphs.left_out or not self._alone(job)):
            job.unmerged |= {capture.program} if graphs.left_out else set()
            job.unused_graphs.append(graphs)
            self._untrimmed = True
            self._continue_job(job, None)
            return
        for start, stop, error in graphs.left_out:
            where = f"operators {start} to {stop - 1} of program {capture.program} stay operator by operator"
            self._warn_uncaptured(job, f"{where}: {error}", error)
        loaded = job.programs[capture.program]
        self._untrimmed = True
        self._recut(job, capture.program, loaded.accept(capture.bounds, graphs, whole=capture.whole))
        self._continue_job(job, None)

    def _recut(self, job: CudaJob, program: ProgramId, gone: Sequence[CapturedCut]) -> None:
        """Report a program's new cut, which is ready to run. `gone`: graphs that no step can use any more."""
        job.unused_graphs += gone
        cuts = job.programs[program].cuts
        bounds = cuts.bounds(cuts.newest)
        assert bounds is not None
        self._profiles.recut(job, program)
        self._events.append(ProgramReady(job.id, program, cuts.newest, cuts.seconds(cuts.newest), bounds))

    # A high job that is alone on the device runs each step as one graph: there is no other work to run between pieces.
    # Both cuts stay captured, so that it runs in pieces again from its next step when another job is opened.

    def _alone(self, job: CudaJob) -> bool:
        others = (other for other in self._jobs.values() if other is not job and not other.ended)
        return job.spec.priority is Priority.HIGH and next(others, None) is None

    def _merge(self, job: CudaJob, program: ProgramId) -> None:
        """Switch between one graph and pieces, after a step of the newest cut and if no other length is wanted."""
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

    def _split_merged(self) -> None:
        """Have other jobs run in pieces from their next steps on: a job was opened."""
        before = len(self._events)
        for job in self._jobs.values():
            for program, loaded in job.programs.items():
                # A capture under way makes a new cut as well. With two new cuts, a step that was sent meanwhile would
                # find neither its own cut nor the one before the newest.
                switching = loaded.merged and loaded.cuts.stepped_through and not job.ended
                if switching and not job.captures(program):
                    self._recut(job, program, loaded.switch(False))
        if len(self._events) > before:
            self._emit()

    def _continue_job(self, job: CudaJob, ended: Launch | None) -> None:
        """Start what can start after a command of the job has ended. `ended`: the launch that ended a step, if it was
        one; then its program may be cut anew first."""
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
            if job.unused_graphs and not any(isinstance(waiting, Capture | DropUnused) for waiting in job.backlog):
                job.backlog.appendleft(DropUnused())  # a capture drops them itself
        self._advance(job)
        self._hand_over()
        self._assigner.release_idle(job)

    def _warn_uncaptured(self, job: CudaJob, what: str, error: GpumuxError | None = None) -> None:
        """Log that a piece can't be captured, once for each job: all its cuts may fail the same way."""
        if not job.warned:
            job.warned = True
            text = "a piece of job %s can't be captured, which makes its steps slower; %s"
            log.warning(text, job.id, what, exc_info=error)

    def _log(self, job: CudaJob, command: Command | InternalCommand, error: BaseException) -> None:
        """Log a failure with its traceback, which the job's fault does not have. Once for each job, and no refusals of
        its Programs."""
        if job.logged or (isinstance(error, ProgramError | AdmissionRefused) and error.__cause__ is None):
            return
        job.logged = True
        log.error("%s of job %s failed: %s", type(command).__name__, job.id, error, exc_info=error)

    # ---- ends ------------------------------------------------------------------------------------

    def _fail_job(self, job: CudaJob, fault: Fault, launch: Launch | None) -> None:
        """End a job whose work failed, in `launch` if that is known: nothing of it runs any more."""
        job.fault = fault
        for token in self._checks.forget(job.id):
            self._supervisor.kill(token)
        unfinished = self._schedule.drop(job.id)
        job.backlog.clear()
        if launch is not None:
            self._events.append(PieceFailed(launch.launch, fault))
        self._profiles.lost(job, fault)
        for command in unfinished:
            if command is not launch:
                self._events += unanswered(job.id, command, fault)
        self._release_job(job)
        self._hand_over()
        self._emit()

    def _drop_job(self, job: CudaJob) -> None:
        """Unload a job. Its commands are not answered."""
        job.unloading = True
        self._profiles.lost(job, None)
        for command in self._schedule.drop(job.id):
            if not (job.busy and command is job.current):  # the worker closes that one
                release(command)
        job.backlog.clear()
        self._release_job(job)
        self._hand_over()

    def _abandon_all(self) -> None:
        """Close the descriptors and mappings of all jobs. The GPU is lost, so its memory can't be given back."""
        for job in self._jobs.values():
            for command in self._schedule.drop(job.id):
                release(command)
            for loaded in job.programs.values():
                loaded.operands.abandon()
        self._jobs.clear()

    def _release_job(self, job: CudaJob) -> None:
        """Give back what an ended job holds, after the command that the worker carries out for it."""
        if job.busy or job.releasing:
            return
        job.releasing = True
        self._worker.submit(partial(self._engine.release, job, job.stream), partial(self._released, job), Priority.HIGH)

    def _released(self, job: CudaJob, value: None, error: BaseException | None) -> None:
        if isinstance(error, DeviceLost):
            raise error
        if error is not None:  # other jobs run on, without the memory it held
            log.error("what job %s held can't all be given back: %s", job.id, error, exc_info=error)
        self._assigner.release(job)
        del self._jobs[job.id]
        self._untrimmed = True
        assert job.fault is not None or job.unloading
        self._events.append(JobReleased(job.id) if job.fault is None or job.unloading else JobDied(job.id, job.fault))

    def _trim(self) -> None:
        """Have torch give unused memory back to the driver. Only while nothing runs: the GPU stops for a moment."""
        if (
            self._untrimmed
            and not len(self._tracker)
            and not any(job.busy or job.releasing for job in self._jobs.values())
        ):
            self._untrimmed = False
            self._worker.submit(self._engine.trim, _trimmed, -1)


def _nothing() -> None:
    pass


def _trimmed(value: None, error: BaseException | None) -> None:
    if isinstance(error, JobFailed):  # no command failed with it, and it is tried again after the next job
        log.warning("%s", error)
    elif error is not None:
        raise error
