"""A grant's memory and weight are bounds of all its jobs together, whatever its holder asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.scheduler import events as cmd
from gpumux.scheduler import events as ev
from gpumux.types import Footprint, Grant, Peer, Priority
from tests.scheduler.test_fairness import INFLIGHT, Shares
from tests.scheduler.world import GIB, INFO, World

QUARTER = Grant("quarter", 25, 100, GIB // 4, Priority.LOW)
HALF = Grant("half", 50, 100, GIB // 2, Priority.HIGH)
UIDS = {"quarter": -7, "half": -8}


def join(world: World, session: str, grant: Grant | None) -> None:
    uid = 1000 if grant is None else UIDS[grant.name]
    world.give(ev.SessionOpened(session, Peer(uid, -1, 5, grant=grant)))
    world.sessions.add(session)


def open_job(world: World, session: str, job: str, weight: float = 1.0, priority: str = "low") -> None:
    world.job(job, priority, None, session, weight=weight)


def weights(world: World) -> dict[str, float]:
    return {entry["job"]: entry["weight"] for entry in world.scheduler.snapshot()["jobs"]}


def test_jobs_of_a_grant_divide_its_weight_as_they_come_and_go() -> None:
    world = World()
    join(world, "a", QUARTER)
    open_job(world, "a", "one")
    assert weights(world) == {"one": 0.25}
    open_job(world, "a", "two", weight=4.0)
    assert weights(world) == pytest.approx({"one": 0.05, "two": 0.2})
    world.give(ev.ChangeRequested("two", None, 1.0))
    assert weights(world) == pytest.approx({"one": 0.125, "two": 0.125})
    world.give(ev.CloseRequested("one", False, "closed"))
    assert weights(world)["two"] == 0.25


def test_others_keep_the_weights_they_ask_for() -> None:
    world = World()
    join(world, "a", QUARTER)
    join(world, "b", None)
    open_job(world, "a", "granted", weight=1000.0)
    open_job(world, "b", "mine", weight=2.0)
    open_job(world, "b", "too", weight=3.0)
    assert weights(world) == {"granted": 0.25, "mine": 2.0, "too": 3.0}


def test_each_class_divides_the_whole_weight() -> None:
    world = World()
    join(world, "a", HALF)
    open_job(world, "a", "low")
    open_job(world, "a", "high", priority="high")
    assert weights(world) == {"low": 0.5, "high": 0.5}
    world.change("low", "high")
    assert weights(world) == {"low": 0.25, "high": 0.25}


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "weigh"]), st.integers(0, 5), st.floats(0.01, 100.0))))
def test_no_sequence_of_requests_gives_a_holder_more_than_its_weight(requests) -> None:
    world = World()
    join(world, "a", QUARTER)
    for what, number, weight in requests:
        job = f"job{number}"
        if what == "open" and job not in world.jobs:
            open_job(world, "a", job, weight)
        elif what == "weigh" and job in world.jobs:
            world.give(ev.ChangeRequested(job, None, weight))
        elif what == "close" and job in world.jobs:
            world.give(ev.CloseRequested(job, False, "closed"))
    live = [entry["weight"] for entry in world.scheduler.snapshot()["jobs"] if entry["state"] != "closing"]
    assert not live or sum(live) == pytest.approx(0.25) or min(live) == 1e-3


def test_device_time_follows_the_shares() -> None:
    shares = Shares()
    world = shares.world
    for session, grant, jobs in (("a", QUARTER, ["a1", "a2", "a3"]), ("b", HALF, ["b1"])):
        join(world, session, grant)
        for job in jobs:
            world.job(job, "low", (3e-4, 3e-4), session, weight=9.0, max_inflight=INFLIGHT)
            shares.took[job] = 3e-4
    shares.start("a1", "a2", "a3", "b1")
    shares.run(2000)
    of_a = sum(shares.served[job] for job in ("a1", "a2", "a3"))
    assert shares.served["b1"] / of_a == pytest.approx(2.0, rel=0.03)


def test_memory_over_the_share_is_refused_in_words_for_its_holder() -> None:
    world = World()
    join(world, "a", QUARTER)
    open_job(world, "a", "one")
    fits = Footprint(INFO.memory_bytes // 8, 0, 0)
    assert world.offer("one", 1, fits) == [cmd.AcceptProgram("one", 1)]
    open_job(world, "a", "two")
    (refusal,) = world.offer("two", 1, Footprint(INFO.memory_bytes // 8 + 1, 0, 0))
    assert isinstance(refusal, cmd.RefuseProgram)
    assert refusal.fault.code == "admission_refused"
    assert "your share of the device (25 of 100)" in refusal.fault.message
    assert "; it comes to " in refusal.fault.message
    assert "the share that is asked for" in refusal.fault.remedy


def test_a_priority_above_the_grant_is_refused() -> None:
    world = World()
    join(world, "a", QUARTER)
    (refusal,) = world.request("one", "high", "a")
    assert (refusal.fault.code, "the grant quarter" in refusal.fault.remedy) == ("access_denied", True)
