"""The workloads of the HFTA paper as arrays: in float64 each model is what training it alone makes of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.models.workloads import RECIPES, workload
from gpumux.fuse.emit import FusionEmitter
from gpumux.fuse.fuse import Fuser
from gpumux.fuse.template import Fused
from tests.fuse.serial import STEPS, TOLERANCE, array_of, relative_difference
from tests.threads import one_thread

MODELS = 2
# Parameters of which elements have no true gradient: a shift before batch norm, which takes the mean off again (before
# a maximum and then batch norm, too, where the maximum isn't cut off at zero), and what all keys of an attention have
# in common, which softmax does not see. Their gradients are rounding alone, and so is what an optimizer makes of them.
NOISE = {
    "pointnet_cls": r"(points\.[0367]|dense\.[03]|first\.0|rest\.[034]|^head\.[03])\.bias",
    "pointnet_seg": r"(points\.[0367]|dense\.[03]|first\.0|rest\.[034]|^head\.0\.[036])\.bias",
    "mobilenet_v3": r"features\.(1\.layers\.1|2\.layers\.3|3\.layers\.2)\.1\.bias",
    "transformer": r"self_attn\.in_proj_bias",
    "bert_medium": r"key\.bias",
}
ROUNDING = 1e-13  # above gradients that are rounding alone, far below any other
RUNNING_MEAN = 1e-6  # the mean that a batch norm keeps is of inputs that such a bias is in
# The optimizers take all parameters at once, as they do by default on a GPU: far fewer operators to capture. Without
# dropout an attention is one operator on a CPU, with it a dozen: both occur. One PointNet with the feature
# transformation is enough.
CONFIG = {"foreach": True}
MORE = {"bert_medium": {"dropout": 0.0}, "pointnet_seg": {"feature_transform": False}}


def parts(made: Any) -> tuple[Any, ...]:
    """A GAN has two of each; everything else one."""
    return made if isinstance(made, tuple) else (made,)


class Alone:
    """One model, and which elements of its parameters have had a gradient of rounding."""

    def __init__(self, step: Any, models: Any, optimizers: Any) -> None:
        self._step = step
        self.models, self.optimizers = parts(models), parts(optimizers)
        self._rounded: list[dict[str, Tensor]] = [{} for _ in self.models]

    def step(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self._step(*batch).detach()
        for model, rounded in zip(self.models, self._rounded, strict=True):
            for key, p in model.named_parameters():
                assert p.grad is not None
                size = p.grad.abs()
                rounded[key] = rounded.get(key, False) | ((size > 0) & (size < ROUNDING))
        return loss

    def noise(self, name: str, position: int) -> dict[str, Tensor]:
        """Which elements are left out: of parameters that NOISE lists, and of no other."""
        found = {k: of for k, of in self._rounded[position].items() if of.any()}
        assert {k for k in found if name not in NOISE or not re.search(NOISE[name], k)} == set()
        assert bool(found) == (name in NOISE)
        return found


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.every(4)
def test_an_array_trains_each_model_as_if_alone(name: str):
    made = workload(name, dtype=torch.float64)
    configs = [config | CONFIG | MORE.get(name, {}) for config in made.configs(MODELS)]
    with one_thread(), array_of(made.factory, configs, made.batch(0)) as array:
        losses = [array.step(*made.batch(i)) for i in range(STEPS)]
        for b, config in enumerate(configs):
            alone = Alone(*made.factory(config))
            for i in range(STEPS):
                assert relative_difference(losses[i][b], alone.step(made.batch(i))) <= TOLERANCE, (
                    f"loss of model {b}, step {i}"
                )
            found = array.state_dict(b)
            several = len(alone.models) > 1
            for position, model in enumerate(alone.models):
                noise = alone.noise(name, position)
                own = found["model"][position] if several else found["model"]
                same_model(own, model, noise, f"of model {b}")
                optimizer = alone.optimizers[position]  # as many as models; a GAN's are in another order
                keys = {id(p): k for m in alone.models for k, p in m.named_parameters()}
                states = found["optimizer"][position] if several else found["optimizer"]
                names = [keys[id(p)] for group in optimizer.param_groups for p in group["params"]]
                same_optimizer(states, optimizer, names, {} if several else noise, f"of model {b}")


def left(value: Tensor, noise: Tensor | None) -> Tensor:
    return value if noise is None or not value.dim() else value[~noise]


def same_model(found: dict[str, Any], model: torch.nn.Module, noise: dict[str, Tensor], whose: str) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        mine, its = left(found[key], noise.get(key)), left(value, noise.get(key))
        limit = RUNNING_MEAN if noise and key.endswith("running_mean") else TOLERANCE
        assert relative_difference(mine, its) <= limit, f"{key} {whose}"


def same_optimizer(
    found: dict[str, Any], optimizer: torch.optim.Optimizer, names: list[str], noise: dict[str, Tensor], whose: str
) -> None:
    expected = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        without = noise.get(names[index])
        for of, value in state.items():
            mine, its = found["state"][index][of], value
            if isinstance(value, Tensor):
                mine, its = left(mine, without), left(its, without)
            assert relative_difference(mine, its) <= TOLERANCE, f"{of} of {names[index]} {whose}"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.every(3)
def test_an_operator_is_written_down_for_other_models_as_for_the_first(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without running it on their fake tensors, which would give the same Program."""
    run, repeat = Fuser.run, FusionEmitter.repeat
    found: list[Fused] = []
    repeated: list[bool] = []

    def kept(self: Fuser, batch_per_model: bool) -> Fused:
        found.append(run(self, batch_per_model))
        return found[-1]

    def counted(self: FusionEmitter, *args: Any) -> Any:
        repeated.append((made := repeat(self, *args)) is not None)
        return made

    monkeypatch.setattr(Fuser, "run", kept)
    made = workload(name)
    programs = []
    for how in (counted, lambda *_: None):
        monkeypatch.setattr(FusionEmitter, "repeat", how)
        with one_thread(), array_of(made.factory, made.configs(3), made.batch(0), choose="per-model"):
            programs.append([(each.program, each.tables) for each in found])
        found.clear()
    assert programs[0] == programs[1]
    assert sum(repeated) > 0.9 * len(repeated)
