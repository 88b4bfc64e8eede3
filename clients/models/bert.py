"""BERT for masked language modelling: post-norm encoder layers, padding masked, the output tied to the input embedding.

Source: Devlin et al., "BERT" (2019); BERT-Medium is the size with 8 layers, 512 wide, of Turc et al., "Well-Read
Students Learn Better" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 0  # its token
IGNORED = -100  # the label of tokens that were not masked


@dataclass(frozen=True)
class Shape:
    words: int
    width: int
    heads: int
    layers: int
    positions: int


SIZES = {
    "full": Shape(30_522, 512, 8, 8, 512),
    "small": Shape(1_000, 128, 2, 2, 64),
    "tiny": Shape(60, 16, 2, 1, 16),
}


class Embeddings(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width, padding_idx=PADDING)
        self.positions, self.segments = nn.Embedding(shape.positions, shape.width), nn.Embedding(2, shape.width)
        self.norm, self.dropout = nn.LayerNorm(shape.width, eps=1e-12), nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        found = self.words(tokens) + self.positions(at) + self.segments(torch.zeros_like(tokens))
        out: Tensor = self.dropout(self.norm(found))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.chance = heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm2, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout)

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (self.heads, -1)).transpose(1, 2)
        return heads

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, self.chance if self.training else 0.0)
        x = self.norm1(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        out: Tensor = self.norm2(x + self.dropout(self.mlp(x)))
        return out


class Bert(nn.Module):
    """[N, T] tokens -> [N, T, words] logits. `PADDING` is attended to by none."""

    def __init__(self, size: str = "full", dropout: float = 0.1) -> None:
        super().__init__()
        shape = SIZES[size]
        self.embed = Embeddings(shape, dropout)
        self.layers = nn.ModuleList(Layer(shape.width, shape.heads, dropout) for _ in range(shape.layers))
        self.head = nn.Sequential(nn.Linear(shape.width, shape.width), nn.GELU(), nn.LayerNorm(shape.width, eps=1e-12))
        self.decoder = nn.Linear(shape.width, shape.words)
        self.apply(_start)
        self.decoder.weight = self.embed.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != PADDING)[:, None, None, :]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.decoder(self.head(x))
        return logits


def _start(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()
