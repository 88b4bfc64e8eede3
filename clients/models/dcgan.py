"""DCGAN: transposed convolutions from noise to 64x64 images, and convolutions that tell them from real ones.

Source: Radford et al., "Unsupervised Representation Learning with Deep Convolutional Generative Adversarial Networks"
(2016), in the layer sizes of PyTorch's official example, which the HFTA paper trains on LSUN.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

NOISE = {"full": 100, "small": 16, "tiny": 8}
WIDTHS = {
    "full": (512, 256, 128, 64),
    "small": (32, 16),
    "tiny": (8, 4),
}  # of the generator; the discriminator's are reversed
COLOURS = 3


def pixels(size: str) -> int:
    """The images' edge."""
    return int(4 * 2 ** len(WIDTHS[size]))


class Generator(nn.Module):
    """[N, noise, 1, 1] -> [N, 3, edge, edge] in [-1, 1]."""

    def __init__(self, size: str = "full") -> None:
        super().__init__()
        widths = WIDTHS[size]
        layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE[size], widths[0], 4, bias=False)]
        for inside, outside in zip(widths, [*widths[1:], COLOURS], strict=True):
            layers += [nn.BatchNorm2d(inside), nn.ReLU(inplace=True)]
            layers.append(nn.ConvTranspose2d(inside, outside, 4, stride=2, padding=1, bias=False))
        self.layers = nn.Sequential(*layers, nn.Tanh()).apply(_start)

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.layers(noise)
        return images


class Discriminator(nn.Module):
    """[N, 3, edge, edge] -> [N] logits, positive for real images."""

    def __init__(self, size: str = "full") -> None:
        super().__init__()
        widths = WIDTHS[size][::-1]
        layers: list[nn.Module] = [nn.Conv2d(COLOURS, widths[0], 4, stride=2, padding=1, bias=False), nn.LeakyReLU(0.2)]
        for inside, outside in pairwise(widths):
            layers.append(nn.Conv2d(inside, outside, 4, stride=2, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outside), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, bias=False)).apply(_start)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images).flatten()
        return logits


def _start(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
