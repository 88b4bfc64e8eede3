"""A tuning task: the user's module. It has a factory and, beside it, the functions below; docs/tuning.md has an
example.

    def factory(config):              # -> (step, model, optimizer), as for gpumux.fuse.Array and client.submit
    def batches(config, start):       # -> training batches (tuples of tensors) from step `start` on, endless
    def score(model, config):         # -> a number, on validation data; in eval mode, without gradients
    direction = "maximize"            # or "minimize": the direction in which scores get better
    def hyperparameters(config, k):   # optional: {"lr": ...} of the optimizer at step k, a schedule

`config` is a dict of the space's parameters. torch is seeded for each trial before `factory` is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch

from gpumux.errors import ConfigError, GpumuxError, TrialFailed
from gpumux.tune.checkpoints import preserving_random_state
from gpumux.tune.space import Config

Built: TypeAlias = tuple[Callable[..., Any], Any, Any]
Batch: TypeAlias = tuple[Any, ...]
DIRECTIONS = ("maximize", "minimize")
_PARTS = ("batches", "score", "direction")


@dataclass(frozen=True, slots=True)
class Task:
    """The user's functions. `name` is the text by which `find` found them."""

    name: str
    factory: Callable[[Config], Built]
    batches: Callable[[Config, int], Iterable[Batch]]
    score: Callable[[Any, Config], float]
    direction: str
    hyperparameters: Callable[[Config, int], Mapping[str, Any]] | None = None

    @property
    def maximize(self) -> bool:
        return self.direction == "maximize"

    def build(self, trial: int, config: Config, seed: int) -> Built:
        """Step, model and optimizer of a configuration, its weights drawn from `seed`. Raises TrialFailed."""
        with naming_trial(trial, config, "factory"):
            torch.manual_seed(seed)
            made = self.factory(dict(config))
        if not (isinstance(made, tuple) and len(made) == 3 and callable(made[0])):
            raise ConfigError(f"{self.name} returns {type(made).__name__}", "let it return (step, model, optimizer)")
        return made

    def data(self, trial: int, config: Config, start: int, steps: int) -> Iterator[Batch]:
        """Batches `start` to `steps`. Raises TrialFailed if there are fewer."""
        done = start
        with naming_trial(trial, config, "batches"):
            for batch in islice(iter(self.batches(config, start)), steps - start):
                if not isinstance(batch, tuple | list):
                    raise ConfigError(
                        f"batches gives a {type(batch).__name__}", "let it give tuples, the arguments of the step"
                    )
                yield tuple(batch)
                done += 1
        if done < steps:
            raise ConfigError(
                f"batches ended after {done} of {steps} steps",
                "let it go on for ever (start another pass over the data)",
            )

    def rate(self, trial: int, model: Any, config: Config) -> float:
        """The score of a model. Leaves its modes and torch's generator as they were. Raises TrialFailed."""
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        modes = {module: module.training for each in models for module in each.modules()}
        for each in models:
            each.eval()
        try:
            with preserving_random_state(), torch.no_grad(), naming_trial(trial, config, "score"):
                return float(self.score(model, dict(config)))
        finally:
            for module, training in modes.items():
                module.training = training

    def schedule(self, config: Config, step: int, optimizer: Any) -> None:
        """Set the optimizer's hyper-parameters for a step. Raises ConfigError for an unknown one."""
        if self.hyperparameters is None:
            return
        for name, value in self.hyperparameters(dict(config), step).items():
            for group in (group for each in several(optimizer) for group in each.param_groups):
                if name not in group:
                    raise ConfigError(
                        f"hyperparameters gives {name!r}, which the optimizer has not", f"it has {', '.join(group)}"
                    )
                group[name] = value


def several(optimizer: Any) -> Sequence[Any]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


@contextmanager
def naming_trial(trial: int, config: Config, what: str) -> Iterator[None]:
    """A block of the user's code: its errors become TrialFailed, which names the trial; gpumux's own pass through."""
    try:
        yield
    except GpumuxError:
        raise
    except Exception as error:
        shown = ", ".join(f"{name}={value}" for name, value in config.items())
        raise TrialFailed(
            f"trial {trial} ({shown}): {what} raises {type(error).__name__}: {error}",
            "mend it, or take such values out of the space; what was finished is kept",
        ) from error


def find(name: str) -> Task:
    """The task of `module:factory`; the module is looked for in the working directory too. Raises ConfigError."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise ConfigError(f"{name!r} names no factory", "write module:function, such as clients.digits_sweep:factory")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"can't import {module_name}: {error}", "name a module on the path") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(getattr(module, attribute, None)):
        raise ConfigError(
            f"{module_name} has no function {attribute}", "name the one that makes step, model and optimizer"
        )
    if missing := [part for part in _PARTS if not hasattr(module, part)]:
        raise ConfigError(
            f"{module_name} has no {', '.join(missing)}",
            "beside the factory it needs batches(config, start), score(model, config) and direction (docs/tuning.md)",
        )
    return make(
        name, getattr(module, attribute), module.batches, module.score, module.direction,
        getattr(module, "hyperparameters", None),
    )  # fmt: skip


def make(
    name: str, factory: Any, batches: Any, score: Any, direction: str, hyperparameters: Any = None
) -> Task:  # fmt: skip
    """A Task of its parts. Raises ConfigError for a direction that is none."""
    if direction not in DIRECTIONS:
        raise ConfigError(f"direction is {direction!r}", 'say "maximize" or "minimize"')
    return Task(name, factory, batches, score, direction, hyperparameters)
