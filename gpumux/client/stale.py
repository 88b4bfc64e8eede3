"""Tripwires on the local model and optimizers while the daemon holds newer state.

Calling the model, stepping the optimizer or reading a state_dict then raises StaleState with the
verb that helps, instead of quietly giving last week's numbers. Reading a parameter tensor directly
can't be noticed; writing one is, by its version counter, at the job's next verb.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gpumux.errors import LocalWrite, StaleState


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _Tripwire:
    """A hook that copies and pickles as one that does nothing, so that deepcopy(model) and torch.save
    work and the copy is free of it."""

    def __init__(self, guard: StaleGuard, what: str) -> None:
        self._guard = guard
        self._what = what

    def __call__(self, *_: Any, **__: Any) -> None:
        self._guard.check(self._what)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return (_restore_nothing, ())


def _restore_nothing() -> Any:
    return _nothing


class StaleGuard:
    def __init__(self, name: str, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], versions: Any) -> None:
        self._name = name
        self._versions = versions
        self._expected: list[int] = versions()
        self.stale = False
        self._quiet = 0
        self._handles: list[Any] = []
        seen: set[int] = set()
        for model in models:
            for module in model.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    self._handles.append(
                        module.register_forward_pre_hook(_Tripwire(self, "the local model was called"))
                    )
            self._handles.append(
                model.register_state_dict_pre_hook(_Tripwire(self, "the local model's state_dict was read"))
            )
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(_Tripwire(self, "the local optimizer was stepped")))
            self._handles.append(
                optimizer.register_state_dict_pre_hook(_Tripwire(self, "the local optimizer's state_dict was read"))
            )

    def check(self, what: str) -> None:
        if self.stale and not self._quiet:
            raise StaleState(
                f"{what} while job {self._name!r} holds newer state in the daemon",
                "call job.sync() first; to evaluate in the daemon use job.add(...)",
            )

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """gpumux itself is at work: tracing calls the model, and writes nothing."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1
            self.settle()

    def settle(self) -> None:
        """What the version counters say now is what we expect to see next time."""
        self._expected = self._versions()

    def check_writes(self) -> None:
        """Raises LocalWrite when a parameter or buffer was written since the last verb."""
        now = self._versions()
        if now != self._expected:
            raise LocalWrite(
                f"the local model was changed while job {self._name!r} holds its state in the daemon",
                "call job.load_state() to push the local state, or job.sync() before changing it",
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stale = False
