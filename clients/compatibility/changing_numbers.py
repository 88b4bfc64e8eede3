"""Numbers that change from step to step or from epoch to epoch."""

from __future__ import annotations

import copy
import importlib
import io
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.compatibility.suite import Train, idiom
from gpumux import errors

BATCHES = 3
EPOCHS = 2


def _classifier(dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
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


@idiom("a loss weight in a closure, annealed by epoch")
def annealed_weight(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    alpha = 1.0

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss: Tensor = F.cross_entropy(logits, y) + alpha * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(8):
        alpha = 0.5**epoch
        losses += [run(x, y) for x, y in batches]
    return losses, model


def _sigmoid_rampup(current: int, length: int) -> float:
    """https://arxiv.org/abs/1610.02242"""
    phase = 1.0 - np.clip(current, 0.0, length) / length
    return float(np.exp(-5.0 * phase * phase))


@idiom("Mean Teacher's ramp-up, computed with numpy in the step: float(np.exp(-5 * phase * phase))")
def rampup_of_numpy(train: Train) -> Any:
    student, optimizer = _classifier(dropout=0.2)
    teacher = copy.deepcopy(student)
    batches = _batches()
    steps = {"count": 0}

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = student(x)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        weight = 0.5 * _sigmoid_rampup(steps["count"], 10)
        loss: Tensor = F.cross_entropy(logits, y) + weight * F.mse_loss(logits.softmax(-1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps["count"] += 1
        alpha = min(1 - 1 / (steps["count"] + 1), 0.9)
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.mul_(alpha).add_(theirs, alpha=1 - alpha)
        return loss

    run = train(step, batches[0], model=student, optimizer=optimizer)
    return [run(*batches[i % BATCHES]) for i in range(14)], student, teacher


@idiom("loss weights in a dictionary, made anew before each step: weights = {'ce': 1.0, 'entropy': a}")
def weights_made_anew(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    weights = {"ce": 1.0, "entropy": 1.0}

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss: Tensor = weights["ce"] * F.cross_entropy(logits, y) + weights["entropy"] * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(8):
        for i, (x, y) in enumerate(batches):
            weights = {"ce": 1.0, "entropy": 0.5 ** (epoch + i / BATCHES)}
            losses.append(run(x, y))
    return losses, model


@idiom(
    "mixup with a lambda drawn outside the step and given as a float",
)
def mixup(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)

    def step(x: Tensor, y: Tensor, lam: float) -> Tensor:
        other = x.flip(0)
        logits = model(lam * x + (1 - lam) * other)
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (*batches[0], 0.5), model=model, optimizer=optimizer)
    return [run(x, y, random.betavariate(0.4, 0.4)) for x, y in batches], model


@idiom(
    "mixup with a lambda drawn in the step",
    refused=errors.NotRepeatable,
    instead="draw before the step, and pass the number as an argument",
)
def mixup_drawn_inside(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)

    def step(x: Tensor, y: Tensor) -> Tensor:
        lam = random.betavariate(0.4, 0.4)
        index = torch.randperm(x.size(0))
        logits = model(lam * x + (1 - lam) * x[index])
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y) for x, y in batches], model


@idiom("a temperature of Gumbel softmax, annealed each step")
def annealed_temperature(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)
    args = SimpleNamespace(temperature=1.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        soft = F.gumbel_softmax(model(x), tau=args.temperature)
        loss = F.nll_loss(soft.clamp_min(1e-6).log(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        losses.append(run(x, y))
        args.temperature = max(0.5, args.temperature * 0.95)
    return losses, model


@idiom(
    "a counter in a closure, counted up in the step, for a warmup of the loss weight",
)
def counter_as_warmup(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)
    seen = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        loss = min(1.0, seen / 6) * F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    return losses, seen, model


@idiom("label smoothing switched off for the last epoch: criterion.label_smoothing = 0.0")
def label_smoothing(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(EPOCHS):
        if epoch == EPOCHS - 1:
            criterion.label_smoothing = 0.0
        losses += [run(x, y) for x, y in batches]
    return losses, model


@idiom("dropout changed between epochs: module.p = ...")
def scheduled_dropout(train: Train) -> Any:
    model, optimizer = _classifier(dropout=0.5)
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(6):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5 * (1 - epoch / 6)
        losses += [run(x, y) for x, y in batches]
    return losses, model


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.decoder = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.decoder(z), mean, logvar


@idiom(
    "the KL weight of a VAE, a function of the global step",
)
def kl_weight(train: Train) -> Any:
    model = _Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = _batches(8)

    def step(x: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        reconstruction, mean, logvar = model(x)
        kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(-1).mean()
        loss = F.mse_loss(reconstruction, x) + beta * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, kl

    run = train(step, (batches[0][0], 0.0), model=model, optimizer=optimizer)
    return [run(x, min(1.0, index / 6)) for index, (x, _) in enumerate(batches)], model


@idiom("a learning rate set by hand: for group in optimizer.param_groups: group['lr'] = ...")
def learning_rate_by_hand(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.7**epoch
        losses += [run(x, y) for x, y in batches]
    return losses, model, optimizer


@idiom(
    "a learning rate set in the step, from the step's number given as an int",
)
def learning_rate_in_the_step(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)

    def step(x: Tensor, y: Tensor, number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (number + 1) / 6)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (*batches[0], 0), model=model, optimizer=optimizer)
    return [run(x, y, number) for number, (x, y) in enumerate(batches)], model, optimizer


def _stepped_inside(
    train: Train, make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
) -> tuple[Any, ...]:
    """Losses of a loop whose step steps a scheduler, its last rates and epoch, and the model."""
    model, optimizer = _classifier()
    scheduler = make(optimizer)
    batches = _batches(8)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    return losses, scheduler.get_last_lr(), scheduler.last_epoch, model


@idiom("scheduler.step() inside the step")
def scheduler_inside(train: Train) -> Any:
    return _stepped_inside(train, lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8))


@idiom(
    "scheduler.step() inside the step, get_last_lr() printed after each step",
)
def scheduler_inside_printed(train: Train) -> Any:
    model, optimizer = _classifier()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 4))
    batches = _batches(8)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    lines = [f"loss {run(x, y).item():.3f} lr {scheduler.get_last_lr()[0]:.2e}" for x, y in batches]
    return lines, model


class _Polynomial(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, most: int, power: float = 0.9) -> None:
        self.most, self.power = most, power
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [base * (1 - self.last_epoch / self.most) ** self.power for base in self.base_lrs]


@idiom("a scheduler of one's own, class PolyLR(_LRScheduler) with get_lr, stepped inside the step")
def own_scheduler_inside(train: Train) -> Any:
    return _stepped_inside(train, lambda optimizer: _Polynomial(optimizer, 20))


@idiom("scheduler.step() after each epoch (StepLR), by hand")
def scheduler_after(train: Train) -> Any:
    model, optimizer = _classifier()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for _ in range(EPOCHS):
        losses += [run(x, y) for x, y in batches]
        scheduler.step()
    return losses, scheduler.get_last_lr(), model


@idiom("ReduceLROnPlateau, stepped with the validation loss")
def reduced_on_a_plateau(train: Train) -> Any:
    model, optimizer = _classifier()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    batches = _batches()
    x_val, y_val = _batches(1)[0]
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for _ in range(4):
        for x, y in batches:
            run(x, y)
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x_val), y_val).item())
        scheduler.step(losses[-1])
    return losses, optimizer.param_groups[0]["lr"], model


@idiom("OneCycleLR after each step, which changes the momentum as well")
def one_cycle(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=len(batches))
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses, rates = [], []
    for x, y in batches:
        losses.append(run(x, y))
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return losses, rates, model


@idiom("OneCycleLR with Adam: beta1 changes with each step")
def one_cycle_with_adam(train: Train) -> Any:
    model, _ = _classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = _batches(8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=len(batches))
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        losses.append(run(x, y))
        scheduler.step()
    return losses, model


@idiom("CosineAnnealingWarmRestarts: scheduler.step(epoch + i / len(loader))")
def warm_restarts(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(3):
        for i, (x, y) in enumerate(batches):
            losses.append(run(x, y))
            scheduler.step(epoch + i / len(batches))
    return losses, model


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, target: Tensor, use_teacher: bool) -> Tensor:
        hidden = torch.zeros(target.size(0), 8)
        token = target[:, 0]
        logits = []
        for t in range(1, target.size(1)):
            hidden = self.cell(self.embedding(token), hidden)
            logits.append(self.head(hidden))
            token = target[:, t] if use_teacher else logits[-1].argmax(-1)
        return torch.stack(logits, 1)


@idiom("teacher forcing, decided outside the step by a ratio")
def teacher_forcing(train: Train) -> Any:
    model = _Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [torch.randint(0, 10, (4, 5)) for _ in range(8)]

    def step(target: Tensor, use_teacher: bool) -> Tensor:
        logits = model(target, use_teacher)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0], True), model=model, optimizer=optimizer)
    return [run(target, random.random() < 0.5) for target in batches], model


@idiom(
    "teacher forcing, decided in the step: random.random() < ratio",
    refused=errors.NotRepeatable,
    instead="draw before the step, and pass the flag as an argument",
)
def teacher_forcing_inside(train: Train) -> Any:
    model = _Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [torch.randint(0, 10, (4, 5)) for _ in range(8)]

    def step(target: Tensor) -> Tensor:
        logits = model(target, random.random() < 0.5)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (batches[0],), model=model, optimizer=optimizer)
    return [run(target) for target in batches], model


@idiom(
    "the global step as an int, for a weight that decays with it",
)
def global_step(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)

    def step(x: Tensor, y: Tensor, global_step: int) -> Tensor:
        decay = 0.99**global_step
        loss: Tensor = decay * F.cross_entropy(model(x), y) + (1 - decay) * model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (*batches[0], 0), model=model, optimizer=optimizer)
    return [run(x, y, number) for number, (x, y) in enumerate(batches)], model


@idiom(
    "the batch's index as an int: if i % 10 == 0 the step returns more",
)
def step_that_logs(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(8)

    def step(x: Tensor, y: Tensor, i: int) -> dict[str, Tensor]:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        logs = {"loss": loss.detach()}
        if i % 4 == 0:
            logs["accuracy"] = (logits.argmax(-1) == y).float().mean()
        return logs

    run = train(step, (*batches[0], 0), model=model, optimizer=optimizer)
    return [run(x, y, i) for i, (x, y) in enumerate(batches)], model


@idiom(
    "losses.append(loss.item()) inside the step",
    refused=errors.DataDependent,
    instead="return the loss, and append it after the step",
)
def appended_inside(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(6)
    losses: list[float] = []

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    run = train(step, batches[0], model=model, optimizer=optimizer)
    for x, y in batches:
        run(x, y)
    return losses, model


class _AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.sum += value * n
        self.count += n


@idiom(
    "an AverageMeter updated inside the step: meter.update(loss.item(), x.size(0))",
    refused=errors.DataDependent,
    instead="return the loss, and update the meter after the step",
)
def meter_inside(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(6)
    meter = _AverageMeter()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), x.size(0))
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    return losses, meter.sum / meter.count, model


@idiom(
    "losses.append(loss.detach()) inside the step, averaged after each epoch",
    refused=errors.NotRepeatable,
    instead="return the loss, and append it in the loop: losses.append(run(x, y))",
)
def tensors_appended_inside(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    losses: list[Tensor] = []

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    run = train(step, batches[0], model=model, optimizer=optimizer)
    means = []
    for _ in range(EPOCHS):
        losses.clear()
        for x, y in batches:
            run(x, y)
        means.append(torch.stack(losses).mean().item())
    return means, model


@idiom(
    "a progress bar moved on inside the step: bar.update(1)",
    needs=("tqdm",),
    refused=errors.CaptureError,
    instead="move the bar after the step",
)
def progress_inside(train: Train) -> Any:
    tqdm = importlib.import_module("tqdm").tqdm
    tqdm.monitor_interval = 0  # starts no thread that outlives the script
    model, optimizer = _classifier()
    batches = _batches(6)
    bar = tqdm(total=len(batches), file=io.StringIO())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        bar.update(1)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    bar.close()
    return losses, bar.n, model


@idiom(
    "a line of the log written inside the step: print(..., file=log)",
    refused=errors.CaptureError,
    instead="return what is logged, and write it after the step",
)
def log_inside(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(6)
    log = io.StringIO()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"trained on {x.size(0)}", file=log)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    return losses, log.getvalue(), model


@idiom(
    "the loss, a tensor, printed inside the step: print('loss', loss.detach(), file=log)",
    refused=errors.CaptureError,
    instead="return the loss, and print it after the step (print to standard output is skipped, with a warning)",
)
def loss_printed_inside(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches(6)
    log = io.StringIO()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", loss.detach(), file=log)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y) for x, y in batches]
    return losses, log.getvalue(), model


@idiom("layers unfrozen after an epoch: parameter.requires_grad = True")
def unfrozen(train: Train) -> Any:
    model, optimizer = _classifier()
    batches = _batches()
    body = next(iter(model.children()))
    body.requires_grad_(False)
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(3):
        if epoch == 1:
            for parameter in body.parameters():
                parameter.requires_grad = True
        losses += [run(x, y) for x, y in batches]
    return losses, model


@idiom("layers unfrozen after an epoch: optimizer.add_param_group")
def parameters_added(train: Train) -> Any:
    body, head = nn.Linear(8, 16), nn.Linear(16, 4)
    model = nn.Sequential(body, nn.ReLU(), head)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(3):
        if epoch == 1:
            optimizer.add_param_group({"params": body.parameters(), "lr": 1e-3})
        losses += [run(x, y) for x, y in batches]
    return losses, model


class _Annealed(nn.Linear):
    """As SphereFace's head, which counts its calls."""

    def __init__(self, *first: float) -> None:
        super().__init__(8, 4)
        self.calls = 0
        if first:
            (self.lamb,) = first

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.lamb = max(5.0, 1000.0 * (1 + 0.5 * self.calls) ** -1)
        return super().forward(x) / (1 + self.lamb)


def _annealed(train: Train, model: _Annealed) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = _batches()
    run = train(_supervised(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = [(run(x, y).item(), model.lamb) for _ in range(EPOCHS) for x, y in batches]
    return losses, model.calls, model


def annealed_with_a_first_value(train: Train) -> Any:
    return _annealed(train, _Annealed(0.0))


@idiom(
    "a weight that forward computes of a count of its calls, and leaves in an attribute that is new (SphereFace)",
    refused=errors.NotRepeatable,
    instead="give it a first value in __init__: self.lamb = 0.0",
    changed=annealed_with_a_first_value,
)
def annealed_in_a_new_attribute(train: Train) -> Any:
    return _annealed(train, _Annealed())
