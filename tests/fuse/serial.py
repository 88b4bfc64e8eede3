"""Support: trains each model alone and all of them as an array, and compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpumux import fuse
from tests.threads import one_thread

TOLERANCE = 1e-9  # relative, in float64
ROUNDING = 1e-13  # above gradients that are rounding alone, far below any other
MODELS = 3
STEPS = 5


@dataclass(frozen=True)
class Config:
    """The argument of these tests' factories. `extra`: for factories of single tests."""

    seed: int
    lr: float = 0.05
    extra: Any = None


def configs(models: int = MODELS) -> list[Config]:
    return [Config(seed, 0.01 * (seed + 1)) for seed in range(models)]


def sgd(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config.lr, momentum=0.9)


def constant(parameters: Any, config: Config) -> torch.optim.Optimizer:
    """SGD whose first step is like all others: without momentum, and with gradients to zero. Other optimizers need
    twice the capturing and fusing, which tests that don't look at optimizers avoid."""
    held = list(parameters)
    for p in held:
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    return torch.optim.SGD(held, lr=config.lr)


def training(
    module: Callable[[], torch.nn.Module], optimizer: Callable[..., Any] = sgd,
    loss: Callable[..., torch.Tensor] | None = None,
) -> Callable[[Config], Any]:  # fmt: skip
    """A factory: `module()` in float64, its own initial values for each seed, trained on `loss(output, *rest)`, with
    `rest` what the batch holds after the input. Default loss: a weighted square, so that every output counts."""

    def factory(config: Config) -> Any:
        torch.manual_seed(config.seed)
        model = module().double()
        optim = optimizer(model.parameters(), config)

        def step(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            optim.zero_grad()
            out = model(x)
            value = loss(out, *rest) if loss is not None else (out * out.detach().cos()).square().mean() + out.mean()
            value.backward()
            optim.step()
            return value

        return step, model, optim

    return factory


steady = partial(training, optimizer=constant)


def batches(*shape: int, classes: int = 0, count: int = STEPS, seed: int = 99) -> list[tuple[torch.Tensor, ...]]:
    """Inputs of float64, and labels below `classes` if given."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        x = torch.randn(*shape, generator=g, dtype=torch.float64)
        made.append((x, torch.randint(0, classes, shape[:1], generator=g)) if classes else (x,))
    return made


def array_of(factory: Callable[[Any], Any], given: Sequence[Any], example: Any, **options: Any) -> fuse.Array:
    """An array that fuses what it can, without measuring."""
    return fuse.Array(factory, given, example, **{"choose": "fused", **options})


def relative_difference(a: Any, b: Any) -> float:
    """The largest difference of two tensors, relative to the largest value of `b`."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    assert a.shape == b.shape
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def check(
    factory: Callable[[Any], Any], data: Sequence[tuple[Any, ...]], *, given: Sequence[Any] | None = None,
    per_model: bool = False, noise: Mapping[str, slice] | None = None, tolerance: float = TOLERANCE, **options: Any,
) -> fuse.Array:  # fmt: skip
    """Losses and state after `len(data)` steps, the array's against each model's alone. `per_model`: model b gets the
    batches rotated by b. `noise`: elements of parameters, along their first dimension, whose true gradient is zero:
    what they get is rounding, which is looked at, and they alone are left out. Returns the closed array."""
    noise = noise or {}
    given = configs() if given is None else given
    count = len(data)

    def batch(step: int, model: int) -> tuple[Any, ...]:
        return data[(step + model) % count] if per_model else data[step]

    with one_thread():
        array = array_of(factory, given, data[0], **options)
        losses = []
        for i in range(count):
            if per_model:
                each = [batch(i, b) for b in range(len(given))]
                losses.append(array.step(*map(list, zip(*each, strict=True)), per_model=True))
            else:
                losses.append(array.step(*data[i]))
        for b, config in enumerate(given):
            step, model, optimizer = factory(config)
            for i in range(count):
                alone = step(*batch(i, b))
                assert relative_difference(losses[i][b], alone.detach()) <= tolerance, f"loss of model {b} at step {i}"
                for key, elements in noise.items():
                    assert model.get_parameter(key).grad[elements].abs().max() < ROUNDING, f"{key} has a true gradient"
            found = array.state_dict(b)
            for key, value in model.state_dict().items():
                mine, its = without(found["model"][key], noise.get(key)), without(value, noise.get(key))
                assert relative_difference(mine, its) <= tolerance, f"{key} of model {b}"
            names = {id(p): key for key, p in model.named_parameters()}
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            left = {index: noise[key] for index, key in enumerate(order) if key in noise}
            _same_optimizer(found["optimizer"], optimizer.state_dict(), tolerance, left)
        array.close()
    return array


def without(tensor: torch.Tensor, elements: slice | None) -> torch.Tensor:
    """The tensor, and of one that is noted, what is not noise."""
    if elements is None or not tensor.dim():
        return tensor
    kept = torch.ones(len(tensor), dtype=torch.bool)
    kept[elements] = False
    return tensor[kept]


def _same_optimizer(found: Any, expected: Any, tolerance: float, left: Mapping[int, slice]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert found["state"][key].keys() == state.keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                mine, its = without(found["state"][key][name], left.get(key)), without(value, left.get(key))
                assert relative_difference(mine, its) <= tolerance, f"{name} of parameter {key}"


def ways(array: fuse.Array) -> dict[str, set[str]]:
    """How each operator ran: "alike", "per-model", or by what it was fused: "rule", "pointwise", "batched"."""
    found: dict[str, set[str]] = {}
    for d in array.decisions:
        found.setdefault(d.target, set()).add(d.why if d.how == "fused" else d.how)
    return found
