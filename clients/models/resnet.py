"""ResNet-18. Source: He et al., "Deep Residual Learning for Image Recognition" (2016), table 1; HFTA trains it on
CIFAR-10."""

from __future__ import annotations

from torch import nn

from gpumux.plan.zoo import ResNet

SIZES = {
    "full": ((2, 2, 2, 2), 64),
    "small": ((1, 1, 1, 1), 16),
    "tiny": ((1, 1), 8),
}  # blocks a stage, channels of the first


def resnet18(size: str = "full", classes: int = 10) -> nn.Module:
    """[N, 3, H, W] -> [N, classes] logits."""
    depths, stem = SIZES[size]
    return ResNet(depths, 0, classes, stem)
