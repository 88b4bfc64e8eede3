"""The space of hyper-parameters: each one's domain and condition, and whether models that differ in it may share an
array.

A parameter is *fusible* when its value changes numbers only (learning rates, betas, weight decay, seeds): models with
different values run as one fused step. It is *infusible* when it changes the step's operators or shapes (batch size,
the optimizer's class, widths). HFTA, appendix E and table 12. Pure: no torch, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias, TypeGuard

from gpumux.errors import ConfigError

Value: TypeAlias = bool | int | float | str
Config: TypeAlias = Mapping[str, Value]

_KEYS = {"low", "high", "log", "step", "choices", "fusible", "when"}


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included. whole: integers only. log: drawn evenly in the logarithm. step: only
    low, low + step, low + 2 step ..."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def draw(self, random: Random) -> Value:
        low, high = self.low, self.high
        if self.step is not None:
            value = low + self.step * random.randrange(self.count())
        elif self.log and self.whole:
            value = math.floor(math.exp(random.uniform(math.log(low), math.log(high + 1))))
        elif self.log:
            value = math.exp(random.uniform(math.log(low), math.log(high)))
        elif self.whole:
            value = random.randint(int(low), int(high))
        else:
            value = random.uniform(low, high)
        value = min(max(value, low), high)  # rounding may exceed a bound
        return int(value) if self.whole else float(value)

    def count(self) -> int:
        """Number of values; only with a step."""
        assert self.step is not None
        return math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def ends(self) -> tuple[Value, ...]:
        """The first value and the last, if they are drawn as often as others: with a step, or of whole numbers."""
        if self.step is None and not self.whole:
            return ()
        last = self.high if self.step is None else self.low + self.step * (self.count() - 1)
        return tuple(dict.fromkeys(int(each) if self.whole else float(each) for each in (self.low, last)))


@dataclass(frozen=True, slots=True)
class Choices:
    """One of these values, all equally probable."""

    values: tuple[Value, ...]

    def draw(self, random: Random) -> Value:
        return self.values[random.randrange(len(self.values))]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A hyper-parameter. `when`: other parameters and their values under which this one exists."""

    name: str
    domain: Range | Choices
    fusible: bool = False
    when: tuple[tuple[str, tuple[Value, ...]], ...] = ()

    def exists(self, config: Config) -> bool:
        return all(name in config and config[name] in values for name, values in self.when)


@dataclass(frozen=True, slots=True)
class Space:
    """Parameters, each after those that its condition names."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Space:
        """The space described by a TOML or JSON file: a table for each parameter, with `low` and `high` (`log`,
        `step`) or `choices`, `fusible` and `when`. Raises ConfigError that names the parameter."""
        if not body:
            raise ConfigError(
                "the space has no parameters", "give each one a table: [lr] with low and high, or choices"
            )
        return cls(_ordered([_parameter(name, table) for name, table in body.items()]))

    def describe(self) -> dict[str, Any]:
        """Plain data that is equal for equal spaces, to be stored in a study."""
        return {p.name: _plain(p) for p in self.parameters}

    def sample(self, seed: int, number: int) -> dict[str, Value]:
        """Configuration `number` of a sweep with `seed`. Each parameter has its own random stream: one more parameter
        does not change the others' values, and a resumed sweep draws the same values."""
        config: dict[str, Value] = {}
        for p in self.parameters:
            if p.exists(config):
                config[p.name] = p.domain.draw(Random(f"{seed}/{number}/{p.name}"))
        return config

    def infusible(self, config: Config) -> tuple[tuple[str, Value], ...]:
        """The values that configurations must have in common to share an array."""
        return tuple((p.name, config[p.name]) for p in self.parameters if not p.fusible and p.name in config)

    def fusible(self, config: Config) -> dict[str, Value]:
        return {p.name: config[p.name] for p in self.parameters if p.fusible and p.name in config}


def _parameter(name: str, table: Any) -> Parameter:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} of the space is {table!r}", "make it a table with low and high, or choices")
    if unknown := sorted(table.keys() - _KEYS):
        raise ConfigError(
            f"{name} of the space has the unknown key {unknown[0]!r}", f"keys are {', '.join(sorted(_KEYS))}"
        )
    fusible = table.get("fusible", False)
    if not isinstance(fusible, bool):
        raise ConfigError(f"{name}: fusible is {fusible!r}", "give true or false")
    return Parameter(name, _domain(name, table), fusible, _when(name, table.get("when", {})))


def _domain(name: str, table: Mapping[str, Any]) -> Range | Choices:
    if "choices" in table:
        if others := sorted({"low", "high", "log", "step"} & table.keys()):
            raise ConfigError(f"{name} has both choices and {others[0]}", "give one kind")
        return Choices(_values(name, table["choices"]))
    low, high, log, step = table.get("low"), table.get("high"), table.get("log", False), table.get("step")
    if not (_is_number(low) and _is_number(high)):
        raise ConfigError(f"{name} has neither choices nor numbers low and high", "give either")
    if not isinstance(log, bool):
        raise ConfigError(f"{name}: log is {log!r}", "give true or false")
    whole = isinstance(low, int) and isinstance(high, int)
    if low > high:
        raise ConfigError(f"{name}: low {low} is above high {high}", "swap them")
    if log and low <= 0:
        raise ConfigError(f"{name}: log with low {low}", "a logarithm needs low above 0")
    if step is not None and (log or not _is_number(step) or step <= 0 or (whole and not isinstance(step, int))):
        raise ConfigError(
            f"{name}: step {step!r}", "give a number above 0 (whole for whole numbers), and no log with it"
        )
    return Range(low, high, log, step, whole)


def _when(name: str, table: Any) -> tuple[tuple[str, tuple[Value, ...]], ...]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name}: when is {table!r}", 'write when = { optimizer = "sgd" }, or a list of values')
    return tuple(
        (other, _values(name, values if isinstance(values, list) else [values])) for other, values in table.items()
    )


def _values(name: str, values: Any) -> tuple[Value, ...]:
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{name}: {values!r} is no list of values", "give one with at least one value")
    if wrong := [v for v in values if not isinstance(v, bool | int | float | str) or v != v]:
        raise ConfigError(f"{name}: {wrong[0]!r} is no value", "use numbers, strings, true and false")
    if len({(type(v), v) for v in values}) < len(values):
        raise ConfigError(f"{name} has a value twice", "name each once")
    return tuple(values)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _ordered(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Parameters after their conditions' parameters; otherwise as written. Raises ConfigError for an impossible
    condition."""
    known = {p.name: p for p in parameters}
    for p in parameters:
        for other, _ in p.when:
            if other not in known:
                raise ConfigError(
                    f"{p.name} depends on {other}, which is no parameter", f"choose from {', '.join(known)}"
                )
            if known[other].fusible:
                raise ConfigError(
                    f"{p.name} depends on {other}, which is marked fusible",
                    f"what decides whether a parameter exists changes the step: leave {other} infusible",
                )
    placed: dict[str, Parameter] = {}
    waiting = list(parameters)
    while waiting:
        ready = [p for p in waiting if all(other in placed for other, _ in p.when)]
        if not ready:
            names = ", ".join(p.name for p in waiting)
            raise ConfigError(f"conditions go in a circle: {names}", "let one of them exist always")
        placed |= {p.name: p for p in ready}
        waiting = [p for p in waiting if p.name not in placed]
    return tuple(placed.values())


def _plain(p: Parameter) -> dict[str, Any]:
    if isinstance(p.domain, Choices):
        domain: dict[str, Any] = {"choices": list(p.domain.values)}
    else:
        d = p.domain
        domain = {"low": d.low, "high": d.high, "log": d.log, "step": d.step, "whole": d.whole}
    return {**domain, "fusible": p.fusible, "when": {name: list(values) for name, values in p.when}}
