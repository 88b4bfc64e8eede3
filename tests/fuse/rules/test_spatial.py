"""Pooling, resampling and padding train what serial training trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import batches, check, steady

nn = torch.nn
F = torch.nn.functional
Tensor = torch.Tensor

SPACE = {1: (8,), 2: (6, 8), 3: (4, 6, 4)}
INTERPOLATION = {1: ("nearest", "nearest-exact", "linear"), 2: ("nearest", "bilinear", "bicubic"),
                 3: ("nearest", "nearest-exact", "trilinear")}  # fmt: skip


class Sum(nn.Module):
    """Some views of one layer's output, each reduced so that all of it counts. The layer is a convolution, whose output
    has models among the channels, or one by which they come first."""

    def __init__(self, dim: int, views: list[Callable[[Tensor], Tensor]], channels: bool) -> None:
        super().__init__()
        self.first = getattr(nn, f"Conv{dim}d")(4, 4, 1) if channels else nn.Linear(SPACE[dim][-1], SPACE[dim][-1])
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        parts = [view(out) for view in self.views]
        return torch.stack([(p * p.detach().cos()).square().mean() for p in parts])


def pools(dim: int) -> list[Callable[[Tensor], Tensor]]:
    kinds = [
        getattr(nn, f"MaxPool{dim}d")(2, padding=1), getattr(nn, f"AvgPool{dim}d")(2),
        getattr(nn, f"AdaptiveAvgPool{dim}d")(3),
        getattr(nn, f"AdaptiveMaxPool{dim}d")(3), getattr(nn, f"AdaptiveAvgPool{dim}d")(1),
    ]  # fmt: skip
    return [*kinds, lambda x: kinds[0](x[0])]  # the last without samples


def resamplings(dim: int) -> list[Callable[[Tensor], Tensor]]:
    return [lambda x, m=m: F.interpolate(x, scale_factor=2, mode=m) for m in INTERPOLATION[dim]]  # type: ignore[misc]


def paddings(dim: int) -> list[Callable[[Tensor], Tensor]]:
    amount = (1, 2) * dim
    return [lambda x, m=m: F.pad(x, amount, mode=m) for m in ("reflect", "replicate")]  # type: ignore[misc]


@pytest.mark.every(6)
@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("dim", SPACE)
def test_by_channel(dim: int, channels: bool):
    views = pools(dim) + resamplings(dim) + paddings(dim)
    array = check(
        steady(lambda: Sum(dim, views, channels)), batches(2, 4, *SPACE[dim]), per_model=channels and dim == 2
    )
    assert not {t for t in by(array, "batched") if any(w in t for w in ("pool", "sample", "reflection", "replication"))}
    assert by(array, "per-model") == set()


def test_random_windows_and_grids():
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.fractional_max_pool2d(x, 2, output_size=(3, 4)),
        lambda x: F.affine_grid(x[:, 0, :2, :3], [2, 1, 3, 3], align_corners=False),
    ]  # fmt: skip
    array = check(steady(lambda: Sum(2, views, True)), batches(2, 4, *SPACE[2]))
    assert by(array, "rule") >= {"fractional_max_pool2d", "fractional_max_pool2d_backward", "affine_grid_generator"}
    assert by(array, "per-model") == {"rand"}


def test_unpooling_and_rearrangements():
    def unpooled(x: Tensor) -> Tensor:
        return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)

    views: list[Callable[[Tensor], Tensor]] = [
        unpooled, lambda x: F.pixel_shuffle(x, 2), lambda x: F.fold(F.unfold(x, 2), (6, 8), 2),
        lambda x: F.pad(x, (1, -1, 2, 0), value=0.5), lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
        lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1).tanh(), align_corners=False),
        lambda x: F.local_response_norm(x, 2), lambda x: F.lp_pool2d(x, 2, 2),
    ]  # fmt: skip
    array = check(steady(lambda: Sum(2, views, True)), batches(2, 4, *SPACE[2]))
    assert "max_unpool2d" in by(array, "rule")
    assert by(array, "per-model") == set()
