"""What each policy lets out, piece by piece."""

from __future__ import annotations

import inspect

import pytest

from gpumux import config
from gpumux.errors import ConfigError
from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.scheduler import policy as policies
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.scheduler import Scheduler
from tests.scheduler.world import INFO, World

FOUR = (1e-4,) * 4


def order(pieces: list[cmd.LaunchPiece]) -> list[tuple[str, int, int]]:
    return [(p.job, p.step, p.piece) for p in pieces]


def test_fifo_launches_everything_at_once_in_order_of_arrival_on_one_stream() -> None:
    world = World("fifo")
    low, high = world.job("low", "low", FOUR), world.job("high", "high", FOUR)
    world.steps(low, 1)
    world.steps(high, 1)
    world.steps(low, 2)
    assert len(world.launches) == 12
    assert {p.stream for p in world.launches.values()} == {0}
    expected = [(job, step, piece) for job, step in ((low, 1), (high, 1), (low, 2)) for piece in range(4)]
    assert order(world.run()) == expected


def test_fifo_passes_over_a_job_that_cannot_run() -> None:
    world = World("fifo")
    world.job("stuck", pieces=None)
    world.offer("stuck", 0)
    world.job("free")
    world.steps("stuck", 1)
    world.steps("free", 1)
    assert order(world.run()) == [("free", 1, 0)]
    world.ready("stuck", 0, 0, (1e-4,))
    assert order(world.run()) == [("stuck", 1, 0)]


def test_fifo_keeps_arrival_order_when_the_device_is_full() -> None:
    world = World("fifo")
    world.job("low", "low", (1e-4,) * (policies.DEEP + 6))
    world.job("high", "high")
    world.steps("low", 1)
    world.steps("high", 1)
    assert len(world.launches) == policies.DEEP
    ran = order(world.run())
    assert ran.index(("high", 1, 0)) > ran.index(("low", 1, policies.DEEP + 5))


def test_streams_lets_the_device_choose_by_priority() -> None:
    world = World("streams")
    low, high = world.job("low", "low", FOUR), world.job("high", "high", FOUR)
    world.steps(low, 1, 2)
    world.steps(high, 1)
    assert len(world.launches) == 12
    assert [p.job for p in world.run()] == [high] * 4 + [low] * 8


def test_paced_lets_two_high_and_four_low_launches_out() -> None:
    for priority, expected in (("high", 2), ("low", 4)):
        world = World("paced")
        world.job("a", priority, FOUR)
        world.job("b", priority, FOUR)
        world.steps("a", 1, 2)
        world.steps("b", 1, 2)
        assert len(world.launches) == expected
        world.done(min(world.launches))
        assert len(world.launches) == expected


def test_paced_keeps_one_low_launch_out_while_a_high_job_is_active() -> None:
    world = World("paced")
    low, high = world.job("low", "low", FOUR), world.job("high", "high", (1e-4,) * 8)
    world.steps(high, 1)
    world.steps(low, 1, 2)
    assert len(world.out("low")) == 1
    for _ in range(3):  # low pieces that end are followed by one more, never two
        world.done(world.out("low")[0].launch)
        assert len(world.out("low")) == 1
    while world.out("high"):
        world.done(world.out("high")[0].launch)
    assert len(world.out("low")) == 4, "an idle high job holds nobody back"


def test_paced_counts_what_was_out_before_a_high_job_came() -> None:
    world = World("paced")
    low, high = world.job("low", "low", FOUR), world.job("high", "high", FOUR)
    world.steps(low, 1, 2)
    assert len(world.out("low")) == 4
    world.steps(high, 1)
    for left in (3, 2, 1, 1):
        world.done(world.out("low")[0].launch)
        assert len(world.out("low")) == left


def test_a_paused_high_job_holds_no_job_back() -> None:
    world = World("paced")
    low, high = world.job("low", "low", FOUR), world.job("high", "high", FOUR)
    world.steps(high, 1)
    world.steps(low, 1, 2)
    assert len(world.out("low")) == 1
    world.pause(high)
    assert len(world.out("low")) == 4


@pytest.mark.parametrize(("piece", "out"), [(1e-4, 4), (0.6e-3, 4), (0.9e-3, 2), (5e-3, 1)])
def test_paced_bounds_predicted_time_and_always_lets_one_out(piece: float, out: int) -> None:
    world = World("paced")  # low window: 2 x 4 x 300 us = 2.4 ms
    world.job("low", "low", (piece,) * 8)
    world.steps("low", 1)
    assert len(world.launches) == out
    assert len(world.run()) == 8


def test_windows_can_be_set() -> None:
    world = World("fifo", high_launches=1)
    core = Scheduler(SchedulerConfig(policy="paced", high_launches=3, high_window_s=1e-3, low_idle_launches=1))
    core.handle(ev.DeviceOpened(INFO), 0.0)
    windows = core.snapshot()["windows"]
    assert (windows["high"]["limit_launches"], windows["high"]["limit_seconds"]) == (3, 1e-3)
    assert windows["low"]["limit_launches"] == 1
    assert world.scheduler.snapshot()["windows"]["high"]["limit_seconds"] is None


def test_class_budgets_do_not_grow_with_jobs() -> None:
    world = World("paced")
    for index in range(40):
        world.job(f"l{index}", "low", FOUR)
        world.job(f"h{index}", "high", FOUR)
    for index in range(40):
        world.steps(f"l{index}", 1)
        world.steps(f"h{index}", 1)
    assert (len(world.out("high")), len(world.out("low"))) == (2, 1 + 3)  # 4 were out before the first high step
    for _ in range(3):
        world.done(world.out("low")[0].launch)
    assert len(world.out("low")) == 1


def test_high_goes_first_on_the_device() -> None:
    world = World("paced")
    low, high = world.job("low", "low", FOUR), world.job("high", "high", FOUR)
    world.steps(low, 1)
    world.steps(high, 1, 2)
    ran = [p.job for p in world.run()]
    assert ran == [high] * 8 + [low] * 4


def test_every_policy_is_short_and_in_both_registries() -> None:
    assert set(policies.POLICIES) == set(config.POLICIES), "gpumux/scheduler/policy.py and gpumux/config.py"
    for made in policies.POLICIES.values():
        assert len(inspect.getsource(made).splitlines()) < 100
        public = [name for name, value in vars(made).items() if callable(value) and not name.startswith("_")]
        assert public in (["choose"], ["limit", "choose"])


def test_an_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"fairest.*fifo, guarded, paced, streams"):
        Scheduler(SchedulerConfig(policy="fairest"))


def test_nothing_is_launched_before_the_device_is_open() -> None:
    core = Scheduler(SchedulerConfig())
    assert core.snapshot()["device"] is None
    assert core.handle(ev.Tick(), 0.0) == []
