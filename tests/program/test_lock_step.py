"""The arena that two waves share, against a simulation of both and their bytes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.program.memory import ArenaPlan, Interval, heights, lock_step_bytes, plans
from tests.program.strategies import programs


def arena(*storages: tuple[int, int, int, int]) -> ArenaPlan:
    """Of (offset, size, birth, last) each."""
    offsets, sizes, births, lasts = zip(*storages, strict=True)
    live = tuple(Interval(birth, last) for birth, last in zip(births, lasts, strict=True))
    return ArenaPlan(offsets, sizes, max(o + s for o, s in zip(offsets, sizes, strict=True)), live)


# Three activations come one after another and go in the opposite order; the peak is at operator 2.
HILL = arena((0, 100, 0, 4), (100, 100, 1, 3), (200, 100, 2, 2))


def test_a_hill_behind_a_hill_takes_what_the_two_slopes_add_up_to():
    assert heights(HILL) == [100, 200, 300, 200, 100]
    # The second wave's heights 100, 200, 300 meet what the first still needs: 200, 100 and nothing.
    assert lock_step_bytes(HILL, [1.0] * 5) == 300
    # A descent of half the speed: 100 + 200, 200 + 200, 300 + 100.
    assert lock_step_bytes(HILL, [1.0, 1.0, 1.0, 2.0, 2.0]) == 400
    # Further behind, the first wave has ended when the second is at its peak.
    assert lock_step_bytes(HILL, [1.0, 1.0, 1.0, 2.0, 2.0], behind_s=2.0) == 300


def test_waves_that_stay_high_take_almost_two_peaks():
    assert lock_step_bytes(arena((0, 126, 0, 9), (126, 2, 0, 0)), [1.0] * 10) == 128 + 126


def test_a_wave_whose_last_peak_is_its_end_has_the_arena_to_itself():
    assert lock_step_bytes(arena((0, 64, 0, 1), (64, 64, 0, 9)), [1.0] * 10) == 128


def test_a_plan_without_temporaries_takes_nothing():
    assert lock_step_bytes(ArenaPlan((), (), 0, ()), []) == 0
    assert lock_step_bytes(ArenaPlan((-1,), (0,), 0, (None,)), [1.0]) == 0


def test_a_time_for_each_operator_is_needed():
    with pytest.raises(ValueError, match="3 times for 5"):
        lock_step_bytes(HILL, [1.0] * 3)


def steps(seconds: list[int], last_peak: int, count: int) -> tuple[list[int], list[int]]:
    """When the steps of the first and of the second wave begin: after the wave's own last one has ended and the other
    wave has run its last peak."""
    whole, peak = sum(seconds), sum(seconds[: last_peak + 1])
    first, second = [0], [peak]
    for _ in range(count - 1):
        first.append(max(first[-1] + whole, second[-1] + peak))
        second.append(max(second[-1] + whole, first[-1] + peak))
    return first, second


def held(planned: ArenaPlan, clock: list[int], begins: list[int], now: int) -> list[tuple[int, int]]:
    """Bytes (start, end) that a wave holds just after `now`."""
    found = []
    for begin in begins:
        for at, (start, end) in enumerate(pairwise(clock)):
            if start <= now - begin < end:
                for offset, size, span in zip(planned.offsets, planned.sizes, planned.live, strict=True):
                    if span is not None and size and span.birth <= at <= span.last:
                        found.append((offset, offset + size))
    return found


@settings(deadline=None, max_examples=50)
@given(programs(max_ops=10), st.data())
def test_no_byte_of_two_waves_overlaps_in_an_arena_of_that_height(program, data):
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=len(program.ops), max_size=len(program.ops)))
    for planned in plans(program).values():
        high = heights(planned)[: len(seconds)]
        height = lock_step_bytes(planned, [float(each) for each in seconds])
        assert planned.peak_bytes <= height <= 2 * planned.peak_bytes
        if not any(high):
            continue
        last_peak = max(at for at, each in enumerate(high) if each == max(high))
        clock = [0, *accumulate(seconds)]
        first, second = steps(seconds, last_peak, 4)
        for now in sorted({begin + at for begin in (*first, *second) for at in clock}):
            below = held(planned, clock, first, now)
            above = [(height - end, height - start) for start, end in held(planned, clock, second, now)]
            assert not [(a, b) for a in below for b in above if a[0] < b[1] and b[0] < a[1]]
