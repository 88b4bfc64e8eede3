"""One way to run a step for the client programs: through gpumux, or `--plain` in this process.

A plain job is the *reference run* that gpumux promises to equal bit for bit: the same functions,
called directly, with the default generator seeded as the job's and used by nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn

from gpumux.types import StepTimes

Step = Callable[..., Any]


class Future(Protocol):
    """A step's answer, waited for by `result`, `float` and `times`."""

    def result(self, timeout: float | None = None) -> Any: ...
    def done(self) -> bool: ...
    def __float__(self) -> float: ...
    @property
    def times(self) -> StepTimes: ...


class Job(Protocol):
    def step(self, *batch: Any) -> Future: ...
    def add(self, fn: Step, *, example: Any) -> Callable[..., Future]: ...
    def sync(self) -> None: ...


class PlainFuture:
    def __init__(self, value: Any, seconds: float) -> None:
        self._value = value
        self.times = StepTimes(queue_s=0.0, device_s=seconds, total_s=seconds)

    def result(self, timeout: float | None = None) -> Any:
        return self._value

    def done(self) -> bool:
        return True

    def __float__(self) -> float:
        return float(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)


class PlainJob:
    """Runs steps where it stands. What it returns has been detached, as a daemon's answers are."""

    def __init__(self, step: Step, seed: int | None = None) -> None:
        self._step = step
        if seed is not None:
            torch.manual_seed(seed)

    def step(self, *batch: Any) -> Future:
        return self._run(self._step, batch)

    def add(self, fn: Step, *, example: Any) -> Callable[..., Future]:
        return lambda *batch: self._run(fn, batch)

    def sync(self) -> None:
        """The local state is the state."""

    def _run(self, fn: Step, batch: tuple[Any, ...]) -> Future:
        began = time.perf_counter()
        value = fn(*batch)
        return PlainFuture(value.detach(), time.perf_counter() - began)


@contextmanager
def open_job(
    step: Step,
    *,
    plain: bool,
    example: Any,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    priority: Literal["high", "low"],
    name: str,
    seed: int,
    endpoint: str | None,
    microbatches: int = 1,
) -> Iterator[Job]:
    if plain:
        yield PlainJob(step, seed)
        return
    from gpumux import client

    with client.submit(
        step,
        example=example,
        model=model,
        optimizer=optimizer,
        priority=priority,
        name=name,
        seed=seed,
        endpoint=endpoint,
        microbatches=microbatches,
    ) as job:
        yield job
