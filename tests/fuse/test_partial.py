"""Models that differ in some blocks share the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpumux.errors import NotFusible
from tests.fuse.serial import Config, array_of, batches, check, configs, training

nn = torch.nn


def adam(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config.lr)


class Blocks(nn.Module):
    """Two layers with a block between them that differs in each of the first three models."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        blocks = [
            nn.Tanh(),
            nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)),
            nn.Sequential(nn.Dropout(0.3), nn.Sigmoid()),
        ]
        self.block = blocks[kind % 3]
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.block(self.first(x)).square()))


def factory(config: Config, optimizer: Any = adam) -> Any:
    return training(lambda: Blocks(config.seed), optimizer, nn.CrossEntropyLoss())(config)


@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.every(2)
def test_blocks_of_their_own_run_alone_and_the_rest_together(per_model: bool):
    data = batches(6, 5, classes=4)
    array = check(factory, data, given=configs(4), partial=True, per_model=per_model)
    rows = array.plan().rows
    layers = {r.layer for r in rows if r.why.startswith("only model")}
    together = {r.layer for r in rows if r.how == "fused"}
    assert any("block" in layer for layer in layers)
    assert not any("'first'" in layer or "'last'" in layer for layer in layers)
    assert {"in layer 'first'", "in layer 'last'", "in layer 'last', backward"} <= together


def test_without_being_asked_for_it_is_refused():
    with pytest.raises(NotFusible, match="not of one kind"):
        array_of(factory, configs(), batches(6, 5, classes=4)[0])


def test_models_of_one_kind_are_fused_as_ever():
    array = check(training(lambda: Blocks(0), adam), batches(6, 5), partial=True)
    assert not any(r.why.startswith("only model") for r in array.plan().rows)


def test_other_results_are_refused():
    def wide(config: Config) -> Any:
        model = nn.Linear(5, 4 + config.seed).double()
        return (lambda x: model(x)), model, None

    with pytest.raises(NotFusible, match="results differ in shape"):
        array_of(wide, configs(), batches(6, 5)[0], partial=True)


def test_a_model_may_join_amid_the_others_optimizer():
    """The first step of a joined model is another Program: common operators still run together."""
    data = batches(6, 5, classes=4, count=6)
    with array_of(factory, configs(), data[0], partial=True) as array:
        for batch in data[:3]:
            array.step(*batch)
        array.add(Config(4, 0.02))
        array.step(*data[3])
        assert array.runs == (4,)
