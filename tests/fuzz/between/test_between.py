"""A few sequences in every run of the tests; `python -m tests.fuzz --seeds A:B` runs more."""

from __future__ import annotations

import pytest

from tests.fuzz.between import compare, hunt, training
from tests.fuzz.between.compare import Work

EACH = 4
STARTS = range(0, 12, EACH)


@pytest.fixture(autouse=True)
def as_the_daemon(one_thread: None) -> None:
    pass


@pytest.mark.parametrize(
    "start", [STARTS[0], *(pytest.param(start, marks=pytest.mark.extended) for start in STARTS[1:])]
)
def test_a_sequence_is_what_the_plain_loop_is(start: int, endpoint: str) -> None:
    tally = hunt.Tally()
    found = list(hunt.hunt(range(start, start + EACH), endpoint, tally, shrink=False))
    assert tally.sequences == EACH
    assert not found, "\n".join(f"seed {each.seed}: {each.words}\n{each.one.script()}" for each in found)


def test_a_difference_is_found_and_shrunk(endpoint: str) -> None:
    """Lines that do something else as a job, among others, and in a later one that needs an earlier one."""
    lines = ("train(1)", "kept['x'] = 1", "note(p.sum())", "job and kept and torch.manual_seed(3)", "model.zero_grad()")
    one = Work("norm", "adam", "whole", ("p = params()[0]", *lines))
    smaller, words = compare.shrunk(one, endpoint)
    assert smaller.lines == ("kept['x'] = 1", "job and kept and torch.manual_seed(3)")
    assert words.startswith("generator in the end")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train(1); job and params()[0].detach().add_(1)", "model in the end"),
        ("job and note(1)", "1 noted, and 0 in the plain loop"),
        ("note(job is None)", "noted of `note(job is None)`:  is False, and True in the plain loop"),
        ("note(torch.zeros(1) * (-1 if job else 1))", "noted of `note(torch.zeros(1) * (-1 if job else 1))`"),
        ("train(2 if job else 1)", "2 losses, and 1 in the plain loop"),
        ("optimizer.param_groups[0]['lr'] = 1.0 if job else 2.0", "settings in the end"),
        ("params()[0].grad = torch.ones_like(params()[0]) if job else None", "gradients in the end"),
        ("kept['x'] = torch.ones(2) if job else torch.zeros(2)", "kept in the end"),
        ("job and [][0]", "`job and [][0]` raises IndexError: list index out of range"),
    ],
)
def test_every_kind_of_difference_is_seen(line: str, words: str, endpoint: str) -> None:
    found, _ = compare.difference(Work("norm", "adam", "whole", (line,)), endpoint)
    assert found.startswith(words)


def test_an_error_of_ours_ends_a_sequence_and_a_remedy_does_not(endpoint: str) -> None:
    lines = ("train(1)", "params()[0].data.mul_(0.5)", "train(1)", "params()[0].grad.sum()", "[][0]")
    found, ours = compare.difference(Work("norm", "adam", "whole", lines), endpoint)
    assert (found, ours.stopped, ours.remedies) == ("", 3, 1)


def test_every_operation_can_be_run() -> None:
    """In the plain loop of one of the models."""
    never = []
    for op in hunt.ALL:
        line = f"p, k = params()[0], 3\n{op.lines}"
        runs = (
            compare.run(Work(model, "adam", "without_zeroing", ("train(1)", line)), None) for model in training.MODELS
        )
        if all(run.stopped is not None for run in runs):
            never.append(op.lines)
    assert not never
    assert len(hunt.ALL) > 150


def test_a_seed_makes_the_same_sequence_again() -> None:
    assert [hunt.sequence(seed) for seed in range(20)] == [hunt.sequence(seed) for seed in range(20)]
    assert not any(hunt.sequence(seed).optimizer in training.KEEPING for seed in range(200))
    assert any(hunt.sequence(seed, keeping=True).optimizer in training.KEEPING for seed in range(200))
