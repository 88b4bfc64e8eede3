"""Tripwires on the local model and optimizers while the daemon holds newer state.

Calling the model, stepping the optimizer, reading a state_dict, copying or pickling the model then raises
StaleState with the verb that helps, instead of quietly giving last week's numbers. Reading a parameter
tensor directly can't be noticed; writing one is, by its version counter, at the job's next verb (unless it
is written through `.data` or numpy, which leave the counter alone).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from gpumux.client.state import StateTable
from gpumux.errors import LocalWrite, StaleState

_NESTED = (dict, list, tuple)
_VERSION, _STATE = attrgetter("_version"), attrgetter("state")  # of many tensors or optimizers, without a call each


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _Tripwire:
    """A hook that copies and pickles as one that does nothing, so that a copy of the model is free of it,
    and that stops deepcopy(model) and torch.save(model) while they would give old weights."""

    def __init__(self, guard: StaleGuard, what: str) -> None:
        self._guard = guard
        self._what = what

    def __call__(self, *_: Any, **__: Any) -> None:
        self._guard.check(self._what)

    def __deepcopy__(self, memo: Any) -> Any:
        self._guard.check("the local model was copied")
        return _nothing

    def __reduce__(self) -> Any:
        self._guard.check("the local model was pickled")
        return (_restore_nothing, ())


def _restore_nothing() -> Any:
    return _nothing


class Words(NamedTuple):
    """How a guard speaks of who holds the state, and of what helps."""

    holder: str
    where: str
    sync: str
    load: str


def of_job(name: str) -> Words:
    return Words(
        f"job {name!r}",
        " in the daemon",
        "call job.sync() first; to evaluate in the daemon use job.add(...)",
        "call job.load_state() to push the local state, or job.sync() before changing it",
    )


class StaleGuard:
    """`table` says which tensors are the job's; they are compared at every verb. `keep`: the parameters
    whose gradients the job keeps from step to step (any other gradient is the user's own)."""

    def __init__(self, words: Words, table: StateTable, keep: Callable[[], frozenset[int]]) -> None:
        self._words = words
        self._table = table
        self._keep = keep
        self.stale = False
        self._wires: list[tuple[Callable[..., Any], _Tripwire]] = []
        self._handles: list[Any] = []
        for module in {id(m): m for model in table.models for m in model.modules()}.values():
            self._wire(module.register_forward_pre_hook, "the local model was called")
            self._wire(module.register_state_dict_pre_hook, "the local model's state_dict was read")
        for optimizer in table.optimizers:
            self._wire(optimizer.register_step_pre_hook, "the local optimizer was stepped")
            self._wire(optimizer.register_state_dict_pre_hook, "the local optimizer's state_dict was read")
        self._arm()
        self.settle()
        _guards.add(self)

    def _wire(self, register: Callable[..., Any], what: str) -> None:
        self._wires.append((register, _Tripwire(self, what)))

    def _arm(self) -> None:
        self._handles = [register(wire) for register, wire in self._wires]

    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self, what: str) -> None:
        if self.stale:
            raise StaleState(
                f"{what} while {self._words.holder} holds newer state{self._words.where}", self._words.sync
            )

    @contextmanager
    def quiet(self, *, writes: bool = False) -> Iterator[None]:
        """gpumux itself is at work: tracing calls the model, with no hook of ours in its way (some
        modules take another path when they have hooks). Raises LocalWrite for a write made before,
        unless `writes`."""
        if not writes:
            self.check_writes()
        self._disarm()
        try:
            yield
        finally:
            self._arm()
            self.settle()

    def settle(self) -> None:
        """What is there now is what we expect to see next time."""
        self._tensors = [t for _, t in self._table.tensors]
        self._states = [o.state for o in self._table.optimizers]
        self._stateless = not (self._tensors or self._states or self._table.models)
        entries = [entry for state in self._states for entry in state.values()]
        self._flat = all(type(e) is dict and not any(isinstance(v, _NESTED) for v in e.values()) for e in entries)
        self._leaves = self._leaves_now()
        self._inner = [t for t in self._leaves if isinstance(t, torch.Tensor)]
        self._expected = self._now()
        self._grads = [(p.grad, None if p.grad is None else p.grad._version) for p in self._table.params]

    def _now(self) -> list[Any]:
        tensors, inner = self._tensors, self._inner
        return [
            *map(_VERSION, tensors),
            *map(torch.Tensor.data_ptr, tensors),
            *map(_VERSION, inner),
            *map(torch.Tensor.data_ptr, inner),
            *map(len, self._states),
        ]

    def check_writes(self) -> None:
        """Raises LocalWrite when local state was written or replaced since the last verb."""
        if self._stateless:
            return
        if self._now() != self._expected or self._table.replaced() or self._replaced() or self._grads_changed():
            raise LocalWrite(
                f"the local model or optimizer was changed while {self._words.holder} holds its state{self._words.where}",
                self._words.load,
            )

    def _replaced(self) -> bool:
        """Whether an optimizer holds other state than it did."""
        if not all(map(is_, map(_STATE, self._table.optimizers), self._states)):
            return True
        try:
            leaves = self._leaves_now()
        except TypeError:
            return True  # an entry is no dictionary any more
        if len(leaves) == len(self._leaves) and all(map(is_, leaves, self._leaves)):
            return False
        return len(leaves) != len(self._leaves) or not all(map(_alike, leaves, self._leaves))

    def _leaves_now(self) -> list[Any]:
        entries = [entry for state in self._states for entry in state.values()]
        if self._flat:  # as every optimizer of torch's keeps it
            return list(chain.from_iterable(map(dict.values, entries)))
        return list(_leaves(entries))

    def _grads_changed(self) -> bool:
        params = self._table.params
        for i in self._keep():
            grad, version = self._grads[i]
            now = params[i].grad
            if now is not grad or (now is not None and now._version != version):
                return True
        return False

    def remove(self) -> None:
        self._disarm()
        self._wires = []
        self.stale = False
        _guards.discard(self)


def _leaves(entry: Any) -> Iterator[Any]:
    if isinstance(entry, dict):
        for value in entry.values():
            if isinstance(value, _NESTED):
                yield from _leaves(value)
            else:
                yield value
    elif isinstance(entry, (list, tuple)):
        for value in entry:
            yield from _leaves(value)
    else:
        yield entry


def _alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and repr(a) == repr(b))


_guards: weakref.WeakSet[StaleGuard] = weakref.WeakSet()


def refuse_stale(table: StateTable) -> None:
    """Raises StaleState when another open job of this process holds newer state of these tensors."""
    mine = {id(t) for _, t in table.tensors}
    for guard in list(_guards):
        if guard.stale and any(id(t) in mine for _, t in guard._table.tensors):
            guard.check("a job was submitted on the local model")
