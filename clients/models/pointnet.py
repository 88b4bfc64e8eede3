"""PointNet over point clouds: classification and part segmentation, with both transformation networks.

Source: Qi et al., "PointNet: Deep Learning on Point Sets for 3D Classification and Segmentation" (2017), in the layer
sizes of fxia22/pointnet.pytorch, which the HFTA paper trains on ShapeNet's parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REGULARISER = 0.001  # weight of the feature transformation's distance from a rotation


@dataclass(frozen=True)
class Widths:
    """Channels of the point-wise layers (the first is the width of the transformed features), and of the dense layers
    behind."""

    points: tuple[int, int, int] = (64, 128, 1024)
    dense: tuple[int, int] = (512, 256)
    parts: int = 128  # the segmentation's last hidden layer


SIZES = {"full": Widths(), "small": Widths((16, 32, 128), (64, 32), 32), "tiny": Widths((8, 8, 16), (16, 8), 8)}


def _pointwise(*widths: int, last_relu: bool = True) -> nn.Sequential:
    """[N, widths[0], P] -> [N, widths[-1], P]: the same dense layers for each point."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Conv1d(inside, outside, 1), nn.BatchNorm1d(outside), nn.ReLU()]
    return nn.Sequential(*layers if last_relu else layers[:-1])


class Transformation(nn.Module):
    """T-Net: a matrix [N, k, k] for each cloud [N, k, P], near the identity."""

    def __init__(self, k: int, widths: Widths) -> None:
        super().__init__()
        self.k = k
        self.points = _pointwise(k, *widths.points)
        first, second = widths.dense
        self.dense = nn.Sequential(
            nn.Linear(widths.points[-1], first), nn.BatchNorm1d(first), nn.ReLU(),
            nn.Linear(first, second), nn.BatchNorm1d(second), nn.ReLU(), nn.Linear(second, k * k),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found = self.dense(self.points(x).amax(2)).view(-1, self.k, self.k)
        matrix: Tensor = found + torch.eye(self.k, dtype=x.dtype, device=x.device)
        return matrix


class Features(nn.Module):
    """[N, 3, P] -> one vector a cloud, one a point, and the feature transformation (None without one)."""

    def __init__(self, widths: Widths, feature_transform: bool) -> None:
        super().__init__()
        narrow, *wide = widths.points
        self.input_transform = Transformation(3, widths)
        self.first = _pointwise(3, narrow)
        self.feature_transform = Transformation(narrow, widths) if feature_transform else None
        self.rest = _pointwise(narrow, *wide, last_relu=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x = self.first(_turned(x, self.input_transform(x)))
        matrix = None
        if self.feature_transform is not None:
            matrix = self.feature_transform(x)
            x = _turned(x, matrix)
        return self.rest(x).amax(2), x, matrix


def _turned(x: Tensor, matrix: Tensor) -> Tensor:
    turned: Tensor = torch.bmm(x.transpose(1, 2), matrix).transpose(1, 2)
    return turned


class Classification(nn.Module):
    """[N, 3, P] -> [N, classes] logarithms of probabilities, and the feature transformation."""

    def __init__(
        self, size: str = "full", classes: int = 16, feature_transform: bool = True, dropout: float = 0.3
    ) -> None:
        super().__init__()
        widths = SIZES[size]
        first, second = widths.dense
        self.features = Features(widths, feature_transform)
        self.head = nn.Sequential(
            nn.Linear(widths.points[-1], first), nn.BatchNorm1d(first), nn.ReLU(), nn.Linear(first, second),
            nn.Dropout(dropout), nn.BatchNorm1d(second), nn.ReLU(), nn.Linear(second, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        cloud, _, matrix = self.features(x)
        return F.log_softmax(self.head(cloud), 1), matrix


class Segmentation(nn.Module):
    """[N, 3, P] -> [N, parts, P] logarithms of probabilities, and the feature transformation."""

    def __init__(self, size: str = "full", parts: int = 4, feature_transform: bool = True) -> None:
        super().__init__()
        widths = SIZES[size]
        narrow, _, wide = widths.points
        self.features = Features(widths, feature_transform)
        self.head = nn.Sequential(
            _pointwise(narrow + wide, *widths.dense, widths.parts), nn.Conv1d(widths.parts, parts, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        cloud, points, matrix = self.features(x)
        both = torch.cat([cloud.unsqueeze(2).expand(-1, -1, x.shape[2]), points], 1)
        return F.log_softmax(self.head(both), 1), matrix


def loss(said: tuple[Tensor, Tensor | None], labels: Tensor) -> Tensor:
    """Negative log-likelihood, and the regulariser that keeps the feature transformation near a rotation."""
    scores, matrix = said
    found: Tensor = F.nll_loss(scores, labels)
    if matrix is None:
        return found
    away = torch.bmm(matrix, matrix.transpose(1, 2)) - torch.eye(
        matrix.shape[1], dtype=matrix.dtype, device=matrix.device
    )
    distance: Tensor = torch.linalg.matrix_norm(away).mean()
    return found + REGULARISER * distance
