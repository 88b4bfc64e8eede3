"""Steps that decide in Python by values of tensors, or use layouts that can't be captured; what to write instead."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pack_padded_sequence

from clients.compatibility.parts import classifier, network
from clients.compatibility.suite import Train, idiom
from gpumux.errors import DataDependent, NotRepeatable, UnsupportedOperator


def bounded_by_where(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss = torch.where(loss > 1.4, 0.5 * loss, loss)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "a branch on the loss in the step: if loss > 1.4: loss = 0.5 * loss",
    refused=DataDependent,
    instead="torch.where(loss > 1.4, 0.5 * loss, loss)",
    changed=bounded_by_where,
)
def branch(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if loss > 1.4:
            loss = 0.5 * loss
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


def nan_by_where(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches[2][0][0, 0] = float("nan")

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="none")
        loss = torch.where(torch.isnan(loss), torch.zeros_like(loss), loss).mean()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad = torch.nan_to_num(p.grad)
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "a check for NaN in the step: if torch.isnan(loss): return loss",
    refused=DataDependent,
    instead="torch.where(torch.isnan(loss), ...) and torch.nan_to_num of the gradients",
    changed=nan_by_where,
)
def nan_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches[2][0][0, 0] = float("nan")

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if torch.isnan(loss):
            return loss
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


def item_outside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    running = 0.0

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    for x, y in batches:
        running += run(x, y).item()
    return running / len(batches), model


@idiom(
    "running += loss.item() inside the step",
    refused=DataDependent,
    instead="return loss, and running += run(x, y).item() in the loop",
    changed=item_outside,
)
def item_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    running = 0.0

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal running
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss.item()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    for x, y in batches:
        run(x, y)
    return running / len(batches), model


def masked_by_product(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="none")
        mask = y != 0
        loss = (loss * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "a boolean mask as an index: loss[mask].mean()",
    refused=DataDependent,
    instead="(loss * mask).sum() / mask.sum()",
    changed=masked_by_product,
)
def boolean_index(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="none")
        mask = y != 0
        loss = loss[mask].mean()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "nonzero: index = (y == 0).nonzero(as_tuple=True)[0]",
    refused=DataDependent,
    instead="(loss * mask).sum() / mask.sum(): a mask in place of indices",
    changed=masked_by_product,
)
def nonzero(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        index = (y != 0).nonzero(as_tuple=True)[0]
        loss = F.cross_entropy(model(x)[index], y[index])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


class Reader(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.packed:
            _, last = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            last = last[0]
        else:
            last = self.gru(x)[0][torch.arange(len(x)), lengths - 1]
        out: Tensor = self.head(last)
        return out


def _read(train: Train, packed: bool) -> Any:
    model = Reader(packed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, lengths), y)
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(3, 5, 4), torch.randint(1, 6, (3,)), torch.randint(0, 4, (3,))) for _ in range(4)]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch).item() for batch in batches], model


def padded(train: Train) -> Any:
    return _read(train, packed=False)


@idiom(
    "pack_padded_sequence before a GRU",
    refused=DataDependent,
    instead="run it on the padded batch and take the last output of each: out[torch.arange(len(x)), lengths - 1]",
    changed=padded,
)
def packed_sequence(train: Train) -> Any:
    return _read(train, packed=True)


def _embedded(train: Train, sparse: bool) -> Any:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randint(0, 10, (6, 3)), torch.randint(0, 4, (6,))) for _ in range(4)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


def dense_embedding(train: Train) -> Any:
    return _embedded(train, sparse=False)


@idiom(
    "nn.Embedding(sparse=True)",
    refused=UnsupportedOperator,
    instead="nn.Embedding(sparse=False)",
    changed=dense_embedding,
)
def sparse_embedding(train: Train) -> Any:
    return _embedded(train, sparse=True)


def flipped_by_where(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = torch.where(torch.rand(()) < 0.5, x.flip(1), x)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "Python's random in the step: if random.random() < 0.5: x = x.flip(1)",
    refused=NotRepeatable,
    instead="torch.where(torch.rand(()) < 0.5, x.flip(1), x), or flip in the loop",
    changed=flipped_by_where,
)
def python_random(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = x.flip(1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "CTC loss",
    refused=DataDependent,
    instead="train without gpumux, or write its recursion with torch.logaddexp over padded targets",
)
def ctc(train: Train) -> Any:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def step(x: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Any:
        optimizer.zero_grad()
        log_probs = model(x).log_softmax(2)
        loss = criterion(log_probs, targets, input_lengths, target_lengths)
        loss.backward()
        optimizer.step()
        return loss

    batches = [
        (torch.randn(6, 2, 4), torch.randint(1, 5, (2, 3)), torch.tensor([6, 5]), torch.tensor([3, 2]))
        for _ in range(4)
    ]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch).item() for batch in batches], model


class CartPole:
    """An environment with a state of four numbers."""

    def reset(self) -> Tensor:
        self.state = torch.zeros(8)
        return self.state

    def step(self, action: int) -> tuple[Tensor, float]:
        self.state = 0.9 * self.state + torch.sin(torch.arange(8.0) + action)
        return self.state, float(action == 2)


@idiom(
    "actor-critic with env.step(action.item()) in the step",
    refused=DataDependent,
    instead="act in the loop with the local model, and submit the update with states, actions and returns as arguments",
)
def actor_critic(train: Train) -> Any:
    actor, critic, env = network(), nn.Linear(8, 1), CartPole()
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)

    def episode(state: Tensor) -> Tensor:
        loss = torch.zeros(())
        for _ in range(3):
            dist = Categorical(logits=actor(state), validate_args=False)
            action = dist.sample()
            value = critic(state).squeeze()
            state, reward = env.step(action.item())
            advantage = reward - value
            loss = loss - dist.log_prob(action) * advantage.detach() + advantage.square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(episode, (env.reset(),), model=[actor, critic], optimizer=optimizer)
    return [run(env.reset()).item() for _ in range(4)], actor, critic
