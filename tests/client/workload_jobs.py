"""The tiny workloads and the demos' models as jobs, and the comparison of two runs of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from clients.models.gan import NOISE, gan
from clients.models.transformer import transformer
from clients.models.workloads import RECIPES, scheduler, workload
from tests.client.parity import Work, plain, through

DEMOS = ("digits_gan", "digits_transformer")
NAMES = (*RECIPES, *DEMOS)


def work(
    name: str, steps: int = 6, *, device: str = "cpu", dtype: torch.dtype = torch.float32, reference: bool = False,
    **config: Any,
) -> Work:  # fmt: skip
    """`steps` steps of one of NAMES under a schedule, on `device`. `reference`: with the optimizers of a reference run,
    which on a GPU count their steps there and take their rates as tensors. `config`: of the workload
    (Workload.factory); the demos have none."""
    config = {"seed": 3, "gamma": 0.5, "step_size": 2, "feature_transform": name == "pointnet_seg", **config}
    if name in DEMOS:
        models, optimizers, functions, data = _demo(name, device, dtype, config)
    else:
        made = workload(name, dtype=dtype, device=device)
        step, one, its = made.factory(config)
        models, optimizers = (list(each) if isinstance(each, tuple) else [each] for each in (one, its))
        data = [made.batch(seed) for seed in range(3)]
        functions = [(step, data[0])]
    if reference and device != "cpu":
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["capturable"] = True
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device=device)
    schedules = [scheduler(each, config) for each in optimizers]

    def loop(call: Callable[..., Any], *more: Callable[..., Any]) -> list[Any]:
        results = []
        for i in range(steps):
            results.append(call(*data[i % 3]))
            results += [other() for other in more]
            for schedule in schedules:
                schedule.step()
        return results

    return Work(models, optimizers, functions, loop)


def _demo(
    name: str, device: str, dtype: torch.dtype, config: dict[str, Any]
) -> tuple[list[nn.Module], list[Any], list[Any], list[Any]]:
    """The training loop of the demo, without the digits."""
    torch.manual_seed(config["seed"])
    g = torch.Generator().manual_seed(99)
    if name == "digits_gan":
        generator, discriminator = (model.to(device, dtype) for model in gan("tiny"))
        g_optimizer, d_optimizer = (
            torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999))
            for model, lr in ((generator, 2e-3), (discriminator, 1e-3))
        )
        images = [(torch.rand(4, 1, 8, 8, generator=g).to(device, dtype),) for _ in range(3)]

        def noise() -> torch.Tensor:
            return torch.randn(4, NOISE, device=device, dtype=dtype)

        def discriminate(real: torch.Tensor) -> torch.Tensor:
            d_optimizer.zero_grad()
            fake = generator(noise()).detach()
            loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
            loss.backward()
            d_optimizer.step()
            return loss

        def generate() -> torch.Tensor:
            g_optimizer.zero_grad()
            loss = F.softplus(-discriminator(generator(noise()))).mean()
            loss.backward()
            g_optimizer.step()
            return loss

        functions = [(discriminate, images[0]), (generate, ())]
        return [generator, discriminator], [g_optimizer, d_optimizer], functions, images
    model = transformer("tiny").to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    data = [
        (torch.rand(4, 1, 8, 8, generator=g).to(device, dtype), torch.randint(0, 10, (4,), generator=g).to(device))
        for _ in range(3)
    ]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return [model], [optimizer], [(step, data[0])], data


@dataclass
class Nearness:
    """The comparison of two runs. `equal`: in every bit; `off`: the largest difference, relative to the largest element
    of its tensor; `where`: its tensor."""

    equal: bool = True
    off: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        return "bit-equal" if self.equal else f"off by {self.off:.1e} of the largest element, at {self.where}"


# Tensors as small as this are noise: the gradients of what a normalisation takes away again.
SMALL = 1e-3
GROWTH = 100  # of a difference, in a few steps


def nearness(want: tuple[list[Any], list[Any]], got: tuple[list[Any], list[Any]]) -> Nearness:
    """Compare results and the models' and optimizers' tensors, on any devices. Raises AssertionError if they differ in
    anything but floating-point values."""
    found = Nearness()
    a, b = _values(want), _values(got)
    assert a.keys() == b.keys()
    for where, x in a.items():
        y = b[where]
        assert x.shape == y.shape, where
        if torch.equal(x, y):
            continue
        assert x.is_floating_point(), f"{where} differs"
        assert torch.isfinite(x).all() == torch.isfinite(y).all(), f"{where}: only one of them is finite"
        found.equal = False
        off = float((x.double() - y.double()).abs().max()) / max(float(x.double().abs().max()), SMALL)
        if not off <= found.off:
            found.off, found.where = off, where
    return found


def _values(run: tuple[list[Any], list[Any]]) -> dict[str, torch.Tensor]:
    results, states = run
    kept: list[Any] = []
    for state in states:  # learning rates are numbers in one run and tensors in the other
        if isinstance(state, torch.Tensor):
            continue  # the random generator: a job on a GPU has one of its own
        moments = state.get("state") if "param_groups" in state else None
        kept.append(state if moments is None else moments)
    found = {}
    for path, leaf in pytree.tree_flatten_with_path({"results": results, "state": kept})[0]:
        at = pytree.keystr(path)
        # An optimizer counts its steps in a type of its own where it counts them on the device.
        counts = at.endswith("['step']")
        found[at] = torch.as_tensor(leaf).detach().cpu().to(torch.int64 if counts else None)
    return found


def near_the_reference(
    name: str, endpoint: str, *, dtype: torch.dtype, home: str = "cpu", device: str = "cpu", steps: int = 5,
    dropout: float = 0.0,
) -> Nearness:  # fmt: skip
    """Compare a job's run with its reference run on `device`, with the model on `home` before it is submitted. With
    `dropout` the masks must be the reference run's as well, which takes a GPU's own operators for both.

    Raises AssertionError if the job claims bit-equality and is not bit-equal. Raises it if the first results are
    further off than the stated tolerance, or in float64 if any are further off than GROWTH times that. Differences grow
    from step to step; in narrower types they soon grow beyond any bound on every device."""

    def make(where: str, reference: bool) -> Callable[[], Work]:
        return lambda: work(name, steps, device=where, dtype=dtype, reference=reference, dropout=dropout)

    want = plain(make(device, reference=True))
    stats: dict[str, Any] = {}
    got = through(make(home, reference=False), endpoint, stats)
    found = nearness(want, got)
    if stats["exactness"] == "bit-equal":
        assert found.equal, found
        return found
    assert stats["exactness"] == "equivalent"
    tolerance = stats["tolerance"][str(dtype).removeprefix("torch.")]
    first = nearness((want[0][:1], []), (got[0][:1], []))
    assert first.off <= tolerance, first
    assert dtype != torch.float64 or found.off <= GROWTH * tolerance, found
    return found
