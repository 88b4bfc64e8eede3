"""Normalizations train what serial training trains, running statistics included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import Config, batches, check, steady

nn = torch.nn

SPACE = {1: (5,), 2: (4, 3), 3: (3, 2, 3)}


def norm(kind: str, dim: int) -> nn.Module:
    if kind == "batch":
        return getattr(nn, f"BatchNorm{dim}d")(4)
    if kind == "instance":
        return getattr(nn, f"InstanceNorm{dim}d")(4, affine=True, track_running_stats=True)
    return nn.GroupNorm(2, 4)


@pytest.mark.every(5)
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize(
    ("kind", "dim"), [("batch", 1), ("batch", 2), ("batch", 3), ("group", 1), ("group", 2), ("instance", 2)]
)
def test_norms_over_channels(kind: str, dim: int, per_model: bool):
    conv = getattr(nn, f"Conv{dim}d")

    def module() -> nn.Module:  # the first norm sees the batch itself
        return nn.Sequential(norm(kind, dim), conv(4, 4, 2, padding=1, bias=False), norm(kind, dim), nn.Tanh())

    array = check(steady(module), batches(3, 4, *SPACE[dim]), per_model=per_model)
    name = "native_group_norm" if kind == "group" else "native_batch_norm"
    assert by(array, "rule") >= {name, f"{name}_backward"}
    more = {"repeat", "mean.dim", "sum.dim_IntList"} if kind == "instance" else set()
    assert by(array, "batched", "per-model") == {"mean"} | more


@pytest.mark.parametrize("per_model", [False, True])
def test_batch_norm_of_features(per_model: bool):
    def module() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 5, bias=False),
            nn.BatchNorm1d(5, affine=False),
            nn.ELU(),
            nn.Linear(5, 4, bias=False),
            nn.BatchNorm1d(4),
        )

    array = check(steady(module), batches(5, 6), per_model=per_model)
    assert by(array, "batched", "per-model") == {"mean", "elu_backward"}


def test_batch_norm_by_fixed_statistics():
    def module() -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None)
        )
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
        return model.eval()

    array = check(steady(module), batches(2, 3, 4, 4))
    assert by(array, "batched", "per-model") == {"mean"}


def test_statistics_in_training_without_running_ones():
    def module() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU())

    check(steady(module), batches(2, 3, 4, 4))


def test_momentum_of_another_value_for_each_model():
    def factory(config: Config) -> Any:
        return steady(lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, momentum=config.lr)))(config)

    array = check(factory, batches(5, 4))
    assert by(array, "per-model") == {"native_batch_norm"}


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight and bias": lambda: nn.LayerNorm(6),
    "no bias": lambda: nn.LayerNorm(6, bias=False),
    "neither": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "two dimensions": lambda: nn.LayerNorm((4, 6)),
    "root mean square": lambda: nn.RMSNorm(6),
}


@pytest.mark.covering
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_norms_over_features(kind: str, per_model: bool):
    make = LAYERS[kind]
    array = check(steady(lambda: nn.Sequential(make(), nn.Linear(6, 6), make())), batches(3, 4, 6), per_model=per_model)
    expected = {"mean", "sum.dim_IntList"}
    if kind == "root mean square":
        expected |= {"mean.dim"}
    else:
        assert by(array, "rule") >= {"native_layer_norm", "native_layer_norm_backward"}
    assert by(array, "batched", "per-model") == expected


@pytest.mark.parametrize("dim", [0, 1])
def test_weights_of_a_direction_and_a_length(dim: int):
    def module() -> nn.Module:
        layers = nn.Linear(6, 5), nn.Conv1d(4, 3, 2)
        first, second = (nn.utils.parametrizations.weight_norm(layer, dim=dim) for layer in layers)
        return nn.Sequential(first, nn.Tanh(), second)

    array = check(steady(module), batches(3, 4, 6))
    assert by(array, "rule") >= {"_weight_norm_interface", "_weight_norm_interface_backward"}
    assert by(array, "per-model") == set()


def test_layer_norm_between_convolutions_and_of_one_sample():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv1d(4, 4, 1, bias=False), nn.LayerNorm(5), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.conv(x)).tanh().sum((0, 2)))

    check(steady(Net), batches(3, 4, 5))


@pytest.mark.parametrize("per_model", [False, True])
def test_a_layer_norm_of_another_epsilon_for_each_model(per_model: bool):
    """Forward runs once a model, backward for all: the operands of one kernel then have different orders in memory."""

    def factory(config: Config) -> Any:
        return steady(lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, eps=10.0 ** -(config.seed + 2))))(config)

    array = check(factory, batches(4, 5), per_model=per_model)
    assert "native_layer_norm" in by(array, "per-model")
    assert "native_layer_norm_backward" in by(array, "rule")
