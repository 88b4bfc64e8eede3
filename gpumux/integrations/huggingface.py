"""A Hugging Face Trainer whose training steps run in a gpumux daemon.

    from gpumux.integrations.huggingface import on_gpumux
    trainer = on_gpumux(Trainer(model, args, train_dataset=data), name="bert")
    trainer.train()

The Trainer keeps its loop: data, schedules, logging, callbacks, checkpoints and evaluation are its own. The computation
of a batch (loss, backward pass, clipping, optimizer) is one captured step. Code that reads the model in this process
(evaluating, predicting, saving, callbacks) has the state fetched from the daemon. `train()` ends with the trained state
in the model and the job closed.

This module does not import transformers: the Trainer is the caller's, of any class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor

from gpumux.client import submit
from gpumux.client.arguments import SubmitOptions
from gpumux.client.job import Job
from gpumux.errors import ConfigError

Trainer = TypeVar("Trainer")


def on_gpumux(trainer: Trainer, **options: Unpack[SubmitOptions]) -> Trainer:
    """Have `trainer.train()` run its steps in a daemon; returns the same trainer. `options` are those of
    gpumux.client.submit (priority, name, endpoint, weight, ...). Subclasses keep their methods, including
    `compute_loss`. One that overrides `training_step` is refused, as that is what gpumux replaces.

    Raises ConfigError for what can't be captured as a step: several devices, float16, DeepSpeed, FSDP, compiled models.
    `train()` raises it for a callback that has on_pre_optimizer_step.
    """
    cls = type(trainer)
    if issubclass(cls, OnGpumux):
        raise ConfigError("this Trainer runs its steps in a daemon already", "call on_gpumux() once")
    overridden = next(c for c in cls.__mro__ if "training_step" in vars(c))
    if not overridden.__module__.startswith("transformers."):
        raise ConfigError(
            f"{overridden.__name__} has a training_step of its own, which gpumux would replace",
            "override compute_loss, or use gpumux.client.submit in a loop of your own",
        )
    _check(trainer)
    moved: Any = trainer
    moved.__class__ = type(f"{cls.__name__}OnGpumux", (OnGpumux, cls), {})
    moved._gpumux = Steps(trainer, options)
    return trainer


def _check(trainer: Any) -> None:
    args = trainer.args
    wrong = {
        "several devices": args.world_size > 1 or args.n_gpu > 1,
        "fp16": args.fp16,
        "DeepSpeed": bool(args.deepspeed),
        "FSDP": bool(args.fsdp),
        "torch_compile": bool(args.torch_compile),
    }
    found = [name for name, is_so in wrong.items() if is_so]
    if found:
        raise ConfigError(
            f"gpumux can't capture the steps of a Trainer with {', '.join(found)}", "turn it off in TrainingArguments"
        )


def _check_callbacks(trainer: Any) -> None:
    """Callbacks are added until training begins. Raises ConfigError for one that would look at gradients."""
    for callback in trainer.callback_handler.callbacks:
        hook = getattr(type(callback), "on_pre_optimizer_step", None)
        if hook is not None and not hook.__module__.startswith("transformers."):
            raise ConfigError(
                f"the callback {type(callback).__name__} has on_pre_optimizer_step(), which would find no gradients:"
                " they are in the daemon",
                "remove it (trainer.remove_callback), or use gpumux.client.submit in a loop of your own",
            )


class Steps:
    """A Trainer's steps as a job, opened at the first step."""

    def __init__(self, trainer: Any, options: SubmitOptions) -> None:
        self._trainer = trainer
        self._options = options
        self.job: Job[Any] | None = None
        # The step of a batch, and of the last batch before the optimizer's step.
        self._calls: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self.norm: Tensor | None = None  # of the newest step's gradients, before clipping
        self._taken: tuple[Any, Any] | None = None  # the optimizer, and the step() that was set on it, if one was

    def take_over(self, optimizer: Any) -> None:
        """Have `optimizer.step()` do nothing until the end: the captured step includes it."""
        if not isinstance(optimizer.step, _Done):
            self._taken = optimizer, vars(optimizer).get("step")
            optimizer.step = _Done()

    def run(self, model: Any, inputs: Mapping[str, Any], items: Any, last: bool) -> Tensor:
        """The loss of one batch, detached. last: it is the last batch before the optimizer's step."""
        trainer = self._trainer
        scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
        if trainer.loss_is_scaled_for_ga is not None:
            scaled = trainer.loss_is_scaled_for_ga
        parts = 1 if scaled else int(trainer.current_gradient_accumulation_steps)
        clip = float(trainer.args.max_grad_norm or math.inf)
        batch = (dict(inputs), items, parts)
        model.train()
        part, whole = self._calls or self._submit(model, batch, clip)
        if last:
            loss, self.norm = whole(*batch, clip).result()
        else:
            loss = part(*batch).result()
        return loss  # type: ignore[no-any-return]

    def _submit(self, model: Any, batch: tuple[Any, ...], clip: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
        trainer, optimizer = self._trainer, self._optimizer()
        _check_callbacks(trainer)
        whole = _step(trainer, model, optimizer)
        if trainer.args.gradient_accumulation_steps == 1:
            self.job = submit(whole, example=(*batch, clip), model=model, optimizer=optimizer, **self._options)
            self._calls = self.job.step, self.job.step
        else:  # the part that leaves gradients comes first, so that the other one keeps them
            backward = _backward(trainer, model)
            self.job = submit(backward, example=batch, model=model, optimizer=optimizer, **self._options)
            self._calls = self.job.step, self.job.add(whole, example=(*batch, clip))
        return self._calls

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._trainer.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]

    def end(self) -> None:
        """Give back the optimizer, and close the job, which copies the trained state back. Idempotent."""
        taken, self._taken = self._taken, None
        if taken is not None:
            optimizer, step = taken
            del optimizer.step
            if step is not None:  # a schedule had replaced it
                optimizer.step = step
        job, self.job, self._calls = self.job, None, None
        if job is not None:
            job.close()


def _backward(trainer: Any, model: Any) -> Callable[..., Tensor]:
    def backward(inputs: dict[str, Any], items: Any, parts: int) -> Tensor:
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
        if parts > 1:
            loss = loss / parts
        loss.backward()
        return loss.detach()

    return backward


def _step(trainer: Any, model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., tuple[Tensor, Tensor]]:
    backward = _backward(trainer, model)

    def step(inputs: dict[str, Any], items: Any, parts: int, clip: float) -> tuple[Tensor, Tensor]:
        loss = backward(inputs, items, parts)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        model.zero_grad()
        return loss, norm

    return step


class OnGpumux:
    """The class that on_gpumux() puts before the Trainer's own class."""

    _gpumux: Steps

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._gpumux.end()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        last = self.accelerator.gradient_state.sync_gradients  # type: ignore[attr-defined]
        self._gpumux.take_over(self.optimizer)  # type: ignore[attr-defined]
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        return self._gpumux.run(model, inputs, num_items_in_batch, last)

    def _clip_grad_norm(self, model: Any) -> Tensor | None:
        return self._gpumux.norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Tensor | None:
        return self._gpumux.norm

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        self._gpumux.end()  # no step comes after this, and the loaded state must not be overwritten
        return super()._load_best_model(*args, **kwargs)  # type: ignore[misc]


class _Done:
    """Replaces `optimizer.step`."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None
