"""Seven models as people train them, from their configurations: weights are drawn at random, and nothing is downloaded.
Imports torch and transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpumux.errors import ConfigError

SIZES = ("full", "tiny")
BATCHES = 4  # different ones, in turn
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class RealModel:
    """A training step over a model of its own. `batch(i)` gives the i-th batch of `length`, a few in turn."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Tensor]
    batches: Mapping[int, tuple[Batch, ...]]

    def batch(self, index: int, length: int = 0) -> Batch:
        return self.batches[length or next(iter(self.batches))][index % BATCHES]


@dataclass(frozen=True)
class Recipe:
    """`make(transformers, tiny)` is the model; `inputs(length, draws, tiny)` a batch's named arguments. `lengths`: of a
    batch, in tokens or, for models of images and sound, in samples; the first is the usual one, all are met in turn.
    `sgd`: trained with momentum, the others with AdamW."""

    make: Callable[[Any, bool], nn.Module]
    inputs: Callable[[int, torch.Generator, bool], dict[str, Tensor]]
    lengths: tuple[int, ...]
    sgd: bool = False


def _ids(rows: int, words: int, length: int, draws: torch.Generator) -> Tensor:
    return torch.randint(0, words, (rows, length), generator=draws)


def _resnet(t: Any, tiny: bool) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]} if tiny else {}
    return _model(t.ResNetForImageClassification(t.ResNetConfig(num_labels=1000, **sizes)))


def _images(edge: int) -> Callable[[int, torch.Generator, bool], dict[str, Tensor]]:
    def inputs(length: int, draws: torch.Generator, tiny: bool) -> dict[str, Tensor]:
        pixels = torch.randn(length, 3, *(2 * [32 if tiny else edge]), generator=draws)
        return {"pixel_values": pixels, "labels": torch.randint(0, 1000, (length,), generator=draws)}

    return inputs


def _gpt2(t: Any, tiny: bool) -> nn.Module:
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2} if tiny else {}
    return _model(t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, **sizes)))


def _bert(t: Any, tiny: bool) -> nn.Module:
    return _model(t.BertForMaskedLM(t.BertConfig(**(_encoder(64) if tiny else {}))))


def _vit(t: Any, tiny: bool) -> nn.Module:
    sizes = (
        {k: v for k, v in _encoder(0).items() if not k.startswith("vocab") and not k.startswith("max")} if tiny else {}
    )
    return _model(t.ViTForImageClassification(t.ViTConfig(num_labels=1000, image_size=32 if tiny else 224, **sizes)))


def _encoder(words: int) -> dict[str, int]:
    return {
        "vocab_size": words, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32,
    }  # fmt: skip


def _t5(t: Any, tiny: bool) -> nn.Module:
    # The sizes of T5-small are the configuration's own; a decoder begins with padding.
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2} if tiny else {}
    return _model(t.T5ForConditionalGeneration(t.T5Config(use_cache=False, decoder_start_token_id=0, **sizes)))


def _whisper(t: Any, tiny: bool) -> nn.Module:
    layers, width, heads = (1, 16, 2) if tiny else (4, 384, 6)
    sizes = {"vocab_size": 64, "max_source_positions": 20, "max_target_positions": 32} if tiny else {}
    sizes |= {f"{side}_layers": layers for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")}
    if tiny:
        sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return _model(t.WhisperForConditionalGeneration(t.WhisperConfig(d_model=width, use_cache=False, **sizes)))


def _llama(t: Any, tiny: bool) -> nn.Module:
    """About 160 million parameters."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    if tiny:
        sizes = {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    return _model(t.LlamaForCausalLM(t.LlamaConfig(use_cache=False, **sizes)))


def _text(words: int) -> Callable[[int, torch.Generator, bool], dict[str, Tensor]]:
    def inputs(length: int, draws: torch.Generator, tiny: bool) -> dict[str, Tensor]:
        ids = _ids(2, 64 if tiny else words, length // 4 if tiny else length, draws)
        return {"input_ids": ids, "labels": ids.clone()}

    return inputs


def _sound(length: int, draws: torch.Generator, tiny: bool) -> dict[str, Tensor]:
    """Thirty seconds of sound for each of `length` samples, and what was said."""
    features = torch.randn(length, 80, 40 if tiny else 3000, generator=draws)
    return {"input_features": features, "labels": _ids(length, 64 if tiny else 51865, 16, draws)}


_LENGTHS = (64, 48, 80, 96, 112)
RECIPES: dict[str, Recipe] = {
    "resnet50": Recipe(_resnet, _images(224), (4, 2, 3, 5, 6), sgd=True),
    "gpt2": Recipe(_gpt2, _text(50257), _LENGTHS),
    "bert-base": Recipe(_bert, _text(30522), _LENGTHS),
    "vit-b16": Recipe(_vit, _images(224), (2, 1, 3, 4, 5)),
    "t5-small": Recipe(_t5, _text(32128), (128, 96, 160, 192, 224)),
    "whisper-tiny": Recipe(_whisper, _sound, (2, 1, 3, 4, 5)),
    "llama-160m": Recipe(_llama, _text(32000), _LENGTHS),
}


def _model(made: Any) -> nn.Module:
    model: nn.Module = made
    return model.train()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("transformers is not installed", "pip install transformers") from error
    transformers.logging.set_verbosity_error()
    return transformers


def build(name: str, size: str = "full", seed: int = 0) -> RealModel:
    """The model, its optimizer and a few batches of each length, the same for the same seed. Raises ConfigError for a
    name there is not."""
    if name not in RECIPES:
        raise ConfigError(f"no model is called {name!r}", f"use one of {', '.join(RECIPES)}")
    recipe, tiny = RECIPES[name], size == "tiny"
    torch.manual_seed(seed)
    model = recipe.make(_transformers(), tiny)
    draws = torch.Generator().manual_seed(seed)
    made = {n: [recipe.inputs(n, draws, tiny) for _ in range(BATCHES)] for n in recipe.lengths}
    batches = {n: tuple(tuple(batch.values()) for batch in some) for n, some in made.items()}
    names = tuple(made[recipe.lengths[0]][0])
    optimizer: torch.optim.Optimizer
    if recipe.sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**dict(zip(names, batch, strict=True))).loss
        loss.backward()
        optimizer.step()
        return loss

    return RealModel(name, model, optimizer, step, batches)
