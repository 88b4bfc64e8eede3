"""Optimizers, their groups and schedules, and what scripts do to gradients before the optimizer's step."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

from clients.compatibility.parts import batches_of, classifier, network, usual_step
from clients.compatibility.suite import Train, idiom
from gpumux.errors import DataDependent


def _trained(train: Train, model: nn.Module, optimizer: Optimizer) -> Any:
    batches = batches_of(6)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model, optimizer


@idiom("SGD with momentum, Nesterov and weight decay")
def sgd(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True))


@idiom("SGD with momentum and dampening")
def sgd_dampened(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.1))


@idiom("Adam with amsgrad")
def adam_amsgrad(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), amsgrad=True))


@idiom("AdamW with a group without decay for biases and norms")
def adamw_groups(train: Train) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return _trained(train, model, torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)))


@idiom("RMSprop, centred, with momentum")
def rmsprop(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9, centered=True))


@idiom("Adagrad")
def adagrad(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.Adagrad(model.parameters(), lr=1e-1, lr_decay=1e-2))


@idiom("Adadelta")
def adadelta(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.Adadelta(model.parameters(), lr=1.0))


@idiom("NAdam")
def nadam(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.NAdam(model.parameters(), lr=2e-3))


@idiom("RAdam")
def radam(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.RAdam(model.parameters(), lr=1e-2))


@idiom("foreach=True")
def foreach(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True))


@idiom("fused=True")
def fused(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


@idiom("two parameter groups: a small learning rate for the backbone, a large one for the head")
def two_learning_rates(train: Train) -> Any:
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(8, 16), nn.ReLU()), "head": nn.Linear(16, 4)})
    groups: list[dict[str, Any]] = [
        {"params": model["backbone"].parameters(), "lr": 1e-3},
        {"params": model["head"].parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=1e-1, momentum=0.9)
    schedule = StepLR(optimizer, step_size=2, gamma=0.5)
    batches = batches_of()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model["head"](model["backbone"](x)), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        loss = run(x, y)
        schedule.step()
        history.append((loss.item(), schedule.get_last_lr()))
    return history, model, optimizer


@idiom("layers frozen midway: p.requires_grad_(False)")
def frozen_midway(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for epoch in range(3):
        if epoch == 1:
            for p in model[0].parameters():
                p.requires_grad_(False)
        losses += [run(x, y).item() for x, y in batches[:2]]
    return losses, model, optimizer


@idiom("gradual unfreezing: optimizer.add_param_group midway")
def unfrozen_midway(train: Train) -> Any:
    model = network()
    batches = batches_of()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1e-1, momentum=0.9)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = [run(x, y).item() for x, y in batches[:2]]
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-2})
    losses += [run(x, y).item() for x, y in batches[2:]]
    return losses, model, optimizer


@idiom("clip_grad_norm_ before the optimizer's step, its norm returned")
def clipped_norm(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        return loss, norm

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [[value.item() for value in run(x, y)] for x, y in batches], model, optimizer


@idiom("clip_grad_value_")
def clipped_value(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=0.01)
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model, optimizer


class Lion(Optimizer):
    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                update = exp_avg * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@idiom("an optimizer of one's own in plain Python (Lion)")
def lion(train: Train) -> Any:
    model = network()
    return _trained(train, model, Lion(model.parameters(), lr=1e-2, decay=1e-2))


class LARS(Optimizer):
    def __init__(self, params: Any, lr: float, momentum: float = 0.9, decay: float = 1e-4, trust: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if p.ndim > 1:
                    dp = dp.add(p, alpha=g["weight_decay"])
                    norm, update_norm, one = torch.norm(p), torch.norm(dp), torch.ones_like(torch.norm(p))
                    scale = torch.where(
                        norm > 0.0, torch.where(update_norm > 0, g["trust"] * norm / update_norm, one), one
                    )
                    dp = dp.mul(scale)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


@idiom("LARS as self-supervised repositories write it, with torch.where on norms")
def lars(train: Train) -> Any:
    model = network()
    return _trained(train, model, LARS(model.parameters(), lr=0.5))


class Lookahead:
    """Slow weights that follow the fast ones of a wrapped optimizer every k steps."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.counter = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.slow = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.counter += 1
        if self.counter % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.data.add_(p.data - q.data, alpha=self.alpha)
                    p.data.copy_(q.data)


@idiom("a wrapper around an optimizer with a counter and tensors of its own (Lookahead)")
def lookahead(train: Train) -> Any:
    model = network()
    batches = batches_of(6)
    inner = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    optimizer = Lookahead(inner)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=inner)
    return [run(x, y).item() for x, y in batches], model, inner, optimizer.slow


class SAM(Optimizer):
    """Sharpness-aware minimization, as the much used repository has it."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self) -> Any:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


@idiom("SAM: two forward and backward passes, first_step and second_step")
def sam(train: Train) -> Any:
    model = network()
    batches = batches_of()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


@idiom("optimizer.step(closure) with Adam")
def closure(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        def compute() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return cast(Tensor, optimizer.step(cast(Any, compute)))

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model, optimizer


@idiom(
    "LBFGS",
    refused=DataDependent,
    instead="it decides by losses and gradients when to stop: use Adam, SGD or another optimizer",
)
def lbfgs(train: Train) -> Any:
    model = network()
    batches = batches_of(4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def compute() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return cast(Tensor, optimizer.step(cast(Any, compute)))

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model


def adafactor_given_rate(train: Train) -> Any:
    from transformers.optimization import Adafactor

    model = network()
    return _trained(train, model, Adafactor(model.parameters(), lr=1e-2, scale_parameter=False, relative_step=False))


@idiom(
    "Adafactor of transformers, with its defaults",
    refused=DataDependent,
    instead="its rate follows the size of each parameter: scale_parameter=False, relative_step=False and lr=",
    changed=adafactor_given_rate,
    needs=("transformers",),
)
def adafactor(train: Train) -> Any:
    from transformers.optimization import Adafactor

    model = network()
    return _trained(train, model, Adafactor(model.parameters()))


@idiom("torch.optim.Adafactor", refused=DataDependent, instead="its rate follows the size of each parameter: AdamW")
def adafactor_of_torch(train: Train) -> Any:
    model = network()
    return _trained(train, model, torch.optim.Adafactor(model.parameters(), lr=1e-2))


@idiom("gradient centralization by a hook on each weight: p.register_hook")
def centralized(train: Train) -> Any:
    model, optimizer, batches = classifier()
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(lambda grad: grad - grad.mean(dim=1, keepdim=True))
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model, optimizer


@idiom("gradient noise added to p.grad in the step")
def noisy_gradients(train: Train) -> Any:
    model, optimizer, batches = classifier()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad += 1e-2 * torch.randn_like(p.grad)
        optimizer.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model, optimizer


def _scheduled(train: Train, schedule: Callable[[Optimizer], Any], by_loss: bool = False) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedule(optimizer)
    batches = batches_of(2)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    history = []
    for _ in range(4):
        epoch_loss: Any = 0.0
        for x, y in batches:
            epoch_loss += run(x, y) / len(batches)
        scheduler.step(epoch_loss) if by_loss else scheduler.step()
        history.append((float(epoch_loss), optimizer.param_groups[0]["lr"]))
    return history, model, optimizer


@idiom("ReduceLROnPlateau with the epoch's loss")
def plateau(train: Train) -> Any:
    return _scheduled(
        train, lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5), True
    )


@idiom("a warm-up by LambdaLR")
def warm_up(train: Train) -> Any:
    return _scheduled(train, lambda optimizer: LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 3)))


@idiom("SequentialLR: a linear warm-up, then a cosine")
def sequential(train: Train) -> Any:
    def schedule(optimizer: Optimizer) -> SequentialLR:
        warm, cosine = LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=4)
        return SequentialLR(optimizer, [warm, cosine], milestones=[2])

    return _scheduled(train, schedule)


@idiom("the learning rate set by hand: for group in optimizer.param_groups: group['lr'] = ...")
def by_hand(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for i, (x, y) in enumerate(batches):
        lr = 1e-2 * 0.5 ** (i // 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses.append(run(x, y).item())
    return losses, model, optimizer


@idiom("a scheduler stepped inside the step, after optimizer.step()")
def scheduled_inside(train: Train) -> Any:
    model, optimizer, batches = classifier()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=len(batches) + 1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    run = train(step, batches[0], model=model, optimizer=optimizer)
    return [run(x, y).item() for x, y in batches], model, optimizer


@idiom("OneCycleLR stepped in the loop, with the momentum it cycles")
def one_cycle(train: Train) -> Any:
    model, optimizer, batches = classifier()
    batches = batches + batches
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=len(batches) + 1)
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    history = []
    for x, y in batches:
        history.append((run(x, y).item(), optimizer.param_groups[0]["betas"]))
        scheduler.step()
    return history, model, optimizer


@idiom("learning rate and weight decay from schedules in arrays, set before each step (DINO)")
def scheduled_decay(train: Train) -> Any:
    model, optimizer, batches = classifier()
    rates, decays = torch.linspace(0.01, 0.001, 8).tolist(), torch.linspace(0.04, 0.4, 8).tolist()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    losses = []
    for it in range(8):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = rates[it]
            if i == 0:
                group["weight_decay"] = decays[it]
        losses.append(run(*batches[it % len(batches)]).item())
    return losses, model, optimizer


@idiom("the optimizer's moments looked at between steps: optimizer.state[p]['exp_avg'].norm()")
def moments(train: Train) -> Any:
    model, optimizer, batches = classifier()
    run = train(usual_step(model, optimizer), batches[0], model=model, optimizer=optimizer)
    norms = []
    for x, y in batches:
        run(x, y)
        norms.append([optimizer.state[p]["exp_avg"].norm().item() for p in model.parameters()])
        norms.append([optimizer.state[p]["step"].item() for p in model.parameters()])
    return norms, model


def _plain_sgd(parameters: Iterable[Tensor], lr: float) -> None:
    with torch.no_grad():
        for p in parameters:
            assert p.grad is not None
            p -= lr * p.grad
            p.grad.zero_()


@idiom("no optimizer: with torch.no_grad(): p -= lr * p.grad")
def no_optimizer(train: Train) -> Any:
    model = network()
    batches = batches_of()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        _plain_sgd(model.parameters(), 0.1)
        return loss

    run = train(step, batches[0], model=model)
    return [run(x, y).item() for x, y in batches], model


class _CountedInTheGroup(Optimizer):
    """Adam without a correction of the second moment, which counts as timm's Lamb and Adan do."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            beta, decay = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - beta)
                state["square"].mul_(decay).addcmul_(p.grad, p.grad, value=1 - decay)
                rate = group["lr"] / (1 - beta ** group["step"])
                p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-rate)


@idiom("an optimizer that counts in its groups: if 'step' in group: group['step'] += 1 (timm's Lamb, Adan)")
def counted_in_the_group(train: Train) -> Any:
    model = network()
    return _trained(train, model, _CountedInTheGroup(model.parameters(), lr=1e-2))


class _SlowWeights(Optimizer):
    """Lookahead as published: its constructor leaves out that of Optimizer."""

    def __init__(self, optimizer: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = torch.zeros_like(fast.data).copy_(fast.data)
                    state["slow"] += (fast.data - state["slow"]) * self.alpha
                    fast.data.copy_(state["slow"])
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


@idiom("Lookahead as published: an Optimizer around another one, without super().__init__()")
def slow_weights(train: Train) -> Any:
    model = network()
    return _trained(train, model, _SlowWeights(torch.optim.SGD(model.parameters(), lr=0.1)))


class _Muon(Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp_(buffer, group["momentum"])
                p.add_(_orthogonal(update) if update.ndim > 1 else update, alpha=-group["lr"])


def _orthogonal(found: Tensor) -> Tensor:
    wide = found.size(-2) <= found.size(-1)
    x = found.bfloat16() if wide else found.bfloat16().mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    result: Tensor = (x if wide else x.mT).to(found.dtype)
    return result


@idiom("Muon: momentum made orthogonal by Newton-Schulz iterations in bfloat16")
def muon(train: Train) -> Any:
    model = network()
    return _trained(train, model, _Muon(model.parameters()))


class _KeptForTheOthers(Optimizer):
    """RAdam as first published: the numbers of a step, by its count, in a group's buffer."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.9), "buffer": [[None, None, None] for _ in range(3)]})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta, decay = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                state["exp_avg_sq"].mul_(decay).addcmul_(p.grad.data, p.grad.data, value=1 - decay)
                state["exp_avg"].mul_(beta).add_(p.grad.data, alpha=1 - beta)
                state["step"] += 1
                kept = group["buffer"][int(state["step"] % 3)]
                if state["step"] == kept[0]:
                    length, size = kept[1], kept[2]
                else:
                    kept[0] = state["step"]
                    power = decay ** state["step"]
                    longest = 2 / (1 - decay) - 1
                    length = kept[1] = longest - 2 * state["step"] * power / (1 - power)
                    size = 1 / (1 - beta ** state["step"])
                    if length >= 2:
                        size *= math.sqrt(1 - power)
                    kept[2] = size
                if length >= 2:
                    p.data.addcdiv_(
                        state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-size * group["lr"]
                    )  # fmt: skip
                else:
                    p.data.add_(state["exp_avg"], alpha=-size * group["lr"])


@idiom(
    "an optimizer that keeps numbers of a step for its other parameters: group['buffer'] (AdaBelief, the first RAdam)"
)
def kept_for_the_others(train: Train) -> Any:
    model = network()
    return _trained(train, model, _KeptForTheOthers(model.parameters(), lr=1e-2))


class _Norm(IntEnum):
    SIGN = 1
    ROWS = 2


class _ByItsNorm(Optimizer):
    """SCION in small: which norm bounds an update is an option of the group."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.01, "norm": _Norm.SIGN})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if group["norm"] == _Norm.SIGN:
                    update = p.grad.sign()
                elif group["norm"] == _Norm.ROWS:
                    update = p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-8)
                p.add_(update, alpha=-group["lr"])


class _CountsInZeros(Optimizer):
    """Adam without its second half, with a count in a tensor that torch.zeros makes, read by item()."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["average"] = torch.zeros_like(p)
                state["step"].add_(1)
                state["average"].lerp_(p.grad, 0.1)
                p.add_(state["average"], alpha=-group["lr"] / (1 - 0.9 ** state["step"].item()))


@idiom("an optimizer that counts in state['step'] = torch.zeros(()) and reads it by item() (timm's Muon)")
def counts_in_zeros(train: Train) -> Any:
    model = network()
    return _trained(train, model, _CountsInZeros(model.parameters(), lr=0.05))


@idiom("an option of the groups that is a member of an IntEnum, by which the optimizer decides (SCION)")
def by_its_norm(train: Train) -> Any:
    model = network()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() < 2]
    return _trained(train, model, _ByItsNorm([{"params": weights, "norm": _Norm.ROWS}, {"params": biases}]))


class _FromCopies(Optimizer):
    """Accelerated SGD in small: its averages begin as deep copies of the parameters."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "average" not in state:
                    state["average"] = copy.deepcopy(p.data)
                gap = torch.abs(state["average"] - p.data)
                p.data.addcmul_(p.grad.data, torch.div(1.0, 1.0 + gap), value=-group["lr"])
                state["average"].mul_(0.9).add_(p.data, alpha=0.1)


@idiom("state that begins with copy.deepcopy(p.data), and torch.div(1.0, x) (AccSGD, DiffGrad)")
def from_copies(train: Train) -> Any:
    model = network()
    return _trained(train, model, _FromCopies(model.parameters(), lr=1e-2))
