"""How training loops are built: what happens in a step, and between steps, epochs and phases."""

from __future__ import annotations

import copy
import io
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from clients.compatibility.parts import batches_of, classifier, network, usual_step
from clients.compatibility.suite import Train, idiom
from gpumux import errors
from gpumux.errors import DataDependent, LocalWrite, NoGraph, StaleGradient, StaleState


@idiom("zero_grad(set_to_none=False)")
def zeroed_in_place(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("zero_grad() at the step's end")
def zeroed_last(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("zero_grad() in the loop, before the submitted step")
def zeroed_outside(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append(run(x, y).item())
    return losses, model


@idiom(
    "gradient accumulation with `if (i + 1) % 4 == 0`, the step's number an argument",
)
def accumulated_by_number(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches = batches + batches[:3]

    def step(i: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    run = train(step, (0, *batches[0]), model=model, optimizer=optimizer)
    return [run(i, x, y).item() for i, (x, y) in enumerate(batches)], model, optimizer


@idiom(
    "gradient accumulation with `if (i + 1) % 4 == 0`, i a variable of the loop around the step",
)
def accumulated_by_variable(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches = batches + batches[:3]
    i = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):  # noqa: B007
        losses.append(run(x, y).item())
    return losses, model, optimizer


@idiom("gradient accumulation with `if i % 4 == 0`, which steps at the first batch too")
def accumulated_from_the_first(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches = batches + batches[:3]

    def step(i: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    run = train(step, (0, *batches[0]), model=model, optimizer=optimizer)
    return [run(i, x, y).item() for i, (x, y) in enumerate(batches)], model, optimizer


def accumulated_in_one_job(train: Train) -> Any:
    return _accumulated_in_two(train, one_job=True)


@idiom(
    "gradient accumulation in two submitted functions: accumulate, then update",
    refused=LocalWrite,
    instead="give the second function to the same job: job.add(update)",
    changed=accumulated_in_one_job,
)
def accumulated_in_two(train: Train) -> Any:
    return _accumulated_in_two(train, one_job=False)


def _accumulated_in_two(train: Train, *, one_job: bool) -> Any:
    model, optimizer, batches = classifier()
    batches = batches + batches[:3]

    def accumulate(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    run = train(accumulate, batches[0], model=model, optimizer=optimizer)
    apply = train.add(update, ()) if one_job else train(update, (), model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        losses.append(run(x, y).item())
        if (i + 1) % 4 == 0:
            apply()
    return losses, model


@idiom(
    "gradient accumulation with the forward and backward pass submitted, optimizer.step() outside",
    refused=LocalWrite,
    instead="put optimizer.step() into a function of the same job: job.add(update)",
    changed=accumulated_in_one_job,
)
def accumulated_outside(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        losses.append(run(x, y).item())
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


@idiom("accumulation inside the step: for chunk in x.chunk(3)")
def accumulated_chunks(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = F.cross_entropy(model(part), target) / 3
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom('torch.autocast("cpu", dtype=torch.bfloat16)')
def autocast(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


def _scaled(train: Train, scaler: Any) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], scaler.get_scale(), model


@idiom("GradScaler with enabled=False")
def scaler_disabled(train: Train) -> Any:
    return _scaled(train, torch.amp.GradScaler("cpu", enabled=False))


@idiom("GradScaler, enabled")
def scaler_enabled(train: Train) -> Any:
    return _scaled(train, torch.amp.GradScaler("cpu", init_scale=1024.0))


@idiom("evaluation with the local model under no_grad, each epoch")
def evaluated(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches, test = batches_of(3), batches_of(2)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    history = []
    for _ in range(2):
        model.train()
        train_loss = 0.0
        for x, y in batches:
            train_loss += run(x, y).item()
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for x, y in test:
                output = model(x)
                test_loss += F.cross_entropy(output, y, reduction="sum").item()
                correct += output.argmax(dim=1).eq(y).sum().item()
        history.append((train_loss, test_loss, correct))
    return history, model


def validated_in_one_job(train: Train) -> Any:
    return _validated(train, one_job=True)


@idiom(
    "validation through a second submitted function under no_grad",
    refused=LocalWrite,
    instead="give it to the same job: job.add(validate)",
    changed=validated_in_one_job,
)
def validated(train: Train) -> Any:
    return _validated(train, one_job=False)


def _validated(train: Train, *, one_job: bool) -> Any:
    model, optimizer, batches = classifier()

    @torch.no_grad()
    def validate(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = model(x)
        return F.cross_entropy(output, y), (output.argmax(1) == y).sum()

    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    check = train.add(validate, batches[0]) if one_job else train(validate, batches[0], model=model)
    history = []
    for _ in range(2):
        losses = [run(x, y).item() for x, y in batches[:3]]
        for x, y in batches[3:]:
            val_loss, correct = check(x, y)
            history.append((losses, val_loss.item(), correct.item()))
    return history, model


@idiom("model.train() and model.eval() inside the step and around it")
def modes(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = batches_of()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            acc = (model(x).argmax(1) == y).float().mean()
        return loss.detach(), acc

    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        loss, acc = run(x, y)
        history.append((loss.item(), acc.item(), model.training))
    return history, model


@idiom('phases as in the tutorial: with torch.set_grad_enabled(phase == "train") in the step')
def phases(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = batches_of()

    def step(inputs: Tensor, labels: Tensor, phase: str) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with torch.set_grad_enabled(phase == "train"):
            outputs = model(inputs)
            _, preds = torch.max(outputs, 1)
            loss = F.cross_entropy(outputs, labels)
            if phase == "train":
                loss.backward()
                optimizer.step()
        return loss, torch.sum(preds == labels.data)

    run = train(step, (*batches[0], "train"), model=model, optimizer=optimizer)
    history = []
    for _ in range(2):
        for phase in ("train", "val"):
            model.train() if phase == "train" else model.eval()
            for inputs, labels in batches[:3] if phase == "train" else batches[3:]:
                loss, corrects = run(inputs, labels, phase)
                history.append((loss.item() * inputs.size(0), corrects.double().item()))
    return history, model


@idiom("an average of the weights kept by hand between steps: shadow[name] = 0.9 * shadow[name] + 0.1 * p.data")
def average_by_hand(train: Train) -> Any:
    model, optimizer, batches = classifier()
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    for x, y in batches:
        run(x, y)
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    return shadow, model


@idiom(
    "only the forward pass submitted, loss.backward() and optimizer.step() in the loop",
    refused=NoGraph,
    instead="call loss.backward() and optimizer.step() in the step: the graph is there",
)
def backward_outside(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    run = train(forward, batches[0], model=model, optimizer=optimizer)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = run(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@idiom("frozen batch norm: for m in model.modules(): if isinstance(m, BatchNorm1d): m.eval()")
def frozen_norm(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = batches_of()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        if i == 2:
            for m in model.modules():
                if isinstance(m, nn.BatchNorm1d):
                    m.eval()
        losses.append(run(x, y).item())
    return losses, model


@idiom("early stopping with patience, on a validation loss of the local model")
def early_stopping(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    best, patience, history = float("inf"), 0, []
    for _ in range(5):
        for x, y in batches[:3]:
            run(x, y)
        with torch.no_grad():
            val_loss = torch.stack([F.cross_entropy(model(x), y) for x, y in batches[3:]]).mean()
        history.append(val_loss.item())
        patience = 0 if val_loss < best else patience + 1
        best = min(best, val_loss.item())
        if patience >= 2:
            break
    return history, model


@idiom("a checkpoint saved with torch.save midway, read again with torch.load")
def checkpoint(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "last.pt")
        for epoch in range(3):
            for x, y in batches[:2]:
                loss = run(x, y)
            state = {
                "epoch": epoch,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loss": loss.item(),
            }
            torch.save(state, path)
        return torch.load(path), model


@idiom("resumed from a checkpoint before submit: load_state_dict of model and optimizer")
def resumed(train: Train) -> Any:
    model, optimizer, batches = classifier()
    local = usual_step(model, optimizer)
    for x, y in batches[:2]:
        local(x, y)
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer, _ = classifier()
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches[2:]], model, optimizer


def put_back_and_told(train: Train) -> Any:
    return _put_back(train, told=True)


@idiom(
    "the best state put back with model.load_state_dict midway, training goes on",
    refused=LocalWrite,
    instead="job.load_state() after it",
    changed=put_back_and_told,
)
def put_back(train: Train) -> Any:
    return _put_back(train, told=False)


def _put_back(train: Train, *, told: bool) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y).item() for x, y in batches[:2]]
    best = copy.deepcopy(model.state_dict())
    losses += [run(x, y).item() for x, y in batches[2:4]]
    model.load_state_dict(best)
    if told:
        train.load_state()
    losses += [run(x, y).item() for x, y in batches[4:]]
    return losses, model


@idiom("best_model = copy.deepcopy(model)")
def copied_model(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    best, best_model = float("inf"), copy.deepcopy(model)
    for x, y in batches:
        loss = run(x, y).item()
        if loss < best:
            best, best_model = loss, copy.deepcopy(model)
    with torch.no_grad():
        return best_model(batches[0][0]), best_model, model


@idiom("best = model.state_dict() without a copy, which follows the training")
def state_not_copied(train: Train) -> Any:
    model, optimizer, batches = classifier()
    first, weight = model.state_dict(), next(model.parameters()).data
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    best, best_state = float("inf"), first
    for x, y in batches:
        loss = run(x, y).item()
        if loss < best:
            best, best_state = loss, model.state_dict()
    return best, best_state, first, weight.norm().item(), model


@idiom(
    "a counter in the step: nonlocal global_step; global_step += 1",
)
def counter_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    global_step = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal global_step
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        global_step += 1
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [(run(x, y).item(), global_step) for x, y in batches], model


@idiom(
    "losses.append(loss.detach()) in the step, read at the epoch's end",
    refused=errors.NotRepeatable,
    instead="return the tensors, and append them after the step",
)
def list_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    losses: list[Tensor] = []

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    run = train(step, batches[0], model=model, optimizer=optimizer)
    for x, y in batches:
        run(x, y)
    return torch.stack(losses).mean(), len(losses), model


@idiom(
    "print of shapes in the step, at every step",
    refused=errors.CaptureError,
    instead="return what is printed, and print it after the step (print to standard output is skipped, with a warning)",
)
def printed_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    out = io.StringIO()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        print("a batch of", tuple(x.shape), file=out)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], out.getvalue(), model


def _sampled_in_train_mode(train: Train, after: Callable[[], None]) -> Any:
    """DCGAN's example samples its generator in train mode, where batch norm counts the samples as well."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
    noise = torch.randn(6, 4)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(generator(torch.randn(len(x), 4)), x)
        loss.backward()
        optimizer.step()
        return loss

    batches = [torch.randn(6, 8) for _ in range(4)]
    run = train(step, (batches[0],), model=generator, optimizer=optimizer)
    losses, samples = [], []
    for i, x in enumerate(batches):
        losses.append(run(x).item())
        if i % 2 == 0:
            samples.append(generator(noise).detach())
            after()
    return losses, samples, generator


def _sampled_and_loaded(train: Train) -> Any:
    return _sampled_in_train_mode(train, train.load_state)


@idiom(
    "samples of a generator with batch norm, in train mode between steps, as DCGAN's example: fake = netG(fixed_noise)",
    refused=LocalWrite,
    instead="job.load_state() after it, or generator.eval() around it",
    changed=_sampled_and_loaded,
)
def sampled_in_train_mode(train: Train) -> Any:
    return _sampled_in_train_mode(train, lambda: None)


@idiom("a new optimizer midway, under the same name: optimizer = SGD(...) at epoch 2")
def new_optimizer(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y).item() for x, y in batches[:3]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses += [run(x, y).item() for x, y in batches[3:]]
    return losses, model


def returned_norms(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss, [p.grad.norm(2) for p in model.parameters() if p.grad is not None]

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [sum(norm.item() ** 2 for norm in run(x, y)[1]) ** 0.5 for x, y in batches], model


@idiom(
    "gradient norms logged outside the step: p.grad.norm()",
    refused=StaleGradient,
    instead="return the norms from the step",
    changed=returned_norms,
)
def gradient_norms(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    norms = []
    for x, y in batches:
        run(x, y)
        total = 0.0
        for p in model.parameters():
            if p.grad is not None:
                total += p.grad.detach().data.norm(2).item() ** 2
        norms.append(total**0.5)
    return norms, model


@idiom("register_forward_hook that collects activations, returned by the step")
def forward_hook(train: Train) -> Any:
    model, optimizer, batches = classifier()
    activations: dict[str, Tensor] = {}

    def hook(module: nn.Module, given: Any, output: Tensor) -> None:
        activations["hidden"] = output.detach()

    model[1].register_forward_hook(hook)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss, activations["hidden"]

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [(value.item(), hidden.mean().item()) for value, hidden in (run(x, y) for x, y in batches)], model


@idiom(
    "activations of a forward hook read outside the step",
    refused=StaleState,
    instead="return them from the step",
    changed=forward_hook,
)
def forward_hook_outside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    activations: dict[str, Tensor] = {}

    def hook(module: nn.Module, given: Any, output: Tensor) -> None:
        activations["hidden"] = output.detach()

    model[1].register_forward_hook(hook)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    means = []
    for x, y in batches:
        run(x, y)
        means.append(activations["hidden"].mean().item())
    return means, model


@idiom("register_full_backward_hook that scales a gradient")
def backward_hook(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if grad is None else 0.5 * grad for grad in grad_input)

    model[1].register_full_backward_hook(hook)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("weights initialized by model.apply(init_weights)")
def initialized(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def init_weights(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    model.apply(init_weights)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("a regularizer over all parameters: sum(p.abs().sum() for p in model.parameters())")
def regularized(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        l1 = sum(p.abs().sum() for p in model.parameters())
        l2 = sum(torch.norm(p) ** 2 for name, p in model.named_parameters() if "weight" in name)
        loss = F.cross_entropy(model(x), y) + 1e-3 * l1 + 1e-4 * l2
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("CrossEntropyLoss(label_smoothing=0.1) as a criterion")
def label_smoothing(train: Train) -> Any:
    model, optimizer, batches = classifier()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "mixup with torch.randperm in the step, a lambda from numpy drawn in the loop",
)
def mixup(train: Train) -> Any:
    import numpy as np

    model, optimizer, batches = classifier()
    draws = np.random.default_rng(0)

    def step(x: Tensor, y: Tensor, lam: float) -> Tensor:
        index = torch.randperm(x.size(0))
        mixed = lam * x + (1 - lam) * x[index]
        optimizer.zero_grad()
        output = model(mixed)
        loss = lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y[index])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, (*batches[0], 0.5), model=model, optimizer=optimizer)
    return [run(x, y, draws.beta(0.2, 0.2)).item() for x, y in batches], model


@idiom(
    "mixup on the device: a lambda from torch.distributions.Beta in the step",
)
def mixup_beta(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        lam = torch.distributions.Beta(0.4, 0.4).sample()
        index = torch.randperm(x.size(0))
        optimizer.zero_grad()
        output = model(lam * x + (1 - lam) * x[index])
        loss = lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y[index])
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom(
    "cutmix: a box at a place drawn in the loop, x[:, :, top : top + 4]",
)
def cutmix(train: Train) -> Any:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [(torch.randn(4, 1, 8, 8), torch.randint(0, 4, (4,))) for _ in range(4)]

    def step(x: Tensor, y: Tensor, top: int, left: int) -> Tensor:
        index = torch.randperm(x.size(0))
        x = x.clone()
        x[:, :, top : top + 4, left : left + 4] = x[index, :, top : top + 4, left : left + 4]
        optimizer.zero_grad()
        output = model(x)
        loss = 0.75 * F.cross_entropy(output, y) + 0.25 * F.cross_entropy(output, y[index])
        loss.backward()
        optimizer.step()
        return loss

    def corner() -> int:
        return int(torch.randint(0, 5, (1,)).item())

    run = train(step, (*batches[0], 0, 0), model=model, optimizer=optimizer)
    return [run(x, y, corner(), corner()).item() for x, y in batches], model


@idiom("random erasing by a mask of torch.rand in the step")
def random_erasing(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        keep = torch.rand(x.shape) > 0.2
        noisy = torch.where(keep, x, torch.zeros_like(x)) + 0.01 * torch.randn_like(x)
        loss = F.cross_entropy(model(noisy), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("knowledge distillation: a frozen teacher called under no_grad in the step")
def distillation(train: Train) -> Any:
    model, optimizer, batches = classifier()
    teacher = network().eval()

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher(x)
        logits = model(x)
        soft = F.kl_div(F.log_softmax(logits / 4, 1), F.softmax(teacher_logits / 4, 1), reduction="batchmean") * 16
        loss = 0.5 * soft + 0.5 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model, teacher


@idiom("contrastive learning with InfoNCE (SimCLR)")
def contrastive(train: Train) -> Any:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.randn(5, 8), torch.randn(5, 8)) for _ in range(5)]

    def step(one: Tensor, two: Tensor) -> Tensor:
        z = F.normalize(model(torch.cat([one, two])), dim=1)
        similarity = z @ z.T / 0.5
        similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        targets = torch.arange(len(z)).roll(len(one))
        loss = F.cross_entropy(similarity, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(one, two).item() for one, two in batches], model


@idiom("a curriculum: `if epoch < 2` in the step, epoch a variable of the loop")
def curriculum(train: Train) -> Any:
    model, optimizer, batches = classifier()
    epoch = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        if epoch >= 2:
            loss = loss + 0.1 * output.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(4):  # noqa: B007
        losses += [run(x, y).item() for x, y in batches[:2]]
    return losses, model


@idiom(
    "a loss weight annealed by the epoch: beta = min(1, epoch / 4)",
)
def annealed(train: Train) -> Any:
    model, optimizer, batches = classifier()
    beta = 0.0

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y) + beta * output.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(7):
        beta = min(1.0, epoch / 4)
        x, y = batches[epoch % len(batches)]
        losses.append(run(x, y).item())
    return losses, model


class MoCo(nn.Module):
    """Momentum contrast, as its authors wrote it, without what spreads it over GPUs."""

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, dim: int = 4, size: int = 12, m: float = 0.9, temperature: float = 0.2) -> None:
        super().__init__()
        self.size, self.m, self.temperature = size, m, temperature
        self.encoder_q, self.encoder_k = network(), network()
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.size

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.temperature
        self._enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def _moco(train: Train, model: MoCo) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(5)]

    def step(one: Tensor, two: Tensor) -> Tensor:
        output, target = model(one, two)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(one, two).item() for one, two in batches], model


class NumberedMoCo(MoCo):
    """With the queue's pointer in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.ptr = 0

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        self.queue[:, self.ptr : self.ptr + keys.shape[0]] = keys.T
        self.ptr = (self.ptr + keys.shape[0]) % self.size


@idiom("MoCo with the queue's pointer in a Python number")
def moco_with_a_number(train: Train) -> Any:
    return _moco(train, NumberedMoCo())


@idiom("MoCo: a momentum encoder by param_k.data = ..., a queue with a pointer")
def moco(train: Train) -> Any:
    return _moco(train, MoCo())


@idiom("BYOL: a target network by exponential averages in the step, stop-gradient by detach()")
def byol(train: Train) -> Any:
    online, predictor = network(), nn.Linear(4, 4)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=1e-2)
    batches = [(torch.randn(5, 8), torch.randn(5, 8)) for _ in range(5)]

    def step(one: Tensor, two: Tensor) -> Tensor:
        loss = -F.cosine_similarity(predictor(online(one)), target(two).detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(online.parameters(), target.parameters(), strict=True):
                q.data.mul_(0.99).add_(p.data, alpha=0.01)
        return loss

    run = train(step, batches[0], model=[online, predictor, target], optimizer=optimizer)
    return [run(one, two).item() for one, two in batches], online, predictor, target


@idiom(
    "REINFORCE: actions sampled with the local model, Categorical.log_prob in the step",
)
def reinforce(train: Train) -> Any:
    policy = network()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def step(states: Tensor, actions: Tensor, returns: Tensor) -> Any:
        dist = Categorical(logits=policy(states))
        loss = -(dist.log_prob(actions) * returns).mean() - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    example = torch.zeros(5, 8), torch.zeros(5, dtype=torch.long), torch.zeros(5)
    run = train(step, example, model=policy, optimizer=optimizer)
    history = []
    for _ in range(4):
        states, actions, rewards = [], [], []
        state = torch.randn(8)
        for _ in range(5):
            with torch.no_grad():
                action = Categorical(logits=policy(state)).sample()
            states.append(state)
            actions.append(action)
            rewards.append(float(action.item() == 1))
            state = torch.randn(8)
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        history.append((run(torch.stack(states), torch.stack(actions), returns).item(), sum(rewards)))
    return history, policy


@idiom(
    "PPO: the clipped ratio over several epochs of a rollout, with an entropy bonus and a value loss",
)
def ppo(train: Train) -> Any:
    body, actor, critic = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)
    agent = nn.ModuleDict({"body": body, "actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)

    def step(obs: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, returns: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(body(obs))
        dist = Categorical(logits=actor(hidden))
        ratio = (dist.log_prob(actions) - old).exp()
        with torch.no_grad():
            kl = ((ratio - 1) - ratio.log()).mean()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
        v_loss = 0.5 * ((critic(hidden).view(-1) - returns) ** 2).mean()
        loss = pg_loss - 0.01 * dist.entropy().mean() + v_loss * 0.5
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), kl

    obs = torch.randn(12, 8)
    with torch.no_grad():
        dist = Categorical(logits=actor(torch.tanh(body(obs))))
        actions = dist.sample()
        old = dist.log_prob(actions)
    rollout = (obs, actions, old, torch.randn(12), torch.randn(12))
    run = train(step, tuple(part[:4].clone() for part in rollout), model=agent, optimizer=optimizer)
    history = []
    for _ in range(2):
        for at in torch.randperm(12).split(4):
            loss, kl = run(*(part[at] for part in rollout))
            history.append((loss.item(), kl.item()))
        if history[-1][1] > 0.5:
            break
    return history, agent


@idiom("DQN: a target network, replaced by target.load_state_dict(policy.state_dict())")
def dqn(train: Train) -> Any:
    policy, target = network(), network()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, amsgrad=True)

    def step(state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> Any:
        values = policy(state).gather(1, action)
        with torch.no_grad():
            expected = reward + 0.99 * target(following).max(1).values
        loss = nn.SmoothL1Loss()(values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        return loss

    batches = [(torch.randn(5, 8), torch.randint(0, 4, (5, 1)), torch.randn(5), torch.randn(5, 8)) for _ in range(4)]
    run = train(step, batches[0], model=policy, optimizer=optimizer)
    losses = []
    for i, batch in enumerate(batches):
        losses.append(run(*batch).item())
        if i % 2 == 1:
            target.load_state_dict(policy.state_dict())
    return losses, policy, target


@idiom("torch.manual_seed(epoch) before each epoch, with dropout")
def seeded_epochs(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = batches_of()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        for i in torch.randperm(len(batches)).tolist():
            losses.append(run(*batches[i]).item())
    return losses, torch.rand(3), model


@idiom("a check outside the step: if torch.isnan(loss): continue")
def nan_outside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    total = 0.0
    for x, y in batches:
        loss = run(x, y)
        if torch.isnan(loss):
            print("loss is NaN")
            continue
        total += loss.item()
    return total, model


@idiom(
    "torch.autograd.set_detect_anomaly(True)",
    refused=DataDependent,
    instead="it reads gradients in Python: look for NaN in what the step returns (the loss, the norm of the gradients)",
)
def anomalies(train: Train) -> Any:
    model, optimizer, batches = classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that this is slow
        with torch.autograd.set_detect_anomaly(True):
            run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
            return [run(x, y).item() for x, y in batches], model


@idiom(
    "with torch.autograd.detect_anomaly() inside the step, around the backward pass",
    refused=DataDependent,
    instead="it reads gradients in Python: look for NaN in what the step returns (the loss, the norm of the gradients)",
)
def anomalies_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autograd.detect_anomaly(check_nan=True):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = train(step, batches[0], model=model, optimizer=optimizer)
        return [run(x, y).item() for x, y in batches], model


@idiom("torch.profiler.record_function in the step, a profile around the loop")
def profiled(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.profiler.record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        with torch.profiler.record_function("backward"):
            loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        losses = []
        for x, y in batches:
            losses.append(run(x, y).item())
            profile.step()
    return losses, model


@contextmanager
def _process_group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    try:
        yield
        # A thread of the group may still want the interpreter, to let go of the last step's sum. If the model is freed
        # before, which waits for that thread without letting it have it, both wait for ever.
        time.sleep(0.1)
    finally:
        dist.destroy_process_group()


@idiom("DistributedDataParallel with a world of one process")
def distributed(train: Train) -> Any:
    with _process_group():
        model = nn.parallel.DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = batches_of()
        run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
        losses = [run(x, y).item() for x, y in batches]
        return losses, copy.deepcopy(model.module.state_dict())


@torch.no_grad()
def _gathered(tensor: Tensor) -> Tensor:
    found = [torch.ones_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, tensor, async_op=False)
    return torch.cat(found, dim=0)


@idiom("dist.all_reduce and dist.all_gather in the step, with a world of one process (MoCo v3, Barlow Twins)")
def collectives(train: Train) -> Any:
    with _process_group():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = batches_of()

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            z = model(x)
            keys = _gathered(F.normalize(z, dim=1))
            labels = torch.arange(len(z)) + len(z) * torch.distributed.get_rank()
            loss = F.cross_entropy(z, y) + F.cross_entropy(F.normalize(z, dim=1) @ keys.t(), labels)
            loss.backward()
            optimizer.step()
            average = loss.detach().clone()
            torch.distributed.all_reduce(average)
            return average.div_(torch.distributed.get_world_size())

        run = train(step, batches[0], model=model, optimizer=optimizer)
        return [run(x, y).item() for x, y in batches], copy.deepcopy(model.state_dict())


@idiom("DataParallel on the CPU")
def data_parallel(train: Train) -> Any:
    model = nn.DataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = batches_of()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model.module, list(model.state_dict())


class _Learner:
    """As in fastai: the step leaves what it computes on the learner, and callbacks read and replace it there."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: list[Any]) -> None:
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks

    def call(self, name: str) -> None:
        for callback in self.callbacks:
            getattr(callback, name, lambda learner: None)(self)

    def one_batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.x, self.y = x, y
        self.call("before_batch")
        self.prediction = self.model(self.x)
        self.loss = F.cross_entropy(self.prediction, self.y)
        self.call("after_loss")
        self.loss.backward()
        self.call("after_backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.loss.detach(), self.prediction.detach()


class _Mixing:
    def before_batch(self, learner: _Learner) -> None:
        learner.share = torch.rand(())  # type: ignore[attr-defined]
        learner.x = torch.lerp(learner.x[torch.randperm(len(learner.x))], learner.x, learner.share)  # type: ignore[attr-defined]


class _Regularized:
    def after_loss(self, learner: _Learner) -> None:
        learner.loss = learner.loss + 1e-3 * torch.stack([p.abs().sum() for p in learner.model.parameters()]).sum()

    def after_backward(self, learner: _Learner) -> None:
        nn.utils.clip_grad_value_(learner.model.parameters(), 0.1)


@idiom("a learner as in fastai: learner.x, learner.loss set in the step, read and replaced by callbacks")
def learner_with_callbacks(train: Train) -> Any:
    model, optimizer, batches = classifier()
    learner = _Learner(model, optimizer, [_Mixing(), _Regularized()])
    run = train(learner.one_batch, batches[0], model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(batches))
    found = []
    for x, y in batches:
        loss, prediction = run(x, y)
        found.append((loss.item(), prediction.argmax(1).tolist()))
        scheduler.step()
    return found, model
