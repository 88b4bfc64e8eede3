"""A small language model that decodes token by token over a static key-value cache, as a job or plainly.

The cache lies in buffers of fixed size, so that every token is one step of the same shape: the step writes its keys and
values at `position`, and attends to all positions up to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Any]  # (words, position) -> the following words, or a future of them


@dataclass(frozen=True)
class Size:
    layers: int = 4
    width: int = 128
    heads: int = 4
    words: int = 256
    length: int = 64  # positions of the cache
    rows: int = 2  # sequences that are decoded together


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.project = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        shape = (size.rows, size.heads, size.length, size.width // size.heads)
        self.keys: Tensor
        self.values: Tensor
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        size = self.size
        q, k, v = (t.view(size.rows, 1, size.heads, -1).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = (torch.arange(size.length) <= position).view(1, size.length)
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(size.rows, 1, size.width))
        return out


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), position)
        out: Tensor = x + self.mlp(self.after(x))
        return out


class Decoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList([Layer(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words)

    def forward(self, words: Tensor, position: Tensor) -> Tensor:
        x = self.words(words) + self.positions(position)
        for layer in self.layers:
            x = layer(x, position)
        out: Tensor = self.head(self.norm(x))
        return out


def step_of(model: Decoder) -> Step:
    """The step: the next word of each sequence, shape (rows, 1)."""

    def decode(words: Tensor, position: Tensor) -> Tensor:
        with torch.no_grad():
            following: Tensor = model(words, position).argmax(-1)
        return following

    return decode


def example(size: Size) -> tuple[Tensor, Tensor]:
    return torch.zeros(size.rows, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def generate(step: Step, prompt: Tensor, words: int) -> tuple[Tensor, list[float]]:
    """The prompt, shape (rows, n), and `words` words after it; and the seconds that each of these took."""
    made = [prompt[:, i : i + 1] for i in range(prompt.shape[1])]
    latencies: list[float] = []
    for at in range(prompt.shape[1] + words - 1):
        began = time.perf_counter()
        following = step(made[at], torch.tensor([at])).clone()  # waits for the step
        if at + 1 >= prompt.shape[1]:
            made.append(following)
            latencies.append(time.perf_counter() - began)
    return torch.cat(made, dim=1), latencies
