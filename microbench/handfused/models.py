"""The convolutional classifier in HFTA's layout [N, B*C, H, W], and the Transformer in [B, N, ...].

`params` are the models' own, by name, stacked to [B, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.models.cnn import DigitsCNN
from clients.models.language import LanguageModel


class Fused:
    """Stacked parameters of models of one kind, and table 6's operators over them. Only training is written."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.count = len(models)
        names = [name for name, _ in models[0].named_parameters()]
        own = [{name: m.get_parameter(name).detach() for name in names} for m in models]
        self.params = {name: torch.stack([each[name] for each in own]).requires_grad_() for name in names}
        kept = [dict(m.named_buffers()) for m in models]
        self.buffers = {name: torch.stack([each[name] for each in kept]) for name in kept[0]}

    def linear(self, name: str, x: Tensor) -> Tensor:
        """[B, N, in] -> [B, N, out]."""
        return self.project(f"{name}.weight", f"{name}.bias", x)

    def project(self, weight: str, bias: str, x: Tensor) -> Tensor:
        return torch.baddbmm(self.params[bias].unsqueeze(1), x, self.params[weight].transpose(1, 2))

    def conv(self, name: str, x: Tensor, **options: Any) -> Tensor:
        """[N, B*in, H, W] -> [N, B*out, H', W'], without a bias."""
        return F.conv2d(x, self.params[f"{name}.weight"].flatten(0, 1), groups=self.count, **options)

    def batch_norm(self, name: str, x: Tensor) -> Tensor:
        """[N, B*C, H, W] -> the same."""
        mean, variance = (self.buffers[f"{name}.running_{of}"].view(-1) for of in ("mean", "var"))
        scale, shift = (self.params[f"{name}.{of}"].flatten() for of in ("weight", "bias"))
        self.buffers[f"{name}.num_batches_tracked"] += 1
        return F.batch_norm(x, mean, variance, scale, shift, training=True)

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        """[B, N, E] -> the same: normalised together, scaled apart."""
        scale, shift = (self.params[f"{name}.{of}"].unsqueeze(1) for of in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:]) * scale + shift

    def embedding(self, name: str, tokens: Tensor) -> Tensor:
        """[N, T] tokens that all models share -> [B, N, T, E]."""
        table = self.params[f"{name}.weight"]
        first = torch.arange(self.count, device=tokens.device).view(-1, 1, 1) * table.shape[1]
        return F.embedding(tokens + first, table.flatten(0, 1))

    def losses(self, *batch: Tensor) -> Tensor:
        """[B] losses of one batch that all models share."""
        raise NotImplementedError


class FusedCNN(Fused):
    """B of clients.models.cnn.DigitsCNN."""

    def __init__(self, models: Sequence[DigitsCNN]) -> None:
        super().__init__(models)
        self._dropout = models[0].classifier[3]

    def losses(self, *batch: Tensor) -> Tensor:
        x, labels = batch
        x = x.repeat(1, self.count, 1, 1)
        x = F.relu(self.batch_norm("features.1", self.conv("features.0", x, padding=1)))
        x = F.relu(self.batch_norm("features.4", self.conv("features.3", x, padding=1)))
        x = F.max_pool2d(x, 2).unflatten(1, (self.count, -1)).transpose(0, 1).flatten(2)
        x = self._dropout(F.relu(self.linear("classifier.1", x)))
        return cross_entropies(self.linear("classifier.4", x), labels)


class FusedLanguageModel(Fused):
    """B of clients.models.language.LanguageModel."""

    def __init__(self, models: Sequence[LanguageModel]) -> None:
        super().__init__(models)
        first = models[0]
        layers: Any = first.encoder.layers
        self._scale, self._chance, self._position = first.scale, first.dropout.p, first.position
        self._layers, self._heads = len(layers), layers[0].self_attn.num_heads

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self._chance)

    def _attend(self, name: str, x: Tensor, length: int) -> Tensor:
        """Multi-head self-attention of [B, N*T, E]; all models' heads in one call."""
        parts = self.project(f"{name}.in_proj_weight", f"{name}.in_proj_bias", x)
        parts = parts.unflatten(1, (-1, length)).unflatten(3, (3, self._heads, -1))  # [B, N, T, 3, heads, d]
        q, k, v = parts.flatten(0, 1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self._chance, is_causal=True)
        return self.linear(f"{name}.out_proj", mixed.transpose(1, 2).flatten(2).view(x.shape))

    def _layer(self, name: str, x: Tensor, length: int) -> Tensor:
        """torch.nn.TransformerEncoderLayer, norms behind."""
        x = self.layer_norm(f"{name}.norm1", x + self._drop(self._attend(f"{name}.self_attn", x, length)))
        inner = self._drop(F.relu(self.linear(f"{name}.linear1", x)))
        return self.layer_norm(f"{name}.norm2", x + self._drop(self.linear(f"{name}.linear2", inner)))

    def losses(self, *batch: Tensor) -> Tensor:
        tokens, labels = batch
        x = self._drop(self.embedding("embed", tokens) * self._scale + self._position).flatten(1, 2)
        for i in range(self._layers):
            x = self._layer(f"encoder.layers.{i}", x, tokens.shape[1])
        return cross_entropies(self.linear("decoder", x), labels.flatten())


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, N, classes] and [N] -> [B] means."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    return each.view(len(logits), -1).mean(1)


FUSED: Mapping[str, Any] = {"cnn": FusedCNN, "transformer": FusedLanguageModel}
