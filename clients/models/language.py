"""A Transformer language model: the next token from those before.

Source: PyTorch's official word language model, with the HFTA paper's sizes (appendix H.1: 2 encoder layers, 2 heads,
128 wide, sequences of 32) and WikiText-2's vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    words: int
    width: int
    heads: int
    inner: int  # of the feed-forward layers
    layers: int
    length: int  # tokens of a sequence


SIZES = {
    "full": Shape(33_278, 128, 2, 128, 2, 32),
    "small": Shape(256, 64, 2, 64, 2, 32),
    "tiny": Shape(50, 16, 2, 16, 2, 8),
}


class LanguageModel(nn.Module):
    """[N, T] tokens -> [N, T, words] logits."""

    mask: Tensor
    position: Tensor

    def __init__(self, size: str = "full", dropout: float = 0.2) -> None:
        super().__init__()
        shape = SIZES[size]
        self.scale = math.sqrt(shape.width)
        self.embed = nn.Embedding(shape.words, shape.width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(shape.width, shape.heads, shape.inner, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(shape.width, shape.words)
        for weight in (self.embed.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.register_buffer("position", _waves(shape.length, shape.width), persistent=False)
        mask = torch.full((shape.length, shape.length), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens) * self.scale + self.position)
        # Unless it is told, the encoder reads the mask to find out, which no captured step can do.
        logits: Tensor = self.decoder(self.encoder(x, self.mask, is_causal=True))
        return logits


def _waves(length: int, width: int) -> Tensor:
    """[length, width] sines and cosines of the positions ("Attention Is All You Need", section 3.5)."""
    at = torch.arange(length).unsqueeze(1) * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    return torch.stack([at.sin(), at.cos()], 2).flatten(1)
