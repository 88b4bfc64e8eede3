"""A whole step of a small network, under several optimizers: fused equals serial."""

from __future__ import annotations

import pytest
import torch

from gpumux.errors import NotFusible
from tests.fuse.serial import Config, array_of, batches, check, configs, training, ways

nn = torch.nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


OPTIMIZERS = {
    "sgd": lambda p, c: torch.optim.SGD(p, lr=c.lr),
    "momentum": lambda p, c: torch.optim.SGD(p, lr=c.lr, momentum=0.5 + 0.1 * c.seed, weight_decay=0.01 * c.lr),
    "nesterov": lambda p, c: torch.optim.SGD(p, lr=c.lr, momentum=0.9, nesterov=True),
    "adam": lambda p, c: torch.optim.Adam(p, lr=c.lr),
    "adam, all different": lambda p, c: torch.optim.Adam(
        p, lr=c.lr, betas=(0.9 - c.lr, 0.99 - c.lr), eps=1e-8 * (c.seed + 1)
    ),
    "adamw": lambda p, c: torch.optim.AdamW(p, lr=c.lr, weight_decay=c.lr, amsgrad=True),
    "foreach adam": lambda p, c: torch.optim.Adam(p, lr=c.lr, foreach=True, weight_decay=0.1),
    "foreach adam, alike": lambda p, c: torch.optim.Adam(p, lr=0.01, foreach=True),
    "foreach sgd": lambda p, c: torch.optim.SGD(p, lr=c.lr, momentum=0.9, foreach=True, weight_decay=c.lr),
    "foreach rmsprop": lambda p, c: torch.optim.RMSprop(p, lr=c.lr, foreach=True, centered=True, momentum=0.4),
    "rmsprop": lambda p, c: torch.optim.RMSprop(p, lr=c.lr, alpha=0.9 + c.lr, momentum=0.5),
    "adagrad": lambda p, c: torch.optim.Adagrad(p, lr=c.lr, lr_decay=c.lr),
    "adadelta": lambda p, c: torch.optim.Adadelta(p, lr=c.lr, rho=0.9 + c.lr),
    "adamax": lambda p, c: torch.optim.Adamax(p, lr=c.lr, betas=(0.8 + c.lr, 0.9)),
    "foreach adamax": lambda p, c: torch.optim.Adamax(p, lr=c.lr, foreach=True),
    "dampened": lambda p, c: torch.optim.SGD(p, lr=c.lr, momentum=0.9, dampening=0.3, maximize=True),
    "rate of a tensor": lambda p, c: torch.optim.Adam(p, lr=torch.tensor(c.lr, dtype=torch.float64), foreach=False),
    "muon": lambda p, c: torch.optim.Muon([q for q in p if q.dim() == 2], lr=c.lr),
    "nadam": lambda p, c: torch.optim.NAdam(p, lr=c.lr),
    "radam": lambda p, c: torch.optim.RAdam(p, lr=c.lr),
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_array_trains_each_model_as_if_alone(name: str):
    factory = training(small, OPTIMIZERS[name], nn.CrossEntropyLoss())
    array = check(factory, batches(6, 5, classes=4))
    found = ways(array)
    assert found["aten.addmm.default"] == {"rule"}
    assert not any("per-model" in how for how in found.values()), found


@pytest.mark.covering
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("alike", [False, True])
def test_fused_optimizers(kind: type[torch.optim.Optimizer], alike: bool):
    """With one learning rate for all SGD is one call. Kernels that take one number, or one step count, run once a
    model."""
    factory = training(small, lambda p, c: kind(p, lr=0.01 if alike else c.lr, fused=True))  # type: ignore[call-arg]
    found = ways(check(factory, batches(6, 5)))
    (target,) = [t for t in found if t.startswith("aten._fused_")]
    assert found[target] == {"rule" if alike and kind is torch.optim.SGD else "per-model"}


def test_gradients_clipped_over_lists():
    def factory(config: Config) -> object:
        torch.manual_seed(config.seed)
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5 + config.lr, foreach=True)
            optimizer.step()
            return loss

        return step, model, optimizer

    assert ways(check(factory, batches(6, 5)))["aten._foreach_norm.Scalar"] == {"rule"}


@pytest.mark.parametrize("choose", ["fused", "per-model"])
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.every(2)
def test_one_batch_for_all_or_one_for_each(choose: str, per_model: bool):
    check(training(mlp, loss=nn.CrossEntropyLoss()), batches(6, 5, classes=4), per_model=per_model, choose=choose)


def test_one_model_is_an_array_too():
    check(training(mlp), batches(6, 5), given=configs(1))


def test_models_of_another_kind_are_refused_by_operator_and_layer():
    def factory(config: Config) -> object:
        return training(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU() if config.seed < 2 else nn.Tanh()))(config)

    with pytest.raises(NotFusible, match=r"models 0 and 2 .* layer '1', is `.*relu.*` in one and `.*tanh"):
        array_of(factory, configs(), batches(6, 5)[0])


def test_an_operator_that_can_not_be_batched_is_named():
    def module() -> nn.Module:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(5))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.histc(x * self.weight, bins=4) + (x * self.weight).sum()

        return Odd()

    factory = training(module)
    with pytest.raises(NotFusible, match=r"aten\.histc\.default, .*per_model_operators="):
        array_of(factory, configs(), batches(6, 5)[0])
    array = check(factory, batches(6, 5), per_model_operators=["aten.histc.default"])
    assert ways(array)["aten.histc.default"] == {"per-model"}
