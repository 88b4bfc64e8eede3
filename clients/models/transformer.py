"""A small pre-norm transformer that reads an 8x8 image as a sequence of its eight rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {"tiny": (16, 2, 1), "small": (64, 4, 2), "large": (128, 8, 4)}  # width, heads, layers


class Attention(nn.Module):
    """Multi-head self-attention over [N, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads), nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class DigitsTransformer(nn.Module):
    """[N, 1, 8, 8] -> [N, 10] logits, from the mean over the rows' representations."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x.squeeze(1)) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(rows)).mean(1))
        return logits


def transformer(size: str = "small") -> DigitsTransformer:
    return DigitsTransformer(*SIZES[size])
