"""Tensors that a step meets and that were not given in `model=`, and tensors kept beside the parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from clients.compatibility.suite import Train, idiom
from gpumux.errors import CaptureError, DataDependent, LocalWrite, StaleState

BATCHES = 6
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
CAUSAL = torch.tril(torch.ones(6, 6, dtype=torch.bool))


def _mlp(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def _classifier() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _batches(count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(count)]


def _supervised(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@idiom("class weights in a closure: F.cross_entropy(..., weight=weights)")
def class_weights(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    weights = 1.0 / torch.tensor([40.0, 10.0, 25.0, 25.0])

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, weight=weights)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("a criterion with weights: nn.CrossEntropyLoss(weight=...), nn.BCEWithLogitsLoss(pos_weight=...)")
def criterion_with_weights(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.4, 0.2, 0.3]))
    binary = nn.BCEWithLogitsLoss(pos_weight=torch.full((4,), 3.0))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(x)
        loss: Tensor = criterion(logits, y) + binary(logits, F.one_hot(y, 4).float())
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("a frozen teacher that is not in model=")
def frozen_teacher(train: Train) -> Any:
    model, optimizer = _classifier()
    teacher = _mlp().eval()
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        logits = model(x)
        loss = F.cross_entropy(logits, y) + F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model, teacher


@idiom("a perceptual loss: a frozen network with requires_grad_(False) in the criterion")
def perceptual_loss(train: Train) -> Any:
    model = nn.Conv2d(3, 3, 3, padding=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    for parameter in features.parameters():
        parameter.requires_grad_(False)
    images = [torch.rand(4, 3, 8, 8) for _ in range(BATCHES)]

    def step(image: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.l1_loss(features(model(image)), features(image))
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (images[0],), model=model, optimizer=optimizer)
    return [run(image) for image in images], model


@idiom("a causal mask in a global")
def global_mask(train: Train) -> Any:
    model = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 8)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [torch.randn(3, 6, 8) for _ in range(BATCHES)]

    def step(x: Tensor) -> Tensor:
        q, k, v = model[0](x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(~CAUSAL, float("-inf"))
        loss = F.mse_loss(model[1](scores.softmax(-1) @ v)[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(x) for x in batches], model


class _Scaled(nn.Module):
    """A module with a plain tensor among its attributes, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()
        self.scale = torch.linspace(0.5, 1.5, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x * self.scale)
        return logits


@idiom("a plain tensor attribute on a module (self.scale = torch.tensor(...), not a buffer)")
def plain_attribute(train: Train) -> Any:
    model = _Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model, model.scale


@idiom("a plain tensor attribute on a module, changed between epochs")
def plain_attribute_changed(train: Train) -> Any:
    model = _Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(2):
        losses += [run(x, y) for x, y in batches]
        model.scale = model.scale * 0.5 if epoch == 0 else model.scale
    return losses, model, model.scale


@idiom("class weights in a closure, written in place between epochs")
def weights_written(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    weights = torch.ones(4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, weight=weights)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for _ in range(3):
        losses += [run(x, y) for x, y in batches]
        weights[0] *= 0.5
        weights.div_(weights.mean())
    return losses, weights, model


@idiom("an EMA copy by copy.deepcopy, updated in the step")
def ema_by_deepcopy(train: Train) -> Any:
    model, optimizer = _classifier()
    ema = copy.deepcopy(model)
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.mul_(0.99).add_(parameter, alpha=0.01)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    ema.eval()
    with torch.no_grad():
        accuracy = (ema(batches[0][0]).argmax(-1) == batches[0][1]).float().mean().item()
    return losses, accuracy, model, ema


@idiom("an EMA as a dict of tensors: shadow[name] = decay * shadow[name] + (1 - decay) * p.data")
def ema_in_a_dict(train: Train) -> Any:
    model, optimizer = _classifier()
    shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            shadow[name] = 0.99 * shadow[name] + 0.01 * parameter.data
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model, shadow


@idiom("an EMA with torch.optim.swa_utils.AveragedModel, update_parameters in the step")
def averaged_model(train: Train) -> Any:
    model, optimizer = _classifier()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model, ema


@idiom("SWA: AveragedModel.update_parameters, SWALR and update_bn between epochs")
def stochastic_weight_averaging(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.05)
    batches = _batches(3)
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for _ in range(3):
        losses += [run(x, y) for x, y in batches]
        swa.update_parameters(model)
        scheduler.step()
    update_bn([x for x, _ in batches], swa)
    return losses, model, swa


def _autoencoder(train: Train, model: nn.Module, lengths: Sequence[int] = (6,)) -> Any:
    """Losses of a loop in which a model of sequences learns its input, and the model. The batches have these lengths in
    turn."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [torch.randn(3, lengths[index % len(lengths)], 8) for index in range(BATCHES)]

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(x) for x in batches], model


class _LazyPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pe: Tensor | None = None
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.pe is None or self.pe.size(0) < x.size(1):
            position = torch.arange(x.size(1)).unsqueeze(1)
            rate = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
            self.pe = torch.zeros(x.size(1), 8)
            self.pe[:, 0::2] = torch.sin(position * rate)
            self.pe[:, 1::2] = torch.cos(position * rate)
        out: Tensor = self.head(x + self.pe[: x.size(1)])
        return out


@idiom("a positional encoding cached lazily: if self.pe is None")
def lazy_positions(train: Train) -> Any:
    return _autoencoder(train, _LazyPositions())


class _LazyRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rope: tuple[Tensor, Tensor] | None = None
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.rope is None:
            rate = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8)).repeat(2)
            angles = torch.arange(x.size(1)).unsqueeze(1) * rate
            self.rope = (angles.cos(), angles.sin())
        cos, sin = self.rope
        first, second = x.chunk(2, -1)
        out: Tensor = self.head(x * cos + torch.cat((-second, first), -1) * sin)
        return out


@idiom("cosines and sines cached lazily in a tuple: if self.rope is None: self.rope = (cos, sin) (lit-gpt)")
def lazy_rotary(train: Train) -> Any:
    return _autoencoder(train, _LazyRotary())


class _LazyMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.masks: dict[int, Tensor] = {}

    def mask(self, length: int) -> Tensor:
        if length not in self.masks:
            self.masks[length] = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        return self.masks[length]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(8) + self.mask(x.size(1))
        out: Tensor = scores.softmax(-1) @ v
        return out


@idiom("causal masks cached lazily, one for each length")
def lazy_masks(train: Train) -> Any:
    return _autoencoder(train, _LazyMask(), (4, 5, 6))


class _Queue(nn.Module):
    """An encoder with a queue of keys, as in MoCo."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _mlp()
        self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))


def _queue(train: Train, enqueue: Callable[[_Queue, Tensor], None]) -> Any:
    model = _Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(BATCHES)]

    def step(query: Tensor, key: Tensor) -> Tensor:
        q = F.normalize(model.encoder(query), dim=1)
        with torch.no_grad():
            k = F.normalize(model.encoder(key), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, model.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        enqueue(model, k)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(query, key) for query, key in batches], model


@torch.no_grad()
def _enqueue_by_a_tensor(model: _Queue, keys: Tensor) -> None:
    model.queue.index_copy_(1, (model.pointer + torch.arange(4)) % 12, keys.T)
    model.pointer.add_(4).remainder_(12)


@torch.no_grad()
def _enqueue(model: _Queue, keys: Tensor) -> None:
    pointer = int(model.pointer)
    model.queue[:, pointer : pointer + 4] = keys.T
    model.pointer[0] = (pointer + 4) % 12


@idiom("a queue of negatives in a buffer, written at a pointer that is a tensor: queue.index_copy_(1, index, keys.T)")
def queue_with_a_tensor(train: Train) -> Any:
    return _queue(train, _enqueue_by_a_tensor)


@idiom("a queue of negatives in a buffer, its pointer read by int(self.pointer) (MoCo as published)")
def queue_with_pointer(train: Train) -> Any:
    return _queue(train, _enqueue)


@idiom("a memory bank buffer, written by index in the step (instance discrimination)")
def memory_bank(train: Train) -> Any:
    model, optimizer = _classifier()
    bank = F.normalize(torch.randn(20, 4), dim=1)
    batches = [(torch.randn(4, 8), torch.randperm(20)[:4]) for _ in range(BATCHES)]

    def step(x: Tensor, index: Tensor) -> Tensor:
        features = F.normalize(model(x), dim=1)
        loss = F.cross_entropy(features @ bank.t() / 0.1, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            bank[index] = F.normalize(0.5 * bank[index] + 0.5 * features, dim=1)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, index) for x, index in batches], model, bank


@idiom("a running mean of the loss in a tensor outside: running.mul_(0.9).add_(0.1 * loss.detach())")
def running_mean(train: Train) -> Any:
    model, optimizer = _classifier()
    running = torch.zeros(())
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        running.mul_(0.9).add_(0.1 * loss.detach())
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    lines = []
    for x, y in batches:
        run(x, y)
        lines.append(f"{running.item():.4f}")
    return lines, running, model


@idiom("the running loss as a tensor bound anew in the step: nonlocal total; total = total + loss.detach()")
def running_sum_rebound(train: Train) -> Any:
    model, optimizer = _classifier()
    total = torch.zeros(())
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal total
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total = total + loss.detach()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    for x, y in batches:
        run(x, y)
    return total / len(batches), model


@idiom("a filter bank and a window put into dictionaries anew at every step, for a spectral loss (HiFi-GAN)")
def spectral_loss(train: Train) -> Any:
    model = nn.Linear(8, 32)
    optimizer = torch.optim.Adam(model.parameters())
    basis: dict[Any, Tensor] = {}
    window: dict[str, Tensor] = {}

    def mel(y: Tensor) -> Tensor:
        if 8000 not in basis:  # never is: its keys are texts
            basis[f"8000_{y.device}"] = torch.from_numpy(np.linspace(0, 1, 5 * 9, dtype=np.float32).reshape(5, 9))
            window[str(y.device)] = torch.hann_window(16).to(y.device)
        found = torch.stft(y, 16, hop_length=4, window=window[str(y.device)], center=False, return_complex=True)
        return torch.log(torch.clamp(basis[f"8000_{y.device}"] @ found.abs(), min=1e-5))

    batches = _batches()

    def step(x: Tensor) -> Tensor:
        loss = F.l1_loss(mel(model(x)), mel(x.repeat(1, 4)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0][0],), model=model, optimizer=optimizer)
    return [run(x) for x, _ in batches], model


@idiom("a coefficient that is learned and used as a tensor: alpha = log_alpha.exp().detach(), bound anew (SAC)")
def tuned_coefficient(train: Train) -> Any:
    model, optimizer = _classifier()
    log_alpha = torch.zeros(1, requires_grad=True)
    of_alpha = torch.optim.Adam([log_alpha], lr=1e-2)
    alpha = log_alpha.exp().detach()
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal alpha
        log_p = F.log_softmax(model(x), dim=1)
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        loss = F.nll_loss(log_p, y) - (alpha * entropy).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        of_alpha.zero_grad()
        (log_alpha.exp() * (entropy.detach() - 1.0)).mean().backward()
        of_alpha.step()
        alpha = log_alpha.exp().detach()
        return loss, alpha.clone()

    run = train(step, batches[0], model=model, optimizer=[optimizer, of_alpha])
    return [run(x, y) for x, y in batches], model, of_alpha


def _lazy_penalty(train: Train, *, in_place: bool) -> Any:
    model, optimizer = _classifier()
    last = torch.zeros(())
    batches = _batches()

    def step(x: Tensor, y: Tensor, regularize: bool) -> tuple[Tensor, Tensor]:
        nonlocal last
        loss = F.cross_entropy(model(x), y)
        if regularize:
            penalty = model(x).pow(2).mean()
            loss = loss + 0.1 * penalty
            if in_place:
                last.copy_(penalty.detach())
            else:
                last = penalty.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, last.clone()

    run = train(step, (*batches[0], True), model=model, optimizer=optimizer)
    return [run(x, y, i % 2 == 0) for i, (x, y) in enumerate(batches)], model


def lazy_penalty_in_place(train: Train) -> Any:
    return _lazy_penalty(train, in_place=True)


@idiom(
    "a penalty in every other step, its last value returned by all: if regularize: last = penalty.detach() (StyleGAN2)",
    refused=StaleState,
    instead="write it in place, last.copy_(penalty.detach())",
    changed=lazy_penalty_in_place,
)
def lazy_penalty(train: Train) -> Any:
    return _lazy_penalty(train, in_place=False)


@idiom("a confusion matrix outside, counted in the step by index_add_")
def confusion_matrix(train: Train) -> Any:
    model, optimizer = _classifier()
    confusion = torch.zeros(4, 4, dtype=torch.long)
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        confusion.view(-1).index_add_(0, 4 * y + logits.argmax(-1), torch.ones_like(y))
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], confusion, model


class _CenterLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(4, 6))

    def forward(self, features: Tensor, y: Tensor) -> Tensor:
        return (features - self.centers[y]).pow(2).sum(1).clamp(1e-12, 1e12).mean()


@idiom("center loss: centers with an optimizer of their own, gradients scaled before its step")
def center_loss(train: Train) -> Any:
    body, head, centers = _mlp(6), nn.Linear(6, 4), _CenterLoss()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    optimizer_centers = torch.optim.SGD(centers.parameters(), lr=0.5)
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        features = body(x)
        loss: Tensor = F.cross_entropy(head(features), y) + 0.01 * centers(features, y)
        optimizer.zero_grad()
        optimizer_centers.zero_grad()
        loss.backward()
        optimizer.step()
        for parameter in centers.parameters():
            assert parameter.grad is not None
            parameter.grad.data *= 1.0 / 0.01
        optimizer_centers.step()
        return loss

    run = train(step, batches[0], model=[body, head, centers], optimizer=[optimizer, optimizer_centers])
    return [run(x, y) for x, y in batches], body, head, centers


@idiom("a learned temperature: a bare nn.Parameter in the optimizer, of no module")
def bare_parameter(train: Train) -> Any:
    model = _mlp()
    logit_scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam([*model.parameters(), logit_scale], lr=1e-2)
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logit_scale.exp() * F.normalize(model(x), dim=-1), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], logit_scale, model


@idiom("weight clipping after the optimizer's step: p.data.clamp_(-c, c)")
def weight_clipping(train: Train) -> Any:
    model = _mlp(1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    batches = [(torch.randn(6, 8), torch.randn(6, 8) + 1) for _ in range(BATCHES)]

    def step(real: Tensor, fake: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(fake).mean() - model(real).mean()
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(real, fake) for real, fake in batches], model


@idiom("a target network, soft update by target.data.copy_(tau * p.data + (1 - tau) * target.data)")
def soft_update(train: Train) -> Any:
    model, optimizer = _classifier()
    target = copy.deepcopy(model)
    batches = [(*batch, torch.randn(6), torch.randn(6, 8)) for batch in _batches()]

    def step(state: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        value = model(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            goal = reward + 0.99 * target(after).max(1).values
        loss = F.mse_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.copy_(0.005 * fast.data + (1.0 - 0.005) * slow.data)
        return loss

    run = train(step, batches[0], model=[model, target], optimizer=optimizer)
    return [run(*batch) for batch in batches], model, target


@idiom("a target network not in model=, replaced every few steps: target.load_state_dict(model.state_dict())")
def hard_update(train: Train) -> Any:
    model, optimizer = _classifier()
    target = copy.deepcopy(model)
    target.load_state_dict(model.state_dict())
    batches = [(*batch, torch.randn(6), torch.randn(6, 8)) for batch in _batches()]

    def step(state: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        value = model(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            goal = reward + 0.99 * target(after).max(1).values
        loss = F.mse_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(run(*batch))
        if number % 3 == 2:
            target.load_state_dict(model.state_dict())
    return losses, model, target


@idiom("mean and std of the images as globals: (x - MEAN) / STD")
def normalisation_constants(train: Train) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.rand(4, 3, 8, 8), torch.randint(0, 4, (4,))) for _ in range(BATCHES)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model((x - MEAN) / STD), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("the whole data set as a tensor in a closure, the step given indices: data[index]")
def data_in_a_closure(train: Train) -> Any:
    model, optimizer = _classifier()
    data, labels = torch.randn(40, 8), torch.randint(0, 4, (40,))

    def step(index: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[index]), labels[index])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (torch.randperm(40)[:8],), model=model, optimizer=optimizer)
    losses = []
    for _ in range(2):
        losses += [run(index) for index in torch.randperm(40).split(8)]
    return losses, model


@idiom("elastic weight consolidation: old parameters and Fisher information in dicts")
def weight_consolidation(train: Train) -> Any:
    model, optimizer = _classifier()
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fisher = {name: torch.rand_like(parameter) for name, parameter in model.named_parameters()}
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        for name, parameter in model.named_parameters():
            loss = loss + 5.0 * (fisher[name] * (parameter - old[name]).pow(2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


def _text_drawn_outside(train: Train) -> Any:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, 20, (200,))

    def get_batch() -> tuple[Tensor, Tensor]:
        ix = torch.randint(len(data) - 8, (4,))
        return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).view(-1, 20), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, get_batch(), model=model, optimizer=optimizer)
    return [run(*get_batch()) for _ in range(BATCHES)], model


@idiom(
    "get_batch() inside the step: slices at drawn places of a text in a closure, as in nanoGPT",
    refused=DataDependent,
    instead="draw the batch before the step and give it: step(*get_batch())",
    changed=_text_drawn_outside,
)
def text_drawn_inside(train: Train) -> Any:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, 20, (200,))

    def get_batch() -> tuple[Tensor, Tensor]:
        ix = torch.randint(len(data) - 8, (4,))
        return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])

    def step() -> Tensor:
        x, y = get_batch()
        loss = F.cross_entropy(model(x).view(-1, 20), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (), model=model, optimizer=optimizer)
    return [run() for _ in range(BATCHES)], model


@idiom("all data in two tensors outside, a minibatch cut out in the step by its number: x[i * n : (i + 1) * n]")
def minibatch_cut_out_inside(train: Train) -> Any:
    model, optimizer = _classifier()
    x, y = torch.randn(48, 8), torch.randint(0, 4, (48,))

    def step(i: int) -> Tensor:
        loss = F.cross_entropy(model(x[i * 4 : (i + 1) * 4]), y[i * 4 : (i + 1) * 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (0,), model=model, optimizer=optimizer)
    return [run(i) for i in range(12)], model


@idiom("a text in one tensor, columns side by side, of which get_batch(source, i) cuts bptt rows (word_language_model)")
def text_cut_out_inside(train: Train) -> Any:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    source, bptt = torch.randint(0, 20, (50, 4)), 5

    def get_batch(i: int) -> tuple[Tensor, Tensor]:
        length = min(bptt, len(source) - 1 - i)
        return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)

    def step(i: int) -> Tensor:
        data, targets = get_batch(i)
        loss = F.cross_entropy(model(data).view(-1, 20), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss

    run = train(step, (0,), model=model, optimizer=optimizer)
    return [run(i) for i in range(0, len(source) - 1, bptt)], model


def _noise(train: Train, draw: Callable[[Tensor], Tensor]) -> Any:
    model, optimizer = _classifier()
    batches = _batches()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + 0.1 * draw(x)), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom(
    "noise drawn in the step from a torch.Generator of the script's own",
    refused=CaptureError,
    instead="draw from torch's default generator: leave generator= out",
    changed=lambda train: _noise(train, lambda x: torch.randn(x.shape)),
)
def own_generator(train: Train) -> Any:
    generator = torch.Generator().manual_seed(3)
    return _noise(train, lambda x: torch.randn(x.shape, generator=generator))


@idiom("noise drawn by torch.randn(..., generator=None)")
def no_generator(train: Train) -> Any:
    return _noise(train, lambda x: torch.randn(x.shape, generator=None, device=x.device))


def _pruned_in_the_step(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()

    def step(x: Tensor, y: Tensor, prune: bool) -> Tensor:
        if prune:
            for parameter in model.parameters():
                parameter.data.mul_(parameter.data.abs() > 0.05)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (*batches[0], False), model=model, optimizer=optimizer)
    losses = []
    for epoch in range(2):
        losses += [run(x, y, epoch > 0 and i == 0) for i, (x, y) in enumerate(batches)]
    return losses, model


@idiom(
    "weights pruned by hand between epochs: p.data.mul_(p.data.abs() > 0.05)",
    refused=LocalWrite,
    instead="prune inside the step, with a flag; or call job.load_state() after it",
    changed=_pruned_in_the_step,
)
def pruned_between(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    for parameter in model.parameters():
        parameter.data.mul_(parameter.data.abs() > 0.05)
    losses += [run(x, y) for x, y in batches]
    return losses, model
