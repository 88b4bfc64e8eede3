"""The workloads of the HFTA paper as arrays: in float64 each model is what training it alone makes of it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from clients.models.workloads import workload
from tests.fuse.serial import STEPS, TOLERANCE, apart, array_of
from tests.threads import one_thread

MODELS = 2
# Parameters without a true gradient: a bias before batch norm, which takes the mean off again, and what all keys of an attention have
# in common, which softmax does not see. Their gradients are rounding alone, and so is what an optimizer makes of them.
NOISE = {
    "pointnet_cls": r"(points\.[036]|dense\.[03]|first\.0|rest\.[03]|^head\.[03])\.bias",
    "pointnet_seg": r"(points\.[036]|dense\.[03]|first\.0|rest\.[03]|^head\.0\.[036])\.bias",
    "bert_medium": r"key\.bias",
}
PACKED = "in_proj_bias"  # of queries, keys and values: only the keys' third is noise
# The optimizers take all parameters at once, as they do by default on a GPU: far fewer operators to capture. Without dropout an
# attention is one operator on a CPU, with it a dozen: both occur.
CONFIG = {"foreach": True}
PLAIN = {"bert_medium": {"dropout": 0.0}}


def parts(made) -> tuple:
    """A GAN has two of each; everything else one."""
    return made if isinstance(made, tuple) else (made,)


def compared(name: str, key: str, value: Tensor) -> Tensor:
    if key.endswith(PACKED):
        q, _, v = value.chunk(3)
        return torch.cat([q, v])
    return value


def noisy(name: str, key: str) -> bool:
    return name in NOISE and re.search(NOISE[name], key) is not None


@pytest.mark.parametrize("name", ["cnn", "resnet18", "mobilenet_v3", "transformer", "bert_medium"])
def test_an_array_trains_each_model_as_if_alone(name: str):
    made = workload(name, dtype=torch.float64)
    configs = [config | CONFIG | PLAIN.get(name, {}) for config in made.configs(MODELS)]
    with one_thread(), array_of(made.factory, configs, made.batch(0)) as array:
        losses = [array.step(*made.batch(i)) for i in range(STEPS)]
        for b, config in enumerate(configs):
            step, models, optimizers = made.factory(config)
            for i in range(STEPS):
                assert apart(losses[i][b], step(*made.batch(i)).detach()) <= TOLERANCE, f"loss of model {b}, step {i}"
            found = array.state_dict(b)
            several = isinstance(models, tuple)
            for position, (model, optimizer) in enumerate(zip(parts(models), parts(optimizers), strict=True)):
                own = found["model"][position] if several else found["model"]
                states = found["optimizer"][position] if several else found["optimizer"]
                same_model(name, b, own, model)
                same_optimizer(name, b, states, model, optimizer)


def same_model(name: str, b: int, found: dict, model: torch.nn.Module) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not noisy(name, key):
            mine, its = compared(name, key, found[key]), compared(name, key, value)
            assert apart(mine, its) <= TOLERANCE, f"{key} of model {b}"


def same_optimizer(name: str, b: int, found: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    expected = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    keys = [key for key, _ in model.named_parameters()]
    for index, state in expected["state"].items():
        for of, value in state.items():
            if isinstance(value, Tensor) and not noisy(name, keys[index]):
                mine, its = found["state"][index][of], value
                if value.dim():
                    mine, its = compared(name, keys[index], mine), compared(name, keys[index], its)
                assert apart(mine, its) <= TOLERANCE, f"{of} of {keys[index]} of model {b}"


@pytest.mark.parametrize("name", [*NOISE, "transformer"])
def test_what_is_left_out_has_no_true_gradient(name: str):
    """And is there: the list names parameters whose gradients are rounding, next to others that are not."""
    made = workload(name, dtype=torch.float64)
    step, model, optimizer = made.factory(made.configs(1)[0] | CONFIG | {"dropout": 0.0})
    optimizer.zero_grad()
    step(*made.batch(0))
    left_out = 0
    for key, p in model.named_parameters():
        assert p.grad is not None
        if noisy(name, key):
            left_out += 1
            assert p.grad.abs().max() < 1e-14
        elif key.endswith(PACKED):
            left_out += 1
            assert p.grad.chunk(3)[1].abs().max() < 1e-14 < p.grad.chunk(3)[2].abs().max()
    assert left_out
