"""Which jobs run as one fused Program, and when: scenarios, and random histories under an oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from gpumux.errors import ConfigError
from gpumux.scheduler.fusion import groups as fg
from gpumux.types import JobId, Priority, StepId

WAIT = 0.01
RULES = fg.FusionRules(wait_s=WAIT, gather_s=WAIT, settle_s=0.5, retry_s=5.0, samples=4)


@dataclass
class Device:
    """Carries commands out and checks each: the oracle. Time passes only by `advance`."""

    rules: fg.FusionRules = RULES
    now: float = 0.0
    users: dict[str, int] = field(default_factory=dict)
    priorities: dict[str, Priority] = field(default_factory=dict)
    waiting: dict[str, list[tuple[int, str, float]]] = field(default_factory=dict)  # steps not launched, by job
    # What is launched of each job, the first to end first: None by itself, or its group.
    running: dict[str, list[int | None]] = field(default_factory=dict)
    stacked: dict[str, int] = field(default_factory=dict)  # where a job's state is, if not in its own place
    groups: dict[int, tuple[str, int]] = field(default_factory=dict)  # Program and models of each that holds memory
    built: set[int] = field(default_factory=set)
    members: dict[int, tuple[str, ...]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)  # the last step launched, by job
    log: list[fg.Command] = field(default_factory=list)
    unstacked: set[str] = field(default_factory=set)  # by the last event
    steps: int = 0

    def __post_init__(self) -> None:
        self.core = fg.FusionGroups(self.rules)

    def give(self, event: fg.Event) -> list[fg.Command]:
        commands = self.core.handle(event, self.now)
        self.unstacked = {command.job for command in commands if isinstance(command, fg.Unstack)}
        for command in commands:
            self._carry_out(command)
        self.log += commands
        return commands

    def _carry_out(self, command: fg.Command) -> None:
        match command:
            case fg.ChargeMemory(group, program, models):
                assert group not in self.groups
                assert self.rules.least <= models <= self.rules.most
                self.groups[group] = (program, models)
            case fg.BuildProgram(group, program, models):
                assert self.groups[group] == (program, models), "memory is charged first"
            case fg.Stack(group, jobs):
                assert group in self.built
                assert len(set(jobs)) == len(jobs) == self.groups[group][1]
                circles = {self.rules.circle(self.users[job]) for job in jobs}
                assert len(circles) == len({self.priorities[job] for job in jobs}) == 1
                for job in jobs:
                    assert job not in self.stacked
                    assert job not in self.running, "state moves at a border"
                    self.stacked[job] = group
                self.members[group] = jobs
            case fg.RunFused(group, steps):
                assert tuple(job for job, _ in steps) == self.members[group]
                for job, step in steps:
                    assert self.stacked[job] == group
                    assert self._launch(job, step, group) == self.groups[group][0]
            case fg.RunAlone(job, step, group):
                assert self.stacked.get(job) == group
                self._launch(job, step, None)
            case fg.Unstack(group, job):
                assert job not in self.running, "state moves at a border"
                assert self.stacked.pop(job) == group
            case fg.ReleaseMemory(group):
                assert group not in self.stacked.values(), "no state is lost"
                assert not any(group in launched for launched in self.running.values())
                del self.groups[group]

    def _launch(self, job: str, step: int, how: int | None) -> str:
        launched = self.running.setdefault(job, [])
        assert launched in ([], [how]), "only another fused step of its group is launched ahead"
        assert how is not None or not launched
        first, program, ready = self.waiting[job].pop(0)
        assert step == first, "steps run once, in order"
        # a group that ends waits for the steps under way; else a step waits no longer than it may
        assert self.now - ready <= WAIT + 1e-9 or job in self.unstacked or launched
        launched.append(how)
        return program

    # ---- what happens

    def open(self, job: str, user: int = 1, priority: Priority = Priority.LOW) -> None:
        self.users[job], self.priorities[job], self.waiting[job] = user, priority, []
        self.give(fg.FusibleJobOpened(JobId(job), priority, user))

    def step(self, job: str, program: str = "cnn") -> list[fg.Command]:
        self.steps += 1
        self.waiting[job].append((self.steps, program, self.now))
        return self.give(fg.StepReady(JobId(job), StepId(self.steps), program))

    def end(self, job: str, seconds: float = 0.001) -> list[fg.Command]:
        """End the first launch of a job: a fused one for all of its group."""
        group = self.running[job][0]
        over = [job] if group is None else [j for j, launched in self.running.items() if group in launched]
        for each in over:
            self.running[each].remove(group)
            if not self.running[each]:
                del self.running[each]
                self.ready_now(each)
        return self.give(fg.AloneEnded(JobId(job), seconds) if group is None else fg.FusedEnded(group, seconds))

    def ready_now(self, job: str) -> None:
        if self.waiting.get(job):
            step, program, _ = self.waiting[job][0]
            self.waiting[job][0] = (step, program, self.now)

    def close(self, job: str) -> list[fg.Command]:
        del self.waiting[job], self.users[job]
        self.stacked.pop(job, None)
        if self.running.get(job) == [None]:
            del self.running[job]
        return self.give(fg.FusibleJobClosed(JobId(job)))

    def charged(self, group: int, reason: str = "") -> list[fg.Command]:
        if reason:
            del self.groups[group]
        return self.give(fg.MemoryCharged(group, reason))

    def build(self, group: int, reason: str = "") -> list[fg.Command]:
        if not reason:
            self.built.add(group)
        return self.give(fg.FusedProgramBuilt(group, reason))

    def advance(self, seconds: float) -> None:
        """Let time pass, with a call at each moment that is due."""
        until = self.now + seconds
        while self.core.due() <= until:
            self.now = max(self.now, self.core.due())
            self.give(fg.WaitOver())
        self.now = until


def measured(device: Device, jobs: str, seconds: float = 0.001, program: str = "cnn") -> list[fg.Command]:
    """Each job runs by itself until its time is known, and then has a step under way. Returns the last commands."""
    made: list[fg.Command] = []
    for _ in range(fg.MEASURED_ALONE):
        for job in jobs:
            device.step(job, program)
        for job in jobs:
            made = device.end(job, seconds)
    for job in jobs:  # the first two of them begin the time in which others may come
        device.step(job, program)
    for job in jobs:
        made = device.end(job, seconds)
    device.now += RULES.settle_s
    for job in jobs:
        made = device.step(job, program)
    return made


def fused(jobs: str = "abc") -> tuple[Device, int]:
    """A device on which these jobs run as one, with a fused step under way, and their group."""
    device = Device()
    for job in jobs:
        device.open(job)
    return device, form(device, jobs)


def form(device: Device, jobs: str) -> int:
    """These jobs of the device run as one, with a fused step under way. Returns their group."""
    before = len(device.log)
    measured(device, jobs)
    (charge,) = [c for c in device.log[before:] if isinstance(c, fg.ChargeMemory)]
    device.charged(charge.group)
    device.build(charge.group)
    for job in list(device.running):
        device.end(job)
    for job in jobs:
        made = device.step(job)
    assert kinds(made) == ["Stack", "RunFused"]
    return charge.group


def kinds(commands: list[fg.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


# ---- Scenarios


def test_memory_is_charged_before_a_program_is_built_and_state_moves_only_when_all_are_there():
    device = Device()
    for job in "ab":
        device.open(job)
    measured(device, "ab")
    assert kinds(device.log).count("ChargeMemory") == 1
    group = next(c.group for c in device.log if isinstance(c, fg.ChargeMemory))
    assert kinds(device.charged(group)) == ["BuildProgram"]
    device.end("a")
    assert kinds(device.step("a")) == ["RunAlone"], "nothing waits while a Program is built"
    device.build(group)
    device.end("a")
    assert device.step("a") == [], "held at its border"
    device.end("b")
    assert kinds(device.step("b")) == ["Stack", "RunFused"]
    assert device.core.group_of(JobId("a")) == ("a", "b")
    assert "equivalent" in device.core.explain(JobId("a"))


def test_the_next_fused_step_is_launched_while_one_runs_and_no_third():
    device, _ = fused("ab")
    assert device.step("a") == []
    assert kinds(device.step("b")) == ["RunFused"]
    for job in "ab":
        assert device.step(job) == []
    assert kinds(device.end("a")) == ["RunFused"]
    device.step("a")
    device.advance(10 * WAIT)
    assert len(device.running["a"]) == fg.AHEAD, "nothing waits for b's step while fused ones run"
    device.end("a")
    assert device.end("a") == [], "the wait begins when none runs"
    device.now += WAIT
    assert kinds(device.give(fg.WaitOver())) == ["RunAlone"]


def test_the_first_fused_steps_of_a_group_count_for_nothing():
    device, _ = fused("ab")
    for n in range(fg.COLD + RULES.samples + 1):
        device.end("a", 1.0 if n < fg.COLD else 0.001)
        for job in "ab":
            device.step(job)
    assert device.core.group_of(JobId("a"))


def test_a_straggler_costs_the_others_at_most_the_wait():
    device, group = fused()
    device.end("a")
    device.step("a")
    device.now += WAIT / 2
    device.step("b")
    assert device.core.due() == pytest.approx(device.now + WAIT / 2), "counted from the first that was ready"
    device.now = device.core.due()
    made = device.give(fg.WaitOver())
    assert [(c.job, c.group) for c in made if isinstance(c, fg.RunAlone)] == [("a", group), ("b", group)]
    for job in "ab":
        device.end(job)
    device.step("c")
    device.step("a")
    assert kinds(device.step("b")) == ["RunFused"], "all together again"


def test_a_member_that_stops_is_waited_for_no_longer_than_fusing_saves():
    device, _ = fused()
    device.end("a", 0.001)  # it saves two thirds of three steps of 1 ms
    waits = 0
    while device.core.group_of(JobId("a")):
        for job in "ab":
            device.step(job)
        device.advance(WAIT)
        for job in "ab":
            device.end(job)
        waits += 1
        assert waits <= RULES.samples + 1, "each costs them the wait"
    assert "waited for each other" in device.core.explain(JobId("a"))
    assert waits >= RULES.samples
    for job in "ab":
        device.step(job)
        assert device.running[job] == [None], "at once"
        device.end(job)
    device.now += RULES.retry_s
    for _ in range(3):
        for job in "ab":
            device.step(job)
        for job in "ab":
            device.end(job)
    (charge,) = [c for c in device.log if isinstance(c, fg.ChargeMemory)][1:]
    assert charge.models == 2, "without it"


def test_fused_steps_that_save_more_than_the_others_wait_keep_a_slow_member():
    device, _ = fused()
    device.end("a", 0.001)
    for _ in range(3 * RULES.samples):
        for job in "ab":  # one of three steps the third does not make
            device.step(job)
        device.advance(WAIT)
        for job in "ab":
            device.end(job)
        for _ in range(int(WAIT / 0.002) + 1):
            for job in "abc":
                device.step(job)
            device.end("a", 0.001)
    assert device.core.group_of(JobId("a")) == ("a", "b", "c")


def test_a_member_that_dies_ends_the_group_when_the_others_steps_have_ended():
    device, group = fused()
    assert device.close("b") == []
    made = device.end("a")
    assert made == [fg.Unstack(group, JobId("a")), fg.Unstack(group, JobId("c")), fg.ReleaseMemory(group)]
    assert kinds(device.step("a")) == ["RunAlone"]


def test_a_member_whose_program_changes_is_unstacked_and_runs_by_itself():
    device, _ = fused("ab")
    device.end("a")
    made = device.step("a", "the step of another batch size")
    assert kinds(made) == ["Unstack", "Unstack", "ReleaseMemory", "RunAlone"]
    assert made[-1] == fg.RunAlone(JobId("a"), StepId(device.steps), None)


def test_state_that_is_wanted_is_brought_home_and_stays_there():
    device, _ = fused("ab")
    device.give(fg.StateWanted(JobId("a"), "a snapshot is taken"))
    assert device.core.group_id(JobId("a")) == 1, "a step runs"
    device.end("a")
    assert device.core.group_id(JobId("a")) is None
    assert device.core.group_id(JobId("b")) is None
    device.now += RULES.retry_s
    measured(device, "ab")
    assert kinds(device.log).count("ChargeMemory") == 1
    device.give(fg.StateReturned(JobId("a")))
    device.end("a")
    device.step("a")
    assert kinds(device.log).count("ChargeMemory") == 2


def test_a_member_with_another_priority_leaves():
    device, _ = fused("ab")
    device.priorities["a"] = Priority.HIGH
    device.give(fg.PriorityChanged(JobId("a"), Priority.HIGH))
    device.end("a")
    device.now += RULES.retry_s
    measured(device, "ab")
    assert kinds(device.log).count("ChargeMemory") == 1


def test_another_users_job_is_fused_only_where_both_are_in_one_set():
    for agreed, groups in (((), 0), ((frozenset({1, 3}),), 0), ((frozenset({1, 2, 3}),), 1)):
        device = Device(fg.FusionRules(wait_s=WAIT, gather_s=WAIT, settle_s=0.5, agreed=agreed))
        device.open("a", user=1)
        device.open("b", user=2)
        measured(device, "ab")
        assert kinds(device.log).count("ChargeMemory") == groups, agreed


def test_other_programs_and_other_classes_are_no_company():
    device = Device()
    device.open("a")
    device.open("b")
    device.open("c", priority=Priority.HIGH)
    for _ in range(5):
        for job, program in (("a", "cnn"), ("b", "mlp"), ("c", "cnn")):
            device.step(job, program)
        for job in "abc":
            device.end(job)
    assert "ChargeMemory" not in kinds(device.log)
    device.step("a")
    assert "no other job" in device.core.explain(JobId("a"))


def slower(device: Device, group: int) -> None:
    """The group runs until it is given up, and its jobs end."""
    made: list[fg.Command] = []
    while fg.ReleaseMemory(group) not in made:
        made = device.end("a", 0.0021)  # twice 0.001 s, and more
        device.step("a")
        device.step("b")
    for job in "ab":
        device.end(job)


def test_a_group_that_is_slower_is_given_up_and_tried_again_ever_later():
    device, group = fused("ab")
    for times in (1, 2, 4):
        tried = kinds(device.log).count("ChargeMemory")
        began = device.now
        slower(device, group)
        device.now = began + 9 * times * RULES.retry_s
        measured(device, "ab")
        assert kinds(device.log).count("ChargeMemory") == tried
        assert "slower fused than one after another, and are tried again in" in device.core.explain(JobId("a"))
        for job in "ab":
            device.end(job)
        device.now = began + 11 * times * RULES.retry_s
        group = form(device, "ab")


def test_a_group_within_the_noise_of_its_members_is_kept():
    device, group = fused("ab")
    for n in range(3 * RULES.samples):
        device.end("a", 0.0021 if n % 2 else 0.0017)
        device.step("a")
        device.step("b")
    assert fg.ReleaseMemory(group) not in device.log


def test_a_program_that_cannot_be_fused_is_asked_for_once_and_explained():
    device = Device()
    for job in "ab":
        device.open(job)
    measured(device, "ab")
    device.charged(1)
    assert fg.ReleaseMemory(1) in device.build(1, "it draws random numbers")
    device.now += 10 * RULES.retry_s
    for job in "ab":
        device.end(job)
    measured(device, "ab")
    assert kinds(device.log).count("ChargeMemory") == 1
    assert "it draws random numbers" in device.core.explain(JobId("b"))


def test_without_memory_jobs_run_by_themselves_and_try_again_later():
    device = Device()
    for job in "ab":
        device.open(job)
    measured(device, "ab")
    device.charged(1, "2 GiB are missing")
    assert "2 GiB are missing" in device.core.explain(JobId("a"))
    device.end("a")
    device.step("a")
    assert kinds(device.log).count("ChargeMemory") == 1
    device.now += RULES.retry_s
    device.end("a")
    device.step("a")
    assert kinds(device.log).count("ChargeMemory") == 2


def test_more_jobs_of_the_kind_make_a_larger_group():
    device, _ = fused("ab")
    device.open("c")
    measured(device, "c")
    device.end("a")
    device.step("a")
    assert kinds(device.step("b")) == ["RunFused"], "not at once"
    device.end("a")
    device.now += RULES.retry_s
    assert device.step("a") == []
    assert kinds(device.step("b")) == ["Unstack", "Unstack", "ReleaseMemory", "RunAlone", "RunAlone"]
    device.now += RULES.retry_s
    for job in "abc":
        device.end(job)
        device.step(job)
    assert [c.models for c in device.log if isinstance(c, fg.ChargeMemory)] == [2, 3]


@pytest.mark.parametrize("phase", ["gathering", "running"])
def test_a_group_that_fails_is_over_and_its_members_run_by_themselves(phase: str):
    if phase == "running":
        device, group = fused("ab")
        device.stacked.clear()  # where their state is, the device says
        device.running = dict.fromkeys("ab")
        made = device.core.handle(fg.GroupFailed(group, "its process died"), device.now)
        assert made == [], "their steps are under way, in their own places"
        made = device.core.handle(fg.FusedEnded(group, 0.002), device.now)
    else:
        device = Device()
        for job in "ab":
            device.open(job)
        measured(device, "ab")
        device.charged(1)
        device.build(1)
        device.end("a")
        assert device.step("a") == [], "held at its border"
        made = device.core.handle(fg.GroupFailed(1, "its process died"), device.now)
        assert kinds(made) == ["ReleaseMemory", "RunAlone"]
    assert fg.ReleaseMemory(1) in made
    assert "its process died" in device.core.explain(JobId("a"))
    assert device.core.handle(fg.GroupFailed(1, "again"), device.now) == []


def test_a_job_is_settled_when_nothing_of_it_runs_or_waits_wherever_its_state_lies():
    device, group = fused("ab")
    assert device.core.group_id(JobId("a")) == group
    assert not device.core.settled(JobId("a"))
    device.core.handle(fg.FusedEnded(group, 0.002), device.now)
    assert device.core.settled(JobId("a"))
    device.step("a")
    assert not device.core.settled(JobId("a")), "it waits for the other's step"
    device.open("c")
    assert device.core.settled(JobId("c"))
    device.step("c")
    assert not device.core.settled(JobId("c"))
    device.end("c")
    assert device.core.settled(JobId("c"))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"wait_s": -1.0}, "wait_s"), ({"retry_s": inf}, "retry_s"), ({"least": 1}, "groups of 1"),
        ({"most": 1}, "to 1 jobs"), ({"samples": 0}, "samples"),
        ({"agreed": (frozenset({1, 2}), frozenset({2, 3}))}, "user 2"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_are_refused(given: dict[str, object], named: str):
    with pytest.raises(ConfigError, match=named):
        fg.FusionRules(**given)  # type: ignore[arg-type]


# ---- Random histories


PICK = st.integers(0, 1 << 16)
SECONDS = st.sampled_from((0.001, 0.001, 0.001, 0.0011, 0.01))


class Histories(RuleBasedStateMachine):
    """Jobs of two users that share, one that does not, two Programs, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(
            fg.FusionRules(
                wait_s=WAIT, gather_s=WAIT, settle_s=0.002, retry_s=0.05, samples=3, most=4, agreed=(frozenset({1, 2}),)
            )
        )
        self.opened = 0
        self.wanted: set[str] = set()
        for user in (1, 1, 2, 3):
            self._open(user, Priority.LOW)

    def _open(self, user: int, priority: Priority) -> None:
        self.opened += 1
        self.device.open(f"job {self.opened}", user, priority)

    def _one(self, names: list[str], n: int) -> str | None:
        return sorted(names)[n % len(names)] if names else None

    @rule(user=st.sampled_from((1, 1, 2, 3)), priority=st.sampled_from((Priority.LOW, Priority.LOW, Priority.HIGH)))
    @precondition(lambda self: len(self.device.waiting) < 7)
    def open(self, user: int, priority: Priority) -> None:
        self._open(user, priority)

    @rule(other=st.integers(0, 15), skip=PICK)
    def step_each(self, other: int, skip: int) -> None:
        """A step of each job, perhaps but one."""
        names = sorted(self.device.waiting)
        for n, job in enumerate(names):
            if len(self.device.waiting[job]) < 3 and (other < 8 or n != skip % len(names)):
                self.device.step(job, "mlp" if other == 11 and n == skip % len(names) else "cnn")

    @rule(rounds=st.integers(1, 4), seconds=SECONDS)
    def train(self, rounds: int, seconds: float) -> None:
        """As jobs mostly do: each steps, waits for the result, and steps again."""
        for _ in range(rounds):
            for job in sorted(self.device.waiting):
                if not self.device.waiting[job]:
                    self.device.step(job)
            self.device.advance(0.001)
            self.end_all(seconds)
            self.answer(0)

    @rule(n=PICK, seconds=SECONDS)
    def end_one(self, n: int, seconds: float) -> None:
        if job := self._one(list(self.device.running), n):
            self.device.end(job, seconds)

    @rule(seconds=SECONDS)
    def end_all(self, seconds: float) -> None:
        for job in sorted(self.device.running):
            if job in self.device.running:
                self.device.end(job, seconds)

    @rule(refuse=st.integers(0, 7))
    def answer(self, refuse: int) -> None:
        for group in list(self.device.groups):
            asked = [c for c in self.device.log if getattr(c, "group", None) == group]
            if asked and isinstance(asked[-1], fg.ChargeMemory):
                self.device.charged(group, "none is left" if refuse == 3 else "")
            elif asked and isinstance(asked[-1], fg.BuildProgram) and group not in self.device.built:
                self.device.build(group)

    @rule(seconds=st.sampled_from((0.001, WAIT, 0.1)))
    def pass_time(self, seconds: float) -> None:
        self.device.advance(seconds)

    @rule(n=PICK, really=st.integers(0, 7))
    def close(self, n: int, really: int) -> None:
        job = self._one(list(self.device.waiting), n)
        if job and really == 3:
            self.device.close(job)
            self.wanted.discard(job)

    @rule(n=PICK, really=st.integers(0, 3))
    def want(self, n: int, really: int) -> None:
        job = self._one(list(self.device.waiting), n)
        if job and really == 2 and job not in self.wanted:
            self.wanted.add(job)
            self.device.give(fg.StateWanted(JobId(job), "a snapshot is taken"))

    @rule()
    def bring_back(self) -> None:
        for job in sorted(self.wanted):
            if self.device.core.group_id(JobId(job)) is None:
                self.device.give(fg.StateReturned(JobId(job)))
                self.wanted.discard(job)

    def teardown(self) -> None:
        """Whatever happened, every step runs in the end, and no memory is kept once all jobs are closed."""
        device = self.device
        for _ in range(20):
            self.answer(0)
            self.end_all(0.001)
            device.advance(1.0)
        assert not any(device.waiting.values())
        for job in list(device.waiting):
            assert (device.core.group_id(JobId(job)) is None) == (job not in device.stacked)
            device.core.explain(JobId(job))
        for job in list(device.waiting):
            device.close(job)
        self.answer(0)
        self.answer(0)
        device.advance(1.0)
        assert not device.groups, "a group of no jobs keeps memory"


def test_random_histories_keep_every_rule():
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
