"""MobileNetV2 and MobileNetV3-Large: inverted residuals with depthwise convolutions; in V3 squeeze and excitation, and
hard swish.

Sources: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (2018), table 2; Howard et al.,
"Searching for MobileNetV3" (2019), table 1. HFTA trains V3 on CIFAR-10, and tunes which of the two is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn


class Row(NamedTuple):
    """A row of MobileNetV3's table 1."""

    kernel: int
    expanded: int
    out: int
    squeeze: bool
    hard_swish: bool
    stride: int


LARGE = (
    Row(3, 16, 16, False, False, 1),
    Row(3, 64, 24, False, False, 2), Row(3, 72, 24, False, False, 1),
    Row(5, 72, 40, True, False, 2), Row(5, 120, 40, True, False, 1), Row(5, 120, 40, True, False, 1),
    Row(3, 240, 80, False, True, 2), Row(3, 200, 80, False, True, 1),
    Row(3, 184, 80, False, True, 1), Row(3, 184, 80, False, True, 1),
    Row(3, 480, 112, True, True, 1), Row(3, 672, 112, True, True, 1),
    Row(5, 672, 160, True, True, 2), Row(5, 960, 160, True, True, 1), Row(5, 960, 160, True, True, 1),
)  # fmt: skip
TINY = (Row(3, 8, 8, False, False, 1), Row(5, 16, 8, True, True, 2), Row(3, 24, 8, False, True, 1))
SIZES: dict[str, tuple[Sequence[Row], int]] = {"full": (LARGE, 1280), "small": (LARGE[:6], 64), "tiny": (TINY, 16)}


class V2Row(NamedTuple):
    """A row of MobileNetV2's table 2: `repeats` blocks, the first of them with the stride."""

    expansion: int
    out: int
    repeats: int
    stride: int


V2 = (
    V2Row(1, 16, 1, 1), V2Row(6, 24, 2, 2), V2Row(6, 32, 3, 2), V2Row(6, 64, 4, 2), V2Row(6, 96, 3, 1),
    V2Row(6, 160, 3, 2), V2Row(6, 320, 1, 1),
)  # fmt: skip
V2_TINY = (V2Row(1, 8, 1, 1), V2Row(2, 8, 2, 2))
# Rows, channels of the first convolution and of the last.
V2_SIZES: dict[str, tuple[Sequence[V2Row], int, int]] = {
    "full": (V2, 32, 1280), "small": (V2[:3], 32, 64), "tiny": (V2_TINY, 8, 16)
}  # fmt: skip


def _round8(channels: float) -> int:
    """To a multiple of 8, at most a tenth below."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


class Convolution(nn.Sequential):
    """A convolution, batch norm, and an activation if there is one."""

    def __init__(
        self,
        inside: int,
        out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        act: type[nn.Module] | None = None,
    ) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(inside, out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(out, eps=0.001, momentum=0.01),
        ]
        super().__init__(*layers, *([act()] if act is not None else []))


class SqueezeExcitation(nn.Module):
    """Scales each channel by what all of the image says of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = _round8(channels / 4)
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.ReLU(), nn.Conv2d(inner, channels, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.scale(x)
        return out


class InvertedResidual(nn.Module):
    """Of `channels` channels. `act`: the activation; by default that of the row."""

    def __init__(self, channels: int, row: Row, act: type[nn.Module] | None = None) -> None:
        super().__init__()
        act = act or (nn.Hardswish if row.hard_swish else nn.ReLU)
        wide = row.expanded
        layers: list[nn.Module] = []
        if wide != channels:
            layers.append(Convolution(channels, wide, 1, act=act))
        layers.append(Convolution(wide, wide, row.kernel, stride=row.stride, groups=wide, act=act))
        if row.squeeze:
            layers.append(SqueezeExcitation(wide))
        self.layers = nn.Sequential(*layers, Convolution(wide, row.out, 1))
        self.skips = row.stride == 1 and channels == row.out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.skips else out


class MobileNetV2(nn.Module):
    """[N, 3, H, W] -> [N, classes] logits."""

    def __init__(self, size: str = "full", classes: int = 10, dropout: float = 0.2) -> None:
        super().__init__()
        rows, channels, last = V2_SIZES[size]
        layers: list[nn.Module] = [Convolution(3, channels, 3, stride=2, act=nn.ReLU6)]
        for row in rows:
            for k in range(row.repeats):
                stride = row.stride if k == 0 else 1
                block = Row(3, row.expansion * channels, row.out, False, False, stride)
                layers.append(InvertedResidual(channels, block, nn.ReLU6))
                channels = row.out
        self.features = nn.Sequential(*layers, Convolution(channels, last, 1, act=nn.ReLU6))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(last, classes)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class MobileNetV3(nn.Module):
    """[N, 3, H, W] -> [N, classes] logits."""

    def __init__(self, size: str = "full", classes: int = 10, dropout: float = 0.2) -> None:
        super().__init__()
        rows, hidden = SIZES[size]
        first, last = rows[0].expanded, 6 * rows[-1].out
        blocks = [
            InvertedResidual(before, row) for before, row in zip([first, *(r.out for r in rows)], rows, strict=False)
        ]
        self.features = nn.Sequential(
            Convolution(3, first, 3, stride=2, act=nn.Hardswish),
            *blocks,
            Convolution(rows[-1].out, last, 1, act=nn.Hardswish),
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, hidden), nn.Hardswish(), nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits
