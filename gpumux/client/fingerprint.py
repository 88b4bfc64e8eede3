"""What Python could change between two calls of a step, read cheaply at every call.

A captured step is replayed without running its Python again. So everything its Python may have
decided by is found once, at capture, and watched: scalars, containers and objects in closures,
globals, defaults, attributes and classes, training flags, `requires_grad`, hooks, optimizer groups and
torch's own modes. A reading that differs means another variant must be captured.

What counts is what the code names: starting from the step, every user function reached by a name is
walked, with the names in it; an attribute of a user's object is watched if some walked function names
it. So `trainer.epoch += 1` outside the step changes nothing, unless the step reads `epoch`. Of modules
and objects of libraries, whose code is not walked, all scalar attributes are watched.
"""

from __future__ import annotations

import collections
import os
import random
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from operator import is_
from typing import Any

import numpy
import torch

import gpumux
from gpumux.client import watch
from gpumux.client.blame import code_names
from gpumux.client.watch import SCALARS, Reading, Watch, generator_state
from gpumux.errors import CaptureError

_STRUCTURE = frozenset(torch.nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARY = tuple(
    {os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(gpumux.__file__)}
)
_MOST = 20_000  # objects a step may reach, and elements of one container
_PLAIN_MODULES = (torch.nn.Module, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, object)


@dataclass(slots=True)
class Change:
    """A value that differs between two readings, and how to put either back."""

    name: str
    old: Any
    new: Any
    flag: bool  # a training flag: may be carried over; anything else may not
    restore: Callable[[], None]
    again: Callable[[], None]


def _in_library(path: str | None) -> bool:
    return path is None or path.startswith((*_LIBRARY, "<"))


def _library_class(cls: type) -> bool:
    return _in_library(getattr(sys.modules.get(cls.__module__), "__file__", "<")) and cls.__module__ != "__main__"


class Fingerprint:
    """Built for one step function and the models and optimizers it was submitted with. Raises
    CaptureError for what can't be watched."""

    def __init__(
        self, fn: Any, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], params: Sequence[torch.Tensor]
    ) -> None:  # fmt: skip
        self._roots = [("model" if len(models) == 1 else f"model{i}", m) for i, m in enumerate(models)]
        self._roots += [("optimizer" if len(optimizers) == 1 else f"optimizer{i}", o) for i, o in enumerate(optimizers)]
        self._roots.append((getattr(fn, "__qualname__", type(fn).__name__), fn))
        self._given = list(optimizers)
        self._params = list(params)
        self._names: set[str] = {"forward", "__call__", "step"}
        known = -1
        while known != len(self._names):  # each walk may reach functions that name more
            known = len(self._names)
            self._walk()
        self.watches += [watch.gradients_wanted(list(params)), watch.modes()]
        if {"environ", "getenv"} & self._names:
            self.watches.append(watch.values("os.environ", os.environ._data))  # type: ignore[attr-defined]

    def _walk(self) -> None:
        self.watches: list[Watch] = []
        self.modules: list[torch.nn.Module] = []
        self.strangers: list[tuple[str, Any]] = []  # optimizers that are reached but were not given
        self.spaces: list[dict[Any, Any]] = []  # where a step may leave tensors
        self.cells: list[types.CellType] = []
        self._generators: list[tuple[str, Any]] = []
        self._seen: dict[int, Any] = {}
        for label, root in self._roots:
            self._visit(label, root)
        for p in self._params:
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(p, kind, None)
                if hooks:
                    self.watches.append(watch.values("a parameter's hooks", hooks))
                    self._items("a parameter's hook", list(hooks.items()))

    # ---- walking -----------------------------------------------------------------------------------

    def _visit(self, label: str, value: Any) -> None:
        if value is None or isinstance(value, (*SCALARS, torch.Tensor)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > _MOST:
            raise CaptureError(
                f"the step reaches more than {_MOST} Python objects, by way of {label}",
                "keep data out of what the step's code names: pass tensors as arguments",
            )
        if isinstance(value, types.FunctionType):
            self._function(label, value)
        elif isinstance(value, types.MethodType):
            self._visit(f"{label}.self" if label.isidentifier() else label, value.__self__)
            self._visit(label, value.__func__)
        elif isinstance(value, (partial, partialmethod)):
            self._visit(label, value.func)
            self._visit(f"{label}.args", list(value.args))
            self._dictionary(f"{label}.keywords", value.keywords)
        elif isinstance(value, torch.nn.Module):
            self._module(label, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(label, value)
        elif isinstance(value, types.ModuleType):
            if not _in_library(getattr(value, "__file__", None)):
                self._named_entries(label, value.__dict__)
        elif isinstance(value, type):
            self._class(label, value)
        else:
            self._data(label, value)

    def _data(self, label: str, value: Any) -> None:
        if isinstance(value, (random.Random, numpy.random.Generator, numpy.random.RandomState)):
            self._generators.append((label, value))
        elif isinstance(value, numpy.ndarray):
            self._bounded(label, value.nbytes // 64)
            self.watches.append(watch.array(label, value))
        elif isinstance(value, dict):
            self._dictionary(label, value)
        elif isinstance(value, (list, set, collections.deque)):
            self._bounded(label, len(value))
            self.watches.append(watch.sequence(label, value))
            self._items(label, enumerate(value))
        elif isinstance(value, (tuple, frozenset)):
            self._bounded(label, len(value))
            self._items(label, enumerate(value))
        elif isinstance(value, collections.abc.Iterator) and "next" in self._names:
            raise CaptureError(
                f"the step draws from the iterator {label}",
                "draw outside the step and pass what it gave as an argument",
            )
        else:
            self._object(label, value)

    def _bounded(self, label: str, size: int) -> None:
        if size > _MOST:
            raise CaptureError(f"{label} is too large to watch for changes", "pass it to the step as a tensor argument")

    def _items(self, label: str, items: Any) -> None:
        for key, item in items:
            self._visit(f"{label}[{key!r}]", item)

    def _dictionary(self, label: str, value: dict[Any, Any]) -> None:
        self._bounded(label, len(value))
        self.spaces.append(value)
        self.watches.append(watch.items(label, value))
        self._items(label, list(value.items()))

    def _function(self, label: str, fn: types.FunctionType) -> None:
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self._visit(label, wrapped)
        code = fn.__code__
        if _in_library(code.co_filename):
            return  # a library's decorator; what it wraps was visited
        self._names.update(code_names(code))
        for name, box in zip(code.co_freevars, fn.__closure__ or (), strict=False):
            self.cells.append(box)
            self.watches.append(watch.cell(name, box))
            found = self.watches[-1].read()
            self._visit(name, found[0] if found else None)
        names = [n for n in dict.fromkeys(code_names(code)) if n in fn.__globals__]
        if names:
            self.spaces.append(fn.__globals__)
            self.watches.append(watch.entries("", fn.__globals__, names))
            for name in names:
                self._visit(name, fn.__globals__[name])
        for default in fn.__defaults__ or ():
            self._visit(f"{label}'s default", default)
        if fn.__kwdefaults__:
            self._dictionary(f"{label}'s defaults", fn.__kwdefaults__)

    def _named_entries(self, label: str, space: dict[Any, Any]) -> None:
        keys = [k for k in space if k in self._names]
        if keys:
            self.watches.append(watch.entries(label, space, keys))
            for key in keys:
                self._visit(f"{label}.{key}", space[key])

    def _class(self, label: str, cls: type, space: dict[str, Any] | None = None) -> None:
        """Methods and attributes that walked code names, of a user's class and its user bases, and the
        entries of an instance's `space` that hide them."""
        for base in cls.__mro__:
            if base is object or _library_class(base) or (base is not cls and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            named = [k for k in vars(base) if k in self._names]
            data = [k for k in named if not isinstance(vars(base)[k], (types.FunctionType, property))]
            data = [
                k
                for k in data
                if not isinstance(vars(base)[k], (classmethod, staticmethod, types.MemberDescriptorType))
            ]
            if data:
                self.watches.append(watch.class_attributes(base.__name__, base, data))
                if space is not None:
                    self.watches.append(watch.optional(label, space, data))
            for key in named:
                item = vars(base)[key]
                if isinstance(item, property):
                    self._visit(f"{base.__name__}.{key}", item.fget)
                elif isinstance(item, (classmethod, staticmethod)):
                    self._visit(f"{base.__name__}.{key}", item.__func__)
                else:
                    self._visit(f"{base.__name__}.{key}", item)

    def _object(self, label: str, value: Any) -> None:
        cls = type(value)
        space = getattr(value, "__dict__", None)
        if _library_class(cls):
            watched = cls.__module__.startswith("torch.optim") or cls.__name__.endswith(("Config", "Namespace"))
            if watched and isinstance(space, dict):
                self._scalars(label, space)
            return
        self._class(label, cls, space if isinstance(space, dict) else None)
        if isinstance(space, dict):
            self.spaces.append(space)
            self._named_entries(label, space)
        names = tuple(n for c in cls.__mro__ for n in getattr(c, "__slots__", ()) if n in self._names)
        if names:
            self.watches.append(watch.slots(label, value, names))
            for name in names:
                self._visit(f"{label}.{name}", getattr(value, name, None))

    def _scalars(self, label: str, space: dict[Any, Any], skip: frozenset[str] = frozenset()) -> None:
        """All plain values of a library's object, and its lists of them."""
        keys = [k for k, v in space.items() if k not in skip and (v is None or isinstance(v, (tuple, *SCALARS)))]
        if keys:
            self.watches.append(watch.entries(label, space, keys))
        for key, item in list(space.items()):
            if (key not in skip and isinstance(item, (list, dict)) and len(item) <= 64) or type(item).__name__.endswith(
                "Config"
            ):
                self._visit(f"{label}.{key}", item)

    def _module(self, label: str, module: torch.nn.Module) -> None:
        self.modules.append(module)
        space = module.__dict__
        self.spaces.append(space)
        if "training" in space:
            self.watches.append(watch.entries(label, space, ["training"], flag=True))
        else:  # a wrapper that shows another module's (torch.compile)
            self.watches.append(watch.slots(label, module, ("training",)))
        for kind in ("_parameters", "_buffers", "_modules"):
            if space[kind] or kind == "_modules":
                self.watches.append(watch.values(f"{label}.{kind}", space[kind], identity=True))
        for kind in _HOOKS:
            self.watches.append(watch.values(f"{label}.{kind}", space[kind]))
            self._items(f"{label}.{kind}", list(space[kind].items()))
        cls = type(module)
        if _library_class(cls):
            self._scalars(label, space, _STRUCTURE | {"training"})
            self._named_callables(label, space)
        else:
            self._class(label, cls, space)
            rest = {k: v for k, v in space.items() if k not in _STRUCTURE and k != "training"}
            keys = [
                k
                for k in rest
                if k in self._names or any(_library_class(b) and b not in _PLAIN_MODULES for b in cls.__mro__)
            ]
            if keys:
                self.watches.append(watch.entries(label, space, keys))
            for key in keys:
                self._visit(f"{label}.{key}", space[key])
        for name, child in module._modules.items():
            self._visit(f"{label}.{name}", child)

    def _named_callables(self, label: str, space: dict[str, Any]) -> None:
        """A library module's replaceable functions (`activation`), and what users put on it."""
        keys = [
            k for k, v in space.items()
            if k not in _STRUCTURE and k != "training" and not isinstance(v, (torch.nn.Module, tuple, *SCALARS))
            and v is not None and (callable(v) or k in self._names)
        ]  # fmt: skip
        if keys:
            self.watches.append(watch.entries(label, space, keys))
            for key in keys:
                self._visit(f"{label}.{key}", space[key])

    def _optimizer(self, label: str, optimizer: Any) -> None:
        if not any(optimizer is o for o in self._given):
            self.strangers.append((label, optimizer))
        self.watches.append(watch.groups(label, optimizer))
        cls = type(optimizer)
        if not _library_class(cls):
            space = optimizer.__dict__
            self._class(label, cls, space)
            keys = [k for k in space if k in self._names and k not in ("state", "param_groups", "defaults")]
            if keys:
                self.watches.append(watch.entries(label, space, keys))
                for key in keys:
                    self._visit(f"{label}.{key}", space[key])
        for hook in [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]:
            self._visit(f"{label}'s hook", hook)

    # ---- reading -----------------------------------------------------------------------------------

    def read(self) -> list[Reading]:
        """The present values. Raises NotRepeatable when a name has gone."""
        return [w.read() for w in self.watches]

    def unchanged(self, since: list[Reading]) -> bool:
        """Whether everything reads as it did. Raises NotRepeatable when a name has gone."""
        for w, old in zip(self.watches, since, strict=True):
            new = w.read()
            # What almost always holds, asked without a call for each watch: the very same objects.
            if not (len(new) == len(old) and all(map(is_, old, new))) and not w.same(old, new):
                return False
        return True

    def random_states(self) -> list[tuple[str, Any]]:
        """Python's and numpy's generators, which no Program can draw from."""
        own: list[tuple[str, Any]] = [("random", random), ("numpy.random", numpy.random)]
        return [(name, generator_state(source)) for name, source in [*own, *self._generators]]

    def changes(self, before: list[Reading]) -> list[Change]:
        """What differs now from an earlier reading: a step that changes it while it is traced."""
        found: list[Change] = []
        for w, old, new in zip(self.watches, before, self.read(), strict=True):
            if not w.same(old, new):
                put, again = partial(w.restore, old), partial(w.restore, new)
                found += [Change(name, a, b, w.flag, put, again) for name, a, b in w.differences(old, new)]
        return found
