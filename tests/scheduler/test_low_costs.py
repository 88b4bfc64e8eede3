"""What is known of one low program beside one high program, and found again in one look."""

from __future__ import annotations

import pytest

from gpumux.scheduler.guard import costs as pairs
from gpumux.scheduler.guard import high_job as estimates
from gpumux.scheduler.guard.costs import LATER, ON_ARRIVAL, LowCosts
from gpumux.scheduler.guard.high_job import HighCosts
from gpumux.scheduler.jobs import LowKey, spans

WHOLE, HALF = LowKey("low", 1.0), LowKey("low", 0.5)
SPAN, OTHER = "0-1 of low", "1-2 of low"


@pytest.fixture
def model() -> HighCosts:
    return HighCosts("high", (0, 1, 2), (1e-3, 1e-3))


def learn(pair: LowCosts, piece: int, cost: float, span: str = SPAN) -> None:
    pair.learn((piece, LATER, span), cost, cost, 1e-3, 1, 1.0)


def test_a_step_that_comes_during_a_launch_loses_what_such_steps_did_or_else_what_any_launch_costs(model: HighCosts):
    pair = model.beside(WHOLE)
    assert model.arrival_cost(WHOLE, SPAN) is model.arrival_cost(WHOLE, SPAN) is None
    learn(pair, 0, 1e-4)
    known = model.arrival_cost(WHOLE, SPAN)
    assert known is not None
    assert known.mean == 1e-4
    learn(pair, 1, 3e-4)  # of the same kind: nothing is to be looked for
    assert model.arrival_cost(WHOLE, SPAN) is known
    assert known.count == 2
    learn(pair, ON_ARRIVAL, 5e-4)
    known = model.arrival_cost(WHOLE, SPAN)
    assert known is not None
    assert known.mean == 5e-4
    assert model.arrival_cost(WHOLE, OTHER) is None


def test_pieces_of_two_programs_are_never_the_same(model: HighCosts):
    """What is known of one is looked for by the piece alone."""
    bounds = (0, 1, 2)
    mine, others = spans("low", bounds), spans("other", bounds)
    assert len({*mine, *others}) == 4
    learn(model.beside(WHOLE), 0, 1e-4, mine[0])
    assert model.arrival_cost(WHOLE, mine[0]) is not None
    assert model.arrival_cost(LowKey("other", 1.0), others[0]) is None


def test_each_share_of_the_device_is_known_for_itself(model: HighCosts):
    learn(model.beside(WHOLE), ON_ARRIVAL, 1e-4)
    assert model.arrival_cost(WHOLE, SPAN) is not None
    assert model.arrival_cost(HALF, SPAN) is None
    learn(model.beside(HALF), ON_ARRIVAL, 7e-4)
    found = [model.arrival_cost(key, SPAN) for key in (HALF, WHOLE)]
    assert [known.mean for known in found if known is not None] == [7e-4, 1e-4]


def test_another_cut_knows_what_launches_cost_and_not_yet_what_a_step_does_that_comes_during_one(model: HighCosts):
    pair = model.beside(WHOLE)
    learn(pair, 0, 1e-4)
    learn(pair, ON_ARRIVAL, 5e-4)
    assert model.arrival_cost(WHOLE, SPAN) is not None
    heir = model.recut((0, 2), (2e-3,))
    known = heir.arrival_cost(WHOLE, SPAN)
    assert known is not None
    assert known.mean == 1e-4
    assert model.arrival_cost(WHOLE, OTHER) is None
    learn(heir.beside(WHOLE), ON_ARRIVAL, 6e-4, OTHER)
    learn(heir.beside(WHOLE), 0, 6e-4, OTHER)
    assert model.arrival_cost(WHOLE, OTHER) is None
    assert OTHER not in pair.lows


def test_what_was_forgotten_is_not_found(model: HighCosts, monkeypatch: pytest.MonkeyPatch):
    learn(model.beside(WHOLE), ON_ARRIVAL, 5e-4)
    assert model.arrival_cost(WHOLE, SPAN) is not None
    monkeypatch.setattr(estimates, "MOST_LOW_COSTS", 1)
    model.beside(LowKey("another", 1.0))
    assert model.arrival_cost(WHOLE, SPAN) is None


def test_of_too_many_places_the_means_stay(model: HighCosts, monkeypatch: pytest.MonkeyPatch):
    pair = model.beside(WHOLE)
    learn(pair, 0, 1e-4)
    learn(pair, ON_ARRIVAL, 5e-4)
    assert model.arrival_cost(WHOLE, SPAN) is not None
    monkeypatch.setattr(pairs, "MOST_KINDS", 2)
    learn(pair, 1, 1e-4)
    known = model.arrival_cost(WHOLE, SPAN)
    assert known is pair.lows[SPAN]
