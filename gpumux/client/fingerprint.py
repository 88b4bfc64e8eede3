"""What Python could change between two calls of a step, read cheaply at every call.

A captured step is replayed without running its Python again. So everything its Python may have
decided by is listed once, at capture: scalars in closures, globals, modules, configuration objects
and optimizer groups, training flags, `requires_grad`, and torch's own modes. `Fingerprint.read()`
returns their present values; a value never seen before means another variant must be captured.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from gpumux.client.blame import _global_names, reachable
from gpumux.errors import NotRepeatable

_SCALARS = (bool, int, float, str, bytes, complex, type(None), torch.dtype)
_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
_LIBRARY = tuple({os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__))})
_MAX_DEPTH = 4


def _is_scalar(value: Any) -> bool:
    if isinstance(value, _SCALARS):
        return True
    return isinstance(value, tuple) and len(value) <= 16 and all(isinstance(v, _SCALARS) for v in value)


def _in_library(path: str | None) -> bool:
    return path is None or path.startswith(_LIBRARY) or path.startswith("<")


def _readable(value: Any) -> bool:
    """Objects whose attributes a step may decide by: the user's own, and libraries' configurations."""
    home = getattr(sys.modules.get(type(value).__module__), "__file__", "<")
    return not _in_library(home) or type(value).__name__.endswith(("Config", "Namespace"))


@dataclass(slots=True)
class _Namespace:
    """Scalars of one dictionary (a module's attributes, a configuration object, globals)."""

    label: str
    values: dict[Any, Any]
    keys: tuple[Any, ...]
    read: Callable[[dict[Any, Any]], Any]


@dataclass(slots=True)
class Change:
    """A value that differs between two readings, and how to put the old one back."""

    name: str
    old: Any
    new: Any
    flag: bool  # a training flag: may be carried over; anything else may not
    restore: Callable[[], None]
    again: Callable[[], None]


class Fingerprint:
    """Built for one step function and the models and optimizers it was submitted with."""

    def __init__(
        self, fn: Any, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], params: Sequence[torch.Tensor]
    ) -> None:
        self._params = list(params)
        self._spaces: list[_Namespace] = []
        self._cells: list[tuple[str, types.CellType]] = []
        self._sized: list[tuple[str, Any]] = []
        self._seen: set[int] = set()
        self.modules: list[torch.nn.Module] = []
        self.spaces: list[dict[Any, Any]] = []  # where a step may leave tensors: attributes, containers, globals
        self.cells: list[types.CellType] = []
        for i, model in enumerate(models):
            self._visit(f"model{i}" if len(models) > 1 else "model", model, 0)
        for i, optimizer in enumerate(optimizers):
            self._optimizer(f"optimizer{i}" if len(optimizers) > 1 else "optimizer", optimizer)
        self._function(getattr(fn, "__qualname__", "step"), fn, 0)

    # ---- collecting --------------------------------------------------------------------------------

    def _namespace(self, label: str, values: dict[Any, Any], keys: list[Any]) -> None:
        # What is None now may hold a tensor tomorrow (a debugging attribute): compare its kind only.
        empty = tuple(k for k in keys if values[k] is None)
        firm = tuple(k for k in keys if values[k] is not None)
        if firm:
            self._spaces.append(_Namespace(label, values, firm, itemgetter(*firm)))
        if empty:
            self._spaces.append(_Namespace(label, values, empty, _kinds(empty)))

    def _function(self, label: str, fn: Any, depth: int) -> None:
        fn = getattr(fn, "__wrapped__", fn)
        if isinstance(fn, types.MethodType):
            self._visit(f"{label}.self", fn.__self__, depth)
            fn = fn.__func__
        code = getattr(fn, "__code__", None)
        if code is None or id(fn) in self._seen or depth > _MAX_DEPTH or _in_library(code.co_filename):
            return
        self._seen.add(id(fn))
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
            self._cells.append((name, cell))
            self.cells.append(cell)
        names = set(_global_names(code))
        found = dict(reachable(fn))
        scalars = [n for n in names if n in fn.__globals__ and _is_scalar(fn.__globals__[n])]
        self._namespace("", fn.__globals__, sorted(scalars))
        self.spaces.append(fn.__globals__)
        for name, value in found.items():
            self._visit(name, value, depth + 1, names)
        if fn.__defaults__:
            for i, value in enumerate(fn.__defaults__):
                self._visit(f"{label}.default{i}", value, depth + 1)

    def _visit(self, label: str, value: Any, depth: int, names: set[str] | None = None) -> None:
        if id(value) in self._seen or depth > _MAX_DEPTH or isinstance(value, (torch.Tensor, type, *_SCALARS)):
            return
        if isinstance(value, torch.nn.Module):
            for path, module in value.named_modules():
                self._object(f"{label}.{path}" if path else label, module, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(label, value)
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            self._function(label, value, depth)
        elif isinstance(value, types.ModuleType):
            if not _in_library(getattr(value, "__file__", None)):
                self._seen.add(id(value))
                space = value.__dict__
                self._namespace(label, space, sorted(k for k in names or () if k in space and _is_scalar(space[k])))
        elif isinstance(value, (list, dict, set)):
            self._container(label, value, depth)
        elif hasattr(value, "__dict__") and _readable(value):
            self._object(label, value, depth)

    def _object(self, label: str, value: Any, depth: int) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        space = value.__dict__
        self.spaces.append(space)
        if isinstance(value, torch.nn.Module):
            self.modules.append(value)
        skip = _MODULE_INTERNALS if isinstance(value, torch.nn.Module) else frozenset()
        self._namespace(label, space, [k for k, v in space.items() if k not in skip and _is_scalar(v)])
        for key, item in list(space.items()):
            if key not in skip and not _is_scalar(item):
                self._visit(f"{label}.{key}", item, depth + 1)

    def _container(self, label: str, value: Any, depth: int) -> None:
        self._seen.add(id(value))
        self._sized.append((label, value))
        if isinstance(value, dict):
            self.spaces.append(value)
            self._namespace(label, value, [k for k, v in value.items() if _is_scalar(v)])
            items = list(value.items())
        else:
            items = list(enumerate(value))
        for key, item in items[:256]:
            self._visit(f"{label}[{key!r}]", item, depth + 1)

    def _optimizer(self, label: str, optimizer: Any) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        self._sized.append((f"{label}.param_groups", optimizer.param_groups))
        self._sized += [(f"{label}.param_groups[{i}]", g["params"]) for i, g in enumerate(optimizer.param_groups)]
        for i, group in enumerate(optimizer.param_groups):
            # Numbers are lifted to host scalars; what is left decides which code runs.
            flags = [k for k, v in group.items() if isinstance(v, (bool, str, type(None)))]
            self._namespace(f"{label}.param_groups[{i}]", group, flags)

    # ---- reading -----------------------------------------------------------------------------------

    def read(self) -> tuple[Any, ...]:
        """The present values, hashable. Raises NotRepeatable when a name has gone."""
        try:
            spaces = tuple([s.read(s.values) for s in self._spaces])
        except KeyError as error:
            raise NotRepeatable(
                f"{error} existed when the step was captured and is gone", "submit the step again"
            ) from None
        cells = tuple([_cell(c) for _, c in self._cells])
        sizes = tuple([len(v) for _, v in self._sized])
        grads = tuple([p.requires_grad for p in self._params])
        return (spaces, cells, sizes, grads, _modes())

    def changes(self, before: tuple[Any, ...]) -> list[Change]:
        """What differs now from an earlier reading: a step that changes it while it is traced."""
        now = self.read()
        found: list[Change] = []
        for space, old, new in zip(self._spaces, before[0], now[0], strict=True):
            olds, news = ((old,), (new,)) if len(space.keys) == 1 else (old, new)
            for key, a, b in zip(space.keys, olds, news, strict=True):
                if a is not b and a != b:
                    name = f"{space.label}.{key}" if space.label else str(key)
                    found.append(_assignment(name, space.values, key, a, b))
        for (name, cell), a, b in zip(self._cells, before[1], now[1], strict=True):
            if a is not b and a != b:
                found.append(Change(name, a, b, False, _setter(cell, a), _setter(cell, b)))
        for (name, value), a, b in zip(self._sized, before[2], now[2], strict=True):
            if a != b:
                found.append(Change(f"len({name})", a, b, False, _truncate(value, a), lambda: None))
        for p, a, b in zip(self._params, before[3], now[3], strict=True):
            if a != b:
                found.append(Change("requires_grad", a, b, True, _require(p, a), _require(p, b)))
        return found


def _kinds(keys: tuple[Any, ...]) -> Callable[[dict[Any, Any]], Any]:
    """A reader that shows tensors as None: whether one was left there decides nothing by itself."""

    def read(space: dict[Any, Any]) -> Any:
        values = [space[k] for k in keys]
        shown = tuple(
            [v if _is_scalar(v) else None if isinstance(v, torch.Tensor) else type(v).__qualname__ for v in values]
        )
        return shown[0] if len(shown) == 1 else shown

    return read


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,
    )  # fmt: skip


def _cell(cell: types.CellType) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:
        return "empty"
    return value if _is_scalar(value) else id(value)


def _assignment(name: str, space: dict[Any, Any], key: Any, old: Any, new: Any) -> Change:
    return Change(
        name, old, new, key == "training", lambda: space.__setitem__(key, old), lambda: space.__setitem__(key, new)
    )  # fmt: skip


def _setter(cell: types.CellType, value: Any) -> Callable[[], None]:
    def put() -> None:
        if _is_scalar(value):
            cell.cell_contents = value

    return put


def _require(param: torch.Tensor, value: bool) -> Callable[[], None]:
    def put() -> None:
        param.requires_grad_(value)

    return put


def _truncate(value: Any, size: int) -> Callable[[], None]:
    def put() -> None:
        if isinstance(value, list):
            del value[size:]

    return put
