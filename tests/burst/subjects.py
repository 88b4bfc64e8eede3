"""The models that tests split over ranks, random placements of their layers, and the comparison with plain torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpumux.burst.norms import BatchNorm
from gpumux.burst.placement import RankPlacement
from gpumux.burst.ranks import BurstSplitter, RankedStep
from gpumux.capture.lower import lower
from gpumux.capture.recorder import RankTraces
from gpumux.capture.state import StateTable
from gpumux.capture.tracer import RawTrace
from tests.burst.emulate import Change, Gang

Steps = list[Callable[..., Any]]
Built = tuple[list[nn.Module], list[torch.optim.Optimizer], Steps]


@dataclass(frozen=True)
class Subject:
    """A model with its training steps. `layers`: the modules that placements name. `build`: the models, optimizers and
    steps over a module that `make` made."""

    name: str
    make: Callable[[], nn.Module]
    build: Callable[[Any], Built]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    layers: tuple[str, ...]


def random_placement(layers: Sequence[str], ranks: int, rng: random.Random) -> RankPlacement:
    """Each layer on a random number of random ranks, in random order. The numbers are powers of two."""
    counts = [1 << i for i in range(ranks.bit_length())]
    return RankPlacement(ranks, {name: tuple(rng.sample(range(ranks), rng.choice(counts))) for name in layers})


@dataclass(frozen=True)
class Difference:
    """How far a gang is from plain torch: the largest difference of any result, and of any parameter after the last
    step."""

    results: float
    parameters: float

    @property
    def largest(self) -> float:
        return max(self.results, self.parameters)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (tuple, list)) else []


def apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors; not a number if one is not."""
    found = [(x.detach().double() - y.detach().double()).abs().max() for x, y in zip(a, b, strict=True) if x.numel()]
    return float(torch.stack(found).max()) if found else 0.0


def compare(
    subject: Subject,
    placement: RankPlacement,
    steps: int,
    *,
    change: Change | None = None,
    which: Sequence[int] = (),
    batch_norm: BatchNorm = "refuse",
) -> tuple[Difference, Gang]:
    """Run a subject plainly and as a gang from the same weights, random state and batches. Asserts that both leave the
    random generator in one state. `which`: the steps that each call of the loop makes, in turn; all without it."""
    torch.manual_seed(0)
    plain = subject.make()
    split = copy.deepcopy(plain)
    batches = [subject.batch() for _ in range(steps)]
    models, _, plain_steps = subject.build(plain)
    turns = [[i] for i in which] or [list(range(len(plain_steps)))]
    torch.manual_seed(1)
    wanted = [plain_steps[i](*batch) for at, batch in enumerate(batches) for i in turns[at % len(turns)]]
    generator = torch.get_rng_state()
    torch.manual_seed(1)
    gang_models, optimizers, gang_steps = subject.build(split)
    gang = Gang(
        gang_models, optimizers, gang_steps, placement, change=change, over=BurstSplitter(placement, batch_norm)
    )
    given = [gang(*batch, which=i) for at, batch in enumerate(batches) for i in turns[at % len(turns)]]
    assert torch.equal(generator, torch.get_rng_state()), "the random generator is elsewhere"
    gang.sync()
    state = [[t for m in each for t in m.state_dict().values()] for each in (models, gang_models)]
    return Difference(apart(tensors_of(wanted), tensors_of(given)), apart(*state)), gang


# ---- a small VGG


def vgg() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10),
    )  # fmt: skip


def build_vgg(model: nn.Module) -> Built:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, scores

    return [model], [optimizer], [step]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,))


# ---- an Inception block, whose branches are layers of their own


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.a = nn.Conv2d(4, 4, 1)
        self.b = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.c = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 4, 1))
        self.fc = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        y = torch.cat([self.a(x), self.b(x), self.c(x)], 1)
        out: torch.Tensor = self.fc(F.relu(y).mean((2, 3)))
        return out


def build_inception(model: nn.Module) -> Built:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return [model], [optimizer], [step]


# ---- a Transformer with tied weights, trained with clipping


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, time, width = x.shape
        q, k, v = self.qkv(self.n1(x)).view(samples, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(samples, time, width)
        x = x + self.drop(self.out(mixed))
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))
        return out


class Transformer(nn.Module):
    def __init__(self, words: int = 20, width: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.pos = nn.Parameter(torch.randn(12, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, 2), Block(width, 2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(x) + self.pos[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.head(self.norm(hidden))
        return out


def build_transformer(model: nn.Module) -> Built:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return [model], [optimizer], [step]


# ---- a GAN, with a step for the discriminator and one for the generator


def gan() -> nn.ModuleList:
    make = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 64))
    judge = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return nn.ModuleList([make, judge])


def build_gan(pair: nn.ModuleList) -> Built:
    make, judge = pair
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9)) for m in (make, judge)
    ]
    bce = F.binary_cross_entropy_with_logits

    def judge_step(x: torch.Tensor) -> torch.Tensor:
        optimizers[1].zero_grad()
        real, fake = judge(x.flatten(1)), judge(make(torch.randn(x.shape[0], 6)).detach())
        loss = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
        loss.backward()
        optimizers[1].step()
        return loss

    def make_step(x: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        judge.zero_grad()
        fake = judge(make(torch.randn(x.shape[0], 6)))
        loss = bce(fake, torch.ones_like(fake))
        loss.backward()
        optimizers[0].step()
        return loss

    return [make, judge], optimizers, [judge_step, make_step]


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("vgg", vgg, build_vgg, digits, ("0", "3", "7", "10")),
        Subject("inception", Inception, build_inception, digits, ("stem", "a", "b.0", "b.2", "c", "fc")),
        Subject(
            "transformer", Transformer, build_transformer,
            lambda: (torch.randint(0, 20, (4, 9)), torch.randint(0, 20, (4, 9))),
            ("emb", "pos", "blocks.0.n1", "blocks.0.qkv", "blocks.0.out", "blocks.0.up", "blocks.0.down", "blocks.1",
             "norm", "head"),
        ),
        Subject(
            "gan", gan, build_gan, lambda: (torch.rand(4, 1, 8, 8),), ("model0.0", "model0.2", "model1.0", "model1.2")
        ),
    )
}  # fmt: skip


# ---- one trace, split by many placements


class Recording(BurstSplitter):
    """A splitter that keeps the traces it is given, in parts for all `numbers` of ranks."""

    def __init__(self, placement: RankPlacement, numbers: Sequence[int]) -> None:
        super().__init__(placement)
        self._numbers = list(numbers)
        self.traces: list[Traces] = []

    @property
    def counts(self) -> list[int]:
        return self._numbers

    def split(
        self, full: RawTrace, parts: dict[int, RawTrace], tensors: list[torch.Tensor], table: StateTable
    ) -> RankTraces:
        self.traces.append(Traces(full, parts, tensors, table))
        return super().split(full, parts, tensors, table)


@dataclass(frozen=True)
class Traces:
    """What a step is split from."""

    full: RawTrace
    parts: dict[int, RawTrace]
    tensors: list[torch.Tensor]
    table: StateTable

    def ranked(self, placement: RankPlacement) -> RankedStep:
        """The step over ranks by a placement."""
        splitter = BurstSplitter(placement)
        parts = {g: self.parts[g] for g in splitter.counts}
        raw = replace(self.full, ranks=splitter.split(self.full, parts, self.tensors, self.table))
        return splitter.programs(raw, self.table, frozenset(), lower(raw, self.table, frozenset()))


def traces_of(subject: Subject, numbers: Sequence[int], steps: int = 1) -> list[Traces]:
    """The traces of a subject's steps in their first phases."""
    torch.manual_seed(0)
    models, optimizers, functions = subject.build(subject.make())
    recording = Recording(RankPlacement(1), numbers)
    gang = Gang(models, optimizers, functions, RankPlacement(1), over=recording)
    for _ in range(steps):
        batch = subject.batch()
        for i in range(len(functions)):
            gang(*batch, which=i)
    return recording.traces
