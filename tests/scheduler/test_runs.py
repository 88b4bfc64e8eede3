"""Consecutive pieces that are one launch, where the device allows it and no high job is open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumux.config import POLICIES
from gpumux.types import DeviceInfo, ProgramReady
from tests.scheduler.test_properties import Life, live
from tests.scheduler.world import INFO, World

RUN_S = 1e-3
IN_RUNS = replace(INFO, run_s=RUN_S, parallel=2)
PIECE_S = 3e-4  # three of them are a run


def world(policy: str = "paced", **config: object) -> World:
    return World(policy, IN_RUNS, **config)


def lengths(of: World) -> list[int]:
    """Run what is there. Of each launch, how many pieces it was."""
    return [launch.pieces for launch in of.run()]


@pytest.mark.parametrize("policy", POLICIES)
def test_pieces_are_one_launch_up_to_the_length_that_the_device_names(policy: str) -> None:
    alone = world(policy)
    alone.job("low", pieces=(PIECE_S,) * 10)
    alone.step("low", 0)
    assert lengths(alone) == [3, 3, 3, 1]
    assert [type(c).__name__ for c in alone.decisions["low", 0]] == ["FinishStep"]


def test_the_launch_ends_the_step_with_its_last_piece_and_says_when_it_was_submitted() -> None:
    alone = world()
    alone.job("low", pieces=(PIECE_S,) * 5)
    alone.step("low", 0)
    first, last = alone.launches.values()
    assert (first.piece, first.pieces, first.submitted) == (0, 3, None)
    assert (last.piece, last.pieces) == (3, 2)
    assert last.submitted is not None


def test_a_piece_that_is_longer_is_a_launch_of_its_own() -> None:
    alone = world()
    alone.job("low", pieces=(PIECE_S, 2e-3, PIECE_S, PIECE_S, 8e-4))
    alone.step("low", 0)
    assert lengths(alone) == [1, 1, 2, 1]


def test_a_device_that_names_no_length_launches_each_piece() -> None:
    alone = World("paced")
    alone.job("low", pieces=(PIECE_S,) * 4)
    alone.step("low", 0)
    assert lengths(alone) == [1, 1, 1, 1]


def test_beside_an_open_high_job_each_piece_is_a_launch_whatever_the_high_job_does() -> None:
    both = world()
    both.job("low", pieces=(PIECE_S,) * 6)
    both.job("high", "high")
    both.step("low", 0)
    assert set(lengths(both)) == {1}
    both.close("high")
    both.step("low", 1)
    assert set(lengths(both)) == {1}, "the device has not released it"
    both.release("high")
    both.step("low", 2)
    assert lengths(both) == [3, 3]


def test_a_high_job_that_is_opened_in_the_middle_of_a_step_ends_runs() -> None:
    both = world(low_idle_launches=1)
    both.job("low", pieces=(PIECE_S,) * 9)
    both.step("low", 0)
    (run,) = both.launches.values()
    assert run.pieces == 3
    both.job("high", "high")
    both.done(run.launch)
    assert set(lengths(both)) == {1}


def test_a_change_of_priority_counts() -> None:
    both = world()
    both.job("low", pieces=(PIECE_S,) * 6)
    both.job("other", pieces=(PIECE_S,) * 6)
    both.change("other", "high")
    both.step("low", 0)
    assert set(lengths(both)) == {1}
    both.change("other", "low")
    both.step("low", 1)
    assert lengths(both) == [3, 3]


def test_where_low_jobs_wait_for_each_other_each_piece_is_a_launch() -> None:
    """The device runs two at once: a third would wait for the end of a run."""
    three = world()
    for name in ("a", "b", "c"):
        three.job(name, pieces=(PIECE_S,) * 6)
    three.steps("a", 0)
    three.steps("b", 0)
    assert set(lengths(three)) == {3}
    for name in ("a", "b", "c"):
        three.steps(name, 1, 2, 3)
    newest = max(three.launches)
    waited = [launch for launch in three.run() if launch.launch > newest]
    assert {launch.job for launch in waited if launch.pieces == 1} >= {"b", "c"}
    assert waited[0].pieces == 1
    assert waited[-1].pieces > 1, "one of them is left"


def test_what_is_out_stays_within_the_window() -> None:
    """The window holds four launches of a run's length where none was set, and what was set where one was."""
    alone = world()
    alone.job("low", pieces=(PIECE_S,) * 30)
    alone.step("low", 0)
    assert [launch.pieces for launch in alone.launches.values()] == [3, 3, 3, 3]
    narrow = world(low_idle_window_s=1.6e-3)
    narrow.job("low", pieces=(PIECE_S,) * 30)
    narrow.step("low", 0)
    assert [launch.pieces for launch in narrow.launches.values()] == [3, 2]


def test_a_run_ends_before_a_collective() -> None:
    alone = world()
    alone.job("rank", pieces=(PIECE_S,) * 7, gated=(2, 5))
    alone.step("rank", 0)
    assert lengths(alone) == [2, 3, 2]


def test_a_launch_in_flight_is_reported_with_all_of_its_operators() -> None:
    alone = world()
    alone.session()
    alone.request("low")
    assert alone.offer("low", 0)
    alone.jobs["low"].programs[0], alone.jobs["low"].gated[0] = (0, (PIECE_S,) * 4), ()
    alone.give(ProgramReady("low", 0, 0, (PIECE_S,) * 4, bounds=(0, 5, 7, 9, 20)))
    alone.step("low", 0)
    told = alone.scheduler.all_out()
    assert [(each.piece, each.first, each.end) for each in told] == [(0, 0, 9), (3, 9, 20)]


@pytest.mark.parametrize(("info", "learns"), [(IN_RUNS, False), (replace(IN_RUNS, run_s=0.0), True)])
def test_what_a_launch_takes_by_itself_is_learned_of_single_pieces(info: DeviceInfo, learns: bool) -> None:
    """What several pieces take longer than was predicted is no such time, and high jobs would be kept from it later."""
    alone = World("guarded", info, low_idle_launches=1)
    alone.job("low", pieces=(PIECE_S,) * 6)
    alone.step("low", 0)
    while alone.launches:
        (launch,) = alone.launches.values()
        alone.done(launch.launch, 1.3 * launch.pieces * PIECE_S)
    assert (alone.scheduler._state.guard.view.launch_overhead > 0) is learns


def test_jobs_share_by_their_weight() -> None:
    both = world()
    for name, weight in (("a", 1.0), ("b", 3.0)):
        both.job(name, pieces=(PIECE_S,) * 12, weight=weight, max_inflight=20)
        both.steps(name, *range(20))
    ran = {"a": 0, "b": 0}
    for _ in range(40):
        launch = min(both.launches.values(), key=lambda each: each.launch)
        ran[launch.job] += launch.pieces
        both.done(launch.launch, launch.pieces * PIECE_S)
    assert 2.0 < ran["b"] / ran["a"] < 4.0


def test_the_history_says_which_pieces() -> None:
    alone = world()
    alone.job("low", pieces=(PIECE_S,) * 4)
    alone.step("low", 0)
    alone.run()
    told = "\n".join(alone.scheduler.story("low"))
    assert "pieces 0 to 2 of 4 launched" in told
    assert "pieces 0 to 2 done" in told
    assert "piece 3 of 4 launched" in told


@pytest.mark.every(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["guarded", "paced", "fifo", "streams"])
def test_promises_hold_in_every_life_in_which_high_jobs_come_and_go(policy: str) -> None:
    live(type("Runs", (Life,), {"policy": policy, "info": IN_RUNS, "priorities": ("low",)}), 20)
