"""How long a launch between a high job's steps has to wait."""

from __future__ import annotations

import pytest

from gpumux.core.lookahead import Gaps
from gpumux.core.lull import wait


@pytest.mark.parametrize("known", [[0.2], [0.1, 0.2], [0.1, 0.1, 0.2]])
@pytest.mark.parametrize("waited", [0.05, 0.15])
@pytest.mark.parametrize("seconds", [0.0, 0.0001])
def test_a_launch_shorter_than_what_a_step_may_lose_is_answered_behind_the_last_gap_but_one(known, waited, seconds):
    gaps = Gaps()
    for gap in known:
        gaps.add(gap)
    until = wait(gaps, waited, seconds, mean=0.1, worst=1.0, room=0.01, budget=0.0)
    assert waited < until <= gaps.longest
