"""A convolutional classifier for 8x8 grey images, with batch norm and dropout."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = {"tiny": 4, "small": 16, "large": 32}


class DigitsCNN(nn.Module):
    """[N, 1, 8, 8] -> [N, 10] logits. `width`: channels of the first convolution."""

    def __init__(self, width: int, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * width * 16, 4 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


def cnn(size: str = "small", dropout: float = 0.25) -> DigitsCNN:
    return DigitsCNN(WIDTHS[size], dropout)
