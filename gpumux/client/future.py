"""The result of a step that may still be on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpumux.errors import GpumuxError
from gpumux.model import StepTimes


class StepFuture:
    """Returned at once by `job.step`. Waiting pumps the connection in the calling thread."""

    __slots__ = ("_done", "_error", "_step", "_times", "_value", "_wait")

    def __init__(self, wait: Callable[[Callable[[], bool], float | None, int], bool], step: int) -> None:
        self._wait = wait
        self._step = step
        self._done = False
        self._value: Any = None
        self._error: GpumuxError | None = None
        self._times: StepTimes | None = None

    def _finish(self, value: Any, times: StepTimes) -> None:
        self._value, self._times, self._done = value, times, True

    def _fail(self, error: GpumuxError) -> None:
        if not self._done:
            self._error, self._done = error, True

    def _answered(self) -> bool:
        return self._done

    def done(self) -> bool:
        """Whether the step was answered. Never waits."""
        if not self._done:
            self._wait(self._answered, 0.0, self._step)
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        """What the step returned, as CPU tensors. Waits at most `timeout` seconds, then raises
        TimeoutError. Raises JobFailed, JobClosed or DaemonGone when the step could not be answered."""
        if not self._done and not self._wait(self._answered, timeout, self._step):
            raise TimeoutError(f"the step was not answered within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value

    def item(self) -> float | int | bool:
        """The value of a step that returns one number."""
        value = self.result()
        if isinstance(value, torch.Tensor):
            return value.item()
        if isinstance(value, (int, float, bool)):
            return value
        raise TypeError(f"the step returns a {type(value).__name__}, not one number; use .result()")

    def __float__(self) -> float:
        return float(self.item())

    @property
    def times(self) -> StepTimes:
        """Queue, device and total seconds of the step. Waits for it."""
        self.result()
        assert self._times is not None
        return self._times

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<StepFuture {state}>"
