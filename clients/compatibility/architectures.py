"""Kinds of models, each trained by its usual loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from clients.compatibility.suite import Train, idiom
from gpumux.errors import DataDependent, LocalWrite, UnsupportedOperator

BATCHES = 4
Classify = Callable[[Tensor, Tensor], Tensor]


def _vectors() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(BATCHES)]


def _pictures(channels: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, channels, 8, 8), torch.randint(0, 4, (4,))) for _ in range(BATCHES)]


def _series() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 5, 8), torch.randint(0, 4, (4,))) for _ in range(BATCHES)]


def _tokens(length: int = 6) -> list[Tensor]:
    return [torch.randint(1, 20, (3, length)) for _ in range(BATCHES)]


def _trained(train: Train, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """The usual loop of a classifier, then its accuracy in evaluation mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(-1) == y).sum().item() for x, y in batches)
    return losses, correct, model


def _language(train: Train, model: nn.Module) -> Any:
    """The usual loop of a language model: the next token of each position."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = _tokens()

    def step(ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(ids) for ids in batches], model


class _Pooled(nn.Module):
    """A network over a series, its result at the last moment given to a head."""

    def __init__(self, net: nn.Module, width: int) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        out = out[0] if isinstance(out, tuple) else out
        logits: Tensor = self.head(out[:, -1])
        return logits


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.size(0), 12), x.new_zeros(x.size(0), 12)
        out = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
            out.append(h)
        return torch.stack(out, dim=1)


@idiom("a multilayer perceptron with dropout")
def mlp(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
    return _trained(train, model, _vectors())


@idiom("a CNN with BatchNorm2d and MaxPool2d")
def cnn(train: Train) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    return _trained(train, model, _pictures())


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        activated: Tensor = self.relu(out)
        return activated


@idiom("ResNet blocks with a downsample branch and ReLU(inplace=True)")
def resnet(train: Train) -> Any:
    model = nn.Sequential(
        _Block(3, 8, 1), _Block(8, 16, 2), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(16, 4)
    )
    return _trained(train, model, _pictures())


@idiom("nn.LSTM, two layers")
def lstm(train: Train) -> Any:
    return _trained(train, _Pooled(nn.LSTM(8, 12, num_layers=2, batch_first=True), 12), _series())


@idiom("a bidirectional nn.LSTM with dropout between the layers")
def bidirectional_lstm(train: Train) -> Any:
    net = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
    return _trained(train, _Pooled(net, 12), _series())


@idiom("nn.GRU")
def gru(train: Train) -> Any:
    return _trained(train, _Pooled(nn.GRU(8, 12, batch_first=True), 12), _series())


@idiom("a loop over nn.LSTMCell")
def lstm_cell(train: Train) -> Any:
    return _trained(train, _Pooled(_Cells(), 12), _series())


@idiom(
    "truncated backpropagation: the LSTM's hidden state carried from batch to batch, detached",
)
def carried_state(train: Train) -> Any:
    net, head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 8)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    batches = [torch.randn(4, 5, 8) for _ in range(BATCHES)]

    def step(x: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = (hidden[0].detach(), hidden[1].detach())
        out, hidden = net(x, hidden)
        loss = F.mse_loss(head(out), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, hidden

    hidden = (torch.zeros(1, 4, 12), torch.zeros(1, 4, 12))
    run = train(step, (batches[0], hidden), model=[net, head], optimizer=optimizer)
    losses = []
    for x in batches:
        loss, hidden = run(x, hidden)
        losses.append(loss)
    return losses, hidden, net, head


@idiom("truncated backpropagation by hand: a GRUCell's hidden state carried from batch to batch, detached")
def carried_state_of_a_cell(train: Train) -> Any:
    cell, head = nn.GRUCell(8, 12), nn.Linear(12, 8)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    batches = [torch.randn(4, 3, 8) for _ in range(BATCHES)]

    def step(x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        loss = torch.zeros(())
        for t in range(x.size(1) - 1):
            hidden = cell(x[:, t], hidden)
            loss = loss + F.mse_loss(head(hidden), x[:, t + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, hidden.detach()

    hidden = torch.zeros(4, 12)
    run = train(step, (batches[0], hidden), model=[cell, head], optimizer=optimizer)
    losses = []
    for x in batches:
        loss, hidden = run(x, hidden)
        losses.append(loss.item())
    return losses, hidden, cell, head


class _Packed(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.gru = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 4)
        self.packed = packed

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.packed:
            packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        else:
            out, _ = self.gru(self.embedding(ids))
        last = out[torch.arange(ids.size(0)), lengths - 1]
        logits: Tensor = self.head(last)
        return logits


def _lengths(train: Train, packed: bool) -> Any:
    model = _Packed(packed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [
        (torch.randint(1, 20, (3, 6)), torch.tensor([6, 4, 3]), torch.randint(0, 4, (3,))) for _ in range(BATCHES)
    ]

    def step(ids: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids, lengths), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch) for batch in batches], model


@idiom(
    "pack_padded_sequence around a GRU",
    refused=DataDependent,
    instead="give the padded batch to the GRU and take each sequence's result at its length: out[arange, lengths - 1]",
    changed=lambda train: _lengths(train, packed=False),
)
def packed_sequences(train: Train) -> Any:
    return _lengths(train, packed=True)


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, dim_feedforward=16, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        padding = source == 0
        out = self.transformer(
            self.embedding(source), self.embedding(target), tgt_mask=causal, src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )  # fmt: skip
        logits: Tensor = self.head(out)
        return logits


@idiom(
    "nn.Transformer with generate_square_subsequent_mask and padding masks",
)
def transformer(train: Train) -> Any:
    model = _Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
    batches = [(source, target) for source, target in zip(_tokens(5), _tokens(6), strict=True)]
    for source, _ in batches:
        source[0, 3:] = 0

    def step(source: Tensor, target: Tensor) -> Tensor:
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), target[:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(source, target) for source, target in batches], model


class _TransformerLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.triu(torch.full((ids.size(1), ids.size(1)), float("-inf")), diagonal=1)
        logits: Tensor = self.head(self.encoder(self.embedding(ids) * math.sqrt(8), mask=mask))
        return logits


@idiom(
    "nn.TransformerEncoder with a mask made in forward by torch.triu",
)
def transformer_language_model(train: Train) -> Any:
    return _language(train, _TransformerLM())


class _CachedMaskLM(_TransformerLM):
    src_mask: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.src_mask is None or self.src_mask.size(0) != ids.size(1):
            self.src_mask = torch.log(torch.tril(torch.ones(ids.size(1), ids.size(1))))
        logits: Tensor = self.head(self.encoder(self.embedding(ids) * math.sqrt(8), mask=self.src_mask))
        return logits


@idiom("nn.TransformerEncoder with a mask that is cached: if self.src_mask is None or ... (word_language_model)")
def cached_mask_language_model(train: Train) -> Any:
    return _language(train, _CachedMaskLM())


class _EncoderOverPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(ids.size(0), -1, -1), self.embedding(ids)], dim=1)
        padding = F.pad(ids == 0, (1, 0), value=False)
        logits: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])
        return logits


@idiom("nn.TransformerEncoder with src_key_padding_mask and a class token")
def encoder_over_padding(train: Train) -> Any:
    batches = [(ids, torch.randint(0, 4, (3,))) for ids in _tokens()]
    for ids, _ in batches:
        ids[0, 4:] = 0
    return _trained(train, _EncoderOverPadding(), batches)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attention(x, x, x, need_weights=True)
        return self.head(out.mean(1)), weights


@idiom("nn.MultiheadAttention with need_weights, the weights returned from the step")
def attention_weights(train: Train) -> Any:
    model = _Attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = _series()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits, weights = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, weights

    run = train(step, batches[0], model=model, optimizer=optimizer)
    results = []
    for x, y in batches:
        loss, weights = run(x, y)
        results.append((loss.item(), weights.detach().cpu().numpy().mean().item()))
    return results, model


class _GPT(nn.Module):
    """A decoder with tied embeddings, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 8), nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 20, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.size()
        x = self.wte(ids) + self.wpe(torch.arange(0, t, dtype=torch.long, device=ids.device))
        q, k, v = (part.view(b, t, 2, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).split(8, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, 8))
        logits: Tensor = self.lm_head(x)
        return logits


@idiom("scaled_dot_product_attention(is_causal=True) and tied embeddings, as in nanoGPT")
def gpt(train: Train) -> Any:
    return _language(train, _GPT())


@idiom("F.scaled_dot_product_attention with a boolean attn_mask made of the lengths")
def masked_attention(train: Train) -> Any:
    qkv, head = nn.Linear(8, 24), nn.Linear(8, 4)
    optimizer = torch.optim.Adam([*qkv.parameters(), *head.parameters()], lr=1e-2)
    batches = [(*batch, torch.randint(1, 6, (4,))) for batch in _series()]

    def step(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.size(1))[None, :] < lengths[:, None])[:, None, None, :]
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(head(out.mean(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=[qkv, head], optimizer=optimizer)
    return [run(*batch) for batch in batches], qkv, head


@idiom("rotary embeddings by complex numbers (Llama), of queries and keys that are parts of one projection")
def complex_rotary_embeddings(train: Train) -> Any:
    qkv, head = nn.Linear(8, 24), nn.Linear(8, 4)
    optimizer = torch.optim.Adam([*qkv.parameters(), *head.parameters()], lr=1e-2)
    angles = torch.outer(torch.arange(16.0), 10.0 ** -torch.linspace(0, 1, 2))
    turns = torch.polar(torch.ones_like(angles), angles)

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[: x.size(1), None]).flatten(3).type_as(x)

    def step(x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)) for part in qkv(x).split(8, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (rotated(q), rotated(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(head(out.mean(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = _series()
    run = train(step, batches[0], model=[qkv, head], optimizer=optimizer)
    return [run(*batch) for batch in batches], qkv, head


class _EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)) for part in self.qkv(x).chunk(3, dim=-1))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(0.5).softmax(dim=-1)
        out = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        logits: Tensor = self.head(out.mean(1))
        return logits


@idiom("attention by einsum")
def einsum_attention(train: Train) -> Any:
    return _trained(train, _EinsumAttention(), _series())


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 8)
        self.words = nn.EmbeddingBag(30, 8, mode="mean")

    def forward(self, item: Tensor, words: Tensor, offsets: Tensor) -> Tensor:
        score: Tensor = (self.items(item) * self.words(words, offsets)).sum(-1)
        return score


@idiom("nn.Embedding and nn.EmbeddingBag with offsets")
def embedding_bag(train: Train) -> Any:
    model = _Recommender()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    offsets = torch.tensor([0, 3, 5, 9])
    batches = [
        (torch.randint(0, 20, (4,)), torch.randint(0, 30, (12,)), offsets, torch.rand(4)) for _ in range(BATCHES)
    ]

    def step(item: Tensor, words: Tensor, offsets: Tensor, rating: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(item, words, offsets), rating)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch) for batch in batches], model


class _Tied(nn.Module):
    """A word model whose decoder shares the encoder's weight, as in torch's word_language_model example."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(20, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.decoder = nn.Linear(8, 20)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.rnn(self.encoder(ids))[0])
        return logits


@idiom("weight tying: decoder.weight = encoder.weight")
def weight_tying(train: Train) -> Any:
    return _language(train, _Tied())


@idiom("spectral_norm (torch.nn.utils.parametrizations)")
def spectral_normalization(train: Train) -> Any:
    model = nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(16, 4)))
    return _trained(train, model, _vectors())


@idiom("spectral_norm (torch.nn.utils, the older one with hooks)")
def spectral_normalization_by_hooks(train: Train) -> Any:
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.2), nn.Flatten(),
        nn.utils.spectral_norm(nn.Linear(288, 4)),
    )  # fmt: skip
    return _trained(train, model, _pictures())


@idiom("weight_norm (torch.nn.utils.parametrizations)")
def weight_normalization(train: Train) -> Any:
    model = nn.Sequential(weight_norm(nn.Linear(8, 16)), nn.Tanh(), weight_norm(nn.Linear(16, 4)))
    return _trained(train, model, _vectors())


@idiom("an orthogonal parametrization")
def orthogonal_weights(train: Train) -> Any:
    model = nn.Sequential(orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4))
    return _trained(train, model, _vectors())


@idiom("GroupNorm and InstanceNorm")
def group_norm(train: Train) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    return _trained(train, model, _pictures())


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge, self.head = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        up = self.up(two)
        if up.shape[-2:] != one.shape[-2:]:
            up = F.interpolate(up, size=one.shape[-2:], mode="bilinear", align_corners=False)
        mask: Tensor = self.head(F.relu(self.merge(torch.cat([one, up], dim=1))))
        return mask


@idiom("a U-Net with skip connections and a Dice loss")
def unet(train: Train) -> Any:
    model = _UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.randn(2, 1, 9, 9), (torch.rand(2, 1, 9, 9) > 0.5).float()) for _ in range(BATCHES)]

    def step(x: Tensor, mask: Tensor) -> Tensor:
        logits = model(x)
        soft = logits.sigmoid()
        dice = 1 - (2 * (soft * mask).sum() + 1) / (soft.sum() + mask.sum() + 1)
        loss: Tensor = F.binary_cross_entropy_with_logits(logits, mask) + dice
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, mask) for x, mask in batches], model


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        return torch.sigmoid(self.decoder(self.reparameterize(mu, logvar))), mu, logvar


@idiom("a VAE with the reparametrisation trick, sampled after each epoch")
def vae(train: Train) -> Any:
    model = _VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = [torch.rand(6, 8) for _ in range(BATCHES)]

    def step(data: Tensor) -> Tensor:
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = F.binary_cross_entropy(recon, data, reduction="sum") + kld
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    total, samples = 0.0, []
    for _ in range(2):
        for data in batches:
            total += run(data).item()
        with torch.no_grad():
            samples.append(torch.sigmoid(model.decoder(torch.randn(2, 3))))
    return total, samples, model


@idiom(
    "a VAE with torch.distributions: Normal(mu, std).rsample() and kl_divergence",
)
def vae_by_distributions(train: Train) -> Any:
    encoder, decoder = nn.Linear(8, 6), nn.Linear(3, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    batches = [torch.rand(6, 8) for _ in range(BATCHES)]

    def step(x: Tensor) -> Tensor:
        mu, logvar = encoder(x).chunk(2, dim=-1)
        posterior = torch.distributions.Normal(mu, (0.5 * logvar).exp())
        prior = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
        kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
        likelihood = torch.distributions.Normal(decoder(posterior.rsample()), 1.0).log_prob(x).sum(-1)
        loss: Tensor = (kl - likelihood).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=[encoder, decoder], optimizer=optimizer)
    return [run(x) for x in batches], encoder, decoder


def _gan() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))
    return generator, critic


@idiom("a GAN: two networks, two optimizers, labels filled with real and fake (as in DCGAN)")
def gan(train: Train) -> Any:
    generator, discriminator = _gan()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    batches = [torch.randn(6, 8) for _ in range(BATCHES)]

    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        discriminator.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        loss_real = criterion(discriminator(real).view(-1), label)
        loss_real.backward()
        fake = generator(torch.randn(real.size(0), 3))
        label.fill_(0.0)
        loss_fake = criterion(discriminator(fake.detach()).view(-1), label)
        loss_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1.0)
        loss_g = criterion(discriminator(fake).view(-1), label)
        loss_g.backward()
        optimizer_g.step()
        return loss_real + loss_fake, loss_g

    run = train(step, (batches[0],), model=[generator, discriminator], optimizer=[optimizer_g, optimizer_d])
    return [run(real) for real in batches], generator, discriminator


def _penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    alpha = torch.rand(real.size(0), 1)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(interpolates)
    (gradient,) = torch.autograd.grad(
        outputs=score, inputs=interpolates, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
    )
    penalty: Tensor = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
    return penalty


@idiom(
    "WGAN-GP: the gradient penalty at interpolates, the generator trained every second batch",
)
def wgan_gp(train: Train) -> Any:
    generator, critic = _gan()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    batches = [torch.randn(6, 8) for _ in range(6)]

    def step(i: int, real: Tensor) -> Tensor:
        optimizer_d.zero_grad()
        z = torch.randn(real.size(0), 3)
        fake = generator(z)
        loss_d: Tensor = critic(fake.detach()).mean() - critic(real).mean() + 10 * _penalty(critic, real, fake.detach())
        loss_d.backward()
        optimizer_d.step()
        if i % 2 == 0:
            optimizer_g.zero_grad()
            loss_g = -critic(generator(z)).mean()
            loss_g.backward()
            optimizer_g.step()
        return loss_d

    run = train(step, (0, batches[0]), model=[generator, critic], optimizer=[optimizer_g, optimizer_d])
    return [run(i, real) for i, real in enumerate(batches)], generator, critic


def _wgan_in_one_step(train: Train) -> Any:
    generator, critic = _gan()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    batches = [torch.randn(6, 8) for _ in range(6)]

    def step(real: Tensor, both: bool) -> Tensor:
        fake = generator(torch.randn(real.size(0), 3)).detach()
        loss: Tensor = critic(fake).mean() - critic(real).mean() + 10 * _penalty(critic, real, fake)
        optimizer_d.zero_grad()
        loss.backward()
        optimizer_d.step()
        if both:
            optimizer_g.zero_grad()
            (-critic(generator(torch.randn(6, 3))).mean()).backward()
            optimizer_g.step()
        return loss

    run = train(step, (batches[0], True), model=[generator, critic], optimizer=[optimizer_g, optimizer_d])
    return [run(real, i % 2 == 0) for i, real in enumerate(batches)], generator, critic


@idiom("WGAN-GP as two steps: the critic's and the generator's, each submitted by itself", refused=LocalWrite,
       instead="one job for both: job.add(the generator's step), or one step for both with a flag",
       changed=_wgan_in_one_step)  # fmt: skip
def wgan_as_two_steps(train: Train) -> Any:
    generator, critic = _gan()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    batches = [torch.randn(6, 8) for _ in range(6)]

    def train_critic(real: Tensor) -> Tensor:
        fake = generator(torch.randn(real.size(0), 3)).detach()
        loss: Tensor = critic(fake).mean() - critic(real).mean() + 10 * _penalty(critic, real, fake)
        optimizer_d.zero_grad()
        loss.backward()
        optimizer_d.step()
        return loss

    def train_generator(z: Tensor) -> Tensor:
        loss: Tensor = -critic(generator(z)).mean()
        optimizer_g.zero_grad()
        loss.backward()
        optimizer_g.step()
        return loss

    networks, optimizers = [generator, critic], [optimizer_g, optimizer_d]
    run_critic = train(train_critic, (batches[0],), model=networks, optimizer=optimizers)
    run_generator = train(train_generator, (torch.randn(6, 3),), model=networks, optimizer=optimizers)
    losses = []
    for i, real in enumerate(batches):
        losses.append(run_critic(real))
        if i % 2 == 0:
            losses.append(run_generator(torch.randn(6, 3)))
    return losses, generator, critic


@idiom("triplets: nn.TripletMarginLoss over one shared network")
def triplets(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.TripletMarginLoss(margin=1.0)
    batches = [(torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8)) for _ in range(BATCHES)]

    def step(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(anchor), model(positive), model(negative))
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch) for batch in batches], model


@idiom("a contrastive loss over all other rows: (z @ z.t())[~torch.eye(n, dtype=torch.bool)].view(n, -1)")
def all_others(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.randn(6, 8), torch.randint(0, 5, (6,))) for _ in range(BATCHES)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=1)
        loss = F.cross_entropy((z @ z.t())[~torch.eye(len(z), dtype=torch.bool)].view(len(z), -1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


class _Crops(nn.Module):
    """DINO's wrapper: crops of one size go through the backbone together."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(6, 4)
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, x: list[Tensor]) -> Tensor:
        sizes = torch.tensor([crop.shape[-1] for crop in x])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, output = 0, torch.empty(0)
        for end in ends:
            output = torch.cat((output, self.backbone(torch.cat(x[start:end]))))
            start = end
        out: Tensor = self.head(output)
        return out


@idiom("DINO: crops of several sizes, a teacher that follows the student, a center in a buffer")
def dino(train: Train) -> Any:
    student, teacher = _Crops(), _Crops()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    sizes = (10, 10, 6, 6, 6)
    batches = [[torch.randn(2, 3, size, size) for size in sizes] for _ in range(BATCHES)]

    def step(crops: list[Tensor]) -> Tensor:
        target = teacher(crops[:2])
        chosen = F.softmax((target - teacher.center) / 0.04, dim=-1).chunk(2)
        outputs = (student(crops) / 0.1).chunk(len(crops))
        losses = [
            torch.sum(-q * F.log_softmax(out, dim=-1), dim=-1).mean()
            for i, q in enumerate(chosen)
            for k, out in enumerate(outputs)
            if k != i
        ]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            teacher.center = teacher.center * 0.9 + target.mean(0, keepdim=True) * 0.1
            for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                q.data.mul_(0.99).add_(0.01 * p.detach().data)
        return loss

    run = train(step, (batches[0],), model=(student, teacher), optimizer=optimizer)
    return [run(crops) for crops in batches], student


@idiom("a siamese network with the contrastive loss of SimCLR (NT-Xent)")
def simclr(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(BATCHES)]

    def step(one: Tensor, other: Tensor) -> Tensor:
        z = F.normalize(model(torch.cat([one, other])), dim=1)
        similarity = z @ z.t() / 0.5
        similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        target = torch.arange(len(z)).roll(len(one))
        loss = F.cross_entropy(similarity, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(one, other) for one, other in batches], model


class _Experts(nn.Module):
    """A mixture of experts; the router is soft, takes the two best by masks, or indexes each expert's tokens."""

    def __init__(self, routing: str) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        if self.routing == "soft":
            return torch.stack([expert(x) for expert in self.experts], -1).mul(weights.unsqueeze(1)).sum(-1)
        best, chosen = weights.topk(2, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        out = x.new_zeros(x.size(0), 4)
        for number, expert in enumerate(self.experts):
            if self.routing == "masks":
                out = out + expert(x) * (best * (chosen == number)).sum(-1, keepdim=True)
            else:
                row, slot = torch.where(chosen == number)
                out.index_add_(0, row, expert(x[row]) * best[row, slot, None])
        return out


@idiom("a mixture of experts with soft routing")
def soft_experts(train: Train) -> Any:
    return _trained(train, _Experts("soft"), _vectors())


@idiom("a mixture of experts, top-k routing by masks")
def masked_experts(train: Train) -> Any:
    return _trained(train, _Experts("masks"), _vectors())


@idiom(
    "a mixture of experts, each given its tokens by torch.where (as in Mixtral)",
    refused=DataDependent,
    instead="give each expert all tokens and multiply by its weight, which is 0 where it is not chosen",
    changed=lambda train: _trained(train, _Experts("masks"), _vectors()),
)
def indexed_experts(train: Train) -> Any:
    return _trained(train, _Experts("index"), _vectors())


def _graph(add: Callable[[Tensor, Tensor, Tensor], Tensor], train: Train) -> Any:
    """The usual loop over one graph: the whole graph in each step, the loss at the nodes for training."""
    first, second = nn.Linear(8, 12), nn.Linear(12, 4)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2, weight_decay=5e-4)
    x, edges, y = torch.randn(10, 8), torch.randint(0, 10, (2, 30)), torch.randint(0, 4, (10,))
    labelled = torch.randperm(10)[:5]

    def convolve(x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = add(torch.ones(x.size(0), 1), target, torch.ones(edges.size(1), 1))
        return add(x, target, x[source]) / degree

    def step(x: Tensor, edges: Tensor, y: Tensor, labelled: Tensor) -> Tensor:
        hidden = F.relu(convolve(first(x), edges))
        logits = convolve(second(F.dropout(hidden, 0.5)), edges)
        loss = F.cross_entropy(logits[labelled], y[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (x, edges, y, labelled), model=[first, second], optimizer=optimizer)
    return [run(x, edges, y, labelled).item() for _ in range(5)], first, second


@idiom("a graph convolution by index_add")
def graph_by_index_add(train: Train) -> Any:
    return _graph(lambda out, index, source: out.index_add(0, index, source), train)


@idiom("a graph convolution by scatter_add")
def graph_by_scatter_add(train: Train) -> Any:
    return _graph(lambda out, index, source: out.scatter_add(0, index.unsqueeze(1).expand_as(source), source), train)


@idiom(
    "a distribution projected onto atoms (Rainbow): lower[(upper > 0) * (lower == upper)] -= 1, m.view(-1).index_add_"
)
def atoms(train: Train) -> Any:
    model = nn.Linear(6, 11)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    support = torch.linspace(-5.0, 5.0, 11)
    states, returns = torch.randn(5, 8, 6), torch.randn(5, 8, 1).round()

    def step(state: Tensor, reward: Tensor) -> Tensor:
        with torch.no_grad():
            following = model(state.flip(0)).softmax(1)
            b = (reward + 0.5 * support).clamp(-5.0, 5.0) + 5.0
            lower, upper = b.floor().to(torch.int64), b.ceil().to(torch.int64)
            lower[(upper > 0) * (lower == upper)] -= 1
            upper[(lower < 10) * (lower == upper)] += 1
            m = state.new_zeros(len(state), 11)
            offset = torch.arange(len(state)).unsqueeze(1) * 11
            m.view(-1).index_add_(0, (lower + offset).view(-1), (following * (upper.float() - b)).view(-1))
            m.view(-1).index_add_(0, (upper + offset).view(-1), (following * (b - lower.float())).view(-1))
        loss: Tensor = -(m * model(state).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (states[0], returns[0]), model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in zip(states, returns, strict=True)], model, optimizer


@idiom("farthest points and the points around them (PointNet++): distance[mask] = dist[mask]")
def farthest_points(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    clouds, labels = torch.randn(5, 4, 24, 3), torch.randint(0, 8, (5, 4))

    def farthest(points: Tensor, count: int) -> Tensor:
        rows = torch.arange(len(points))
        centroids = torch.zeros(len(points), count, dtype=torch.long)
        distance = torch.ones(points.shape[:2]) * 1e10
        found = torch.randint(0, points.size(1), (len(points),), dtype=torch.long)
        for i in range(count):
            centroids[:, i] = found
            dist = torch.sum((points - points[rows, found, :].view(-1, 1, 3)) ** 2, -1)
            mask = dist < distance
            distance[mask] = dist[mask]
            found = torch.max(distance, -1)[1]
        return points[rows[:, None], centroids]

    def around(points: Tensor, centers: Tensor, radius: float, count: int) -> Tensor:
        n = points.size(1)
        group = torch.arange(n).repeat(len(points), centers.size(1), 1)
        group[torch.cdist(centers, points) > radius] = n
        group = group.sort(dim=-1)[0][:, :, :count]
        first = group[:, :, :1].repeat(1, 1, count)
        mask = group == n
        group[mask] = first[mask]
        return points[torch.arange(len(points))[:, None, None], group] - centers[:, :, None]

    def step(points: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        features = model(around(points, farthest(points, 6), 1.0, 5)).amax((1, 2))
        loss = F.cross_entropy(features, y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (clouds[0], labels[0]), model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in zip(clouds, labels, strict=True)], model


@idiom("a graph convolution by torch.sparse.mm with an adjacency made of the edges", refused=UnsupportedOperator,
       instead="sum over the edges: out.index_add(0, target, x[source])", changed=graph_by_index_add)  # fmt: skip
def graph_by_sparse(train: Train) -> Any:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, edges, y = torch.randn(10, 8), torch.randint(0, 10, (2, 30)), torch.randint(0, 4, (10,))

    def step(x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.size(1)), (10, 10), check_invariants=False)
        loss = F.cross_entropy(torch.sparse.mm(adjacency, model(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (x, edges, y), model=model, optimizer=optimizer)
    return [run(x, edges, y).item() for _ in range(5)], model


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


@idiom("blocks under torch.utils.checkpoint.checkpoint(use_reentrant=False), with dropout")
def checkpointed(train: Train) -> Any:
    return _trained(train, _Checkpointed(), _vectors())


class _CheckpointedOldWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=True) if self.training else self.blocks(x)
        logits: Tensor = self.head(x)
        return logits


@idiom("checkpoint_sequential(use_reentrant=True)")
def checkpointed_reentrant(train: Train) -> Any:
    return _trained(train, _CheckpointedOldWay(), _vectors())


class _Hypernetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(8, 4)
        self.hyper = nn.Linear(5, 8 * 4 + 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.hyper(x[:, :5].mean(0))
        weights = {"weight": made[:32].view(4, 8), "bias": made[32:]}
        logits: Tensor = functional_call(self.main, weights, (x,))
        return logits


@idiom("a hypernetwork: torch.func.functional_call with generated weights")
def hypernetwork(train: Train) -> Any:
    model = _Hypernetwork()
    model.main.requires_grad_(False)
    return _trained(train, model, _vectors())


@idiom("MAML: an inner step by autograd.grad(create_graph=True), the outer loss through functional_call")
def maml(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(*support, *query) for support, query in zip(_vectors(), _vectors(), strict=True)]

    def step(x_support: Tensor, y_support: Tensor, x_query: Tensor, y_query: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(functional_call(model, weights, (x_support,)), y_support)
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        loss = F.cross_entropy(functional_call(model, weights, (x_query,)), y_query)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch) for batch in batches], model


@idiom("Reptile: a deepcopy of the model trained in the step by an SGD of its own")
def reptile(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batches = _vectors()

    def step(x: Tensor, y: Tensor) -> Tensor:
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            loss = F.cross_entropy(fast(x), y)
            loss.backward()
            inner.step()
        with torch.no_grad():
            for slow, new in zip(model.parameters(), fast.parameters(), strict=True):
                slow.add_(new - slow, alpha=0.5)
        return loss

    run = train(step, batches[0], model=model)
    return [run(x, y) for x, y in batches], model


@idiom("an autoencoder with ConvTranspose2d")
def convolutional_autoencoder(train: Train) -> Any:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(4, 8, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, stride=2), nn.Sigmoid(),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [torch.rand(4, 1, 8, 8) for _ in range(BATCHES)]

    def step(image: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        output = model(image + 0.1 * torch.randn_like(image))
        loss = F.mse_loss(output, image)
        loss.backward()
        optimizer.step()
        return loss, output

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(image) for image in batches], model


@idiom("super resolution with PixelShuffle, the PSNR printed")
def pixel_shuffle(train: Train) -> Any:
    model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.Tanh(), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(F.avg_pool2d(image, 2), image) for image in torch.rand(BATCHES, 2, 1, 8, 8)]

    def step(small: Tensor, large: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(small), large)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [10 * math.log10(1 / run(small, large).item()) for small, large in batches], model


@idiom("Conv1d, dilated, over a signal")
def conv1d(train: Train) -> Any:
    model = nn.Sequential(
        nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=2, dilation=2), nn.ReLU(),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return _trained(train, model, [(torch.randn(4, 2, 16), torch.randint(0, 4, (4,))) for _ in range(BATCHES)])


@idiom("Conv3d with BatchNorm3d over a clip")
def conv3d(train: Train) -> Any:
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(32, 4)
    )
    return _trained(train, model, [(torch.randn(3, 1, 4, 4, 4), torch.randint(0, 4, (3,))) for _ in range(BATCHES)])


class _WithAuxiliaryLoss(nn.Module):
    def __init__(self, first: float | None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.aux_loss: Tensor | float | None = first

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).relu()
        self.aux_loss = hidden.pow(2).mean()
        logits: Tensor = self.head(hidden)
        return logits


def _auxiliary(train: Train, first: float | None) -> Any:
    model = _WithAuxiliaryLoss(first)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = _vectors()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        assert model.aux_loss is not None
        loss = loss + 0.1 * model.aux_loss
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("an auxiliary loss that forward leaves on the module, None at first: loss + 0.1 * model.aux_loss")
def auxiliary_loss(train: Train) -> Any:
    return _auxiliary(train, None)


@idiom("an auxiliary loss that forward leaves on the module, 0.0 at first")
def auxiliary_loss_from_zero(train: Train) -> Any:
    return _auxiliary(train, 0.0)


@idiom("features taken by a forward hook and used in the loss")
def forward_hook(train: Train) -> Any:
    body = nn.Linear(8, 16)
    model = nn.Sequential(body, nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    features: dict[str, Tensor] = {}
    body.register_forward_hook(lambda module, args, out: features.update(body=out))
    batches = _vectors()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.1 * features["body"].pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


class _ShiftedWindows(nn.Module):
    """Attention within windows of 4 x 4, shifted by two, with a bias by relative position."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.window, self.heads = 4, 2
        self.table = nn.Parameter(torch.zeros((2 * self.window - 1) ** 2, self.heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        coordinates = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        relative = (coordinates[:, :, None] - coordinates[:, None, :]).permute(1, 2, 0).contiguous()
        relative += self.window - 1
        relative[:, :, 0] *= 2 * self.window - 1
        self.register_buffer("index", relative.sum(-1))
        self.stem, self.norm = nn.Conv2d(3, 16, 1), nn.LayerNorm(16)
        self.qkv, self.proj, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1))
        batch, height, width, channels = x.shape
        shifted = torch.roll(x, shifts=(-2, -2), dims=(1, 2))
        windows = shifted.view(batch, height // 4, 4, width // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        windows = windows.reshape(-1, 16, channels)
        q, k, v = self.qkv(windows).reshape(-1, 16, 3, self.heads, 8).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(16, 16, -1).permute(2, 0, 1).contiguous()
        attention = (q * 8**-0.5 @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1)
        mixed = self.proj((attention @ v).transpose(1, 2).reshape(-1, 16, channels))
        mixed = mixed.view(batch, height // 4, width // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(mixed.reshape(batch, height, width, channels), shifts=(2, 2), dims=(1, 2))
        out: Tensor = self.head(x.mean((1, 2)))
        return out


@idiom("Swin's windows, shifted by torch.roll, with a table of relative positions looked up by an index in a buffer")
def shifted_windows(train: Train) -> Any:
    return _trained(train, _ShiftedWindows(), _pictures())


class _EdgeConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(2, 1)  # channels, points
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        squares = torch.sum(x**2, dim=1, keepdim=True)
        index = (-squares - inner - squares.transpose(2, 1)).topk(k=3, dim=-1)[1]
        batch, channels, points = x.size()
        index = (index + torch.arange(0, batch, device=x.device).view(-1, 1, 1) * points).view(-1)
        x = x.transpose(2, 1).contiguous()
        near = x.view(batch * points, -1)[index, :].view(batch, points, 3, channels)
        x = x.view(batch, points, 1, channels).repeat(1, 1, 3, 1)
        x = self.edge(torch.cat((near - x, x), dim=3).permute(0, 3, 1, 2).contiguous()).max(dim=-1)[0]
        x = torch.cat((F.adaptive_max_pool1d(x, 1).view(batch, -1), F.adaptive_avg_pool1d(x, 1).view(batch, -1)), 1)
        out: Tensor = self.head(x)
        return out


@idiom("a graph of the nearest points, made in forward by topk and looked up by its indices (DGCNN)")
def nearest_points(train: Train) -> Any:
    return _trained(train, _EdgeConvolution(), _series())


class _Retention(nn.Module):
    decay: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 16), nn.GroupNorm(2, 2)
        self.q, self.k, self.v, self.gate = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.head = nn.Linear(16, 20)
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(2, dtype=torch.float))))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        length = ids.size(1)
        index = torch.arange(length).to(self.decay)
        mask = torch.tril(torch.ones(length, length).to(self.decay))
        mask = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), float("inf"))
        mask = torch.nan_to_num(torch.exp(mask * self.decay[:, None, None]))
        mask = mask / mask.sum(dim=-1, keepdim=True).sqrt()
        q, k, v = (each(x).view(*ids.shape, 2, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = q @ k.transpose(-1, -2) * 8**-0.5 * mask
        weights = weights / weights.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1)
        mixed = self.norm((weights @ v).transpose(1, 2).reshape(-1, 2, 8)).reshape(*ids.shape, 16)
        out: Tensor = self.head(x + F.silu(self.gate(x)) * mixed)
        return out


@idiom("retention with a decay by distance, its mask made in forward (RetNet)")
def retention(train: Train) -> Any:
    return _language(train, _Retention())


class _AngularMargin(nn.Module):
    """ArcFace's head, which takes the labels, behind a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(8, 8), nn.Parameter(torch.empty(4, 8))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.m = 8.0, 0.5

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(0, 1))
        phi = cosine * math.cos(self.m) - sine * math.sin(self.m)
        phi = torch.where(cosine > math.cos(math.pi - self.m), phi, cosine - math.sin(math.pi - self.m) * self.m)
        one_hot = torch.zeros(cosine.size(), device=x.device)
        one_hot.scatter_(1, label.view(-1, 1).long(), 1)
        out: Tensor = ((one_hot * phi) + ((1.0 - one_hot) * cosine)) * self.s
        return out


@idiom("an angular margin: torch.where over cosines, a one-hot of the labels by scatter_ (ArcFace)")
def angular_margin(train: Train) -> Any:
    model = _AngularMargin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x, y), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    batches = _vectors()
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


class _FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fields = nn.Embedding(20, 1), nn.Embedding(20, 4)
        self.deep = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        each = self.fields(ids)
        pairs = 0.5 * (each.sum(1).pow(2) - each.pow(2).sum(1)).sum(1, keepdim=True)
        out: Tensor = (self.first(ids).sum(1) + pairs + self.deep(each.flatten(1))).squeeze(1)
        return out


@idiom("a factorization machine beside a deep network, L2 of its embeddings in the loss (DeepFM)")
def factorization_machine(train: Train) -> Any:
    model = _FactorizationMachine()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def step(ids: Tensor, clicked: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        scores = model(ids)
        loss = F.binary_cross_entropy_with_logits(scores, clicked)
        total = loss + sum(
            1e-3 * torch.sum(torch.square(w)) for name, w in model.named_parameters() if "deep" not in name
        )
        total.backward()
        optimizer.step()
        return loss, scores

    batches = [(ids, (ids.sum(1) % 2).float()) for ids in _tokens()]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [(loss.item(), scores.sigmoid()) for loss, scores in (run(*batch) for batch in batches)], model


class _GatedConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Sequential(nn.ReLU(), nn.Conv1d(8, 20, 1))
        self.filters = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.rest, self.skip = (nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        skips: Any = 0
        for i, (each, rest, skip) in enumerate(zip(self.filters, self.rest, self.skip, strict=True)):
            left, right = each(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            gated = torch.tanh(left) * torch.sigmoid(right)
            skips = skip(gated) + skips
            x = (rest(gated) + x) * math.sqrt(0.5)
        out: Tensor = self.head(skips).transpose(1, 2)
        return out


@idiom("gated dilated convolutions of the past alone, whose skips are summed (WaveNet)")
def gated_convolutions(train: Train) -> Any:
    return _language(train, _GatedConvolutions())


class _GatedResiduals(nn.Module):
    """A gated residual network with a context, and a choice among the inputs (Temporal Fusion Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.context = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second, self.gate, self.norm = nn.Linear(8, 8), nn.Linear(8, 16), nn.LayerNorm(8)
        self.weights, self.head = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        static = x.mean(1)
        chosen = F.softmax(self.weights(static), dim=-1).unsqueeze(-1)
        inner = self.second(F.elu(self.first(x) + self.context(static).unsqueeze(1)))
        x = self.norm(x + F.glu(self.gate(F.dropout(inner, 0.1, self.training)), dim=-1))
        out: Tensor = self.head((x * chosen).sum(1))
        return out


@idiom("gated residuals, a choice among the inputs, and a quantile loss by torch.max (Temporal Fusion Transformer)")
def quantile_loss(train: Train) -> Any:
    model, quantiles = _GatedResiduals(), (0.1, 0.5, 0.9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = model(x)
        losses = []
        for i, q in enumerate(quantiles):
            errors = target - found[:, i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
        loss = torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    batches = [(x, y.float()) for x, y in _series()]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch).item() for batch in batches], model


class _MaskedConvolution(nn.Conv2d):
    mask: Tensor

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after, 3, padding=1)
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 1:], mask[:, :, 2] = 0, 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        out: Tensor = super().forward(x)
        return out


@idiom("convolutions masked by weight.data *= mask, with a mixture of discretised logistics as the loss (PixelCNN++)")
def masked_convolutions(train: Train) -> Any:
    model = nn.Sequential(_MaskedConvolution(1, 8), nn.ELU(), nn.Conv2d(8, 9, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(x: Tensor, out: Tensor) -> Tensor:
        logits, means, scales = out.permute(0, 2, 3, 1).chunk(3, dim=-1)
        scales = torch.clamp(scales, min=-7.0)
        centered, inverse = x.squeeze(1).unsqueeze(-1) - means, torch.exp(-scales)
        above, below = inverse * (centered + 1 / 255), inverse * (centered - 1 / 255)
        delta, middle = torch.sigmoid(above) - torch.sigmoid(below), inverse * centered
        dense = middle - scales - 2.0 * F.softplus(middle) - math.log(127.5)
        inner = (delta > 1e-5).float()
        log_probs = inner * torch.log(torch.clamp(delta, min=1e-12)) + (1.0 - inner) * dense
        edge = (x.squeeze(1).unsqueeze(-1) < -0.999).float()
        log_probs = edge * (above - F.softplus(above)) + (1.0 - edge) * log_probs
        return -torch.logsumexp(log_probs + F.log_softmax(logits, dim=-1), dim=-1).sum()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, model(x))
        loss.backward()
        optimizer.step()
        return loss

    batches = [torch.tanh(x) for x, _ in _pictures(1)]
    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(x).item() for x in batches], model
