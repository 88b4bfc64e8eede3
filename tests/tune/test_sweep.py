"""The loop: budgets, survivors, resuming after any kill, and independence of the trainer's order."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.tune.algorithms import Algorithm, hyperband, random_search
from gpumux.tune.checkpoints import MemoryCheckpoints
from gpumux.tune.sweep import MemoryLedger, SweepLedger, TrialRecord, best_of, sweep
from gpumux.tune.trainer import seed_of
from tests.tune.fakes import SPACE, FakeTrainer, Killed, quiet

Made = Callable[[], Algorithm]
ALGORITHMS = st.one_of(
    st.builds(lambda n, steps: lambda: random_search(n, steps), st.integers(1, 12), st.integers(1, 50)),
    st.builds(
        lambda steps, eta, skip, trials: lambda: hyperband(steps, min_steps=1, eta=eta, skip_last=skip, trials=trials),
        st.integers(1, 30), st.integers(2, 4), st.integers(0, 2), st.none() | st.integers(1, 30),
    ),
)  # fmt: skip


def run(
    made: Made, trainer: FakeTrainer, ledger: SweepLedger | None = None, *, maximize: bool = True
) -> list[TrialRecord]:
    ledger = ledger or MemoryLedger(SPACE, 5)
    sweep(made(), ledger, trainer, trainer.checkpoints, quiet(), maximize=maximize, seed=5)
    return ledger.entries()


def fake(**options) -> FakeTrainer:
    return FakeTrainer(MemoryCheckpoints(), **options)


@given(ALGORITHMS, st.integers(1, 7), st.booleans())
def test_results_do_not_depend_on_the_scheduler(made: Made, group: int, reverse: bool):
    assert run(made, fake()) == run(made, fake(group=group, reverse=reverse))


@given(ALGORITHMS, st.booleans(), st.frozensets(st.integers(0, 12)))
def test_all_trials_end_and_none_is_trained_twice(made: Made, maximize: bool, bad: frozenset[int]):
    trainer = fake(bad=bad)
    entries = run(made, trainer, maximize=maximize)
    assert {e.state for e in entries} <= {"complete", "pruned", "failed"}
    assert len(set(trainer.trained)) == len(trainer.trained)
    for e in entries:
        stretches = sorted((s, t) for n, s, t in trainer.trained if n == e.number)
        assert [s for s, _ in stretches] == [0, *(t for _, t in stretches[:-1])], "no gap and no step twice"
        assert stretches[-1][1] == e.steps
        assert e.device_s == 0.5 * len(stretches)
        assert (e.state == "failed") == (e.number in bad) == math.isnan(e.score)
    best = best_of(entries, maximize=maximize)
    if best is not None:
        assert trainer.checkpoints.has(best.number, best.steps), "the best one's state is kept"
    kept = [e for e in entries if trainer.checkpoints.has(e.number, e.steps)]
    assert len(kept) <= 1 + len([e for e in entries if e.state == "complete"])
    assert all(e.state == "complete" for e in kept)


@given(ALGORITHMS, st.integers(0, 40), st.booleans())
def test_a_killed_sweep_goes_on(made: Made, die_after: int, lose: bool):
    """Killed anywhere and run again, a sweep ends the same; finished trials are not trained again."""
    whole = fake()
    expected = run(made, whole)
    ledger = MemoryLedger(SPACE, 5)
    first = fake(die_after=die_after)
    if die_after < len(whole.trained):
        with pytest.raises(Killed):
            run(made, first, ledger)
    else:
        run(made, first, ledger)
    checkpoints = MemoryCheckpoints() if lose else first.checkpoints
    second = FakeTrainer(checkpoints)
    found = run(made, second, ledger)
    assert [(e.number, e.config, e.state, e.scores) for e in found] == [
        (e.number, e.config, e.state, e.scores) for e in expected
    ]
    if not lose:
        assert sorted(first.trained + second.trained) == sorted(whole.trained)
    else:
        assert set(first.trained + second.trained) == set(whole.trained)


def test_the_best_go_on():
    ledger = MemoryLedger(SPACE, 5)
    run(lambda: hyperband(27, min_steps=3, eta=3), fake(), ledger)
    entries = ledger.entries()
    first = [e for e in entries if 3 in e.scores]
    promoted = {e.number for e in first if 9 in e.scores}
    best = sorted(first, key=lambda e: -e.scores[3])[: len(promoted)]
    assert promoted == {e.number for e in best}
    assert {e.state for e in first if e.number not in promoted} == {"pruned"}


def test_where_all_diverge_the_next_bracket_is_tried():
    entries = run(lambda: hyperband(9, min_steps=1, eta=3), fake(bad=frozenset(range(9))))
    assert {e.state for e in entries if e.number < 9} == {"failed"}
    assert any(e.state == "complete" for e in entries)


def test_a_trainer_that_loses_a_trial_is_found_out():
    class Loses(FakeTrainer):
        def train(self, works, watch):
            yield from super().train(works[1:], watch)

    with pytest.raises(AssertionError, match="asked for trials"):
        run(lambda: random_search(3, 10), Loses(MemoryCheckpoints()))


def test_seeds():
    assert seed_of(0, 1, {}) != seed_of(0, 2, {}) != seed_of(1, 2, {})
    assert seed_of(0, 1, {}, 0) not in (seed_of(0, 1, {}), seed_of(0, 1, {}, 5))
    assert seed_of(0, 1, {"seed": 3}) == seed_of(7, 9, {"seed": 3}) != seed_of(0, 1, {"seed": 4})
    assert all(0 <= seed_of(0, n, {}) < 2**31 for n in range(1000))


def test_an_error_closes_the_trainer():
    closed = []

    class Watched(FakeTrainer):
        def train(self, works, watch):
            try:
                yield from super().train(works, watch)
            finally:
                closed.append(True)

    class Full(MemoryLedger):
        def report(self, *_: object) -> None:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        run(lambda: random_search(3, 10), Watched(MemoryCheckpoints()), Full(SPACE, 0))
    assert closed == [True]
