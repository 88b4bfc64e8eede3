"""A simulated day by messages, through a coordinator and eight daemons, is the day of the placement alone; and no job
is lost or run twice when the coordinator dies again and again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpumux.cluster import events as ev
from gpumux.types import JobId
from microbench.cluster_day import HIGHS, LOWS, WAYS, Day, DayJob, Pair, Way, draw_jobs
from tests.coordinator.day import DayByMessages

NODES = 8
PAIRS = {(high, low): Pair(1.04, 0.3 + 0.1 * (at % 4)) for at, high in enumerate(HIGHS) for low in LOWS}
SHARED = [way for way in WAYS if way.max_jobs > 1]
WHOLE = [way for way in WAYS if not way.high_nodes]  # a part of eight devices has no room for the gangs of eight
KILLS = 50
SEED = 6  # of a day that takes another course if pairs of programs are not learned


def jobs_of(number: int, seed: int) -> list[DayJob]:
    """Jobs under ids as clients choose them."""
    drawn = draw_jobs(number, seed, HIGHS, LOWS)
    return [replace(job, request=replace(job.request, id=JobId(f"{at:032x}"))) for at, job in enumerate(drawn)]


class Unlearned(Day):
    """A day whose placement is not told what was measured of pairs of programs."""

    def feed(self, event: ev.ClusterEvent) -> None:
        super().feed(ev.TimePassed() if isinstance(event, ev.PairMeasured) else event)


def test_the_day_that_is_compared_depends_on_what_is_learned():
    days = [kind(jobs_of(60, SEED), SHARED[-1], PAIRS, NODES, 1) for kind in (Day, Unlearned)]
    for day in days:
        day.run()
    assert days[0].figures() != days[1].figures()


@pytest.mark.every(3)
@pytest.mark.parametrize("way", WHOLE, ids=lambda way: way.name)
def test_eight_daemons_give_the_placements_day_exactly(way: Way, tmp_path: Path):
    jobs = jobs_of(60, SEED)
    alone = Day(jobs, way, PAIRS, NODES, 1)
    alone.run()
    spoken = DayByMessages(jobs, way, PAIRS, NODES, tmp_path)
    try:
        spoken.run()
    finally:
        spoken.close()
    assert spoken.refusals == []
    assert spoken.figures() == alone.figures()
    assert bool(alone.moves) == way.moves


def test_a_coordinator_that_is_killed_fifty_times_loses_no_job_and_runs_none_twice(tmp_path: Path):
    jobs = jobs_of(100, 11)
    day = DayByMessages(jobs, SHARED[-1], PAIRS, NODES, tmp_path, kills=KILLS, seed=0)
    try:
        day.run()
    finally:
        day.close()
    assert day.killed["between"] >= KILLS // 2 - 5  # a few come while it is dead already
    assert day.killed["unsent"] >= KILLS // 2 - 5
    assert len(day.over) == len(jobs)
    assert not day.requests
    assert not day.coordinator.jobs
    for running in day.known.values():  # the whole length, once
        assert running.remaining == pytest.approx(0.0, abs=1e-6)
    done = sum(answer.outcome == "done" for answer in day.coordinator.answers.values())
    assert done == len(jobs), day.coordinator.answers
