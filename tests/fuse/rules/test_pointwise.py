"""Activations and dropout train what serial training trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import array_of, batches, check, configs, relative_difference, steady
from tests.threads import one_thread

nn = torch.nn

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.GELU, lambda: nn.GELU("tanh"),
    nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid, nn.PReLU, lambda: nn.PReLU(6), nn.GLU, lambda: nn.Threshold(0.1, 0.2),
]  # fmt: skip


class Each(nn.Module):
    """Several layers on one input, each output so that all of it counts."""

    def __init__(self, first: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers = first, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        made = [layer(out) for layer in self.layers]
        return torch.stack([(m * m.detach().cos()).square().mean() for m in made])


def test_activations():
    def module() -> nn.Module:
        return Each(nn.Linear(5, 6), [kind() for kind in ACTIVATIONS])

    array = check(steady(module), batches(4, 5))
    assert by(array, "per-model") == set()


@pytest.mark.parametrize("kind", [nn.GELU, nn.SiLU, nn.Hardswish, nn.Softplus])
def test_a_gradient_that_is_one_for_all_models(kind: Callable[[], nn.Module]):
    """Kernels in float32 are other ones than in float64: oneDNN's gradient of gelu takes operands of one size alone."""

    def factory(config: Any) -> Any:
        torch.manual_seed(config.seed)
        model = nn.Sequential(nn.Linear(5, 6), kind())
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    data = [(x.float(),) for (x,) in batches(4, 5, count=2)]
    with one_thread(), array_of(factory, configs(), data[0]) as array:
        for batch in data:
            array.step(*batch)
        for b, config in enumerate(configs()):
            step, model, _ = factory(config)
            for batch in data:
                step(*batch)
            for key, value in model.state_dict().items():
                assert relative_difference(array.state_dict(b)["model"][key], value) < 1e-6


DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "elements": lambda: Each(nn.Linear(5, 6), [nn.Dropout(0.4), nn.AlphaDropout(0.4), nn.RReLU()]),
    "channels": lambda: Each(nn.Conv1d(3, 4, 1), [nn.Dropout1d(0.4), nn.FeatureAlphaDropout(0.4)]),
    "planes": lambda: Each(nn.Conv2d(3, 4, 1), [nn.Dropout2d(0.4)]),
    "volumes": lambda: Each(nn.Conv3d(3, 4, 1), [nn.Dropout3d(0.4)]),
}
SIZES = {"elements": (4, 5), "channels": (4, 3, 5), "planes": (4, 3, 5, 2), "volumes": (4, 3, 5, 2, 2)}


@pytest.mark.parametrize("case", DROPOUTS)
def test_each_model_draws_its_own_masks(case: str):
    array = check(steady(DROPOUTS[case]), batches(*SIZES[case]))
    drawn = by(array, "per-model")
    assert drawn
    assert all("bernoulli" in name or "rrelu" in name or "uniform" in name for name in drawn)


@pytest.mark.parametrize(
    ("layer", "numbers"), [(nn.Dropout, (0.1, 0.5, 0.3)), (nn.LeakyReLU, (0.01, 0.2, 0.01))], ids=["dropout", "slope"]
)
@pytest.mark.parametrize("partial", [False, True])
def test_a_number_that_is_an_operators_default_in_some_models(layer: Any, numbers: tuple[float, ...], partial: bool):
    """A Program leaves such a number out, and it still counts as one that differs."""

    def factory(config: Any) -> Any:
        return steady(lambda: nn.Sequential(nn.Linear(5, 6), layer(numbers[config.seed])))(config)

    with one_thread(), array_of(factory, configs(), batches(4, 5)[0], partial=partial) as array:
        losses = [array.step(*batch) for batch in batches(4, 5)]
        assert array.runs == (3,)
        assert not [d for d in array.decisions if d.why.startswith("only model")]
    for b, config in enumerate(configs()):
        step, _, _ = factory(config)
        for batch, loss in zip(batches(4, 5), losses, strict=True):
            assert relative_difference(loss[b], step(*batch).detach()) <= 1e-9


@pytest.mark.parametrize("bad", [0, 1])
def test_a_number_that_is_not_one_is_of_its_model_alone(bad: int):
    def factory(config: Any) -> Any:
        slope = float("nan") if config.seed == bad else 0.2
        return steady(lambda: nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(slope)))(config)

    with one_thread(), array_of(factory, configs(), batches(4, 5)[0]) as array:
        losses = array.step(*batches(4, 5)[0])
    assert losses.isnan().tolist() == [b == bad for b in range(3)]
