"""The baselines train what serial training trains: in float64, up to rounding."""

from __future__ import annotations

import pytest
import torch

from clients.models.workloads import workload
from gpumux.errors import ConfigError
from microbench.handfused.models import FUSED
from microbench.handfused.train import hand_fused, vmapped

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MODELS = 5, 3


def same(a, b) -> bool:
    """Whether two tensors are equal but for 1e-9 of the second's largest number."""
    return bool((a - b).abs().max() <= 1e-9 * b.abs().max())


def true(name: str, value):
    """What of a parameter has a true gradient: softmax does not see a term that all keys share, so the gradient of a
    key's bias is rounding alone, and the optimizer makes steps of it."""
    if name.endswith("in_proj_bias"):
        q, _, v = value.chunk(3)
        return torch.cat([q, v])
    return value


@pytest.mark.parametrize(
    ("make", "name"),
    [(hand_fused, name) for name in FUSED] + [(vmapped, name) for name in ("cnn", "transformer", "resnet18")],
)
def test_equal_to_serial_training(make, name: str):
    made = workload(name, "tiny", dtype=torch.float64)
    configs = [config | {"dropout": 0.0, "weight_decay": 0.01 * b} for b, config in enumerate(made.configs(MODELS))]
    step, params = make(made, configs)
    losses = torch.stack([step(*made.batch(i)) for i in range(STEPS)])
    for b, config in enumerate(configs):
        alone, model, _ = made.factory(config)
        assert same(losses[:, b], torch.stack([alone(*made.batch(i)).detach() for i in range(STEPS)]))
        assert params.keys() == dict(model.named_parameters()).keys()
        for key, value in model.named_parameters():
            assert same(true(key, params[key][b]), true(key, value)), key


def test_a_model_without_a_baseline_says_so():
    with pytest.raises(ConfigError, match="by hand"):
        hand_fused(workload("resnet18"), [{}])
    with pytest.raises(ConfigError, match="several losses"):
        vmapped(workload("dcgan"), [{}])
