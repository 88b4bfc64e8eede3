"""Partitions are pure, arrays full and within capacity, and results come back in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.errors import ConfigError
from gpumux.tune.fused import Partition, arrays, partition, reorder
from gpumux.tune.space import Space
from tests.tune.fakes import SPACE

TRIALS = st.lists(st.integers(0, 500), unique=True, max_size=40)


@given(trials=TRIALS, capacities=st.lists(st.integers(1, 9), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_arrays(trials: list[int], capacities: list[int], seed: int):
    configs = {t: SPACE.sample(seed, t) for t in trials}
    parts = partition(configs, SPACE)
    sizes = {part: capacities[i] for i, part in enumerate(parts)}
    made = arrays(parts, sizes.__getitem__)
    assert sorted(t for _, members in made for t in members) == sorted(trials), "each trial once"
    for part, members in made:
        assert len(members) <= sizes[part]
        assert {SPACE.infusible(configs[t]) for t in members} == {part.key}, "pure"
    for part in parts:
        of_it = [members for each, members in made if each == part]
        assert all(len(members) == sizes[part] for members in of_it[:-1]), "full but for the last"
    assert len({part.key for part in parts}) == len(parts)
    assert list(reorder({t: str(t) for t in reversed(trials)}, trials)) == trials


def test_values_of_different_types_part():
    space = Space.read({"x": {"choices": [1, True, 1.0]}})
    configs: dict[int, dict[str, Any]] = {0: {"x": 1}, 1: {"x": True}, 2: {"x": 1.0}, 3: {"x": True}}
    assert [p.trials for p in partition(configs, space)] == [(0,), (1, 3), (2,)]


def test_a_partition_that_does_not_fit_is_named():
    part = Partition((("batch", 64), ("model", "cnn")), (0, 1))
    with pytest.raises(ConfigError, match="batch=64 model=cnn"):
        arrays([part], lambda _: 0)


@pytest.mark.parametrize("results", [{0: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}])
def test_a_result_lost_or_invented_is_a_mistake(results: dict[int, float]):
    with pytest.raises(AssertionError):
        reorder(results, (0, 1))
