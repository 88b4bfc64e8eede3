"""The jobs that share a device in the benchmarks: models of the papers, full size or tiny, training or answering
requests. Imports torch (and transformers, for BERT and GPT-2, with weights drawn at random: nothing is downloaded)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux.errors import ConfigError
from gpumux.plan import zoo

SIZES = ("full", "tiny")
BATCHES = 4  # different ones, in turn
Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Built:
    """A job that can run anywhere: `step(*batch)` over the model's state. Batches lie in host memory."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    step: Step
    batches: tuple[tuple[Tensor, ...], ...]

    def batch(self, index: int) -> tuple[Tensor, ...]:
        return self.batches[index % len(self.batches)]


@dataclass(frozen=True)
class Recipe:
    """`full` and `tiny` make the model; `input`: pixels of an image's edge, or tokens, of each size; `batch`: samples
    of a training step, of each size. A request is one sample."""

    full: Callable[[], nn.Module]
    tiny: Callable[[], nn.Module]
    input: tuple[int, int]
    batch: tuple[int, int]
    words: tuple[int, int] | None = None  # of the vocabulary; None: images


def _small(*body: nn.Module, width: int) -> nn.Module:
    return zoo.Classifier(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1)), nn.Linear(width, 10))


def _tiny_vgg() -> nn.Module:
    body = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU())
    return _small(*body, nn.Dropout(), width=16)


def _tiny_inception() -> nn.Module:
    fork = zoo.Fork(a=zoo.Conv(8, 8, 1), b=zoo.Conv(8, 8, (1, 3)), c=zoo.Conv(8, 8, (3, 1)))
    return _small(zoo.Conv(3, 8, 3, stride=2), fork, width=24)


class Kernels(nn.Module):
    """`count` kernels of one kind over a tensor of `rows` rows that is made from one number, so that nothing large is
    sent."""

    def __init__(self, intensity: str, rows: int, width: int, count: int) -> None:
        super().__init__()
        self.intensity, self.rows, self.width, self.count = intensity, rows, width, count
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.expand(self.rows, self.width) + 0.0
        for _ in range(self.count):
            y = y @ self.weight if self.intensity == "compute" else y + 1.0
        return y[:1, :1].sum()


class Language(nn.Module):
    """What a transformers model says of token numbers: a loss with `labels`, else logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        said = self.inner(input_ids=ids) if labels is None else self.inner(input_ids=ids, labels=labels)
        found: Tensor = said.logits if labels is None else said.loss
        return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "transformers is not installed", "pip install transformers, or leave BERT and GPT-2 out"
        ) from error
    return transformers


def _bert(**sizes: int) -> nn.Module:
    t = _transformers()
    return Language(t.BertForSequenceClassification(t.BertConfig(**sizes)))


def _gpt2(**sizes: int) -> nn.Module:
    t = _transformers()
    return Language(t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, **sizes)))


_TINY_BERT = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16,
}  # fmt: skip
_TINY_GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}

RECIPES: dict[str, Recipe] = {
    "resnet50": Recipe(
        lambda: zoo.ResNet((3, 4, 6, 3), 1), lambda: _small(zoo.Bottleneck(3, 4, 4, 2), width=16), (224, 16), (32, 2)
    ),
    "vgg16": Recipe(lambda: zoo.vgg(16), _tiny_vgg, (224, 16), (32, 2)),
    "vgg16-b4": Recipe(lambda: zoo.vgg(16), _tiny_vgg, (224, 16), (4, 1)),
    "vgg16-b16": Recipe(lambda: zoo.vgg(16), _tiny_vgg, (224, 16), (16, 2)),
    "inception_v3": Recipe(zoo.inception_v3, _tiny_inception, (299, 16), (32, 2)),
    "wide_resnet101_2": Recipe(
        lambda: zoo.ResNet((3, 4, 23, 3), 2), lambda: _small(zoo.Bottleneck(3, 4, 8, 2), width=16), (400, 16), (16, 2)
    ),
    "bert_base": Recipe(
        lambda: _bert(num_labels=2), lambda: _bert(num_labels=2, **_TINY_BERT), (128, 8), (32, 2), (30522, 64)
    ),
    "gpt2": Recipe(_gpt2, lambda: _gpt2(**_TINY_GPT2), (512, 8), (8, 2), (50257, 64)),
}  # fmt: skip
TRAIN, INFER = "train", "infer"
KERNELS = "kernels"  # kernels:INTENSITY:ROWS:WIDTH:COUNT, for kernels of a wanted length


def names() -> list[str]:
    """`MODEL:train` and `MODEL:infer`."""
    return [f"{model}:{task}" for model in RECIPES for task in (TRAIN, INFER)]


def build(name: str, size: str = "full", *, device: str = "cpu", seed: int = 0) -> Built:
    """The job called `name` with its model on `device`. Raises ConfigError for one that there is not.

    On CUDA Adam is capturable, so that the plain step can be captured as a graph."""
    model_name, _, task = name.partition(":")
    if model_name == KERNELS:
        return _kernels(name, device)
    if model_name not in RECIPES or task not in (TRAIN, INFER):
        raise ConfigError(f"no job is called {name!r}", f"use one of {', '.join(names())}")
    recipe, which = RECIPES[model_name], SIZES.index(size)
    torch.manual_seed(seed)
    model = (recipe.tiny if which else recipe.full)().to(device).train(task == TRAIN)
    draws = torch.Generator().manual_seed(seed)
    samples = recipe.batch[which] if task == TRAIN else 1

    def batch() -> tuple[Tensor, ...]:
        edge = recipe.input[which]
        if recipe.words is not None:
            ids = torch.randint(0, recipe.words[which], (samples, edge), generator=draws)
            if task == INFER:
                return (ids,)
            return ids, (
                torch.randint(0, 2, (samples,), generator=draws) if model_name.startswith("bert") else ids.clone()
            )
        images = torch.randn(samples, 3, edge, edge, generator=draws)
        return (images, torch.randint(0, 10, (samples,), generator=draws)) if task == TRAIN else (images,)

    batches = tuple(batch() for _ in range(BATCHES))
    if task == INFER:
        return Built(name, model.requires_grad_(False), None, _answer(model), batches)
    text = recipe.words is not None
    optimizer: torch.optim.Optimizer
    if text:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=device == "cuda")
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Built(name, model, optimizer, _train(model, optimizer, text), batches)


def _kernels(name: str, device: str) -> Built:
    _, intensity, *sizes = name.split(":")
    rows, width, count = (int(size) for size in sizes)
    model = Kernels(intensity, rows, width, count).to(device).requires_grad_(False)
    return Built(name, model, None, lambda x: model(x), ((torch.ones(1, 1),),))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, text: bool) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x, y) if text else F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _answer(model: nn.Module) -> Step:
    def step(x: Tensor) -> Tensor:
        logits: Tensor = model(x)
        # Of a language model the last token's: what a server would answer with.
        return logits[:, -1] if logits.dim() == 3 else logits

    return step
