"""Random lives of sessions, jobs, steps and transfers; the oracle in `world.py` watches each command."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from gpumux.config import POLICIES
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.types import (
    CollectiveEnded,
    Footprint,
    JobDied,
    JobReleased,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramReady,
    TransferEnded,
)
from tests.scheduler.world import FAULT, INFO, World

SECONDS = st.floats(0, 2e-3)
PIECES = st.lists(SECONDS, min_size=1, max_size=4).map(tuple)
PICK = st.integers(0, 1 << 16)
RARELY = st.integers(0, 15).map(lambda n: n == 11)  # ends lives; not 0, which is drawn more often than the rest
BYTES = st.sampled_from((0, 10, 1 << 20, 1 << 28, 1 << 31))
MODEST = {"max_jobs": 6, "max_jobs_per_uid": 4, "max_programs_per_job": 3, "max_transfers_per_job": 2}


class Life(RuleBasedStateMachine):
    """Rules pick among what exists by a number, so that every one of them nearly always does something."""

    policy, info = "paced", INFO
    priorities: tuple[str, ...] = ("low", "high")  # of the jobs that are there from the beginning

    @initialize(pieces=PIECES)
    def begin(self, pieces: tuple[float, ...]) -> None:
        self.world = World(self.policy, self.info, **MODEST)
        self.world.session("s0", uid=1)
        self.count = 0
        self.leaving = False
        for priority in self.priorities:
            self.world.job(priority, priority, pieces, "s0", max_inflight=3)
            self.world.job(f"{priority} rank", priority, pieces, "s0", gated=gates(pieces, 1), max_inflight=3)

    def fresh(self) -> int:
        self.count += 1
        return self.count

    def pick(self, n: int) -> str:
        """One of the jobs, preferably one that takes work."""
        jobs = [j for j, v in self.world.jobs.items() if not v.unloading] or list(self.world.jobs)
        return jobs[n % len(jobs)]

    def any_job(self) -> bool:
        return bool(self.world.jobs)

    def any_launch(self) -> bool:
        return bool(self.world.launches)

    # ---- clients

    @rule()
    @precondition(any_job)
    def open_session(self) -> None:
        if len(self.world.sessions) < 3:
            self.world.session(f"s{self.fresh()}", uid=len(self.world.sessions))

    @rule(n=PICK, really=RARELY)
    def close_session(self, n: int, really: bool) -> None:
        sessions = sorted(self.world.sessions)
        if len(sessions) > 1 and really:
            gone = sessions[n % len(sessions)]
            self.world.sessions.remove(gone)
            self.world.give(ev.SessionClosed(gone, "it left"))
            assert all(view.unloading for view in self.world.jobs.values() if view.session == gone)

    @rule(
        n=PICK,
        priority=st.sampled_from(("low", "high")),
        weight=st.floats(0.1, 10),
        inflight=st.integers(1, 4),
        pieces=PIECES,
        shared=st.booleans(),
    )
    def request_job(
        self, n: int, priority: str, weight: float, inflight: int, pieces: tuple[float, ...], shared: bool
    ) -> None:
        sessions = sorted(self.world.sessions)
        name, session = f"j{self.fresh()}", sessions[n % len(sessions)]
        arena = 0 if shared and priority == "low" else None
        (answer,) = self.world.request(name, priority, session, weight=weight, max_inflight=inflight, arena=arena)
        full = len(self.world.jobs) - (name in self.world.jobs) >= MODEST["max_jobs"]
        if isinstance(answer, cmd.RefuseJob):
            assert answer.fault.code == ("daemon_gone" if self.leaving else "admission_refused")
        else:
            assert not full
            assert not self.leaving
            self.world.program(name, 0, pieces, Footprint(10, 10, 10))

    @rule(
        n=PICK,
        high=st.booleans(),
        nbytes=BYTES,
        lease=st.sampled_from((1e-3, 1.0)),
        then=st.sampled_from(("confirm", "confirm", "release", "")),
        waits=st.booleans(),
    )
    def reserve(self, n: int, high: bool, nbytes: int, lease: float, then: str, waits: bool) -> None:
        """For a job that comes, or does not, in time, or too late."""
        sessions = sorted(self.world.sessions)
        name, session, priority = f"j{self.fresh()}", sessions[n % len(sessions)], Priority(high)
        (answer,) = self.world.give(ev.ReserveRequested(session, 1, name, priority, nbytes, lease))
        assert isinstance(answer, cmd.AnswerReservation)
        reserved = answer.fault is None
        if then == "confirm":
            self.world.give(ev.ConfirmRequested(session, 2, name, lease))
        elif then == "release":
            self.world.give(ev.ReleaseRequested(session, 2, name))
        if waits:
            self.world.elapse(2e-3)
        before = self.world.scheduler.snapshot()["memory"]["used"]
        (opened,) = self.world.request(name, "high" if high else "low", session)
        if reserved and then == "confirm" and (lease == 1.0 or not waits):
            assert isinstance(opened, cmd.AcceptJob), "what was confirmed was not to be had"
            assert self.world.scheduler.snapshot()["memory"]["used"] == before, "the job's bytes were held already"

    @rule(n=PICK)
    @precondition(any_job)
    def request_again(self, n: int) -> None:
        job = self.pick(n)
        view = self.world.jobs[job]
        (answer,) = self.world.give(ev.JobRequested(view.session, job, view.spec))
        if view.unloading or view.draining:
            assert isinstance(answer, cmd.RefuseJob)
        else:
            assert answer == cmd.AcceptJob(view.session, job, False)

    @rule(n=PICK, program=st.integers(0, 3), state=BYTES, transient=BYTES)
    @precondition(any_job)
    def offer(self, n: int, program: int, state: int, transient: int) -> None:
        self.world.offer(self.pick(n), program, Footprint(state, transient, 0))

    @rule(n=PICK, program=st.sampled_from((0, 0, 0, 1, 1, 2, 3)))
    @precondition(any_job)
    def submit(self, n: int, program: int) -> None:
        self.world.step(self.pick(n), self.fresh(), program)

    @rule(n=PICK, more=st.sampled_from((0, 0, 3)))
    @precondition(any_job)
    def submit_all(self, n: int, more: int) -> None:
        """Every job as many steps as it may have, and one of them more than that."""
        greedy = self.pick(n)
        for job, view in list(self.world.jobs.items()):
            room = view.spec.max_inflight - sum(1 for item in view.items if item.program is not None)
            for _ in range(room + (more if job == greedy else 0)):
                self.world.step(job, self.fresh())

    @rule(n=PICK)
    @precondition(any_job)
    def submit_again(self, n: int) -> None:
        """A step that was said before, and one of a job that never was."""
        (answer,) = self.world.step("nobody", self.fresh())
        assert isinstance(answer, cmd.FailStep)
        assert answer.fault.code == "unknown_job"
        job = self.pick(n)
        mine = [step for name, step in self.world.submitted if name == job]
        if mine:
            assert not steps_answered(self.world.give(ev.StepSubmitted(job, mine[n % len(mine)], 0)))

    @rule(n=PICK, other=PICK, over=st.booleans())
    @precondition(any_job)
    def client_waits(self, n: int, other: int, over: bool) -> None:
        """For a step of a job that may be a low one, before it steps two others, one of which may be a high one."""
        job = self.pick(n)
        steps = [item.id for item in self.world.jobs[job].items if item.program is not None] or [0]
        before = (self.pick(other), self.pick(other + 1))
        self.world.give(ev.ClientWaits(job, steps[other % len(steps)], before, over))

    @rule(n=PICK, into=st.booleans())
    @precondition(any_job)
    def ask_transfer(self, n: int, into: bool) -> None:
        self.world.transfer(self.pick(n), self.fresh(), into)

    @rule(n=PICK)
    @precondition(any_job)
    def pause(self, n: int) -> None:
        self.world.pause(self.pick(n))

    @rule(n=PICK)
    @precondition(any_job)
    def resume(self, n: int) -> None:
        paused = [job for job, view in self.world.jobs.items() if view.paused]
        if paused:
            self.world.resume(paused[n % len(paused)])

    @rule(n=PICK, priority=st.sampled_from(("", "low", "high", "high")), weight=st.none() | st.floats(0.1, 10))
    @precondition(any_job)
    def change(self, n: int, priority: str, weight: float | None) -> None:
        job = self.pick(n)
        view = self.world.jobs[job]
        before = view.changes
        self.world.change(job, priority, weight)
        if not view.unloading and not view.out:
            assert view.changes == before + 1, "nothing was out, and the change is not in force"
            assert view.wanted is None

    @rule(n=PICK, drain=st.booleans(), really=RARELY)
    @precondition(any_job)
    def close(self, n: int, drain: bool, really: bool) -> None:
        if really:
            self.world.close(self.pick(n), drain)

    @rule(really=RARELY, truly=RARELY)
    def leave(self, really: bool, truly: bool) -> None:
        if really and truly:
            self.leaving = True
            self.world.give(ev.DrainRequested("SIGTERM"))
            assert all(view.unloading for view in self.world.jobs.values())

    # ---- the device

    @rule(n=PICK, cut=st.integers(0, 3), pieces=PIECES, every=st.sampled_from((0, 0, 1, 2)))
    @precondition(any_job)
    def ready(self, n: int, cut: int, pieces: tuple[float, ...], every: int) -> None:
        job = self.pick(n)
        view = self.world.jobs[job]
        if not view.unloading:
            programs = sorted(view.pending) or sorted(view.programs)
            if programs:
                self.world.ready(job, programs[n % len(programs)], cut, pieces, gates(pieces, every))

    @rule(n=PICK)
    @precondition(any_job)
    def drop(self, n: int) -> None:
        job = self.pick(n)
        pending = sorted(self.world.jobs[job].pending)
        if pending and not self.world.jobs[job].unloading:
            commands = self.world.give(ev.ProgramDropped(job, pending[0], FAULT))
            assert cmd.RefuseProgram(job, pending[0], FAULT) in commands

    @rule(n=PICK, seconds=SECONDS)
    @precondition(any_launch)
    def piece_done(self, n: int, seconds: float) -> None:
        """Jobs may overtake each other on the device, launches of one job may not."""
        oldest = sorted(view.out[0] for view in self.world.jobs.values() if view.out)
        self.world.done(oldest[n % len(oldest)], seconds)

    @rule(n=PICK)
    @precondition(any_launch)
    def many_done(self, n: int) -> None:
        for _ in range(n % 16):
            if self.world.launches:
                self.world.done(min(self.world.launches))

    @rule(n=PICK, seconds=SECONDS)
    def peers_came(self, n: int, seconds: float) -> None:
        parked = self.world.parked()
        if parked:
            self.world.met(parked[n % len(parked)], seconds)

    @rule(n=PICK, piece=st.integers(0, 4))
    @precondition(any_job)
    def peers_came_to_nothing(self, n: int, piece: int) -> None:
        """A collective of a job that waits for none, or for another one."""
        job = self.pick(n)
        steps = [item.id for item in self.world.jobs[job].items if item.program is not None] or [0]
        if job not in self.world.parked():
            before = self.world.scheduler.snapshot()["counters"]["ignored"].get("CollectiveEnded", 0)
            assert self.world.give(CollectiveEnded(job, steps[n % len(steps)], piece, 0.0, 1.0)) == []
            assert self.world.scheduler.snapshot()["counters"]["ignored"]["CollectiveEnded"] == before + 1

    @rule(n=PICK, really=RARELY)
    @precondition(any_launch)
    def piece_failed(self, n: int, really: bool) -> None:
        if really:
            self.world.fail(sorted(self.world.launches)[n % len(self.world.launches)])

    @rule(n=PICK, fault=st.sampled_from((None, FAULT)))
    def transfer_ended(self, n: int, fault: object) -> None:
        begun = [(job, v.items[0].id) for job, v in self.world.jobs.items() if v.items and v.items[0].started]
        if begun:
            self.world.end_transfer(*begun[n % len(begun)], fault)

    @rule(n=PICK, really=RARELY)
    @precondition(any_job)
    def job_died(self, n: int, really: bool) -> None:
        if really:
            jobs = sorted(self.world.jobs)
            self.world.died(jobs[n % len(jobs)])

    @rule(n=PICK)
    def released(self, n: int) -> None:
        unloading = [job for job, view in self.world.jobs.items() if view.unloading]
        if unloading:
            job = unloading[n % len(unloading)]
            assert cmd.ForgetJob(job) in self.world.release(job)

    @rule(n=PICK)
    @precondition(any_job)
    def stale(self, n: int) -> None:
        """Late and repeated events about what is over, and about what never was."""
        gone = (self.world.forgotten or ["never"])[-1]
        events = (
            PieceDone(10**9 + n, 0.0, 1.0), PieceFailed(10**9 + n, FAULT), TransferEnded(gone, 1, None),
            JobDied(gone, FAULT), CollectiveEnded(gone, 1, 1, 0.0, 1.0), JobReleased(gone),
            ProgramReady(gone, 0, 0, (1.0,)),
            ev.ProgramOffered(gone, 0, Footprint(1, 1, 1)), ev.ProgramDropped(gone, 0, FAULT), ev.PauseRequested(gone),
            ev.ResumeRequested(gone), ev.ChangeRequested(gone, None, 2.0), ev.CloseRequested(gone, True, ""),
            ev.SessionClosed("never", ""),
        )  # fmt: skip
        event = events[n % len(events)]
        before = self.world.scheduler.snapshot()["counters"]["ignored"].get(type(event).__name__, 0)
        assert self.world.give(event) == []
        assert self.world.scheduler.snapshot()["counters"]["ignored"][type(event).__name__] == before + 1

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def gates(pieces: tuple[float, ...], every: int) -> tuple[int, ...]:
    """Every so many pieces one that begins with a collective; 0: none."""
    return tuple(range(every, len(pieces), every)) if every else ()


def steps_answered(commands: list[cmd.Command]) -> list[cmd.Command]:
    return [c for c in commands if isinstance(c, cmd.FinishStep | cmd.FailStep)]


@pytest.mark.every(2)
@pytest.mark.timeout(600)  # a failure is made small before it is shown
@pytest.mark.parametrize("policy", POLICIES)
def test_promises_hold_in_every_life(policy: str) -> None:
    live(type("Life", (Life,), {"policy": policy}), 150 if policy == "guarded" else 60)


def live(machine: type[Life], lives: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=lives,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("job", [0, 1])
@pytest.mark.parametrize("pieces", [(0.001953125,), (0.001953125, 0.001953125), (1e-3, 1e-3)])
@pytest.mark.parametrize("done", [4, 9, 10, 14])
def test_a_job_that_is_paused_as_the_guard_would_launch_it_is_not(
    pieces: tuple[float, ...], done: int, job: int
) -> None:
    """The guard asks to be woken for a launch, and the job is paused about when that is due."""
    life = type("Guarded", (Life,), {"policy": "guarded"})()
    life.begin(pieces=pieces)
    for _ in range(2):
        life.submit_all(more=0, n=0)
        life.many_done(n=done)
    world = life.world
    if world.now < world.wake_at < inf:
        world.now = world.wake_at - 5e-5
    life.pause(n=job)
    world.elapse(1.0)
    life.submit_all(more=0, n=0)
    life.teardown()
