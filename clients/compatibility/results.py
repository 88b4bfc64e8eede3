"""What scripts do with a step's result."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import tempfile
from collections import deque
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from clients.compatibility.parts import classifier, usual_step
from clients.compatibility.suite import Train, idiom


@idiom('printed with f"{loss:.4f}"')
def formatted(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [f"{run(x, y):.4f}" for x, y in batches], model


@idiom("summed up: total += loss.item()")
def summed_items(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    total = 0.0
    for x, y in batches:
        total += run(x, y).item()
    return total / len(batches), model


@idiom("unpacked: loss, acc = step(x, y)")
def unpacked(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss, (logits.argmax(dim=1) == y).float().mean()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    lines = []
    for i, (x, y) in enumerate(batches):
        loss, acc = run(x, y)
        lines.append(f"[{i}] loss {loss.item():.4f} acc {100.0 * acc.item():.1f}%")
    return lines, model


@idiom("indexed: out[0], out[-1]")
def indexed(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return [loss, logits]

    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        out = run(x, y)
        history.append((out[0].item(), out[-1].argmax(dim=-1).tolist()))
    return history, model


@idiom('a dict of losses, read by key: out["loss"]')
def by_key(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        entropy, size = nn.functional.cross_entropy(logits, y), 1e-3 * logits.square().mean()
        loss = entropy + size
        loss.backward()
        optimizer.step()
        return {"loss": loss, "entropy": entropy.detach(), "size": size.detach()}

    run = train(step, batches[0], model=model, optimizer=optimizer)
    sums: dict[str, float] = {}
    for x, y in batches:
        losses = run(x, y)
        print(losses["loss"].item())
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return sums, model


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


@idiom("a dataclass of one's own, read by attribute: out.loss, out.logits")
def by_attribute(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Output:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return Output(loss=loss, logits=logits)

    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        out = run(x, y)
        history.append((out.loss.item(), (out.logits.argmax(1) == y).float().mean().item()))
    return history, model


class Metrics(NamedTuple):
    loss: Tensor
    accuracy: Tensor


@idiom("a named tuple, read by attribute and unpacked")
def named_tuple(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Metrics:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return Metrics(loss, (logits.argmax(1) == y).float().mean())

    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        metrics = run(x, y)
        loss, accuracy = metrics
        history.append((metrics.loss.item(), loss.item(), float(accuracy)))
    return history, model


@idiom("a named tuple as a dict: metrics._asdict().items()")
def named_tuple_as_dict(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Metrics:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return Metrics(loss, (logits.argmax(1) == y).float().mean())

    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        history.append({name: value.item() for name, value in run(x, y)._asdict().items()})
    return history, model


@idiom("losses kept as tensors: torch.stack(losses).mean() at the epoch's end")
def stacked(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    means = []
    for _ in range(2):
        losses = []
        for x, y in batches:
            loss = run(x, y)
            losses.append(loss)
        means.append(torch.stack(losses).mean().item())
    return means, model


@idiom("compared: if loss < best: best = loss")
def compared(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    best, at = float("inf"), -1
    for i, (x, y) in enumerate(batches):
        loss = run(x, y)
        if loss < best:
            best, at = loss, i
            print(f"new best {best:.4f}")
    return best, at, model


@idiom("float(loss), int(correct), bool(done)")
def converted(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        correct = (logits.argmax(1) == y).sum()
        return loss.detach(), correct, correct > 3

    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        loss, correct, done = run(x, y)
        history.append((float(loss), int(correct), bool(done)))
    return history, model


@idiom("loss.detach().cpu().numpy()")
def to_numpy(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    running = 0.0
    for x, y in batches:
        loss = run(x, y)
        running += loss.detach().cpu().numpy()
    return float(running / len(batches)), model


@idiom("np.mean(losses) over a list of results")
def mean_by_numpy(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        losses.append(run(x, y))
    return float(np.mean(losses)), float(np.mean([loss.item() for loss in losses])), model


@idiom("a running sum of tensors, .item() once at the end")
def summed_then_item(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    total: Any = 0.0
    for x, y in batches:
        total += run(x, y) * x.size(0)
    losses = [run(x, y) for x, y in batches]
    return (total / sum(len(x) for x, _ in batches)).item(), sum(losses).item() / len(losses), model


@idiom("correct predictions counted outside: (pred.argmax(1) == y).sum().item()")
def counted(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        pred = model(x)
        loss = nn.functional.cross_entropy(pred, y)
        loss.backward()
        optimizer.step()
        return loss, pred

    run = train(step, batches[0], model=model, optimizer=optimizer)
    correct, total = 0, 0
    for x, y in batches:
        loss, pred = run(x, y)
        _, predicted = torch.max(pred.data, 1)
        correct += (pred.argmax(1) == y).sum().item()
        correct += predicted.eq(y).sum().item()
        total += y.size(0)
    return correct, total, loss.item(), model


@idiom("if math.isnan(loss) or not math.isfinite(loss.item()): break")
def checked_for_nan(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    steps = 0
    for x, y in batches:
        loss = run(x, y)
        if math.isnan(loss) or not math.isfinite(loss.item()):
            print(f"Loss is {loss}, stopping training")
            break
        steps += 1
    return steps, model


class Bar:
    """The part of tqdm's bar that scripts use."""

    def __init__(self, total: int) -> None:
        self.total, self.n, self.lines = total, 0, list[str]()

    def set_postfix(self, **values: Any) -> None:
        shown = {key: f"{value:.3g}" if isinstance(value, Number) else str(value) for key, value in values.items()}
        self.lines.append(", ".join(f"{key}={value.strip()}" for key, value in shown.items()))

    def set_description(self, text: str) -> None:
        self.lines.append(text)

    def update(self, count: int = 1) -> None:
        self.n += count


@idiom("a progress bar: bar.set_postfix(loss=loss.item())")
def progress_bar(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    bar = Bar(total=len(batches))
    for i, (x, y) in enumerate(batches):
        loss = run(x, y)
        bar.set_postfix(loss=loss.item(), step=i)
        bar.set_postfix(loss=f"{loss:.3f}", lr=optimizer.param_groups[0]["lr"])
        bar.set_description(f"loss {loss:.2f}")
        bar.update(1)
    return bar.lines, bar.n, model


class Writer:
    """A SummaryWriter's add_scalar, into a file of lines."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def add_scalar(self, tag: str, value: Any, global_step: int) -> None:
        self.file.write(f"{global_step}\t{tag}\t{float(value)}\n")

    def add_scalars(self, tag: str, values: dict[str, Any], global_step: int) -> None:
        for name, value in values.items():
            self.add_scalar(f"{tag}/{name}", value, global_step)


@idiom('writer.add_scalar("train/loss", loss, step)')
def summary_writer(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as directory:
        writer = Writer(Path(directory) / "events")
        for global_step, (x, y) in enumerate(batches):
            loss = run(x, y)
            writer.add_scalar("train/loss", loss, global_step)
            writer.add_scalar("train/lr", optimizer.param_groups[0]["lr"], global_step)
            writer.add_scalars("train", {"loss": loss, "perplexity": torch.exp(loss)}, global_step)
        writer.file.close()
        return (Path(directory) / "events").read_text(), model


class MeanMetric:
    """A mean kept in tensors, as torchmetrics keeps it."""

    def __init__(self) -> None:
        self.total, self.weight = torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value: Tensor, weight: int = 1) -> None:
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, dtype=torch.float32)
        self.total += value.detach() * weight
        self.weight += weight

    def compute(self) -> Tensor:
        return self.total / self.weight


@idiom(
    "a metric class that accumulates tensors: metric.update(loss, x.size(0))",
)
def accumulated(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    metric = MeanMetric()
    for x, y in batches:
        metric.update(run(x, y), x.size(0))
    return metric.compute(), model


@idiom("print(loss)")
def printed(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    out = io.StringIO()
    for i, (x, y) in enumerate(batches):
        loss = run(x, y)
        print(i, loss, file=out)
        print("loss: {}".format(loss), file=out)  # noqa: UP032
        print("loss: %.3f" % loss, file=out)  # noqa: UP031
    return out.getvalue(), model


@idiom("rows of a CSV file and lines of JSON: json.dumps({'loss': float(loss)})")
def rows_and_lines(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    table, lines = io.StringIO(), []
    writer = csv.writer(table)
    writer.writerow(["step", "loss"])
    for i, (x, y) in enumerate(batches):
        loss = run(x, y)
        writer.writerow([i, loss.item()])
        lines.append(json.dumps({"step": i, "loss": float(loss), "rounded": round(loss.item(), 3)}))
    return table.getvalue(), lines, model


@idiom("a moving average over a deque")
def moving_average(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    window: deque[Any] = deque(maxlen=3)
    averages = []
    for x, y in batches:
        window.append(run(x, y))
        averages.append(f"{sum(window) / len(window):.5f}")
    return averages, torch.tensor([float(loss) for loss in window]), model


@idiom("an exponential average: ema = 0.9 * ema + 0.1 * loss")
def exponential_average(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    ema = None
    for x, y in batches:
        loss = run(x, y)
        ema = loss if ema is None else 0.9 * ema + 0.1 * loss
    return ema, model


@idiom("outputs collected for a confusion matrix: torch.cat(preds)")
def confusion_matrix(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        output = model(x)
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()
        return output.detach()

    run = train(step, batches[0], model=model, optimizer=optimizer)
    preds, targets = [], []
    for x, y in batches:
        preds.append(run(x, y).argmax(dim=1))
        targets.append(y)
    matrix = torch.zeros(4, 4, dtype=torch.long)
    for target, pred in zip(torch.cat(targets), torch.cat(preds), strict=True):
        matrix[target, pred] += 1
    return matrix, model


@idiom("early stopping by the best loss, with a deep copy of the state_dict")
def early_stopping(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    best_loss, best_state, bad = float("inf"), copy.deepcopy(model.state_dict()), 0
    for _ in range(4):
        epoch_loss = sum(run(x, y).item() for x, y in batches) / len(batches)
        if epoch_loss < best_loss:
            best_loss, best_state, bad = epoch_loss, copy.deepcopy(model.state_dict()), 0
        else:
            bad += 1
            if bad >= 2:
                break
    return best_loss, best_state, model


@idiom(
    "torch.tensor(losses).mean() over a list of results",
)
def list_to_tensor(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        losses.append(run(x, y))
    return torch.tensor(losses).mean(), model


@idiom("norms of the parameters as one tensor, between steps: torch.tensor([p.norm() for p in model.parameters()])")
def tensor_of_norms(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    norms = []
    for x, y in batches:
        run(x, y)
        norms.append(torch.tensor([p.detach().norm() for p in model.parameters()]))
    return norms, model


@idiom("min, max, sorted and index over a list of results")
def ordered(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    best = min(losses)
    return best, max(losses), losses.index(best), sorted(losses)[: len(losses) // 2], int(np.argmin(losses)), model


@idiom("written into an array made before: history[epoch, i] = loss")
def written_into_arrays(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    history, kept = np.zeros((2, len(batches))), torch.zeros(2, len(batches))
    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            loss = run(x, y)
            history[epoch, i] = loss
            kept[epoch, i] = loss
    return history.tolist(), kept, model


class MetricLogger:
    """The meters of torchvision's reference scripts, which many repositories copied."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def update(self, **kwargs: Any) -> None:
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.values.setdefault(k, []).append(v)


@idiom(
    "a MetricLogger as in torchvision's references: if isinstance(v, torch.Tensor): v = v.item()",
)
def metric_logger(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    logger = MetricLogger()
    for x, y in batches:
        loss = run(x, y)
        logger.update(loss=loss, lr=optimizer.param_groups[0]["lr"])
    return logger.values, model


@idiom(
    "the last loss in a checkpoint: torch.save({'loss': loss, ...})",
)
def saved(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    for x, y in batches:
        loss = run(x, y)
    file = io.BytesIO()
    torch.save({"model_state_dict": model.state_dict(), "loss": loss}, file)
    file.seek(0)
    return torch.load(file), model


@idiom("loss.clone(), loss.data, loss.detach().clone().requires_grad_()")
def cloned(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    return [(loss.clone(), loss.data, loss.detach().clone().requires_grad_()) for loss in losses], model


@idiom(
    "copy.deepcopy of a result, or of a history that holds results",
)
def copied(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    history: dict[str, list[Any]] = {"loss": []}
    for x, y in batches:
        history["loss"].append(run(x, y))
        best = copy.deepcopy(history)
    return best, model


@idiom(
    "printed within a dict: print({'loss': loss})",
)
def printed_in_dict(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    out = io.StringIO()
    for i, (x, y) in enumerate(batches):
        print({"step": i, "loss": run(x, y)}, file=out)
    return out.getvalue(), model


@idiom("total = loss of the first step, then total += loss; and if loss != loss: break")
def summed_in_place(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    total, losses = None, []
    for x, y in batches:
        loss = run(x, y)
        if loss != loss:
            break
        losses.append(loss)
        if total is None:
            total = loss
        else:
            total += loss
    return total, losses, model


@idiom(
    "isinstance(loss, torch.Tensor), torch.is_tensor(loss): a history of floats",
)
def asked_for_its_class(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        loss = run(x, y)
        losses.append(loss.item() if isinstance(loss, torch.Tensor) or torch.is_tensor(loss) else loss)
    return losses, model


def _as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_floats(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_floats(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor) else f"another {type(value).__name__}"


@idiom("a container by its class: if isinstance(out, dict): ..., elif isinstance(out, (list, tuple)): ...")
def asked_for_the_class_of_a_container(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor, paired: bool) -> Any:
        optimizer.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        accuracy = (output.argmax(1) == y).float().mean()
        return (loss, accuracy) if paired else {"loss": loss, "accuracy": accuracy}

    run = train(step, (*batches[0], False), model=model, optimizer=optimizer)
    return [_as_floats(run(x, y, i % 2 == 1)) for i, (x, y) in enumerate(batches)], model
