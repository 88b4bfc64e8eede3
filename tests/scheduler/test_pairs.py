"""What is known of one low program beside one high program, and found again in one look."""

from __future__ import annotations

import pytest

from gpumux.scheduler.guard import costs as estimates
from gpumux.scheduler.guard import costs as pairs
from gpumux.scheduler.guard.costs import GAP, HighModel, Pair
from gpumux.scheduler.jobs import PairKey, spans

WHOLE, HALF = PairKey("low", 1.0), PairKey("low", 0.5)
SPAN, OTHER = "0-1 of low", "1-2 of low"


@pytest.fixture
def model() -> HighModel:
    return HighModel("high", (0, 1, 2), (1e-3, 1e-3))


def learn(pair: Pair, piece: int, cost: float, span: str = SPAN) -> None:
    pair.learn((piece, 3, span), cost, cost, 1e-3, 1, 1.0)


def test_a_step_that_comes_during_a_launch_loses_what_such_steps_did_or_else_what_any_launch_costs(model: HighModel):
    pair = model.pair(WHOLE)
    assert model.delay(WHOLE, SPAN) is model.delay(WHOLE, SPAN) is None
    learn(pair, 0, 1e-4)
    known = model.delay(WHOLE, SPAN)
    assert known is not None
    assert known.mean == 1e-4
    learn(pair, 1, 3e-4)  # of the same kind: nothing is to be looked for
    assert model.delay(WHOLE, SPAN) is known
    assert known.count == 2
    learn(pair, GAP, 5e-4)
    known = model.delay(WHOLE, SPAN)
    assert known is not None
    assert known.mean == 5e-4
    assert model.delay(WHOLE, OTHER) is None


def test_pieces_of_two_programs_are_never_the_same(model: HighModel):
    """What is known of one is looked for by the piece alone."""
    bounds = (0, 1, 2)
    mine, others = spans("low", bounds), spans("other", bounds)
    assert len({*mine, *others}) == 4
    learn(model.pair(WHOLE), 0, 1e-4, mine[0])
    assert model.delay(WHOLE, mine[0]) is not None
    assert model.delay(PairKey("other", 1.0), others[0]) is None


def test_each_share_of_the_device_is_known_for_itself(model: HighModel):
    learn(model.pair(WHOLE), GAP, 1e-4)
    assert model.delay(WHOLE, SPAN) is not None
    assert model.delay(HALF, SPAN) is None
    learn(model.pair(HALF), GAP, 7e-4)
    found = [model.delay(key, SPAN) for key in (HALF, WHOLE)]
    assert [known.mean for known in found if known is not None] == [7e-4, 1e-4]


def test_another_cut_knows_what_launches_cost_and_not_yet_what_a_step_does_that_comes_during_one(model: HighModel):
    pair = model.pair(WHOLE)
    learn(pair, 0, 1e-4)
    learn(pair, GAP, 5e-4)
    assert model.delay(WHOLE, SPAN) is not None
    heir = model.recut((0, 2), (2e-3,))
    known = heir.delay(WHOLE, SPAN)
    assert known is not None
    assert known.mean == 1e-4
    assert model.delay(WHOLE, OTHER) is None
    learn(heir.pair(WHOLE), GAP, 6e-4, OTHER)
    learn(heir.pair(WHOLE), 0, 6e-4, OTHER)
    assert model.delay(WHOLE, OTHER) is None
    assert OTHER not in pair.lows


def test_what_was_forgotten_is_not_found(model: HighModel, monkeypatch: pytest.MonkeyPatch):
    learn(model.pair(WHOLE), GAP, 5e-4)
    assert model.delay(WHOLE, SPAN) is not None
    monkeypatch.setattr(estimates, "MOST_PAIRS", 1)
    model.pair(PairKey("another", 1.0))
    assert model.delay(WHOLE, SPAN) is None


def test_of_too_many_places_the_means_stay(model: HighModel, monkeypatch: pytest.MonkeyPatch):
    pair = model.pair(WHOLE)
    learn(pair, 0, 1e-4)
    learn(pair, GAP, 5e-4)
    assert model.delay(WHOLE, SPAN) is not None
    monkeypatch.setattr(pairs, "MOST_PLACES", 2)
    learn(pair, 1, 1e-4)
    known = model.delay(WHOLE, SPAN)
    assert known is pair.lows[SPAN]
