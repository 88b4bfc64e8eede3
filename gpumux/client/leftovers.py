"""What a traced step leaves behind in Python places, and putting it back.

A buffer that the step replaces (`self.running = 0.9 * self.running + ...`) is state: the new value is
copied to where the old one lies. Any other tensor it leaves in an attribute, a variable or a dictionary
is harmless while nobody reads it: it stays until the step was traced a second time, and reading it then
is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.client.fingerprint import Fingerprint
from gpumux.errors import CaptureError

_MISSING = object()


class Leftovers:
    """Looks at the places a fingerprint found, before and after a trace."""

    def __init__(self, prints: Fingerprint) -> None:
        self._prints = prints
        self._buffers = [(m, dict(m._buffers)) for m in prints.modules]
        self._params = [(m, dict(m._parameters)) for m in prints.modules]
        self._spaces = [(s, dict(s)) for s in prints.spaces]
        self._cells = [(c, _content(c)) for c in prints.cells]
        self._strange = [(o, dict(o.state)) for _, o in prints.strangers]

    def replaced_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(old, new) of every buffer the step replaced; the old ones are back when this returns.
        Raises CaptureError where the new one can't take the old one's place."""
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

    def refuse_strangers(self) -> None:
        """Raises CaptureError when the step stepped an optimizer that was not given."""
        for label, optimizer in self._prints.strangers:
            if _holds_fake(list(optimizer.state.values()), 4):
                raise CaptureError(
                    f"the step uses the optimizer {label} ({type(optimizer).__name__}), which was not given",
                    "pass it in optimizer=, alone or in a list with the others",
                )

    def restorers(self) -> list[Callable[[], None]]:
        """One for every place that holds a tensor of the trace now."""
        found: list[Callable[[], None]] = []
        for space, before in self._spaces:
            for key, value in list(space.items()):
                if _holds_fake(value):
                    found.append(_put_back(space, key, before.get(key, _MISSING)))
        for cell, old in self._cells:
            if _holds_fake(_content(cell)):
                found.append(_refill(cell, old))
        return found

    def restore(self) -> None:
        """After a failed trace: everything as it was."""
        for module, before in self._buffers:
            module._buffers.clear()
            module._buffers.update(before)
        for module, params in self._params:
            module._parameters.update(params)
        for optimizer, state in self._strange:
            optimizer.state.clear()
            optimizer.state.update(state)
        for put in self.restorers():
            put()


def _holds_fake(value: Any, depth: int = 3) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if depth == 0 or not isinstance(value, (tuple, list, dict)) or len(value) > 1000:
        return False
    return any(_holds_fake(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _put_back(space: dict[Any, Any], key: Any, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is _MISSING:
            space.pop(key, None)
        else:
            space[key] = old

    return put


def _refill(cell: Any, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = old

    return put
