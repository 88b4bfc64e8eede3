"""A core, its clients and a device on a virtual clock, and an oracle that watches every command.

The oracle is a second, naive account of the promises: it scans where the core keeps counters, and
raises AssertionError at the first command that breaks order, a window, or "answered exactly once".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.scheduler import SHORTEST_WAKE_S, Scheduler
from gpumux.types import (
    CollectiveEnded,
    DeviceInfo,
    Fault,
    Footprint,
    JobDied,
    JobReleased,
    JobSpec,
    Peer,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramReady,
    TransferEnded,
)

GIB = 1 << 30
INFO = DeviceInfo("sim", "virtual", GIB, None, 0, "", {"high": 400e-6, "low": 300e-6})
SMALL = Footprint(state_bytes=1000, transient_bytes=100, slot_bytes=10)
FAULT = Fault("executor_crashed", "it crashed", "mend it")
LAX = 1e-9
LONGEST_LEASE_S = 2.0  # of the tests' reservations


@dataclass
class Item:
    """A submitted step or transfer, as the client counts it."""

    id: int
    program: int | None  # None: a transfer
    pieces: tuple[float, ...] = ()
    cut: int = -1
    launched: int = 0
    done: int = 0
    started: bool = False  # transfers
    finished: int = 0
    gated: tuple[int, ...] = ()
    met: int = 0  # collectives that have ended

    @property
    def waits(self) -> bool:
        """Whether its next piece waits for its peers."""
        return self.met < len(self.gated) and self.gated[self.met] == self.launched


@dataclass
class View:
    """A job as its client and the device know it."""

    session: str
    spec: JobSpec
    priority: Priority
    wanted: Priority | None = None  # asked for, and not in force
    changes: int = 0  # JobChanged seen
    programs: dict[int, tuple[int, tuple[float, ...]]] = field(default_factory=dict)  # newest cut and its pieces
    gated: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of these, those that begin with a collective
    pending: set[int] = field(default_factory=set)
    items: list[Item] = field(default_factory=list)  # unanswered, in order
    out: list[int] = field(default_factory=list)  # launches on the device, oldest first
    paused: bool = False
    draining: bool = False
    closed: bool = False  # EndJob seen
    unloading: bool = False


class World:
    def __init__(self, policy: str = "paced", info: DeviceInfo | None = INFO, **config: object) -> None:
        self.scheduler = Scheduler(SchedulerConfig(policy=policy, **config))
        self.policy = policy
        self.run_s = info.run_s if info is not None else 0.0
        self.parallel = info.parallel if info is not None else None
        self.now = 0.0
        self.jobs: dict[str, View] = {}
        self.sessions: set[str] = set()
        self.launches: dict[int, cmd.LaunchPiece] = {}
        self.predicted: dict[int, float] = {}
        self.decisions: dict[tuple[str, int], list[cmd.Command]] = {}
        self.submitted: list[tuple[str, int]] = []
        self.forgotten: list[str] = []
        self.wake_at = inf  # a Tick was asked for
        self.late: Callable[[], bool] = lambda: False
        if info is not None:
            self.give(ev.DeviceOpened(info))

    # ---- events

    def give(self, event: ev.Event, after: float = 1e-4) -> list[cmd.Command]:
        """What the event led to. Under `guarded` without the launches: time alone may free a held job."""
        self.elapse(after, wake=not isinstance(event, ev.Tick))
        commands = self.scheduler.handle(event, self.now)
        for command in commands:
            self.observe(command)
        self.scheduler.check_invariants()
        self._will_be_woken()
        unasked = (cmd.WakeAt, cmd.LaunchPiece, cmd.CutProgram) if self.policy == "guarded" else (cmd.WakeAt,)
        return [c for c in commands if not isinstance(c, unasked)]

    def _will_be_woken(self) -> None:
        """Checks that a job held until a time is reconsidered by then, though nothing else happens."""
        policy = self.scheduler._state.policy
        guard = policy.guard if policy is not None else None
        if guard is None:
            return
        until = [answer.hold.until for answer in guard.decisions.held_now if answer.hold is not None]
        if min(until, default=inf) < inf:
            assert self.wake_at <= max(min(until), self.now + SHORTEST_WAKE_S), (self.wake_at, until, self.now)

    def elapse(self, seconds: float, wake: bool = True) -> None:
        """Time passes, and the core is woken if it asked for that: before whatever happens next, not in the middle of
        it, unless the wake-up is `late`."""
        self.now += seconds
        if self.wake_at <= self.now and not (wake and self.late()):
            self.wake_at = inf
            if wake:
                self.give(ev.Tick(), after=0.0)

    def session(self, name: str = "s", uid: int = 1000) -> str:
        self.sessions.add(name)
        self.give(ev.SessionOpened(name, Peer(uid, uid, 1)))
        return name

    def job(
        self,
        name: str,
        priority: str = "low",
        pieces: tuple[float, ...] | None = (1e-4,),
        session: str = "s",
        footprint: Footprint = SMALL,
        gated: tuple[int, ...] = (),
        **spec: object,
    ) -> str:
        """Open a job with program 0 ready under cut 0 (or no program: pieces None)."""
        if session not in self.sessions:
            self.session(session)
        (answer,) = self.request(name, priority, session, **spec)
        assert answer == cmd.AcceptJob(session, name, True), answer
        if pieces is not None:
            self.program(name, 0, pieces, footprint, gated)
        return name

    def request(self, name: str, priority: str = "low", session: str = "s", **spec: object) -> list[cmd.Command]:
        wanted = JobSpec(name, Priority[priority.upper()], **spec)
        commands = self.give(ev.JobRequested(session, name, wanted))
        if commands == [cmd.AcceptJob(session, name, True)]:
            self.jobs[name] = View(session, wanted, wanted.priority)
        return commands

    def program(
        self, job: str, program: int, pieces: tuple[float, ...], footprint: Footprint = SMALL,
        gated: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        assert self.offer(job, program, footprint) == [cmd.AcceptProgram(job, program)]
        assert cmd.AnnounceProgram(job, program) in self.ready(job, program, 0, pieces, gated)

    def offer(self, job: str, program: int, footprint: Footprint = SMALL) -> list[cmd.Command]:
        view = self.jobs.get(job)
        known = view is not None and (program in view.programs or program in view.pending)
        commands = self.give(ev.ProgramOffered(job, program, footprint))
        if view is not None and cmd.AcceptProgram(job, program) in commands:
            assert not known, "a program was accepted twice"
            view.pending.add(program)
        return commands

    def ready(
        self, job: str, program: int, cut: int, pieces: tuple[float, ...], gated: tuple[int, ...] = ()
    ) -> list[cmd.Command]:
        view = self.jobs[job]
        if program in view.pending or cut > view.programs.get(program, (inf,))[0]:
            view.programs[program] = (cut, pieces)
            view.gated[program] = gated
        view.pending.discard(program)
        return self.give(ProgramReady(job, program, cut, pieces, gated=gated))

    def step(self, job: str, step: int, program: int = 0) -> list[cmd.Command]:
        """Submit a step with a new number."""
        assert (job, step) not in self.decisions, "the test submits a step twice"
        self.submitted.append((job, step))
        self.decisions[job, step] = []
        if job in self.jobs:
            self.jobs[job].items.append(Item(step, program))
        return self.give(ev.StepSubmitted(job, step, program))

    def steps(self, job: str, *steps: int) -> None:
        for step in steps:
            self.step(job, step)

    def transfer(self, job: str, transfer: int, into_device: bool = True) -> list[cmd.Command]:
        if job in self.jobs:
            self.jobs[job].items.append(Item(transfer, None))
        return self.give(ev.TransferRequested(job, transfer, into_device))

    def end_transfer(self, job: str, transfer: int, fault: Fault | None = None) -> list[cmd.Command]:
        return self.give(TransferEnded(job, transfer, fault))

    def done(
        self, launch: int, seconds: float = 1e-4, suspended: float = 0.0, fault: Fault | None = None
    ) -> list[cmd.Command]:
        """The device finishes a launch it has; `seconds` is what it measured, in the last `suspended` of which it stood
        still. `fault`: of a step that failed alone."""
        piece = self.launches.pop(launch)
        view = self.jobs[piece.job]
        assert view.out[0] == launch, "the test's device broke the order of a job"
        view.out.pop(0)
        for item in view.items:
            if item.program is not None and item.id == piece.step:
                item.done += piece.pieces
        started = self.now
        self.now += seconds
        return self.give(PieceDone(launch, started, self.now, False, suspended, fault), after=0.0)

    def parked(self) -> list[str]:
        """Jobs that wait for their peers with nothing on the device."""
        return [job for job, view in self.jobs.items() if not view.out and any(item.waits for item in view.items)]

    def met(self, job: str, seconds: float = 1e-4, exchange_s: float = 0.0) -> list[cmd.Command]:
        """The peers of a job that waits for them have come and data were exchanged, after so long in all."""
        item = next(item for item in self.jobs[job].items if item.waits)
        item.met += 1
        started = self.now
        self.elapse(seconds)
        moved = ((1, 8, 16),)
        return self.give(CollectiveEnded(job, item.id, item.launched, started, self.now, moved, exchange_s), after=0.0)

    def fail(self, launch: int) -> list[cmd.Command]:
        piece = self.launches.pop(launch)
        self.jobs[piece.job].out.remove(launch)
        return self.give(PieceFailed(launch, FAULT))

    def died(self, job: str) -> list[cmd.Command]:
        view = self.jobs[job]
        for launch in view.out:
            del self.launches[launch]
        view.out.clear()
        return self.give(JobDied(job, FAULT))

    def release(self, job: str) -> list[cmd.Command]:
        view = self.jobs[job]
        assert view.unloading
        for launch in view.out:
            del self.launches[launch]
        view.out.clear()
        return self.give(JobReleased(job))

    def pause(self, job: str) -> list[cmd.Command]:
        self.elapse(1e-4)
        self.jobs[job].paused = True
        return self.give(ev.PauseRequested(job), after=0.0)

    def resume(self, job: str) -> list[cmd.Command]:
        self.jobs[job].paused = False
        return self.give(ev.ResumeRequested(job))

    def change(self, job: str, priority: str = "", weight: float | None = None) -> list[cmd.Command]:
        """Ask for another priority ("": as it is) or weight. Whether the answer came is in `changes` of the job's
        view."""
        view, wanted = self.jobs[job], Priority[priority.upper()] if priority else None
        if not view.unloading:
            view.wanted = wanted if wanted is not None else view.wanted
        return self.give(ev.ChangeRequested(job, wanted, weight))

    def close(self, job: str, drain: bool = False) -> list[cmd.Command]:
        self.jobs[job].draining = True
        if drain:
            self.jobs[job].paused = False
        return self.give(ev.CloseRequested(job, drain, "the test says so"))

    def run(self, limit: int = 10_000) -> list[cmd.LaunchPiece]:
        """A device of one lane: highest stream first, oldest launch first, until it is idle."""
        ran: list[cmd.LaunchPiece] = []
        while self.launches or self.wake_at < inf or self.parked():
            limit -= 1
            assert limit, "the device never came to rest"
            if not self.launches and self.parked():
                self.met(self.parked()[0])
                continue
            if not self.launches:
                self.give(ev.Tick(), after=max(0.0, self.wake_at - self.now))
                continue
            launch = min(self.launches.values(), key=lambda p: (-p.stream, p.launch))
            ran.append(launch)
            self.done(launch.launch)
        return ran

    # ---- the oracle

    def out(self, priority: str) -> list[cmd.LaunchPiece]:
        wanted = Priority[priority.upper()]
        return [p for p in self.launches.values() if self.jobs[p.job].priority is wanted]

    def window(self, priority: Priority) -> tuple[int, float]:
        if self.policy not in ("paced", "guarded"):
            return 1024, inf
        if priority is Priority.HIGH:
            return 2, 2 * 2 * 400e-6
        active = self.active(Priority.HIGH)
        idle_s = self.scheduler.config.low_idle_window_s or 2 * 4 * 300e-6
        if self.in_runs():
            return 4, max(idle_s, 4 * self.run_s)
        beside = 4 if self.policy == "guarded" else 1  # the guard widens it where that costs nothing
        return (beside, beside * 2 * 300e-6) if active else (4, idle_s)

    def in_runs(self) -> bool:
        """Whether several pieces may be one launch."""
        if self.run_s == 0 or any(v.priority is Priority.HIGH for v in self.jobs.values()):
            return False
        return self.parallel is None or self.active(Priority.LOW) <= self.parallel

    def active(self, priority: Priority) -> int:
        """How many jobs of the class have work and may do it."""
        parked = self.parked()
        working = [v for j, v in self.jobs.items() if v.items and not v.paused and not v.unloading and j not in parked]
        return sum(v.priority is priority for v in working)

    def observe(self, command: cmd.Command) -> None:
        name = type(command).__name__
        watch = getattr(self, f"_saw_{name}", None)
        if watch is not None:
            watch(command)

    def _saw_LaunchPiece(self, c: cmd.LaunchPiece) -> None:
        view = self.jobs[c.job]
        assert not view.paused, "a paused job was launched"
        assert not view.unloading, "a job was launched after its unload"
        ahead = next(i for i in view.items if i.program is None or i.launched == 0 or i.launched < len(i.pieces))
        assert (ahead.program, ahead.id) == (c.program, c.step), f"{c} out of order, {ahead} comes first"
        if c.piece == 0:
            ahead.cut, ahead.pieces = view.programs[c.program]
            ahead.gated = view.gated[c.program]
        assert (c.cut, c.piece) == (ahead.cut, ahead.launched), f"{c} is not the next piece of {ahead}"
        assert not ahead.waits, f"{c} was made before its collective had ended"
        predicted = sum(ahead.pieces[c.piece : c.piece + c.pieces])
        if c.pieces > 1:
            assert self.in_runs(), f"{c} covers several pieces"
            assert predicted <= self.run_s + LAX, f"{c} takes {predicted} s"
            crossed = [piece for piece in ahead.gated[ahead.met :] if piece < c.piece + c.pieces]
            assert not crossed, f"{c} crosses a collective"
        assert view.wanted in (None, view.priority), "a job that is about to change its class was launched"
        before = self.out(view.priority.name)
        launches, seconds = self.window(view.priority)
        assert len(before) < launches, f"{c} made with {len(before)} out, {launches} allowed"
        held = sum(self.predicted[p.launch] for p in before)
        assert not before or held + predicted <= seconds + LAX, f"{c} made with {held} s out, {seconds} s allowed"
        assert c.stream == (0 if self.policy == "fifo" else int(view.priority))
        assert c.launch not in self.predicted, "a launch id was used twice"
        ahead.launched += c.pieces
        self.launches[c.launch] = c
        self.predicted[c.launch] = predicted
        view.out.append(c.launch)

    def _saw_JobChanged(self, c: cmd.JobChanged) -> None:
        view = self.jobs[c.job]
        assert not view.unloading, "a job that has ended was changed"
        wanted = view.priority if view.wanted is None else view.wanted
        assert c.priority is wanted
        assert c.priority is view.priority or not view.out, "a job changed its class with pieces out"
        view.priority, view.wanted = c.priority, None
        view.changes += 1

    def _saw_AnswerReservation(self, c: cmd.AnswerReservation) -> None:
        """Nothing is changed by it."""

    def _saw_WakeAt(self, c: cmd.WakeAt) -> None:
        assert self.now < c.when < inf, f"{c} at {self.now}"
        self.wake_at = min(self.wake_at, c.when)

    def _saw_StartTransfer(self, c: cmd.StartTransfer) -> None:
        view = self.jobs[c.job]
        first = view.items[0]
        assert (first.program, first.id, first.started) == (None, c.transfer, False), f"{c} is not first"
        assert not view.out, "a transfer began beside launches"
        assert not view.paused
        first.started = True

    def _saw_FinishTransfer(self, c: cmd.FinishTransfer) -> None:
        view = self.jobs.get(c.job)
        if view is not None:
            item = next(i for i in view.items if i.program is None and i.id == c.transfer)
            assert item.started or c.fault is not None, "a transfer ended well that never began"
            view.items.remove(item)

    def _saw_FinishStep(self, c: cmd.FinishStep) -> None:
        item = self.jobs[c.job].items[0]
        assert item.program is not None, "a step was finished out of order"
        assert item.id == c.step, "a step was finished out of order"
        assert item.done == item.launched == len(item.pieces) > 0, f"{c} before its pieces were done"
        assert 0 <= c.times.queue_s <= c.times.total_s + LAX
        self._answered(c)

    def _saw_FailStep(self, c: cmd.FailStep) -> None:
        assert c.fault.code
        assert c.fault.message
        self._answered(c)

    def _answered(self, c: cmd.FinishStep | cmd.FailStep) -> None:
        before = self.decisions[c.job, c.step]
        assert not before, f"{c} after {before}"
        before.append(c)
        view = self.jobs.get(c.job)
        if view is not None:
            view.items = [i for i in view.items if i.program is None or i.id != c.step]

    def _saw_RefuseProgram(self, c: cmd.RefuseProgram) -> None:
        if c.job in self.jobs:
            self.jobs[c.job].pending.discard(c.program)

    def _saw_UnloadJob(self, c: cmd.UnloadJob) -> None:
        view = self.jobs[c.job]
        assert not view.unloading, "a job was unloaded twice"
        assert not view.items, f"{view.items} unanswered when the job was unloaded"
        assert not view.pending, f"programs {view.pending} were offered and never answered"
        view.unloading = True

    def _saw_EndJob(self, c: cmd.EndJob) -> None:
        view = self.jobs[c.job]
        assert not view.closed, "a job was closed twice"
        assert c.session == view.session
        view.closed = True

    def _saw_ForgetJob(self, c: cmd.ForgetJob) -> None:
        assert self.jobs.pop(c.job).closed, "a job was forgotten before its client was told"
        self.forgotten.append(c.job)

    def finish(self) -> None:
        """Let everything end, and hold the core to having answered all and kept nothing."""
        for job, view in self.jobs.items():
            if view.paused and not view.unloading:
                self.resume(job)
        for job, view in list(self.jobs.items()):
            for program in sorted(view.pending):
                if not view.unloading:
                    self.ready(job, program, 0, (1e-4,))
        rounds = sum(len(v.items) for v in self.jobs.values()) + 1  # each lets a transfer end, and what waits for it
        while self.launches or any(v.items for v in self.jobs.values()):
            rounds -= 1
            stuck = {job: v.items for job, v in self.jobs.items() if v.items}
            assert rounds >= 0, f"never answered: {stuck}"
            self.run()
            for job, view in self.jobs.items():
                if view.items and view.items[0].started:
                    self.end_transfer(job, view.items[0].id)
        for job, view in list(self.jobs.items()):
            if not view.unloading:
                self.close(job)
            self.release(job)
        unanswered = [key for key, answers in self.decisions.items() if len(answers) != 1]
        assert not unanswered, f"{unanswered} not answered exactly once"
        self.give(ev.Tick(), after=LONGEST_LEASE_S)  # what was reserved, and never confirmed
        assert_empty(self.scheduler)


def assert_empty(core: Scheduler) -> None:
    """Nothing of any job is left, in what the core shows and in what it keeps."""
    seen, state = core.snapshot(), core._state
    assert seen["jobs"] == []
    assert seen["memory"]["used"] == 0
    assert all(w["launches"] == w["seconds"] == w["active_jobs"] == 0 for w in seen["windows"].values())
    assert state.jobs == {}
    assert state.ledger.charges == state.ledger.jobs_by_uid == {}
    assert state.changed_jobs == []
    assert all(not session.jobs for session in state.sessions.values())
    assert all(not window.launches for window in state.windows.by_class)
    assert all(not queue._heap for queue in state.windows.ready)
