"""What a batch is made of, and what steps do to it."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from clients.compatibility.suite import Train, idiom
from gpumux.errors import DataDependent, NotRepeatable

BATCHES = 6


def _classifier() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _images() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


class _BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        weight = mask.unsqueeze(-1).float()
        mean = (self.embedding(ids) * weight).sum(1) / weight.sum(1)
        logits: Tensor = self.head(mean)
        return logits


def _text() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _BagOfWords()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _pairs(count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(count)]


def _sentences(count: int, seed: int = 0) -> list[tuple[Tensor, int]]:
    """Sentences of different lengths, each with its label."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (count,), generator=generator).tolist()
    return [(torch.randint(1, 20, (length,), generator=generator), index % 4) for index, length in enumerate(lengths)]


def _supervised(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@idiom("numpy arrays, made tensors in the step by torch.from_numpy")
def numpy_arrays(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [(x.numpy(), y.numpy()) for x, y in _pairs()]

    def step(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Tensor:
        inputs, labels = torch.from_numpy(x).float(), torch.from_numpy(y).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom(
    "numpy arrays, made tensors in the step by torch.as_tensor and torch.tensor",
)
def numpy_as_tensor(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [(x.double().numpy(), y.numpy()) for x, y in _pairs()]

    def step(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Tensor:
        inputs = torch.as_tensor(x, dtype=torch.float32)
        labels = torch.tensor(y)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


def _minibatches(train: Train, index: Callable[[Any], Any]) -> Any:
    model, optimizer = _classifier()
    x, y = (torch.cat(parts) for parts in zip(*_pairs(), strict=True))
    indices, generator = np.arange(len(x)), np.random.default_rng(0)

    def step(inds: np.ndarray[Any, Any], x: Tensor, y: Tensor) -> Tensor:
        chosen = index(inds)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (indices[:6], x, y), model=model, optimizer=optimizer)
    losses = []
    for _ in range(2):
        generator.shuffle(indices)
        losses += [run(indices[start : start + 6], x, y) for start in range(0, len(indices) - 5, 6)]
    return losses, model


def minibatches_of_tensors(train: Train) -> Any:
    return _minibatches(train, lambda inds: torch.from_numpy(inds))  # by its name, as a script calls it


@idiom(
    "minibatches chosen in the step by an array of indices: np.random.shuffle(inds), obs[inds] (cleanrl's PPO)",
    refused=DataDependent,
    instead="make it a tensor first: inds = torch.from_numpy(inds)",
    changed=minibatches_of_tensors,
)
def minibatches(train: Train) -> Any:
    return _minibatches(train, lambda inds: inds)


@dataclasses.dataclass
class Sample:
    image: Tensor
    label: Tensor


@idiom("a dataclass")
def data_class(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [Sample(x, y) for x, y in _pairs()]

    def step(batch: Sample) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.image), batch.label)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


class Transition(NamedTuple):
    state: Tensor
    action: Tensor
    reward: Tensor


@idiom("a named tuple (transitions of a replay buffer)")
def named_tuple(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [Transition(x, y, torch.randn(6)) for x, y in _pairs()]

    def step(batch: Transition) -> Tensor:
        value = model(batch.state).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(value, batch.reward)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


@idiom("a SimpleNamespace")
def namespace(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [SimpleNamespace(x=x, y=y) for x, y in _pairs()]

    def step(batch: SimpleNamespace) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


@idiom("a dict of tensors, moved by a dict comprehension")
def dictionary(train: Train) -> Any:
    device = torch.device("cpu")
    model, optimizer = _classifier()
    batches = [{"inputs": x, "labels": y} for x, y in _pairs()]

    def step(batch: dict[str, Tensor]) -> Tensor:
        batch = {key: value.to(device) for key, value in batch.items()}
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["inputs"]), batch["labels"])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


class Encoding(UserDict[str, Any]):
    """A dict with attributes and `to`, as a tokenizer's result is."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: str) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


@idiom(
    "a tokenizer's BatchEncoding: model(**batch), batch.labels, batch.to(device)",
)
def batch_encoding(train: Train) -> Any:
    model, optimizer = _text()
    batches = [
        Encoding({"ids": torch.randint(1, 20, (6, 5)), "mask": torch.ones(6, 5), "labels": torch.randint(0, 4, (6,))})
        for _ in range(BATCHES)
    ]

    def step(batch: Encoding) -> Tensor:
        batch = batch.to("cpu")
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        loss = F.cross_entropy(model(**inputs), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


@idiom("a list of tensors, stacked in the step")
def list_of_tensors(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [(list(x), y) for x, y in _pairs()]

    def step(xs: list[Tensor], y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.stack(xs)), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(xs, y) for xs, y in batches], model


@idiom("the batch scaled in place: x.div_(255)")
def scaled_in_place(train: Train) -> Any:
    model, optimizer = _images()
    data = TensorDataset(torch.randint(0, 256, (36, 3, 8, 8)).float(), torch.randint(0, 4, (36,)))
    loader = DataLoader(data, batch_size=6)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.div_(255).sub_(0.5)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, next(iter(loader)), model=model, optimizer=optimizer)
    return [run(x, y) for x, y in loader], model


@idiom("the batch scaled in place, and logged after the step")
def scaled_and_logged(train: Train) -> Any:
    model, optimizer = _images()
    data = TensorDataset(torch.randint(0, 256, (36, 3, 8, 8)).float(), torch.randint(0, 4, (36,)))
    loader = DataLoader(data, batch_size=6)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.div_(255)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, next(iter(loader)), model=model, optimizer=optimizer)
    log = []
    for x, y in loader:
        loss = run(x, y)
        log.append((loss, x.mean().item()))
    return log, model


@idiom("a gradient penalty: x.requires_grad_() and autograd.grad(create_graph=True)")
def gradient_penalty(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _pairs()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.requires_grad_()
        logits = model(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        penalty = gradient.pow(2).sum(1).mean()
        loss = F.cross_entropy(logits, y) + 0.1 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, penalty

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("adversarial training (FGSM): x.requires_grad = True, x.grad.sign()")
def adversarial(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _pairs()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad = True
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        adversarial = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(adversarial), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("adversarial training (PGD): a perturbation made in the step, several steps of ascent")
def projected_ascent(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _pairs()

    def step(x: Tensor, y: Tensor) -> Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            F.cross_entropy(model(x + delta), y).backward()
            assert delta.grad is not None
            delta.data = (delta + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1)
            delta.grad.zero_()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + delta.detach()), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("a DataLoader whose last batch is smaller")
def smaller_last_batch(train: Train) -> Any:
    model, optimizer = _classifier()
    data = TensorDataset(torch.randn(20, 8), torch.randint(0, 4, (20,)))
    loader = DataLoader(data, batch_size=6)
    run = train(_supervised(model, optimizer), next(iter(loader)), model=model, optimizer=optimizer)
    losses = []
    for _ in range(2):
        for x, y in loader:
            losses.append(run(x, y).item() * x.size(0))
    return sum(losses) / 40, losses, model


class Digits(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.images = torch.randn(24, 8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 4


@idiom("a shuffled DataLoader over a Dataset class, for x, y in enumerate(loader)")
def shuffled_loader(train: Train) -> Any:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = _classifier()
    loader = DataLoader(Digits(), batch_size=6, shuffle=True, num_workers=0)

    def step(data: Tensor, target: Tensor) -> Tensor:
        data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(F.log_softmax(output, dim=1), target)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, next(iter(loader)), model=model, optimizer=optimizer)
    losses = []
    for _ in range(2):
        for _, (data, target) in enumerate(loader):
            losses.append(run(data, target))
    return losses, model


@idiom("ten different lengths, each batch padded to its longest")
def ten_lengths(train: Train) -> Any:
    model, optimizer = _text()
    batches = [(torch.randint(1, 20, (6, length)), torch.randint(0, 4, (6,))) for length in range(3, 13)]

    def step(ids: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids, ids != 0), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(ids, y).item() for ids, y in batches], model


def _padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    ids = pad_sequence([each for each, _ in samples], batch_first=True)
    lengths = torch.tensor([len(each) for each, _ in samples])
    return ids, lengths, torch.tensor([label for _, label in samples])


@idiom("a collate_fn that pads with pad_sequence and gives the lengths as a tensor")
def padded_by_collate(train: Train) -> Any:
    model, optimizer = _text()
    loader: DataLoader[Any] = DataLoader(_sentences(24), batch_size=6, collate_fn=_padded)  # type: ignore[arg-type]

    def step(ids: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        mask = torch.arange(ids.size(1), device=ids.device)[None, :] < lengths[:, None]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids, mask), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, next(iter(loader)), model=model, optimizer=optimizer)
    return [run(*batch) for batch in loader], model


@idiom("images of uint8, converted in the step")
def bytes_converted(train: Train) -> Any:
    model, optimizer = _images()
    batches = [
        (torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8), torch.randint(0, 4, (6,))) for _ in range(BATCHES)
    ]

    def step(x: Tensor, y: Tensor) -> Tensor:
        images = x.permute(0, 3, 1, 2).float() / 255.0
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("a list of int lengths in the batch")
def list_of_lengths(train: Train) -> Any:
    model, optimizer = _text()
    batches = []
    for index in range(BATCHES):
        ids, lengths, y = _padded([*_sentences(5, seed=index), (torch.randint(1, 20, (12,)), 1)])
        batches.append((ids, lengths.tolist(), y))

    def step(ids: Tensor, lengths: list[int], y: Tensor) -> Tensor:
        mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids, mask), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(ids, lengths, y) for ids, lengths, y in batches], model


@idiom("lengths in a list, sequences split by them in the step")
def split_by_lengths(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [(torch.randn(12, 8), [3, 3, 6] if i % 2 else [2, 4, 6], y) for i, (_, y) in enumerate(_pairs())]

    def step(x: Tensor, lengths: list[int], y: Tensor) -> Tensor:
        pooled = torch.stack([part.mean(0) for part in x.split(lengths)])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pooled), y[:3])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, lengths, y) for x, lengths, y in batches], model


@idiom("a nested dict: two views and their targets")
def nested_dictionary(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [
        {"views": {"weak": x, "strong": x + 0.1 * torch.randn_like(x)}, "target": {"label": y, "weight": torch.rand(6)}}
        for x, y in _pairs()
    ]

    def step(batch: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        views, target = batch["views"], batch["target"]
        weak, strong = model(views["weak"]), model(views["strong"])
        losses = {
            "supervised": (F.cross_entropy(weak, target["label"], reduction="none") * target["weight"]).mean(),
            "consistency": F.mse_loss(strong.softmax(-1), weak.softmax(-1).detach()),
        }
        optimizer.zero_grad()
        sum(losses.values(), torch.zeros(())).backward()
        optimizer.step()
        return {key: loss.detach() for key, loss in losses.items()}

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


@idiom(
    "a batch with an int, a float, a string and None in it",
)
def python_values(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = [
        {"x": x, "y": y, "index": i, "weight": 1.0 / (i + 1), "split": "train", "mask": None}
        for i, (x, y) in enumerate(_pairs())
    ]

    def step(batch: dict[str, Any]) -> Tensor:
        loss: Tensor = F.cross_entropy(model(batch["x"]), batch["y"]) * batch["weight"]
        if batch["mask"] is not None:
            loss = loss * batch["mask"].mean()
        if batch["split"] == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


@idiom(
    "a batch with the files' names in a list of strings, other names in each batch",
)
def names_of_files(train: Train) -> Any:
    model, optimizer = _classifier()
    data = [{"x": torch.randn(8), "y": i % 4, "path": f"images/{i}.png"} for i in range(36)]
    loader: DataLoader[Any] = DataLoader(data, batch_size=6)  # type: ignore[arg-type]

    def step(batch: dict[str, Any]) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (next(iter(loader)),), model=model, optimizer=optimizer)
    return [(batch["path"][0], run(batch)) for batch in loader], model


@idiom("channels_last: the model and the batches")
def channels_last(train: Train) -> Any:
    model, optimizer = _images()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batches = [(torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))) for _ in range(BATCHES)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("one buffer filled anew for each batch: buffer.copy_(...), numpy memory behind it")
def reused_buffer(train: Train) -> Any:
    model, optimizer = _classifier()
    memory = np.zeros((6, 8), dtype=np.float32)
    x, y = torch.from_numpy(memory), torch.zeros(6, dtype=torch.long)
    batches = _pairs()
    run = train(_supervised(model, optimizer), (x, y), model=model, optimizer=optimizer)
    losses = []
    for inputs, labels in batches:
        memory[:] = inputs.numpy()
        y.copy_(labels)
        losses.append(run(x, y))
    return losses, model


class _Pair:
    """A batch as graph and detection repositories have it: a plain class that moves and unpacks."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def to(self, device: str) -> _Pair:
        return _Pair(self.inputs.to(device), self.labels.to(device))

    def __iter__(self) -> Iterator[Tensor]:
        yield self.inputs
        yield self.labels


@idiom("an object of a plain class with __iter__ and to(): x, y = batch.to(device)")
def plain_class(train: Train) -> Any:
    model, optimizer = _classifier()
    usual = _supervised(model, optimizer)

    def step(batch: _Pair) -> Tensor:
        x, y = batch.to("cpu")
        return usual(x, y)

    batches = [_Pair(x, y) for x, y in _pairs()]
    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(batch) for batch in batches], model


class _Graph:
    """As torch_geometric.data.Data: a store of tensors that shows itself as attributes, items and pairs."""

    _store: dict[str, Tensor]

    def __init__(self, **tensors: Tensor) -> None:
        self.__dict__["_store"] = tensors

    def __getattr__(self, name: str) -> Tensor:
        store = self.__dict__.get("_store", {})
        if name not in store:
            raise AttributeError(name)
        found: Tensor = store[name]
        return found

    def __setattr__(self, name: str, value: Tensor) -> None:
        self._store[name] = value

    def __getitem__(self, name: str) -> Tensor:
        return self._store[name]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._store.items()

    def keys(self) -> list[str]:
        return list(self._store)

    @property
    def num_nodes(self) -> int:
        return self.x.size(0)

    def to(self, device: str) -> _Graph:
        for name, value in self:
            self._store[name] = value.to(device)
        return self


@idiom("a graph as of torch_geometric: data.to(device), data.x, data.edge_index, data['y'], data.num_nodes")
def graph_object(train: Train) -> Any:
    model, optimizer = _classifier()

    def step(data: _Graph) -> Tensor:
        data = data.to("cpu")
        optimizer.zero_grad()
        source, target = data.edge_index
        logits = model(data.x.index_add(0, target, data.x[source]))
        loss = nn.functional.cross_entropy(logits, data["y"], reduction="sum") / data.num_nodes
        loss.backward()
        optimizer.step()
        return loss

    graphs = [_Graph(x=x, y=y, edge_index=torch.randint(0, len(x), (2, 9))) for x, y in _pairs()]
    run = train(step, (graphs[0],), model=model, optimizer=optimizer)
    return [run(graph).item() for graph in graphs], model


@idiom("a batch put into a dictionary of the trainer before each step: self.inputs = {name: t.to(device), ...}")
def inputs_in_a_dictionary(train: Train) -> Any:
    model, optimizer = _classifier()
    trainer = SimpleNamespace(inputs={})

    def set_inputs(data: dict[str, Any]) -> None:
        trainer.inputs = {name: value.to("cpu") for name, value in data.items() if torch.is_tensor(value)}

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(trainer.inputs["image"]), trainer.inputs["label"])
        loss.backward()
        optimizer.step()
        return loss

    batches = list(_named_images())
    set_inputs(batches[0])
    run = train(step, (), model=model, optimizer=optimizer)
    found = []
    for data in batches:
        set_inputs(data)
        found.append(run().item())
    return found, model


class _WithInput:
    """As in pix2pix: an object that takes the batch apart, and computes with what it holds."""

    def __init__(self) -> None:
        self.model, self.optimizer = _classifier()

    def set_input(self, data: dict[str, Any]) -> None:
        self.image, self.label, self.paths = data["image"], data["label"], data["paths"]

    def optimize_parameters(self) -> Tensor:
        self.loss = F.cross_entropy(self.model(self.image), self.label)
        self.optimizer.zero_grad()
        self.loss.backward()
        self.optimizer.step()
        return self.loss


def _named_images() -> Iterator[dict[str, Any]]:
    for epoch in range(3):
        for i, size in enumerate((6, 6, 3)):
            labels = torch.randint(0, 4, (size,))
            yield {
                "image": torch.randn(size, 8),
                "label": labels,
                "paths": [f"{epoch}/{i}/{k}.png" for k in range(size)],
            }


def set_input_in_the_loop(train: Train) -> Any:
    trained = _WithInput()
    batches = list(_named_images())
    trained.set_input(batches[0])
    run = train(trained.optimize_parameters, (), model=trained.model, optimizer=trained.optimizer)
    found = []
    for data in batches:
        trained.set_input(data)
        found.append((run().item(), trained.paths))
    return found, trained.model


@idiom(
    "an object that takes the batch apart, the names of files too: self.image, self.paths = ... (set_input of pix2pix)",
    refused=NotRepeatable,
    instead="call it in the loop: model.set_input(data), then the step, which has no arguments",
    changed=set_input_in_the_loop,
)
def set_input(train: Train) -> Any:
    trained = _WithInput()
    batches = list(_named_images())

    def step(data: dict[str, Any]) -> Tensor:
        trained.set_input(data)
        return trained.optimize_parameters()

    run = train(step, (batches[0],), model=trained.model, optimizer=trained.optimizer)
    return [(run(data).item(), trained.paths) for data in batches], trained.model


def _without_punctuation(train: Train, *, in_the_step: bool) -> Any:
    table, scores = nn.Embedding(20, 8), nn.Linear(8, 4)
    model = nn.ModuleList([table, scores])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mask_of(ids: Tensor) -> Tensor:
        return torch.tensor([[float(token not in (0, 5, 7)) for token in row] for row in ids.tolist()])

    def step(ids: Tensor, mask: Tensor | None, y: Tensor) -> Tensor:
        mask = mask_of(ids) if mask is None else mask
        optimizer.zero_grad()
        loss = F.cross_entropy(scores((table(ids) * mask.unsqueeze(2)).sum(1)), y)
        loss.backward()
        optimizer.step()
        return loss

    ids, y = torch.randint(0, 20, (BATCHES, 4, 9)), torch.randint(0, 4, (BATCHES, 4))
    batches = [(each, None if in_the_step else mask_of(each), labels) for each, labels in zip(ids, y, strict=True)]
    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(*batch).item() for batch in batches], model


def masks_made_in_the_loop(train: Train) -> Any:
    return _without_punctuation(train, in_the_step=False)


@idiom(
    "a mask made in the step from a list of the tokens: for token in ids.tolist() (ColBERT's punctuation)",
    refused=DataDependent,
    instead="make it in the loop, and give it to the step",
    changed=masks_made_in_the_loop,
)
def masks_made_of_lists(train: Train) -> Any:
    return _without_punctuation(train, in_the_step=True)
