"""Tensors that a traced step leaves in attributes, variables and containers, and restoring what was there before.

A buffer that the step replaces (`self.running = 0.9 * self.running + ...`) is state: the new value is copied to the
place of the old one. Any other tensor that the step leaves in an attribute, a variable, a dictionary or a list stays
there until the second trace of the step, in which reading it is an error that names it; then the old value is restored.
Each step that runs puts an `Unreturned` tensor there, which names the place when its value is read (state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.capture.state import unreturned
from gpumux.capture.watch.fingerprint import Fingerprint
from gpumux.errors import CaptureError

_MISSING = object()


class _Place(NamedTuple):
    """A place in which a step left tensors. `space`: the dictionary (of attributes, of globals), the variable's cell,
    or the object or class that owns the slot or attribute."""

    name: str
    space: Any
    key: Any
    value: Any
    old: Any


class SideEffects:
    """Compares the places that a fingerprint found before and after a trace."""

    def __init__(self, fingerprint: Fingerprint, number: Callable[[Any], bool] = lambda value: False) -> None:
        """`number`: whether a value is a number of the trace that differs from step to step."""
        self._number = number
        self._fingerprint = fingerprint
        self._buffers = [(m, dict(m._buffers)) for m in fingerprint.modules]
        self._params = [(m, dict(m._parameters)) for m in fingerprint.modules]
        self._spaces = [(name, s, skip, dict(s)) for name, s, skip in fingerprint.spaces]
        self._fields = [(label, o, {n: _field(o, n) for n in names}) for label, o, names in fingerprint.fields]
        self._lists = [(label, items, list(items)) for label, items in fingerprint.lists]
        self._cells = [(name, c, _content(c)) for name, c in fingerprint.cells]
        self._others = [(o, dict(o.state)) for _, o in fingerprint.other_optimizers]

    def replaced_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(old, new) of every buffer that the step replaced. Restores the old ones. Raises CaptureError if a new one
        differs in shape or type, or if a parameter was replaced."""
        found = []
        for module, before in self._buffers:
            for name, old in before.items():
                new = module._buffers.get(name)
                if new is old:
                    continue
                module._buffers[name] = old
                if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
                    raise CaptureError(
                        f"the step replaces the buffer {type(module).__name__}.{name} by one of another shape or type",
                        "keep the buffer's shape and type, or write into it in place",
                    )
                found.append((old, new))
        for module, params in self._params:
            for name, old in params.items():
                if module._parameters.get(name) is not old:
                    module._parameters[name] = old
                    raise CaptureError(
                        f"the step replaces the parameter {type(module).__name__}.{name}",
                        "write into it in place under no_grad",
                    )
        return found

    def refuse_other_optimizers(self) -> None:
        """Raises CaptureError if the step used an optimizer that was not submitted."""
        for label, optimizer in self._fingerprint.other_optimizers:
            if _holds_fake(list(optimizer.state.values()), 4):
                raise CaptureError(
                    f"the step uses the optimizer {label} ({type(optimizer).__name__}), which was not given",
                    "pass it in optimizer=, alone or in a list with the others",
                )

    def restorers(self) -> list[Callable[[], None]]:
        """A function for every place that holds a tensor of the trace now, which restores its old value."""
        found = [_put_back(place.space, place.key, place.old) for place in self._entries()]
        found += [_refill(place.space, place.old) for place in self._variables()]
        found += [_assign(place.space, place.key, place.old) for place in self._attributes()]
        return found + [_relist(items, old) for _, items, old in self._lists if any(map(self._holds, items))]

    def left(self, home: torch.device | None) -> list[Callable[[], None]]:
        """A function for each of these places, which puts an `Unreturned` there. `home`: the device of the job's
        tensors. Raises CaptureError for a list whose other items the step moves."""
        found = [_put_back(p.space, p.key, unreturned(p.name, p.value, home, self._number)) for p in self._entries()]
        found += [_refill(p.space, unreturned(p.name, p.value, home, self._number)) for p in self._variables()]
        found += [_assign(p.space, p.key, unreturned(p.name, p.value, home, self._number)) for p in self._attributes()]
        for label, items, old in self._lists:
            if not any(map(self._holds, items)):
                continue
            pairs = list(zip(items, old, strict=False))
            if len(items) != len(old) or any(new is not was and not self._holds(new) for new, was in pairs):
                raise CaptureError(
                    f"the step moves what {label} holds, to leave a tensor there",
                    "return the tensor from the step, and keep it outside",
                )
            found += [
                _put_back(items, i, unreturned(f"{label}[{i}]", new, home, self._number))
                for i, (new, was) in enumerate(pairs)
                if self._holds(new) and new is not was
            ]
        return found

    def _holds(self, value: Any) -> bool:
        return _holds_fake(value, also=self._number)

    def _entries(self) -> Iterator[_Place]:
        for name, space, skip, before in self._spaces:
            for key, value in list(space.items()):
                old = before.get(key, _MISSING)
                if key not in skip and value is not old and self._holds(value):
                    yield _Place(name(key), space, key, value, old)

    def _attributes(self) -> Iterator[_Place]:
        for label, owner, before in self._fields:
            for name, old in before.items():
                value = _field(owner, name)
                if value is not old and self._holds(value):
                    yield _Place(f"{label}.{name}", owner, name, value, old)

    def _variables(self) -> Iterator[_Place]:
        for name, cell, old in self._cells:
            value = _content(cell)
            if value is not old and self._holds(value):
                yield _Place(name, cell, None, value, old)

    def restore(self) -> None:
        """Restore everything after a failed trace."""
        for module, before in self._buffers:
            module._buffers.clear()
            module._buffers.update(before)
        for module, params in self._params:
            module._parameters.update(params)
        for optimizer, state in self._others:
            optimizer.state.clear()
            optimizer.state.update(state)
        for put in self.restorers():
            put()


def _holds_fake(value: Any, depth: int = 3, also: Callable[[Any], bool] = lambda value: False) -> bool:
    if isinstance(value, FakeTensor) or also(value):
        return True
    if depth == 0 or not isinstance(value, (tuple, list, dict)) or len(value) > 1000:
        return False
    return any(_holds_fake(v, depth - 1, also) for v in (value.values() if isinstance(value, dict) else value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _field(owner: Any, name: str) -> Any:
    return vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING)


def _assign(owner: Any, name: str, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is not _MISSING:
            setattr(owner, name, old)
        elif _field(owner, name) is not _MISSING:
            delattr(owner, name)

    return put


def _put_back(space: Any, key: Any, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is _MISSING:
            space.pop(key, None)
        else:
            space[key] = old

    return put


def _relist(items: Any, old: list[Any]) -> Callable[[], None]:
    def put() -> None:
        items.clear()
        items.extend(old)

    return put


def _refill(cell: Any, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = old

    return put
