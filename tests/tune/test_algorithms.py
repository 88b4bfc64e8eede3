"""Budgets: Hyperband's table in the paper, and what holds for every choice of R, eta and trials."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.errors import ConfigError
from gpumux.tune.algorithms import Algorithm, Rung, brackets, hyperband, random_search, ranked


def run(algorithm: Algorithm) -> list[Rung]:
    """All rungs, if the lowest numbers continue."""
    rungs = []
    try:
        rung = next(algorithm)
        while True:
            rungs.append(rung)
            rung = algorithm.send(rung.trials[: rung.keep])
    except StopIteration:
        return rungs


def test_the_table_of_the_paper():
    """Li et al., table 1: R = 81, eta = 3; n_i and r_i of each bracket."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rung in run(hyperband(81, min_steps=1, eta=3)):
        found.setdefault(rung.bracket, []).append((len(rung.trials), rung.steps))
    assert found == {
        0: [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        1: [(34, 3), (11, 9), (3, 27), (1, 81)],
        2: [(15, 9), (5, 27), (1, 81)],
        3: [(8, 27), (2, 81)],
        4: [(5, 81)],
    }


@given(
    steps=st.integers(1, 2000), share=st.integers(1, 500), eta=st.integers(2, 5), skip=st.integers(0, 3),
    trials=st.none() | st.integers(1, 150),
)  # fmt: skip
def test_every_trial_gets_its_budget(steps: int, share: int, eta: int, skip: int, trials: int | None):
    rungs = run(hyperband(steps, min_steps=max(1, steps // share), eta=eta, skip_last=skip, trials=trials))
    reached: dict[int, int] = {}
    ended: set[int] = set()
    for rung in rungs:
        assert rung.trials
        assert 0 <= rung.start < rung.steps <= steps
        assert rung.keep <= len(rung.trials)
        assert all(reached.get(t, 0) == rung.start for t in rung.trials), "goes on from where it was"
        assert not ended & set(rung.trials)
        reached |= dict.fromkeys(rung.trials, rung.steps)
        ended |= set(rung.trials[rung.keep :])
    assert sorted(reached) == list(range(len(reached)))
    assert ended == set(reached)
    if trials is not None:
        assert len(reached) == trials
    if skip == 0 and trials is None:
        assert max(reached.values()) == steps
        lasts = [r for r in rungs if r.keep == 0]
        assert all(r.steps == steps for r in lasts)
        assert len({r.bracket for r in rungs}) == len(lasts)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(2, 6))
def test_brackets_cost_about_the_same(steps: int, min_steps: int, eta: int):
    """Each bracket's budget is about (s_max + 1) R; the paper's n, in whole numbers."""
    if min_steps > steps:
        return
    found = brackets(steps, min_steps, eta)
    s_max = found[0][0]
    assert min_steps * eta**s_max <= steps < min_steps * eta ** (s_max + 1)
    assert [s for s, _ in found] == list(range(s_max, -1, -1))
    for s, n in found:
        assert n == math.ceil((s_max + 1) * eta**s / (s + 1) - 1e-9)
        assert n // eta**s >= 1


def test_random_search_is_one_rung():
    assert run(random_search(3, 10)) == [Rung(0, 0, 0, 10, (0, 1, 2))]


def test_ranks():
    nan = math.nan
    assert ranked({0: 1.0, 1: nan, 2: 3.0, 3: 3.0, 4: -math.inf}, maximize=True) == [2, 3, 0, 4, 1]
    assert ranked({0: 1.0, 1: nan, 2: 3.0, 3: 3.0, 4: math.inf}, maximize=False) == [0, 2, 3, 4, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: random_search(0, 10),
        lambda: random_search(3, 0),
        lambda: hyperband(10, min_steps=11),
        lambda: hyperband(10, min_steps=0),
        lambda: hyperband(10, min_steps=1, eta=1),
        lambda: hyperband(10, min_steps=1, skip_last=-1),
        lambda: hyperband(10, min_steps=1, trials=0),
    ],
)
def test_budgets_that_are_none(wrong):
    with pytest.raises(ConfigError):
        next(wrong())
