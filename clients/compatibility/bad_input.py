"""Batches that are wrong in the middle of training: the script catches the error, leaves the batch out and goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clients.compatibility.parts import Batches, batches_of, classifier, network, usual_step
from clients.compatibility.suite import Train, idiom


def _caught(train: Train, bad: tuple[Tensor, Tensor], *, last_good: int = 2) -> Any:
    """A loop whose third batch is bad."""
    model, optimizer, batches = classifier()
    batches.insert(last_good, bad)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses, skipped = [], []
    for i, (x, y) in enumerate(batches):
        try:
            loss = run(x, y).item()
        except (RuntimeError, IndexError) as error:
            print(f"skipping batch {i}: {error}")
            skipped.append(i)
            continue
        losses.append(loss)
    return losses, skipped, model, optimizer


@idiom("a label out of range, caught by except (RuntimeError, IndexError)")
def label_out_of_range(train: Train) -> Any:
    return _caught(train, (torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 4, 0])))


@idiom("a label out of range, caught by except Exception")
def label_caught_by_all(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches[2][1][0] = 4
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        try:
            losses.append(run(x, y).item())
        except Exception as error:  # noqa: BLE001, as scripts have it
            print(f"batch {i}: {error}")
    return losses, model


@idiom("a label out of range, the step alone inside of try and its loss read after it")
def label_read_later(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches[2][1][0] = 4
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        try:
            loss = run(x, y)
        except IndexError:
            continue
        losses.append(loss.item())
    return losses, model


def _probabilities(train: Train, spoil: Callable[[Tensor], Tensor]) -> Any:
    """A loop with binary_cross_entropy whose third batch has targets that are none."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(x, (y % 2).float().unsqueeze(1)) for x, y in batches_of()]
    batches[2] = batches[2][0], spoil(batches[2][1])

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy(model(x), y * 0.9 + 0.05)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        try:
            losses.append(run(x, y).item())
        except RuntimeError:
            losses.append(-float(i))
    return losses, model, optimizer


@idiom("a target outside of 0 to 1 for binary_cross_entropy, caught by except RuntimeError")
def no_probability(train: Train) -> Any:
    return _probabilities(train, lambda y: y * 255)


@idiom("a target that is NaN for binary_cross_entropy, caught by except RuntimeError")
def nan_as_probability(train: Train) -> Any:
    return _probabilities(train, lambda y: y / 0 * 0)


@idiom("a NaN that the model gives to binary_cross_entropy, made of one in the batch, caught by except RuntimeError")
def nan_as_input(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = batches_of()
    batches[2][0][0, 0] = float("nan")

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy(model(x), (y % 2).float().unsqueeze(1))
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        try:
            losses.append(run(x, y).item())
        except RuntimeError as error:
            print(f"skipping batch {i}: {error}")
    return losses, model, optimizer


@idiom("an index that the model computes, out of range of a table, caught by except IndexError")
def computed_index(train: Train) -> Any:
    model = nn.ModuleDict({"place": nn.Linear(8, 1), "table": nn.Embedding(4, 4), "head": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = batches_of()
    batches[2][0][0, 0] = 1e6

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        places = model["place"](x).detach().abs().squeeze(1).long()
        loss = nn.functional.cross_entropy(model["head"](x) + model["table"](places), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses, left_out = [], 0
    for x, y in batches:
        try:
            losses.append(run(x, y).item())
        except IndexError:
            left_out += 1
    return losses, left_out, model


@idiom(
    "a label that is out of range after the step has computed it (labels from 1 on: y - 1), caught by except IndexError"
)
def computed_label(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches = [(x, y + 1) for x, y in batches]
    batches[2][1][0] = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y - 1)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        try:
            losses.append(run(x, y).item())
        except IndexError:
            losses.append(-1.0)
    return losses, model, optimizer


@idiom("a class out of range in a one_hot of another name, caught by except RuntimeError")
def one_hot_class(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches[2][1][0] = 4
    encode = partial(nn.functional.one_hot, num_classes=4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), encode(y).float())
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        try:
            losses.append(run(x, y).item())
        except RuntimeError:
            losses.append(-1.0)
    return losses, model, optimizer


@idiom("a matrix of the batch that has no Cholesky factor, caught by except RuntimeError")
def no_factor(train: Train) -> Any:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    matrices = [torch.eye(8) * (i + 1) + 0.5 for i in range(4)]
    matrices[2] = -matrices[2]

    def step(covariance: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(torch.linalg.cholesky(covariance)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (matrices[0],), model=model, optimizer=optimizer)
    losses = []
    for covariance in matrices:
        try:
            losses.append(run(covariance).item())
        except RuntimeError:
            losses.append(-1.0)
    return losses, model


@idiom("a token out of the embedding's range, caught by except IndexError")
def token_out_of_range(train: Train) -> Any:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randint(0, 10, (6, 3)), torch.randint(0, 4, (6,))) for _ in range(4)]
    batches[2][0][1, 1] = 10
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        try:
            losses.append(run(x, y).item())
        except IndexError:
            losses.append(float("nan"))
    return losses, model, optimizer


@idiom(
    "a batch of float64 midway, caught by except RuntimeError",
)
def wrong_dtype(train: Train) -> Any:
    return _caught(train, (torch.randn(6, 8, dtype=torch.float64), torch.randint(0, 4, (6,))))


@idiom(
    "labels of int32 midway, caught by except RuntimeError",
)
def wrong_label_dtype(train: Train) -> Any:
    return _caught(train, (torch.randn(6, 8), torch.randint(0, 4, (6,), dtype=torch.int32)))


@idiom(
    "a wrong number of features midway, caught by except RuntimeError",
)
def wrong_features(train: Train) -> Any:
    return _caught(train, (torch.randn(6, 7), torch.randint(0, 4, (6,))))


@idiom(
    "one label less than the batch has rows, caught by except ValueError",
)
def wrong_count(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches.insert(2, (torch.randn(6, 8), torch.randint(0, 4, (5,))))
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        try:
            losses.append(run(x, y).item())
        except ValueError as error:
            losses.append(str(error))
    return losses, model


@idiom(
    "an exception of one's own in the step: if len(x) < 2: raise ValueError, caught in the loop",
)
def raised_by_step(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches[2:2] = batches_of(1, size=1)
    usual = usual_step(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError(f"a batch of {len(x)}")
        assert x.dim() == 2, x.shape
        return usual(x, y)

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        try:
            losses.append(run(x, y).item())
        except ValueError as error:
            losses.append(str(error))
    return losses, model


def _left_out(train: Train, layer: nn.Module, bad: tuple[Tensor, Tensor]) -> Any:
    """A loop that leaves out whatever raises, after a forward pass through the layer."""
    model = nn.Sequential(nn.Linear(8, 16), layer, nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = batches_of()
    batches.insert(2, bad)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        try:
            losses.append(run(x, y).item())
        except Exception as error:  # noqa: BLE001, as scripts have it
            print(f"batch {i}: {error}")
    return losses, torch.rand(2), model, optimizer


@idiom("a wrong number of features midway, caught by except Exception")
def features_left_out(train: Train) -> Any:
    return _left_out(train, nn.LayerNorm(16), (torch.randn(6, 7), torch.randint(0, 4, (6,))))


@idiom(
    "labels of int32 after dropout has drawn, caught by except Exception",
    differs="the draws of the bad batch are not made, as a warning says",
)
def drawn_and_left_out(train: Train) -> Any:
    return _left_out(train, nn.Dropout(0.5), (torch.randn(6, 8), torch.randint(0, 4, (6,), dtype=torch.int32)))


@idiom(
    "labels of int32 after batch norm has counted the batch, caught by except Exception",
    differs="the bad batch is not counted, as a warning says",
)
def counted_and_left_out(train: Train) -> Any:
    return _left_out(train, nn.BatchNorm1d(16), (torch.randn(6, 8), torch.randint(0, 4, (6,), dtype=torch.int32)))


@idiom("a last batch that is smaller")
def smaller(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches.append((torch.randn(3, 8), torch.randint(0, 4, (3,))))
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for _ in range(2) for x, y in batches], model


@idiom(
    "batch norm in training and a last batch of one sample, caught by except ValueError",
    differs="the bad batch is not counted, as a warning says",
)
def one_sample(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches: Batches = [*batches_of(3), *batches_of(1, size=1)]
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for _ in range(2):
        for x, y in batches:
            try:
                losses.append(run(x, y).item())
            except ValueError as error:
                losses.append(str(error))
    return losses, model


@idiom("NaN in a batch, seen in the loss: if not math.isfinite(loss): stop")
def nan_stops(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches[3][0][1, 2] = float("nan")
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        losses.append(run(x, y).item())
        if not math.isfinite(losses[-1]):
            break
    return losses, model


@idiom("NaN in a batch, made harmless in the step: torch.nan_to_num of loss and gradients")
def nan_to_num(train: Train) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = batches_of()
    batches[2][0][1, 2] = float("nan")

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                torch.nan_to_num(p.grad, nan=0.0, posinf=0.0, neginf=0.0, out=p.grad)
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("an empty batch, whose mean loss is NaN")
def empty(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches.insert(3, (torch.randn(0, 8), torch.randint(0, 4, (0,))))
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model
