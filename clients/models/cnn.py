"""A convolutional classifier for small images, with batch norm and dropout."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = {"tiny": 4, "small": 16, "large": 32}


class DigitsCNN(nn.Module):
    """[N, colours, edge, edge] -> [N, 10] logits; digits are grey and 8 pixels wide. `width`: channels of the first
    convolution."""

    def __init__(self, width: int, dropout: float = 0.25, colours: int = 1, edge: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(colours, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * width * (edge // 2) ** 2, 4 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


def cnn(size: str = "small", dropout: float = 0.25) -> DigitsCNN:
    return DigitsCNN(WIDTHS[size], dropout)
