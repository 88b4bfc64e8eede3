"""Jobs with equal Programs that run as one: real Programs on stacked state, as the scheduler's groups command it, give
every job what it computes undisturbed, and the log of the commands gives the same bits again."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import pytest
import torch

from gpumux.capture.lower import with_generator
from gpumux.capture.state import byte_view
from gpumux.errors import NotFusible
from gpumux.fuse import equal
from gpumux.fuse.equal import FusedJobs, StackedState, fuse_jobs
from gpumux.fuse.member import Member
from gpumux.fuse.proof import ProgramRunner
from gpumux.fuse.template import Fused, stream_bytes
from gpumux.program.codec import encode
from gpumux.program.ir import Op, Program, ProgramBuilder, Wave, slot_layout
from gpumux.program.validate import state_slots
from gpumux.scheduler.fusion import groups as fg
from gpumux.types import JobId, Priority, StepId
from tests.fuse.serial import Config, batches, relative_difference, training
from tests.threads import one_thread

nn = torch.nn

JOBS = "abcd"
STEPS = 16
STEPS_BEFORE = fg.MEASURED_ALONE + 4  # steps that may run alone before a group is there
TURN_S = 0.004
RULES = fg.FusionRules(wait_s=0.01, gather_s=0.01, settle_s=0.008, retry_s=0.03, samples=4)


# ---- Jobs: their steps as a client would send them, and what carries them out


@dataclass(frozen=True)
class Step:
    """One step as a daemon gets it: a Program, the buffers of its state slots, host scalars, and the batch."""

    program: Program
    binding: tuple[int, ...]
    scalars: tuple[float | int, ...]
    batch: tuple[torch.Tensor, ...]

    @property
    def key(self) -> str:
        return key_of(self.program)


@dataclass(frozen=True)
class Recorded:
    """A job's whole life, as its client sends it. `buffers`: bytes at the beginning."""

    buffers: tuple[torch.Tensor, ...]
    steps: tuple[Step, ...]


@cache
def key_of(program: Program) -> str:
    return hashlib.sha256(encode(program)).hexdigest()


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )


@cache
def recorded(job: str) -> Recorded:
    """A job with its own learning rate, initial values and batches. Its first step, which makes the momentum, is
    another Program than those after it."""
    seed = JOBS.index(job)
    config = Config(seed, 0.02 * (seed + 1))
    member = Member(job, *training(small_cnn, loss=nn.CrossEntropyLoss())(config), max_variants=None, twice=False)
    local: list[torch.Tensor] = []
    steps = []
    for batch in batches(4, 1, 8, 8, classes=5, count=STEPS, seed=seed):
        choice = member.choose(batch, {})
        for buffer in member.table.buffers[len(local) :]:
            made = torch.zeros(buffer.nbytes, dtype=torch.uint8)
            for storage, start in buffer.home if buffer.filled else ():
                made[start : start + storage.nbytes()].copy_(byte_view(storage))
            local.append(made)
        lowered = choice.program.lowered
        count = len(lowered.program.scalars)
        tensors = tuple(t.detach().clone() for t in choice.tensors)
        steps.append(Step(lowered.program, tuple(lowered.binding), tuple(choice.values[:count]), tensors))
        member.advance(choice)
    member.release()
    return Recorded(tuple(local), tuple(steps))


@cache
def fused_program(program: Program, jobs: int) -> FusedJobs:
    return fuse_jobs(program, jobs)


@dataclass
class RunningJob:
    recorded: Recorded
    buffers: list[torch.Tensor] = field(init=False)
    runners: dict[str, ProgramRunner] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = [buffer.clone() for buffer in self.recorded.buffers]

    def own(self, step: Step) -> list[torch.Tensor]:
        return [self.buffers[index] for index in step.binding]


@dataclass
class Group:
    fused: FusedJobs
    order: tuple[str, ...] = ()
    state: StackedState = field(init=False)
    whole: ProgramRunner = field(init=False)
    alone: dict[str, ProgramRunner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = StackedState(self.fused)
        self.whole = ProgramRunner(self.fused.fused.program, self.state.lines)


def run(runner: ProgramRunner, step: Step) -> torch.Tensor:
    for target, source in zip(runner.inputs, step.batch, strict=True):
        target.copy_(source)
    return runner.run(step.scalars)[0]


class Executor:
    """Carries the groups' commands out on real Programs, each as it comes. It decides nothing."""

    def __init__(self) -> None:
        self.jobs = {job: RunningJob(recorded(job)) for job in JOBS}
        self.groups: dict[int, Group] = {}
        self.log: list[fg.Command] = []
        self.fused_steps = 0

    def carry_out(self, command: fg.Command) -> None:
        self.log.append(command)
        match command:
            case fg.BuildProgram(group, program, models):
                self.groups[group] = Group(fused_program(self._program(program), models))
            case fg.Stack(group, jobs):
                found = self.groups[group]
                found.order = jobs
                for place, job in enumerate(jobs):
                    found.state.stack(place, self.jobs[job].own(self._sample(found)))
            case fg.RunFused(group, steps):
                self._run_fused(self.groups[group], [(job, number) for job, number in steps])
            case fg.RunAlone(job, number, group):
                running = self.jobs[job]
                step = running.recorded.steps[number]
                if group is None:
                    runner = running.runners.get(step.key)
                    if runner is None:
                        runner = running.runners[step.key] = ProgramRunner(step.program, running.own(step))
                else:
                    found = self.groups[group]
                    if job not in found.alone:
                        parts = found.state.parts(found.order.index(job))
                        found.alone[job] = ProgramRunner(step.program, parts)
                    runner = found.alone[job]
                running.losses[number] = run(runner, step)
            case fg.Unstack(group, job):
                found = self.groups[group]
                found.state.unstack(found.order.index(job), self.jobs[job].own(self._sample(found)))
            case fg.ReleaseMemory(group):
                self.groups.pop(group, None)

    def _program(self, key: str) -> Program:
        return next(s.program for job in self.jobs.values() for s in job.recorded.steps if s.key == key)

    def _sample(self, group: Group) -> Step:
        """A step of the group's Program, for its binding."""
        return next(s for s in self.jobs["a"].recorded.steps if s.program == group.fused.program)

    def _run_fused(self, group: Group, steps: Sequence[tuple[str, int]]) -> None:
        self.fused_steps += 1
        fused, program = group.fused, group.fused.program
        found = [self.jobs[job].recorded.steps[number] for job, number in steps]
        for place, step in enumerate(found):
            # As bytes, from a slot laid out for the job's own Program, as a daemon has them.
            own = ProgramRunner(program, [b.clone() for b in self.jobs[steps[place][0]].own(step)])
            for target, source in zip(own.inputs, step.batch, strict=True):
                target.copy_(source)
            for at in fused.layout.input_places(place):
                group.whole.slot[at.fused : at.fused + at.nbytes] = own.slot[at.alone : at.alone + at.nbytes]
        fused.layout.fill_tables(group.whole.inputs, [step.scalars for step in found])
        group.whole.run(fused.layout.scalars([step.scalars for step in found]))
        loss = program.views[program.results[0]]
        for place, (job, number) in enumerate(steps):
            at = fused.layout.result_places(place)[0]
            data = group.whole.slot[at.fused : at.fused + at.nbytes].clone()
            self.jobs[job].losses[number] = data.view(getattr(torch, loss.dtype)).view(loss.size)


@cache
def undisturbed(job: str) -> RunningJob:
    """The job by itself."""
    found = RunningJob(recorded(job))
    with one_thread():
        runners: dict[str, ProgramRunner] = {}
        for number, step in enumerate(found.recorded.steps):
            if step.key not in runners:
                runners[step.key] = ProgramRunner(step.program, found.own(step))
            found.losses[number] = run(runners[step.key], step)
    return found


class History:
    """A random life of the four jobs under the groups' decisions. `steady`: all step in turn, undisturbed."""

    def __init__(self, seed: int, killed: str = "", steady: bool = False) -> None:
        self.random = Random(seed)
        self.steady, self.killed = steady, killed
        self.core, self.executor, self.now = fg.FusionGroups(RULES), Executor(), 0.0
        self.running: list[fg.RunAlone | fg.RunFused] = []
        self.next = dict.fromkeys(JOBS, 0)  # step to submit, of the jobs that live
        self.wanted: set[str] = set()
        for job in JOBS:
            self.give(fg.FusibleJobOpened(JobId(job), Priority.LOW, 1))

    def give(self, *events: fg.Event) -> None:
        waiting = deque(events)
        while waiting:
            for command in self.core.handle(waiting.popleft(), self.now):
                self.executor.carry_out(command)
                match command:
                    case fg.RunAlone() | fg.RunFused():
                        self.running.append(command)
                    case fg.ChargeMemory(group):
                        waiting.append(fg.MemoryCharged(group))
                    case fg.BuildProgram(group):
                        waiting.append(fg.FusedProgramBuilt(group))

    def end(self, command: fg.RunAlone | fg.RunFused) -> None:
        self.running.remove(command)
        seconds = 0.001
        if isinstance(command, fg.RunFused):
            self.give(fg.FusedEnded(command.group, seconds))
        else:
            self.give(fg.AloneEnded(command.job, seconds))

    def kill(self, job: str) -> None:
        self.running = [c for c in self.running if not (isinstance(c, fg.RunAlone) and c.job == job)]
        del self.next[job]
        self.give(fg.FusibleJobClosed(JobId(job)))

    def submit(self, job: str) -> None:
        number = self.next[job]
        self.next[job] += 1
        step = self.executor.jobs[job].recorded.steps[number]
        self.give(fg.StepReady(JobId(job), StepId(number), step.key))

    def run(self) -> Executor:
        death = self.random.randrange(8, 2 * STEPS) if self.killed else -1
        turn = 0
        with one_thread():
            while self.running or turn <= death or self._unfinished():
                turn += 1
                assert turn < 100 * STEPS, "a step is held for ever"
                if turn == death:
                    self.kill(self.killed)
                self._something()
                self.now += TURN_S
                if self.now >= self.core.due():
                    self.give(fg.WaitOver())
            for job in list(self.next):
                self.give(fg.StateWanted(JobId(job), "the end"))
                assert self.core.group_id(JobId(job)) is None
        return self.executor

    def _unfinished(self) -> bool:
        return any(len(self.executor.jobs[job].losses) < STEPS for job in self.next)

    def _something(self) -> None:
        left = [job for job, number in self.next.items() if number < STEPS]
        submitted = left and (not self.running or self.random.random() < 0.5)
        if self.steady:
            for job in left:
                self.submit(job)
        elif submitted:
            for job in self.random.sample(left, self.random.randint(max(1, len(left) - 1), len(left))):
                self.submit(job)
        if not self.steady and self.random.random() < 0.03 and self.next:
            job = self.random.choice(sorted(self.next))
            wanted = job in self.wanted
            self.wanted ^= {job}
            self.give(fg.StateReturned(JobId(job)) if wanted else fg.StateWanted(JobId(job), "a snapshot is taken"))
        for command in list(self.running):
            if command in self.running and (self.steady or not submitted or self.random.random() < 0.7):
                self.end(command)


def check_equivalent(executor: Executor, jobs: str) -> None:
    for job in jobs:
        found, alone = executor.jobs[job], undisturbed(job)
        assert found.losses.keys() == alone.losses.keys()
        for number, loss in alone.losses.items():
            assert relative_difference(found.losses[number], loss) <= 1e-9, f"loss of {job} at step {number}"
        for place, (mine, its) in enumerate(zip(found.buffers, alone.buffers, strict=True)):
            if not torch.equal(mine, its):
                a, b = mine.view(torch.float64), its.view(torch.float64)
                assert relative_difference(a, b) <= 1e-9, f"buffer {place} of {job}"


def check_replay(executor: Executor) -> None:
    again = Executor()
    with one_thread():
        for command in executor.log:
            again.carry_out(command)
    for job, found in executor.jobs.items():
        other = again.jobs[job]
        assert all(torch.equal(a, b) for a, b in zip(found.buffers, other.buffers, strict=True)), job
        assert all(torch.equal(found.losses[n], other.losses[n]) for n in found.losses), job


# ---- What is shown


def test_steps_of_four_jobs_run_as_one_and_each_learns_what_it_would_alone():
    executor = History(0, steady=True).run()
    assert executor.fused_steps >= STEPS - STEPS_BEFORE
    check_equivalent(executor, JOBS)
    check_replay(executor)


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", [7, 12, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(20, 40))])
def test_members_that_straggle_or_are_wanted_elsewhere_change_nothing(seed: int):
    executor = History(seed).run()
    if seed in (7, 12):
        assert any(isinstance(c, fg.RunAlone) and c.group is not None for c in executor.log), "on its part of the state"
    check_equivalent(executor, JOBS)
    check_replay(executor)


@pytest.mark.parametrize("seed", [4, 5, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(6, 54))])
def test_a_member_that_dies_changes_nothing_for_the_others(seed: int):
    killed = JOBS[seed % len(JOBS)]
    executor = History(seed, killed=killed).run()
    if seed in (4, 5):
        stacked = [c for c in executor.log if isinstance(c, fg.Stack) and killed in c.jobs]
        assert stacked
        assert not any(isinstance(c, fg.Unstack) and c.job == killed for c in executor.log), "it died in its group"
    check_equivalent(executor, JOBS.replace(killed, ""))
    check_replay(executor)


def test_a_part_of_the_stacked_state_is_a_buffer_of_its_own():
    step = recorded("a").steps[-1]
    state = StackedState(fused_program(step.program, 3))
    jobs = [RunningJob(recorded(job)) for job in "abc"]
    for place, job in enumerate(jobs):
        state.stack(place, job.own(step))
    for place, job in enumerate(jobs):
        own, made = job.own(step), [torch.full_like(buffer, 7) for buffer in job.own(step)]
        state.unstack(place, made)
        for buffer, part, copy in zip(own, state.parts(place), made, strict=True):
            assert part.storage_offset() == 0
            assert part.untyped_storage().nbytes() == part.numel()
            assert torch.equal(part, buffer[: part.numel()])
            assert torch.equal(copy[: part.numel()], part)
    state.parts(1)[0].fill_(9)
    jobs[0].own(step)[0].fill_(1)
    state.unstack(0, jobs[0].own(step))
    assert torch.equal(jobs[0].buffers[step.binding[0]], recorded("a").buffers[step.binding[0]]), "its own alone"


def test_every_byte_of_a_batch_and_of_the_results_has_one_place_in_the_group():
    fused = fused_program(recorded("a").steps[-1].program, 3)
    for places, starts, indices in (
        (fused.layout.input_places, slot_layout(fused.fused.program).inputs, fused.program.inputs),
        (fused.layout.result_places, slot_layout(fused.fused.program).results, fused.program.results),
    ):
        for at in range(len(indices)):
            each = [places(job)[at] for job in range(3)]
            assert [place.fused for place in each] == [starts[at] + job * each[0].nbytes for job in range(3)]
            assert {place.alone for place in each} == {each[0].alone}


def plain_program(**changes: object) -> Program:
    """y = x * 2 on the state."""
    build = ProgramBuilder()
    x = build.state("float32", (3,))
    build.call("aten.mul.Tensor", x, 2.0, dtype="float32", size=(3,))
    return replace(build.build(), **changes)


def looks_up() -> Program:
    """y = table[place], of which the state has both."""
    build = ProgramBuilder()
    table, place = build.state("float32", (3,)), build.state("int64", (2,))
    build.call("aten.index_select.default", table, 0, place, dtype="float32", size=(2,))
    return build.build()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (looks_up(), "may raise on what its step computes"),
        (plain_program(device="cuda"), "on a CPU only"),
        (plain_program(kind="compiled"), "is compiled"),
        (plain_program(ranks=2), "other ranks"),
        (plain_program(wave=Wave(0, 1)), "two waves"),
        (plain_program(ops=(Op("aten.rand_like.default", (), random=0),)), "a generator in the daemon"),
    ],
)
def test_what_can_not_run_as_one_is_refused_with_the_reason(program: Program, why: str):
    with pytest.raises(NotFusible, match=why) as error:
        fuse_jobs(program, 2)
    assert error.value.remedy


def test_a_step_that_draws_has_the_jobs_generators_as_one_more_line_of_state():
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 5))
    member = Member("a", *training(lambda: model, loss=nn.CrossEntropyLoss())(Config(0, 0.1)), max_variants=None)
    try:
        batch = next(iter(batches(4, 6, classes=5, count=1)))
        program = with_generator(member.choose(batch, {}).program.lowered.program)
    finally:
        member.release()
    group = fuse_jobs(program, 3)
    own, fused = state_slots(program), state_slots(group.fused.program)
    assert fused == (*(3 * nbytes for nbytes in own), 3 * stream_bytes())
    assert {op.stream is not None for op in group.fused.program.ops if op.random is not None} == {True}
    assert group.layout.generator == (len(program.inputs) - 1, [len(program.results) - 1])
    state = StackedState(group)
    assert [line.numel() for line in state.lines] == list(fused)
    assert [part.numel() for part in state.parts(2)] == list(own), "a job's own Program has none of it"


def test_one_job_is_no_group():
    with pytest.raises(NotFusible, match="no group"):
        fuse_jobs(plain_program(), 1)


def test_a_program_that_is_fused_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The proof runs on numbers that differ between jobs, so that it sees one job's learning rate given to another."""
    right = equal.fuse_template

    def swapped(*args: object, **kwargs: object) -> Fused:
        fused = right(*args, **kwargs)
        if kwargs["choose"] != "fused":
            return fused
        tables = tuple(replace(t, rows=tuple((row[0], 0.5) for row in t.rows)) for t in fused.tables)
        return replace(fused, tables=tables)

    program = recorded("a").steps[-1].program
    fuse_jobs(program, 2)
    monkeypatch.setattr(equal, "fuse_template", swapped)
    with pytest.raises(NotFusible, match="comes out otherwise"):
        fuse_jobs(program, 2)
