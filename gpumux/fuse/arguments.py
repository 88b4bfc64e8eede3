"""Checks an array's arguments before a model is made."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from gpumux.capture.state import StateTable
from gpumux.client.arguments import several, whole
from gpumux.errors import ConfigError
from gpumux.fuse.template import GPU_STREAM_BYTES
from gpumux.program import operators

MAX_SEED = 2**64 - 1
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, type(None))


def check_factory(factory: Any) -> None:
    if not callable(factory):
        raise ConfigError(
            f"factory is of type {type(factory).__name__}",
            "pass a function: factory(config) -> (step, model, optimizer)",
        )


def configurations(configs: Any) -> Sequence[Any]:
    """`configs` itself. Raises ConfigError unless it is a sequence with one configuration for each model."""
    if isinstance(configs, Mapping):
        raise ConfigError(
            "configs is one mapping, and an array takes one configuration for each model",
            'give a list of them: configs=[{"lr": 0.1}, {"lr": 0.2}]',
        )
    if isinstance(configs, (str, bytes)) or not isinstance(configs, Sequence):
        raise ConfigError(
            f"configs is {_shown(configs)}",
            'give a list, with one configuration for each model: configs=[{"lr": 0.1}, {"lr": 0.2}]',
        )
    if not configs:
        raise ConfigError("configs is empty", "give one configuration for each model")
    return configs


def explain(error: Exception, factory: Any, config: Any) -> ConfigError | None:
    """The error for a factory that failed because `config` is not what it reads: a plain value was passed, and a line
    of the factory itself raised TypeError. None if it failed otherwise."""
    if not isinstance(error, TypeError) or not isinstance(config, _PLAIN):
        return None
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_code is not getattr(factory, "__code__", None):
        return None
    return ConfigError(
        f"factory({_shown(config)}) raised TypeError: {error}",
        "each of configs is what factory is called with: give it what it reads, such as {'lr': 0.1}",
    )


def check_own(model: Any, optimizer: Any, before: Sequence[StateTable], config: Any) -> None:
    """Raise ConfigError if factory(config) returned another model's optimizer, or a model that shares a layer or
    parameter with one: each model has its own state and is watched for changes by itself."""
    optimizers = {id(o) for table in before for o in table.optimizers}
    if any(id(o) in optimizers for o in several(optimizer, torch.optim.Optimizer, "optimizer")):
        raise ConfigError(
            f"factory({config!r}) returned the optimizer of another model",
            "make a model and an optimizer anew at each call",
        )
    taken = {
        id(held): number for number, table in enumerate(before) for held in (*_modules(table.models), *table.params)
    }
    for part in several(model, torch.nn.Module, "model"):
        for name, held in (*part.named_modules(), *part.named_parameters()):
            if id(held) in taken:
                raise ConfigError(
                    f"factory({config!r}) returned a model whose {name or type(held).__name__} is that of model"
                    f" {taken[id(held)]} too",
                    "make each model's layers at each call of factory; copy.deepcopy() what they are to begin with",
                )


def _modules(models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    return [module for model in models for module in model.modules()]


def seeds_of(seeds: Any, models: int) -> list[int | None]:
    """A seed for each model, None for each if none are given. Raises ConfigError."""
    if seeds is None:
        return [None] * models
    seeds = seeds.tolist() if hasattr(seeds, "tolist") else seeds  # numpy's
    if isinstance(seeds, (str, bytes, Mapping)) or not isinstance(seeds, Sequence):
        raise ConfigError(f"seeds is {_shown(seeds)}", "give a list, with one whole number for each model")
    if len(seeds) != models:
        raise ConfigError(f"{len(seeds)} seeds for {models} models", "give one a model")
    return [seed_of(f"seeds[{index}]", seed) for index, seed in enumerate(seeds)]


def seed_of(what: str, seed: Any) -> int:
    return whole(what, seed, 0, MAX_SEED, "use a whole number from 0 to 2**64 - 1")


def check_random_state(state: Any, gpu: bool) -> None:
    """Raise ConfigError unless a random generator of the CPU, or with `gpu` of a GPU, accepts it."""
    device = ', device="cuda"' if gpu else ""
    try:
        if not gpu:
            torch.Generator().set_state(state)
        elif state.dtype != torch.uint8 or state.shape != (GPU_STREAM_BYTES,):
            raise TypeError(f"a GPU's has {GPU_STREAM_BYTES} bytes")
        elif (drawn := int(state.clone().view(torch.int64)[1])) < 0 or drawn % 4:
            raise TypeError(f"it says that {drawn} numbers were drawn, which is no multiple of 4")
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{_shown(state)} is no state of a random generator: {str(error).splitlines()[0]}",
            f"give what random_state(), or torch.Generator({device.removeprefix(', ')}).get_state(), returned",
        ) from None


def model_of(model: Any, models: int) -> int:
    if not isinstance(model, Integral) or isinstance(model, bool) or not 0 <= int(model) < models:
        raise ConfigError(f"there is no model {_shown(model)} among {models}", "count from 0")
    return int(model)


def operators_of(names: Any) -> tuple[str, ...]:
    """`names` of operators that Programs may hold. Raises ConfigError for others, with suggestions."""
    if isinstance(names, str) or not isinstance(names, Collection):
        raise ConfigError(f"per_model_operators is {_shown(names)}", f"give a list, such as [{_example(names)!r}]")
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"per_model_operators holds {_shown(name)}", 'use names, such as "aten.mm.default"')
        if not operators.is_allowed(name):
            raise ConfigError(
                f"per_model_operators names {name!r:.100}, which no step can hold", _meant(name, operators.ALLOWED)
            )
    return tuple(names)


def check_operators(names: Collection[str], there: Collection[str]) -> None:
    """Raise ConfigError for a name that is none of the operators `there`: the option would have no effect."""
    for name in names:
        if name not in there:
            raise ConfigError(
                f"per_model_operators names {name}, and no model's step has it",
                f"{_meant(name, there)}, or leave it out",
            )


def _meant(name: str, known: Collection[str]) -> str:
    """Operators whose own name is close to the given one; users often leave out namespace or overload."""
    stem = name.removeprefix("torch.ops.").removeprefix("aten.").partition(".")[0]
    stems = {k.split(".")[1] for k in known}
    near = [stem] if stem in stems else difflib.get_close_matches(stem, sorted(stems), 3, 0.7)
    close = sorted(k for k in known if k.split(".")[1] in near)
    listed = "print(array.plan()), without per_model_operators, lists those of a step"
    return f"use {' or '.join(close[:3])}; {listed}" if close else listed


def _example(names: Any) -> str:
    return names if isinstance(names, str) and operators.is_allowed(names) else "aten.mm.default"


def _shown(value: Any) -> str:
    """A plain value itself; the type of anything else."""
    if isinstance(value, (list, tuple)) or not isinstance(value, _PLAIN):
        return f"a {type(value).__name__}"
    return f"{value!r:.60}"
