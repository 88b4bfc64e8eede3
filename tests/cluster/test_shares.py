"""Fair shares and quotas, each rule by itself."""

from __future__ import annotations

import pytest

from gpumux.cluster.events import ClusterJob, PlacementConfig, Quota
from gpumux.cluster.jobs import JobPhase, PlacedJob
from gpumux.cluster.placement import ClusterPlacement
from gpumux.cluster.saved import facts_of, job_data, restore
from gpumux.cluster.shares import FairShares, OverQuota, QuotaUse
from gpumux.types import JobId, Priority

LOW, HIGH = Priority.LOW, Priority.HIGH


def job(
    user: str, number: int = 1, priority: Priority = LOW, devices: int = 1, held_since: float | None = None
) -> PlacedJob:
    made = PlacedJob(ClusterJob(JobId(f"{user}{number}"), user, "g", priority, devices, 1), number, 0.0)
    if held_since is not None:
        made.phase, made.held_since = JobPhase.RUNNING, held_since
    return made


def test_absence_saves_nothing_up() -> None:
    """A user that joins begins at the level of the one that had least, and not at nothing."""
    shares = FairShares(PlacementConfig(advance_s=1.0))
    there = [job("ada", held_since=0.0), job("ben", held_since=40.0)]
    shares.joined(job("cleo"), there, 100.0)
    assert shares.settled[LOW, "cleo"] == 60.0
    shares.joined(job("dan", priority=HIGH), there, 100.0)
    assert shares.settled[HIGH, "dan"] == 0.0  # of its class there is none


def test_a_user_that_had_more_does_not_begin_at_less_again() -> None:
    shares = FairShares(PlacementConfig(advance_s=1.0))
    shares.settle(job("cleo", held_since=0.0), 500.0)
    shares.joined(job("cleo", 2), [job("ada", held_since=0.0)], 600.0)
    assert shares.settled[LOW, "cleo"] == 600.0
    shares.joined(job("cleo", 3), [job("ada", held_since=590.0)], 600.0)
    assert shares.settled[LOW, "cleo"] == 600.0


def test_what_was_stopped_comes_before_what_is_urgent() -> None:
    shares = FairShares(PlacementConfig())
    stopped, urgent = job("ada", 2), job("ada", 1)
    stopped.began = True
    urgent.request = ClusterJob(urgent.id, "ada", "g", LOW, 1, 1, (), 100)
    assert sorted([urgent, stopped], key=shares.rank) == [stopped, urgent]


def test_a_quota_of_high_jobs_is_for_high_jobs() -> None:
    config = PlacementConfig(quotas={"ada": Quota(high_devices=1)})
    held = [job("ada", 1, HIGH, held_since=0.0), job("ada", 2, LOW, devices=5, held_since=0.0)]
    quotas = QuotaUse(config, held)
    assert quotas.exceeded(job("ada", 3).request) is None
    assert quotas.exceeded(job("ada", 3, HIGH).request) == OverQuota("user ada", "holds 1 of 1 devices with high jobs")


@pytest.mark.parametrize("owner", ["quotas", "group_quotas"])
def test_a_quota_counts_what_its_owner_holds_alone(owner: str) -> None:
    config = PlacementConfig(**{owner: {"ada": Quota(devices=2), "g": Quota(devices=2)}})  # type: ignore[arg-type]
    quotas = QuotaUse(config, [job("ben", held_since=0.0), job("ada", held_since=0.0), job("ada", 2)])
    over = quotas.exceeded(job("ada", 3).request)
    assert (over is None) == (owner == "quotas")


def test_shares_and_orders_to_stop_are_known_after_a_restart() -> None:
    config = PlacementConfig()
    placement = ClusterPlacement(config)
    placement.now = 100.0
    placement.shares.settle(job("ada", held_since=0.0), 70.0)
    leaving = job("ben", held_since=10.0)
    leaving.phase, leaving.attempt, leaving.stopped_for = JobPhase.STOPPING, 4, "its node drains"
    again = restore(config, facts_of(placement), [], [job_data(leaving)])
    assert again.shares.settled == {(LOW, "ada"): 70.0}
    (found,) = again.jobs.values()
    assert (found.phase, found.attempt, found.stopped_for) == (JobPhase.STOPPING, 4, "its node drains")
    assert found.due <= again.now  # its ranks are asked again at once
