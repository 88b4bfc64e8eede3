"""Steps that wait for their peers in the middle: what they hold meanwhile, and what low work does."""

from __future__ import annotations

import pytest

from gpumux.scheduler.guard.bans import Ban
from gpumux.scheduler.guard.budget import MOST_OVERDRAFT
from gpumux.types import CollectiveEnded, Gang
from tests.scheduler.scenarios import known_by_now

from .world import World

PIECES = (1e-3, 1e-3)


def windows(world: World) -> dict[str, tuple[int, int]]:
    """Launches and active jobs of each class."""
    return {name: (w["launches"], w["active_jobs"]) for name, w in world.scheduler.snapshot()["windows"].items()}


def ran(world: World) -> list[tuple[str, int]]:
    return [(launch.job, launch.piece) for launch in world.launches.values()]


def finish(world: World, job: str, seconds: float = 1e-3) -> None:
    """The job's oldest piece ends."""
    world.done(world.jobs[job].out[0], seconds)


def test_a_step_that_waits_for_its_peers_holds_no_place() -> None:
    world = World()
    world.job("high", "high", PIECES, gated=(1,))
    world.job("low", "low", (1e-4,) * 8)
    world.steps("high", 1)
    assert ran(world) == [("high", 0)], "the second piece waits for its peers while the first still runs"
    assert windows(world)["high"] == (1, 1)
    finish(world, "high")
    assert windows(world)["high"] == (0, 0)
    world.steps("low", 1)
    assert len(world.launches) == 4, "as where no high job is active"
    world.met("high")
    assert ("high", 1) in ran(world)
    world.run()
    world.finish()


def test_later_steps_wait_behind_it() -> None:
    world = World()
    world.job("high", "high", (5e-4, 5e-4), gated=(1,))
    world.steps("high", 1, 2)
    finish(world, "high")
    assert ran(world) == []
    world.met("high")
    assert ran(world) == [("high", 1), ("high", 0)]
    world.run()
    world.finish()


def test_it_says_what_it_waits_for() -> None:
    world = World()
    world.job("high", "high", (1e-3,) * 4, gated=(1, 3))
    world.steps("high", 1)
    assert (
        "waits for its peers: collective 1 of 2 of its step, before piece 1 (operator 1); 1 piece before it"
        in (world.scheduler.explain("high")[0])
    )
    finish(world, "high")
    world.met("high", 2e-3)
    finish(world, "high")
    finish(world, "high")
    assert world.scheduler.explain("high")[0].startswith(
        "Job 'high' (high) waits for its peers: collective 2 of 2 of its step, before piece 3 (operator 3);"
    )
    story = "\n".join(world.scheduler.story("high", 1))
    assert "waits for its peers: collective 2 of 2, before piece 3" in story
    assert "the collective before piece 1 has ended: 2.000 ms after the piece before" in story
    world.finish()


def test_what_was_exchanged_is_counted() -> None:
    world = World()
    world.job("high", "high", PIECES, gated=(1,))
    for number in range(3):
        world.step("high", number)
        finish(world, "high")
        world.met("high", 5e-3)
        finish(world, "high")
    job = world.scheduler._state.jobs["high"]
    assert (job.sent_bytes, job.received_bytes) == (24, 48)
    assert job.peers_s == pytest.approx(15e-3)
    assert job.device_s == pytest.approx(6e-3)


@pytest.mark.parametrize(
    ("step", "piece"), [(1, 0), (1, 2), (0, 1), (2, 1)], ids=["no gate", "later gate", "step before", "step behind"]
)
def test_a_collective_that_is_not_waited_for_changes_nothing(step: int, piece: int) -> None:
    world = World()
    world.job("high", "high", (1e-3,) * 3, gated=(1, 2))
    world.steps("high", 1, 2)
    finish(world, "high")
    assert world.give(CollectiveEnded("high", step, piece, 0.0, 1.0)) == []
    assert world.scheduler.snapshot()["counters"]["ignored"] == {"CollectiveEnded": 1}
    assert ran(world) == []


def test_one_that_comes_before_its_piece_has_ended_changes_nothing() -> None:
    world = World()
    world.job("high", "high", PIECES, gated=(1,))
    world.steps("high", 1)
    world.give(CollectiveEnded("high", 1, 1, 0.0, 1.0))
    finish(world, "high")
    assert ran(world) == []


def test_a_step_keeps_the_gates_that_it_began_with() -> None:
    world = World()
    world.job("high", "high", PIECES, gated=(1,))
    world.steps("high", 1, 2)
    world.ready("high", 0, 1, (1e-3,) * 3, gated=(2,))
    finish(world, "high")
    world.met("high")
    finish(world, "high")
    finish(world, "high")
    assert ran(world) == [("high", 1)], "of the second step, under the new cut"
    world.finish()


@pytest.mark.parametrize("end", ["close", "died", "pause"])
def test_a_job_that_waits_can_end_or_pause(end: str) -> None:
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,))
    world.steps("high", 1)
    finish(world, "high")
    if end == "pause":
        world.pause("high")
        world.met("high")
        assert ran(world) == []
        world.resume("high")
        assert ran(world) == [("high", 1)]
    else:
        getattr(world, end)("high")
        world.give(CollectiveEnded("high", 1, 1, 0.0, 1.0))
    world.finish()


# ---- the guard: a wait is a pause of the high job


WAIT_S = 10e-3


def stepped(world: World, steps: int, wait_s: float = WAIT_S) -> None:
    """Whole steps of the high job, one after the other; its peers come after `wait_s`."""
    for number in range(steps):
        world.step("high", number)
        finish(world, "high")
        world.elapse(wait_s - 1e-4)
        world.met("high", 1e-4)
        finish(world, "high")


def parked(world: World, number: int) -> None:
    world.step("high", number)
    finish(world, "high")


def gated(low_s: float, wait_s: float = WAIT_S) -> World:
    """A high job that is known by now, waits for its peers, and a low one with pieces of `low_s`."""
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,))
    stepped(world, 80, wait_s)
    known_by_now(world)
    world.job("low", "low", (low_s,), max_inflight=64)
    parked(world, 80)
    return world


def test_low_work_that_fits_runs_while_a_high_job_waits_for_its_peers() -> None:
    world = gated(2e-3)
    world.steps("low", 1)
    assert ran(world) == [("low", 0)]


def test_low_work_that_does_not_fit_is_held_for_the_rest_of_the_step() -> None:
    world = gated(20e-3)
    world.steps("low", 1)
    assert ran(world) == []
    (held,) = world.scheduler.held()
    assert held.reason == "gap"
    world.met("high")
    assert ran(world) == [("high", 1)]


def test_how_long_a_gate_takes_is_learned_for_each() -> None:
    """One gate takes 10 ms, the other 1 ms: a low piece of 6 ms fits the first alone."""
    world = World("guarded")
    world.job("high", "high", (1e-3,) * 3, gated=(1, 2))
    for number in range(80):
        world.step("high", number)
        finish(world, "high")
        world.elapse(WAIT_S)
        world.met("high", 1e-5)
        finish(world, "high")
        world.met("high", 1e-3)
        finish(world, "high")
    known_by_now(world)
    world.job("low", "low", (6e-3,), max_inflight=64)
    parked(world, 80)
    world.steps("low", 1)
    assert ran(world) == [("low", 0)]
    finish(world, "low", 6e-3)
    world.met("high", WAIT_S)
    finish(world, "high")
    world.steps("low", 2)
    assert ran(world) == []


def test_a_step_that_comes_while_another_waits_is_no_arrival() -> None:
    world = gated(20e-3)
    world.step("high", 81)
    high = world.scheduler._state.guard.high_jobs["high"]
    assert high.parked
    world.steps("low", 1)
    assert ran(world) == []


def test_what_is_lost_on_other_ranks_counts_on_all_of_them() -> None:
    """Its peers come 1 ms later than alone in every step beside low work, of which this rank has none."""
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,), gang=Gang("g", 1, 4, "127.0.0.1:1"))
    for number in range(60):
        parked(world, number)
        world.met("high", 1e-3 if number < 6 else 2e-3)
        finish(world, "high")
    high = world.scheduler._state.guard.high_jobs["high"]
    assert high.solo_step() == pytest.approx(3e-3)
    assert max(high.ratios) == pytest.approx(4 / 3)
    assert high.host_wait == pytest.approx(0.0, abs=1e-9)


def test_a_rank_holds_low_work_once_other_ranks_have_used_what_the_job_may_lose() -> None:
    """Its low work costs nothing that it can see, neither beside pieces nor in the pause before the exchange."""
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,), gang=Gang("g", 1, 4, "127.0.0.1:1"))
    for number in range(80):
        parked(world, number)
        world.met("high", WAIT_S if number < 70 else 2 * WAIT_S)
        finish(world, "high")
    high = world.scheduler._state.guard.high_jobs["high"]
    assert not high.shared_steps
    world.job("low", "low", (1e-4,), max_inflight=64)
    world.step("high", 80)
    world.steps("low", 1)
    assert ran(world) == [("high", 0)]  # not beside a piece of it
    finish(world, "high")
    assert ran(world) == []  # nor in its pause
    (held,) = world.scheduler.held()
    assert held.reason == "budget"
    world.met("high", WAIT_S)
    finish(world, "high")
    number = 81
    while not world.jobs["low"].out:
        stepped_once(world, number, WAIT_S)
        number += 1
    assert high.budget.balance >= 0.0
    assert number - 81 == MOST_OVERDRAFT  # steps that are as quick as alone, each of which pays back one credit


def stepped_once(world: World, number: int, wait_s: float) -> None:
    """A whole step of the high job, until low work runs."""
    parked(world, number)
    if not world.jobs["low"].out:
        world.met("high", wait_s)
        finish(world, "high")


def test_an_exchange_is_known_from_steps_in_which_no_rank_runs_low_work() -> None:
    """It takes twice as long in all others, in which low work may run beside its peers."""
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,), gang=Gang("g", 1, 4, "127.0.0.1:1"))
    for number in range(60):
        parked(world, number)
        lasts = EXCHANGE_S if number < 6 else 2 * EXCHANGE_S
        world.met("high", AWAITED_S + lasts, lasts)
        finish(world, "high")
    (gate,) = world.scheduler._state.guard.high_jobs["high"].gates.values()
    assert gate.exchange.value == pytest.approx(EXCHANGE_S)


def test_no_rank_runs_low_work_in_steps_of_the_same_numbers_in_which_all_learn_what_a_step_takes_alone() -> None:
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,), gang=Gang("g", 1, 4, "127.0.0.1:1"))
    world.job("low", "low", (1e-4,), max_inflight=64)
    without = set()
    for number in range(30, 140):  # the first of them is no multiple of anything
        parked(world, number)
        world.steps("low", number)
        if not world.launches:
            without.add(number)
        while world.jobs["low"].out:
            finish(world, "low", 1e-4)
        world.met("high", WAIT_S)
        while world.jobs["high"].out or world.jobs["low"].out:
            finish(world, "high" if world.jobs["high"].out else "low", 1e-3)
    assert without >= {*range(30, 36), 64, 128}
    assert len(without) < 80


def test_a_piece_that_starts_late_after_its_gate_is_charged_to_the_low_work_that_was_out() -> None:
    world = gated(2e-3)
    world.steps("low", 1)
    assert ran(world) == [("low", 0)]
    low = next(iter(world.scheduler._state.guard.view.low_launches.values()))
    world.met("high", 1e-4)
    finish(world, "high", 3e-3)  # alone it takes 1 ms
    assert low.met_arrival
    assert low.charged == pytest.approx(2e-3, rel=0.1)


# ---- the guard: an exchange is a range of its own


AWAITED_S, EXCHANGE_S, LOW_S = 1e-3, 20e-3, 8e-3
LOST_S = 5e-3  # more than a step may lose


def sensitive(lost_s: float) -> World:
    """A high job, and a low piece that ran beside four of its exchanges, which lost `lost_s` by
    it."""
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,))
    exchanges(world, range(40))
    world.job("low", "low", (LOW_S,), max_inflight=64)
    met = 0
    for number in range(40, 80):
        met += meet(world, number, lost_s)
        if met == 4 or world.scheduler.snapshot()["guard"]["bans"]:
            break
    return world


def exchanges(world: World, numbers: range) -> None:
    """Whole steps of the high job, without low work."""
    for number in numbers:
        parked(world, number)
        world.met("high", AWAITED_S + EXCHANGE_S, EXCHANGE_S)
        finish(world, "high")


def meet(world: World, number: int, lost_s: float) -> bool:
    """A whole step of the high job, beside a step of the low one if that may run as soon as the high job waits. Whether
    it did."""
    parked(world, number)
    world.steps("low", number)
    runs = bool(world.launches)
    if runs:
        finish(world, "low", AWAITED_S + LOW_S)
        lasts = EXCHANGE_S + lost_s
        world.met("high", lasts - LOW_S, lasts)
    else:
        world.met("high", AWAITED_S + EXCHANGE_S, EXCHANGE_S)
    finish(world, "high")
    while world.jobs["low"].out:
        finish(world, "low", LOW_S)
    return runs


def until_a_probe(world: World, ban: Ban) -> int:
    """Steps of the high job until the ban may be probed: it has expired, and the job may lose something again. The
    number of the next one."""
    high, number = world.scheduler._state.guard.high_jobs["high"], 80
    while world.now <= ban.until or high.budget.violations_left < 1.0:
        exchanges(world, range(number, number + 1))
        number += 1
    return number


def test_low_work_is_banned_from_a_collective_that_suffers_and_the_explanation_names_it() -> None:
    world = sensitive(LOST_S)
    (ban,) = world.scheduler.snapshot()["guard"]["bans"]
    assert (ban["high"], ban["low"], ban["operators"]) == ("high", "low", [1, 1])
    assert ban["ratio"] > 2.0
    parked(world, 80)
    world.steps("low", 80)
    assert ran(world) == []
    (held,) = world.scheduler.held()
    assert held.reason == "ban"
    assert "it would run into the collective before operator 1 of job 'high'" in "\n".join(
        world.scheduler.explain("low")
    )
    assert "Banned: job 'low' while the collective before operator 1 of job 'high' runs" in "\n".join(
        world.scheduler.explain("high")
    )
    world.met("high", AWAITED_S + EXCHANGE_S, EXCHANGE_S)
    world.finish()


def test_low_work_beside_a_collective_that_does_not_suffer_is_not_banned() -> None:
    world = sensitive(0.0)
    assert world.scheduler.snapshot()["guard"]["bans"] == []


def test_a_ban_from_a_collective_is_lifted_once_a_launch_shows_that_it_no_longer_suffers() -> None:
    world = sensitive(LOST_S)
    (ban,) = world.scheduler._state.guard.bans.active
    number = until_a_probe(world, ban)
    assert meet(world, number, 0.0), "one launch is made to find out"
    assert ban.lifted
    assert world.scheduler.snapshot()["guard"]["bans"] == []


def test_a_ban_from_a_collective_is_lengthened_if_it_still_suffers() -> None:
    world = sensitive(LOST_S)
    (ban,) = world.scheduler._state.guard.bans.active
    first = ban.until - ban.since
    number = until_a_probe(world, ban)
    probed = world.now
    assert meet(world, number, LOST_S)
    assert not meet(world, number + 1, LOST_S)
    assert (ban.failures, ban.lifted) == (1, False)
    assert ban.until - probed > 1.9 * first


def test_peers_that_come_late_are_no_reason_for_a_ban() -> None:
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,))
    exchanges(world, range(40))
    known_by_now(world)
    world.job("low", "low", (LOW_S,), max_inflight=64)
    for number in range(40, 60):
        parked(world, number)
        world.steps("low", number)
        while world.jobs["low"].out:
            finish(world, "low", LOW_S)
        world.met("high", 5 * AWAITED_S + EXCHANGE_S, EXCHANGE_S)
        finish(world, "high")
    assert world.scheduler.snapshot()["guard"]["bans"] == []


def test_waiting_and_the_exchange_belong_to_the_steps_time() -> None:
    world = World("guarded")
    world.job("high", "high", PIECES, gated=(1,))
    exchanges(world, range(10))
    assert world.scheduler._state.guard.high_jobs["high"].solo_step() == pytest.approx(2e-3 + AWAITED_S + EXCHANGE_S)
