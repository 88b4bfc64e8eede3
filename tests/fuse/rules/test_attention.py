"""Attention and the layers made of it train what serial training trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fuse.rules.found import by
from tests.fuse.serial import batches, check, steady

nn = torch.nn
F = torch.nn.functional

KEYS = slice(6, 12)  # of a bias of queries, keys and values: what all keys have in common, which softmax does not see
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
BATCHED = {"mean", "sum.dim_IntList", "cat", "select_backward"}  # one operator each, as in one model


class Attention(nn.Module):
    """Self-attention by the kernel. `mask`: of keys ([N, 1, 1, S]), of all ([L, S]), of heads or a causal one."""

    def __init__(self, mask: str = "", key_bias: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18, bias=key_bias)
        self.kind = mask
        masks = {
            "keys": torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool().logical_not()[:, None, None, :],
            "all": torch.arange(16.0, dtype=torch.float64).reshape(4, 4).cos(),
            "heads": torch.arange(32.0, dtype=torch.float64).reshape(1, 2, 4, 4).cos(),
        }
        self.register_buffer("mask", masks.get(mask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.kind == "causal")
        return out.transpose(1, 2).flatten(2)


@pytest.mark.every(3)
@pytest.mark.parametrize("per_model", [False, True])
@pytest.mark.parametrize("mask", ["", "keys", "all", "heads", "causal"])
def test_the_kernel(mask: str, per_model: bool):
    array = check(steady(lambda: Attention(mask)), batches(3, 4, 6), per_model=per_model)
    assert by(array, "rule") >= {KERNEL, f"{KERNEL}_backward"}
    assert by(array, "batched", "per-model") <= BATCHED


def test_a_mask_of_the_batch_is_shared():
    """A key padding mask that comes with the batch."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, key_padding_mask=x[:, :, 0] > 1, need_weights=True)[0]

    array = check(steady(Padded), batches(3, 4, 6))
    assert by(array, "per-model") == set()


class Heads(nn.Module):
    """Self-attention whose weights are wanted or not, its keys padded or not. Without a bias of the keys, which has no
    true gradient."""

    def __init__(self, padded: bool, weights: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, bias=False, **options)
        self.padded, self.weights = padded, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = (x[:, :, 0] > 1) if self.padded else None
        out, weights = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.weights)
        return out if weights is None else torch.cat([out, weights], 2)


@pytest.mark.every(2)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_dropout_inside_attention(padded: bool, weights: bool):
    array = check(steady(lambda: Heads(padded, weights, dropout=0.3)), batches(3, 4, 6))
    assert by(array, "per-model") == {"bernoulli_.float"}


def test_heads_of_other_sizes_and_more_keys():
    options = {"kdim": 6, "vdim": 6, "add_bias_kv": True, "add_zero_attn": True}
    array = check(steady(lambda: Heads(False, True, **options)), batches(3, 4, 6))
    assert by(array, "per-model") == set()


@pytest.mark.every(2)
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoders_with_dropout_wherever_they_have_it(norm_first: bool):
    def module() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            6, 2, 8, dropout=0.3, activation="gelu", batch_first=True, norm_first=norm_first, bias=False
        )
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    array = check(steady(module), batches(3, 4, 6))
    assert by(array, "per-model") == {"bernoulli_.float"}


def layers(**options: Any) -> nn.Module:
    kind = nn.TransformerDecoderLayer if options.pop("decoder", False) else nn.TransformerEncoderLayer
    return kind(6, 2, 8, dropout=0.0, batch_first=True, **options)


@pytest.mark.every(2)
@pytest.mark.parametrize("per_model", [False, True])
def test_encoder_layers(per_model: bool):
    """With the residual connections where they belong."""
    array = check(
        steady(lambda: nn.Sequential(layers(), layers(norm_first=True))), batches(3, 4, 6), per_model=per_model,
        noise=dict.fromkeys(["0.self_attn.in_proj_bias", "1.self_attn.in_proj_bias"], KEYS),
    )  # fmt: skip
    assert by(array, "batched", "per-model") <= BATCHED


def test_a_decoder_layer():
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layers(decoder=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, x * 2, tgt_is_causal=True, tgt_mask=nn.Transformer.generate_square_subsequent_mask(4))

    noise = dict.fromkeys(["layer.self_attn.in_proj_bias", "layer.multihead_attn.in_proj_bias"], KEYS)
    array = check(steady(Decoder), batches(3, 4, 6), noise=noise)
    assert by(array, "per-model") == set()


def test_a_layer_of_many_models_has_few_operators_more_than_one():
    array = check(steady(layers), batches(3, 4, 6), noise={"self_attn.in_proj_bias": KEYS})
    program = array.programs[0]
    assert len(program.ops) <= 1.3 * len(array.decisions)
