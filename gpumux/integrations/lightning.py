"""A Lightning strategy whose training steps run in a gpumux daemon.

    from gpumux.integrations.lightning import GpumuxStrategy
    trainer = Trainer(strategy=GpumuxStrategy(priority="low", name="mnist"), accelerator="cpu")
    trainer.fit(module, loader)

Lightning keeps its loop: data, schedulers, loggers, callbacks, checkpoints, validation. `training_step`, the backward
pass, gradient clipping and the optimizer's step are one captured step. Values that `training_step` logs (`self.log`)
are results of the step and logged after it. Code that reads the model in this process (validating, testing, saving,
callbacks) has its state fetched from the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor

from gpumux.client import submit
from gpumux.client.arguments import SubmitOptions
from gpumux.client.job import Job
from gpumux.errors import CaptureError, ConfigError

try:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ModuleNotFoundError:  # the same, under its older name
    from pytorch_lightning.callbacks import GradientAccumulationScheduler
    from pytorch_lightning.plugins.precision import MixedPrecision, Precision
    from pytorch_lightning.strategies import SingleDeviceStrategy
    from pytorch_lightning.utilities.model_helpers import is_overridden

# Hooks that are part of the captured step if the module has them. Callbacks may have none: what they look at is there.
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


class GpumuxStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """`options` are those of gpumux.client.submit: priority, name, endpoint, weight, ...

    Raises ConfigError, when fitting begins, for modules that optimize by hand, have a backward() of their own or don't
    have exactly one optimizer, for callbacks with HOOKS, and for precisions but 32-true and bf16-mixed; and
    CaptureError, with the line, for a training_step that can't be captured. Batches may have a few shapes
    (`max_variants`). `training_step` can't use `batch_idx`, which differs at every step.
    """

    strategy_name = "gpumux"

    def __init__(self, **options: Unpack[SubmitOptions]) -> None:
        super().__init__(device="cpu")
        self._options = options
        self._job: Job[Any] | None = None
        self._whole: Callable[..., Any] | None = None  # the step of a batch after which the optimizer steps
        self._log = Log()

    # ---- training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        if self._job is not None and getattr(module.trainer.fit_loop, "_skip_backward", False):
            return super().training_step(*args, **kwargs)  # StochasticWeightAveraging, which only looks at activations
        given = [a for a in args if not isinstance(a, int)]  # batch, batch_idx, dataloader_idx
        module.train()
        if self._job is None:
            self._submit(module, given, len(args) - len(given))
        assert self._job is not None
        loop, parts = module.trainer.fit_loop, module.trainer.accumulate_grad_batches
        if loop._should_accumulate():
            run, last = self._job.step, False
        else:
            run, last = self._whole or self._job.step, True
        out, logged = run(given, parts, loop.epoch_loop.batch_idx % parts == 0, last).result()
        for name, value, settings in logged:
            self._log.pass_on(name, value, **settings)
        return out

    def _submit(self, module: Any, given: list[Any], indices: int) -> None:
        trainer = module.trainer
        optimizer = self._only_optimizer()
        precision = self.precision_plugin
        bfloat16 = type(precision) is MixedPrecision and precision.precision == "bf16-mixed"
        for wrong, so in (
            ("optimizes by hand (automatic_optimization = False)", not module.automatic_optimization),
            (f"uses the precision {precision.precision}", not (type(precision) is Precision or bfloat16)),
            ("has a backward() of its own", is_overridden("backward", module)),
            *(
                (f"has a callback, {type(callback).__name__}, with {hook}()", is_overridden(hook, callback))
                for callback in trainer.callbacks
                for hook in HOOKS
            ),
        ):
            if so:
                raise ConfigError(
                    f"this trainer {wrong}, which gpumux does not capture", "turn it off, or use another strategy"
                )
        parts = trainer.accumulate_grad_batches
        several = parts > 1 or any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks)
        self._log.take_over(module)
        clip = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        step = _step(module, optimizer, self._log, clip, indices)
        example = (given, parts, True, not several)
        self._job = submit(step, example=example, model=module, optimizer=optimizer, **self._options)
        if several:
            # Lightning would clear the gradients after the step that has made them.
            object.__setattr__(module, "optimizer_zero_grad", _in_the_step)
            # The one that leaves gradients was submitted first, so that they are kept for this one.
            self._whole = self._job.add(step, example=(given, parts, False, True))

    def _only_optimizer(self) -> torch.optim.Optimizer:
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"this module has {len(self.optimizers)} optimizers", "use gpumux.client.submit in a loop of your own"
            )
        return self.optimizers[0]  # type: ignore[no-any-return]

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss: the step includes the backward pass."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, which is the whole step."""
        return closure()

    # ---- the end

    def on_train_end(self) -> None:
        self._end()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        self._end()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._end()
        super().teardown()

    def _end(self) -> None:
        job, self._job, self._whole = self._job, None, None
        self._log.give_back()
        if job is None:
            return
        self.lightning_module.__dict__.pop("optimizer_zero_grad", None)
        job.close()  # copies the trained state back, except what a callback has set since


def _step(
    module: Any, optimizer: torch.optim.Optimizer, log: Log, clip: tuple[float | None, Any], indices: int
) -> Callable[..., Any]:
    most, algorithm = clip

    def step(batch: list[Any], parts: int, first: bool, last: bool) -> tuple[Any, list[Any]]:
        """parts: how many batches are accumulated. first, last: whether this one is the first or the last of them."""
        with log.caught() as logged:
            with module.trainer.strategy.precision_plugin.train_step_context():
                out = module.training_step(*batch, *[NO_INDEX] * indices)
            loss = out["loss"] if isinstance(out, dict) else out
            if first:
                optimizer.zero_grad()
            if parts > 1:
                loss = loss / parts
            module.on_before_backward(loss)
            loss.backward()
            module.on_after_backward()
            if last:
                module.on_before_optimizer_step(optimizer)
                module.configure_gradient_clipping(optimizer, most, algorithm)
                optimizer.step()
        return out, logged

    return step


def _in_the_step(*_: Any, **__: Any) -> None:
    """Replaces `module.optimizer_zero_grad`."""


class Log:
    """Replaces `module.log` while a job is open: collects what a captured step logs, and passes everything else on."""

    def __init__(self) -> None:
        self.catching: list[Any] | None = None
        self._module: Any = None
        self.pass_on: Callable[..., None] = _unheard

    def take_over(self, module: Any) -> None:
        self._module = module
        self.pass_on = module.log
        object.__setattr__(module, "log", self)

    def give_back(self) -> None:
        if self._module is not None:
            object.__delattr__(self._module, "log")
            self._module = None

    @contextmanager
    def caught(self) -> Iterator[list[Any]]:
        """A block whose log calls are collected: (name, value, settings) each."""
        self.catching = []
        try:
            yield self.catching
        finally:
            self.catching = None

    def __call__(self, name: str, value: Any, *args: Any, **settings: Any) -> None:
        if self.catching is None:
            self.pass_on(name, value, *args, **settings)
            return
        if args or not isinstance(value, (Tensor, bool, int, float)):
            raise CaptureError(
                f"training_step logs {name!r} as {type(value).__name__}, or with settings that have no names",
                "log tensors and numbers: self.log(name, value, prog_bar=True)",
            )
        self.catching.append((name, value.detach() if isinstance(value, Tensor) else value, settings))


def _unheard(*_: Any, **__: Any) -> None:
    raise AssertionError("nothing is logged before the first step")


class NoIndex:
    """Replaces `batch_idx` in a captured step. It can be passed on, but not used."""

    def _used(self, *_: Any) -> Any:
        raise CaptureError(
            "training_step uses batch_idx, which is another number at every step",
            "count in a tensor of the module, or do what depends on it in a callback",
        )

    __index__ = __int__ = __float__ = __bool__ = __mod__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = (
        __rsub__
    ) = _used
    __floordiv__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __str__ = __format__ = _used
    __hash__ = object.__hash__


NO_INDEX = NoIndex()
