"""A running mean that one outlier can't move far."""

from __future__ import annotations

from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from gpumux.scheduler.guard.costs import MIN_SAMPLES, RangeCost

RATES = st.floats(-1.0, 1.0) | st.sampled_from([0.0, 0.5])


@given(st.lists(RATES, min_size=1, max_size=MIN_SAMPLES))
def test_the_first_three_samples_count_by_their_median(rates: list[float]) -> None:
    cell = RangeCost()
    for rate in rates:
        cell.add(rate)
    assert [cell.third, cell.second, cell.newest][-len(rates) :] == rates
    assert cell.mean == cell.median == sorted(rates)[len(rates) // 2]
    assert abs(cell.deviation - mean(abs(rate - cell.mean) for rate in rates)) < 1e-12


def test_one_outlier_does_not_move_it_far() -> None:
    cell = RangeCost()
    for _ in range(8):
        cell.add(0.1)
    cell.add(10.0)
    assert cell.mean < 0.11
    for _ in range(40):
        cell.add(10.0)
    assert cell.mean > 5.0, "what stays is believed"
