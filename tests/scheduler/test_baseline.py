"""What a piece takes alone: a median that notices when the work changes, and is not taken in by noise."""

from __future__ import annotations

from random import Random

import pytest

from gpumux.scheduler.guard.high_job import Baseline


def told(samples: list[float]) -> Baseline:
    baseline = Baseline()
    for seconds in samples:
        baseline.add(seconds)
    return baseline


@pytest.mark.parametrize("factor", [0.5, 0.85, 1.15, 2.0, 30.0])
def test_two_samples_show_that_the_work_changed_and_one_does_not(factor):
    baseline = told([1.0] * 20)
    assert not baseline.add(factor)
    assert baseline.suspect
    assert baseline.value == 1.0
    assert baseline.add(factor)
    assert baseline.value == factor
    assert baseline.drifts == 1


def test_a_lone_sample_that_is_far_off_changes_nothing():
    baseline = told([1.0] * 10 + [50.0] + [1.0] * 10)
    assert baseline.value == 1.0
    assert baseline.drifts == 0


def test_samples_that_always_differ_are_noise_and_their_median_is_believed():
    """As on a CPU that other programs use: half of the samples are a fifth to two times longer than the rest."""
    random = Random(0)
    baseline = Baseline()
    drifts = [baseline.add(1e-3 * (1.0 + random.choice((0.0, random.uniform(0.2, 2.0))))) for _ in range(2000)]
    assert sum(drifts[:100]) <= 20, "it takes a while to know"
    assert sum(drifts[100:]) <= 38, "then no more than one in fifty"
    assert 1e-3 <= baseline.value <= 3e-3


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_change_beyond_the_noise_is_noticed_all_the_same(factor):
    random = Random(1)
    baseline = told([1e-3 * random.uniform(0.8, 1.6) for _ in range(200)])
    before = baseline.drifts
    assert [baseline.add(factor * 1e-3), baseline.add(factor * 1e-3)] == [False, True]
    assert baseline.drifts == before + 1
    assert baseline.value == factor * 1e-3


def test_where_samples_are_often_late_it_is_known_by_how_much():
    random = Random(2)
    baseline = told([1e-3 * random.choice((1.0, 1.0, 1.0, 1.8)) for _ in range(600)])
    assert baseline.value == 1e-3
    assert 0.05e-3 < baseline.late < 0.3e-3


def test_what_always_takes_the_same_is_not_late_and_neither_is_what_changed():
    random = Random(3)
    assert told([1e-3 * random.uniform(0.98, 1.02) for _ in range(300)]).late == 0.0
    assert told([1e-3] * 50 + [2e-3] * 50).late == 0.0, "the first two of these are no noise"
    assert told([1e-3, 1e-3, 1e-3, 0.2e-3, *[1e-3] * 20]).late == 0.0, "it is never early"
