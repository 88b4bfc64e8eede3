"""One array during training: in this process, or as a job of a daemon. Counts the seconds of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from gpumux.client import StepFuture
from gpumux.fuse.array import Array
from gpumux.fuse.job import submit_array
from gpumux.program.ir import Program
from gpumux.tune.task import Batch
from gpumux.tune.trainer import TrialWork

INFLIGHT = 2  # unanswered steps of a job at a time
Make = Callable[[TrialWork], Any]


class ArrayRun(Protocol):
    """A context in which an array trains; leaving it closes the array."""

    def __enter__(self) -> ArrayRun: ...

    def __exit__(self, *error: Any) -> None: ...

    def step(self, batch: Batch, *, per_model: bool) -> None: ...

    def programs(self) -> tuple[Program, ...]:
        """The fused Programs of the last step."""
        ...

    def finish(self) -> float:
        """Copy the state into the models that the factory made, and return the device seconds of all steps."""
        ...


class LocalArrayRun:
    """An array in this process."""

    def __init__(self, make: Make, works: Sequence[TrialWork], example: Batch) -> None:
        self._array = Array(make, works, example, seeds=[work.draws for work in works], name="sweep")
        self._seconds = 0.0

    def __enter__(self) -> LocalArrayRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self._array.close()

    def step(self, batch: Batch, *, per_model: bool) -> None:
        began = time.perf_counter()
        self._array.step(*batch, per_model=per_model)
        self._seconds += time.perf_counter() - began

    def programs(self) -> tuple[Program, ...]:
        return self._array.programs

    def finish(self) -> float:
        self._array.sync()
        return self._seconds


class DaemonArrayRun:
    """An array that is a job of a daemon, which measures the seconds."""

    def __init__(self, make: Make, works: Sequence[TrialWork], example: Batch, endpoint: str | None) -> None:
        self._array = submit_array(
            make, works, example, seeds=[work.draws for work in works],
            name=f"trials-{works[0].trial}-and-{len(works) - 1}",
            endpoint=endpoint, max_inflight=INFLIGHT,
        )  # fmt: skip
        self._pending: deque[StepFuture] = deque()
        self._seconds = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> DaemonArrayRun:
        self._stack.enter_context(self._array)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def step(self, batch: Batch, *, per_model: bool) -> None:
        if len(self._pending) >= INFLIGHT:
            self._take()
        self._pending.append(self._array.step(*batch, per_model=per_model))

    def programs(self) -> tuple[Program, ...]:
        return self._array.programs

    def finish(self) -> float:
        while self._pending:
            self._take()
        self._array.sync()
        return self._seconds

    def _take(self) -> None:
        future = self._pending.popleft()
        future.result()
        self._seconds += future.times.device_s
