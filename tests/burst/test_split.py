"""Steps split over ranks compute what plain torch computes, for any placement of their layers."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpumux.burst.placement import RankPlacement, data_parallel
from tests.burst.many import split_programs
from tests.burst.subjects import SUBJECTS, Built, compare, random_placement

BOUND = 1e-10
PLACEMENTS = 2  # of each subject on each number of ranks; `python -m tests.burst.many` runs 200 of each


@pytest.mark.every(4)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_random_placements_compute_what_plain_torch_computes(name: str, ranks: int) -> None:
    rng = random.Random(f"{name} {ranks}")
    for _ in range(PLACEMENTS):
        placement = random_placement(SUBJECTS[name].layers, ranks, rng)
        difference, gang = compare(SUBJECTS[name], placement, 3)
        assert difference.largest <= BOUND, placement
        assert gang.ranks.moved == gang.predicted, placement


@pytest.mark.every(12)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_layers_on_one_rank_compute_the_same_bits(name: str, ranks: int) -> None:
    placement = RankPlacement(ranks, dict.fromkeys(SUBJECTS[name].layers, (ranks - 1,)))
    difference, gang = compare(SUBJECTS[name], placement, 3)
    assert difference.largest == 0.0
    assert gang.ranks.moved == {}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", SUBJECTS)
def test_data_parallel_training_sums_gradients_and_moves_nothing_else(name: str) -> None:
    difference, gang = compare(SUBJECTS[name], data_parallel(2), 3)
    assert difference.largest <= BOUND
    assert gang.last is not None
    kinds = {one.kind for rank in gang.last.ranks for one in rank.lowered.program.collectives}
    assert kinds == {"all_reduce"}


def test_each_gradient_is_summed_once_that_of_tied_weights_too() -> None:
    """What makes up a gradient is added in each rank; there is one exchange besides that of the result."""
    difference, gang = compare(SUBJECTS["transformer"], data_parallel(2), 3)
    assert difference.largest <= BOUND
    assert gang.last is not None
    program = gang.last.ranks[0].lowered.program
    summed = [prod(program.views[view].size) for one in program.collectives for view in one.views]
    parameters = [p.numel() for p in SUBJECTS["transformer"].make().parameters()]
    assert sorted(summed) == sorted([*parameters, 1]), "of the loss, too"


def test_what_the_proofs_took_goes_back_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step has been split, before the job begins."""
    called: list[bool] = []

    def block() -> ExitStack:
        stack = ExitStack()
        stack.callback(called.append, True)
        return stack

    monkeypatch.setattr("gpumux.burst.split.freed_is_reused", block)
    compare(SUBJECTS["vgg"], data_parallel(2), 1)
    assert called


def build_summed(model: Any) -> Built:
    """The sum of a loss over the batch, a penalty on the weights beside it, and a mean of its own for one layer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum") + model[0](x).square().mean()
        loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        return loss

    return [model], [optimizer], [step]


@pytest.mark.every(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_a_mean_and_a_penalty_on_the_weights_are_added_once_they_are_whole(ranks: int) -> None:
    subject = replace(SUBJECTS["vgg"], name="summed", build=build_summed)
    rng = random.Random(ranks)
    for placement in (data_parallel(ranks), *(random_placement(subject.layers, ranks, rng) for _ in range(PLACEMENTS))):
        difference, _ = compare(subject, placement, 3)
        assert difference.largest <= BOUND, placement


def build_viewed(model: Any) -> Built:
    """A step whose results are views of values of samples, which nothing else in the step reads."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        (slopes,) = torch.autograd.grad(loss, scores, retain_graph=True)
        loss.backward()
        optimizer.step()
        return loss, scores[:, 0], scores.t(), scores.detach()[:, 2:4].unsqueeze(1), slopes[:, 1]

    return [model], [optimizer], [step]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_may_return_views_that_only_it_has(ranks: int) -> None:
    subject = replace(SUBJECTS["vgg"], name="viewed", build=build_viewed)
    for placement in (data_parallel(ranks), random_placement(subject.layers, ranks, random.Random(ranks))):
        difference, _ = compare(subject, placement, 2)
        assert difference.largest <= BOUND, placement


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "placements"), [("vgg", 15), ("inception", 15), ("gan", 10)])
def test_the_programs_of_random_placements_fit_together(name: str, placements: int) -> None:
    """`python -m tests.burst.many --programs` splits ten times as many, a thousand."""
    assert split_programs(name, placements) > placements // 2
