"""Which jobs are admitted, what they are charged, and refusals that say what to do."""

from __future__ import annotations

import pytest

from gpumux.access import Access, Rule
from gpumux.errors import ConfigError, GpumuxError, from_code
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import Fault, Footprint, JobSpec, Priority
from tests.scheduler.world import GIB, World

MIB = 1 << 20


def used(world: World) -> dict[str, int]:
    memory = world.scheduler.snapshot()["memory"]
    return {part: memory[part] for part in ("state", "slots", "transient", "used")}


def refusal(commands: list[cmd.Command]) -> Fault:
    (command,) = commands
    assert isinstance(command, cmd.RefuseProgram | cmd.RefuseJob)
    assert type(from_code(command.fault.code, "")) is not GpumuxError, "the code is not one of gpumux.errors"
    assert command.fault.remedy
    return command.fault


def test_a_job_is_charged_state_and_slots_and_the_largest_transient_part() -> None:
    world = World()
    world.job("a", pieces=None)
    world.program("a", 0, (1e-4,), Footprint(state_bytes=100, transient_bytes=50, slot_bytes=8))
    world.program("a", 1, (1e-4,), Footprint(state_bytes=10, transient_bytes=70, slot_bytes=4))
    assert used(world) == {"state": 110, "slots": 12, "transient": 70, "used": 192}
    world.job("b", footprint=Footprint(1, 60, 2))
    assert used(world) == {"state": 111, "slots": 14, "transient": 130, "used": 255}
    world.close("a")
    assert used(world)["used"] == 255, "the device has not let go of it yet"
    world.release("a")
    assert used(world) == {"state": 1, "slots": 2, "transient": 60, "used": 63}


def test_a_program_that_does_not_fit_is_refused_with_the_numbers() -> None:
    world = World()
    world.job("big", footprint=Footprint(900 * MIB, 0, 0))
    world.job("b", pieces=None)
    fault = refusal(world.offer("b", 0, Footprint(200 * MIB, 0, 24 * MIB)))
    assert fault.code == "admission_refused"
    assert str(224 * MIB) in fault.message
    assert str(124 * MIB) in fault.message
    assert str(100 * MIB) in fault.remedy
    world.program("b", 0, (1e-4,), Footprint(100 * MIB, 0, 24 * MIB))
    assert world.scheduler.snapshot()["memory"]["free"] == 0


def test_what_a_job_holds_already_is_not_asked_for_twice() -> None:
    world = World()
    world.job("a", footprint=Footprint(500 * MIB, 24 * MIB, 0))
    world.program("a", 1, (1e-4,), Footprint(500 * MIB, 10 * MIB, 0))
    assert used(world)["used"] == GIB
    world.program("a", 2, (1e-4,), Footprint(0, 24 * MIB, 0))
    assert "1 bytes more" in refusal(world.offer("a", 3, Footprint(0, 24 * MIB + 1, 0))).message


def test_memory_comes_back_when_loading_fails() -> None:
    world = World()
    world.job("a", pieces=None)
    world.offer("a", 0, Footprint(GIB, 0, 0))
    assert refusal(world.offer("a", 1, Footprint(1, 0, 0))).code == "admission_refused"
    world.give(ev.ProgramDropped("a", 0, Fault("refused", "no", "")))
    world.program("a", 1, (1e-4,), Footprint(GIB, 0, 0))


def test_a_jobs_own_limit_counts_all_its_programs() -> None:
    world = World()
    world.job("a", pieces=None, memory_limit=200)
    world.program("a", 0, (1e-4,), Footprint(100, 50, 0))
    fault = refusal(world.offer("a", 1, Footprint(20, 80, 1)))
    assert "201" in fault.message
    assert "200" in fault.message
    assert "201" in fault.remedy
    world.program("a", 2, (1e-4,), Footprint(20, 80, 0))


def test_an_operator_may_keep_memory_back() -> None:
    world = World(memory_bytes=1000)
    world.job("a", pieces=None)
    assert refusal(world.offer("a", 0, Footprint(1001, 0, 0))).code == "admission_refused"
    world.program("a", 0, (1e-4,), Footprint(1000, 0, 0))


def test_no_program_before_the_device_is_open() -> None:
    world = World(info=None)
    world.job("a", pieces=None)
    assert "not open" in refusal(world.offer("a", 0)).message


def test_programs_of_a_job_are_bounded() -> None:
    world = World(max_programs_per_job=2)
    world.job("a")
    world.program("a", 1, (1e-4,))
    assert "2 programs" in refusal(world.offer("a", 2)).message


def test_sizes_that_make_no_sense_are_refused() -> None:
    world = World()
    world.job("a", pieces=None)
    assert refusal(world.offer("a", 0, Footprint(-5, 0, 0))).code == "admission_refused"


def test_jobs_are_bounded_in_all_and_for_each_user() -> None:
    world = World(max_jobs=3, max_jobs_per_uid=2)
    world.session("s", uid=1)
    world.session("s2", uid=1)
    world.session("t", uid=2)
    world.job("a")
    world.job("b", session="s2")
    assert "you have 2 jobs open" in refusal(world.request("c")).message
    world.job("d", session="t")
    assert "3 jobs are open" in refusal(world.request("e", session="t")).message
    world.close("a")
    assert refusal(world.request("c")).code == "admission_refused"
    world.release("a")
    world.job("c")


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0}, {"weight": -1.0}, {"weight": float("nan")}, {"weight": float("inf")}, {"weight": 1e-300},
        {"max_inflight": 0}, {"max_inflight": 65}, {"models": 0}, {"models": 1 << 17}, {"max_slowdown": 0.5},
        {"max_slowdown": float("nan")}, {"max_slowdown": float("inf")}, {"memory_limit": 0}, {"memory_limit": -1},
        {"priority": 7}, {"name": "n" * 201},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    world = World()
    world.session()
    spec = JobSpec(**{"name": "a", **wrong})
    event = ev.JobRequested("s", "a", spec)
    fault = refusal(world.give(event))
    assert fault.code == "refused"
    assert next(iter(wrong)) in fault.message
    assert world.scheduler.snapshot()["jobs"] == []
    assert world.scheduler.snapshot()["counters"]["refusals"] == {"refused": 1}


@pytest.mark.parametrize(
    "wrong", [{"max_jobs": 0}, {"story_records": 0}, {"memory_bytes": 0}, {"high_window_s": -1.0}, {"low_launches": 0}]
)
def test_a_configuration_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Scheduler(SchedulerConfig(**wrong))


LOW_ONLY = Rule("students", users=frozenset({7}), max_priority=Priority.LOW, max_jobs=1, max_bytes=1000, max_weight=2.0)
RULES = Access((LOW_ONLY, Rule("guests", groups=frozenset({50}), submit=False)))


def test_a_rule_limits_only_those_it_names() -> None:
    world = World(access=RULES)
    world.session("student", uid=7)
    world.session("other", uid=8)
    world.session("guest", uid=50)
    for request, says in (
        (world.request("a", priority="high", session="student"), "max_priority"),
        (world.request("a", weight=2.5, session="student"), "max_weight"),
        (world.request("a", session="guest"), "submit"),
    ):
        fault = refusal(request)
        assert fault.code == "access_denied"
        assert says in fault.remedy
    world.job("mine", session="student", weight=2.0, pieces=None)
    fault = refusal(world.request("more", session="student"))
    assert (fault.code, "max_jobs in [access.rules.students]" in fault.remedy) == ("admission_refused", True)
    world.job("high", priority="high", session="other", weight=100.0)
    world.job("another", session="other")


def test_a_rules_bytes_are_for_all_jobs_of_one_user_and_come_back() -> None:
    world = World(access=Access((Rule("default", max_bytes=1000),)))
    world.session("s", uid=7)
    world.session("t", uid=8)
    world.job("a", pieces=None)
    world.program("a", 0, (1e-4,), Footprint(600, 0, 0))
    world.job("b", pieces=None)
    fault = refusal(world.offer("b", 0, Footprint(401, 0, 0)))
    assert (fault.code, "max_bytes in [access.rules.default]" in fault.remedy) == ("admission_refused", True)
    world.job("theirs", session="t", pieces=None)
    world.program("theirs", 0, (1e-4,), Footprint(1000, 0, 0))
    world.close("a")
    world.release("a")
    world.program("b", 0, (1e-4,), Footprint(1000, 0, 0))


def test_without_a_rule_the_daemons_own_limit_on_a_users_bytes_counts() -> None:
    world = World(max_bytes_per_uid=1000)
    world.job("a", pieces=None)
    assert "max_bytes_per_user" in refusal(world.offer("a", 0, Footprint(1001, 0, 0))).remedy
    world.program("a", 0, (1e-4,), Footprint(1000, 0, 0))
