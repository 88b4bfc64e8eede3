"""A small deep-convolutional GAN for 8x8 grey images in [-1, 1]."""

from __future__ import annotations

from torch import Tensor, nn

NOISE = 16
WIDTHS = {"tiny": 8, "small": 32, "large": 64}


class Generator(nn.Module):
    """[N, NOISE] normal noise -> [N, 1, 8, 8] images in [-1, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE, 2 * width * 4, bias=False),
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.layers(noise)
        return images


class Discriminator(nn.Module):
    """[N, 1, 8, 8] images -> [N] logits, positive for real ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 4, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images).squeeze(1)
        return logits


def gan(size: str = "small") -> tuple[Generator, Discriminator]:
    return Generator(WIDTHS[size]), Discriminator(WIDTHS[size])
