"""A small VGG for digits: three blocks of convolutions and dense layers, without batch norm."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = {"tiny": 4, "small": 16, "large": 32}
EDGE = 24  # pixels: digits of 8 are scaled up, so that a layer takes longer than a message


class DigitsVGG(nn.Module):
    """[N, 1, edge, edge] -> [N, 10] logits. `width`: channels of the first convolution."""

    def __init__(self, width: int, edge: int, dropout: float = 0.3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for block in (width, 2 * width, 4 * width):
            for _ in range(2):
                layers += [nn.Conv2d(channels, block, 3, padding=1), nn.ReLU()]
                channels = block
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(channels * (edge // 8) ** 2, 4 * channels),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * channels, 10),
        )
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.flatten(self.features(x)))
        return logits


def vgg(size: str = "small", edge: int = EDGE, dropout: float = 0.3) -> DigitsVGG:
    return DigitsVGG(WIDTHS[size], edge, dropout)
