"""What the objects that a step reaches hold: containers, attributes, modules, optimizers."""

from __future__ import annotations

import abc
import collections
import enum
import random
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch

from gpumux.client import foreign, watch
from gpumux.client.fetching import before_forward
from gpumux.client.origin import Origin, of_class
from gpumux.client.reading import SCALARS, Watch
from gpumux.errors import CaptureError

_STRUCTURE = frozenset(torch.nn.Module().__dict__) - {"training"}
_OF_OPTIMIZERS = frozenset(("state", "param_groups", "defaults"))
_NONE: frozenset[str] = frozenset()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
MOST = 20_000  # objects a step may reach, and elements of one container
_PLAIN_MODULES = (torch.nn.Module, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, object)
_PLAIN_BASES = (abc.ABC, typing.Generic, typing.Protocol, enum.Enum, enum.IntEnum, *_PLAIN_MODULES)
_CONTAINERS = (
    dict,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
    list,
    set,
    tuple,
    frozenset,
    collections.deque,
)
COMPILED = "compiled code can't be captured, and what would run instead is not what it computes"


class Objects(abc.ABC):
    """The part of a walk (walk.py) that looks into objects. Collects watches, and what a step may write to."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = list(given)  # optimizers
        self._names: set[str] = {"forward", "__call__", "step"}
        self._clear()

    def _clear(self) -> None:
        self.watches: list[Watch] = []
        self.modules: list[torch.nn.Module] = []
        self.strangers: list[tuple[str, Any]] = []  # optimizers that are reached but were not given
        # Where a step may leave tensors: attributes, globals and dictionaries, with what names an entry and the keys that are
        # looked after elsewhere; slots and attributes of classes; lists; and variables of closures.
        self.spaces: list[tuple[Callable[[Any], str], dict[Any, Any], frozenset[str]]] = []
        self.fields: list[tuple[str, Any, tuple[str, ...]]] = []
        self.lists: list[tuple[str, Any]] = []
        self.cells: list[tuple[str, types.CellType]] = []
        self.generators: list[tuple[str, Any]] = []

    @abc.abstractmethod
    def _visit(self, label: str, value: Any) -> None:
        """Watch a value and what it leads to, once."""

    @abc.abstractmethod
    def _class(self, label: str, cls: type, space: dict[str, Any] | None = None) -> None:
        """Watch a class's attributes and walk its methods."""

    # ---- data --------------------------------------------------------------------------------------

    def _data(self, label: str, value: Any) -> None:
        if isinstance(value, (random.Random, numpy.random.Generator, numpy.random.RandomState)):
            self.generators.append((label, value))
        elif isinstance(value, numpy.ndarray):
            self._bounded(label, value.nbytes // 64)
            self.watches.append(watch.array(label, value))
        elif isinstance(value, dict):
            self._dictionary(label, value)
        elif isinstance(value, (list, set, collections.deque)):
            self._bounded(label, len(value))
            self.watches.append(watch.sequence(label, value))
            if not isinstance(value, set):
                self.lists.append((label, value))
            self._items(label, enumerate(value))
        elif isinstance(value, (tuple, frozenset)):
            self._bounded(label, len(value))
            self._items(label, enumerate(value))
        if type(value) not in _CONTAINERS and not isinstance(value, (numpy.ndarray, random.Random)):
            self._object(label, value)  # a subclass may have attributes too

    def _bounded(self, label: str, size: int) -> None:
        if size > MOST:
            raise CaptureError(f"{label} is too large to watch for changes", "pass it to the step as a tensor argument")

    def _items(self, label: str, items: Iterable[tuple[Any, Any]]) -> None:
        for key, item in items:
            self._visit(f"{label}[{key!r}]", item)

    def _dictionary(self, label: str, value: dict[Any, Any]) -> None:
        self._bounded(label, len(value))
        self.spaces.append((lambda key: f"{label}[{key!r}]", value, _NONE))
        self.watches.append(watch.items(label, value))
        self._items(label, list(dict.items(value)))

    def _named_entries(self, label: str, space: dict[Any, Any], skip: frozenset[str] = frozenset()) -> None:
        self._entries(label, space, [k for k in space if k in self._names and k not in skip])

    def _entries(self, label: str, space: dict[Any, Any], keys: list[Any]) -> None:
        if keys:
            self.watches.append(watch.entries(label, space, keys))
            for key in keys:
                self._visit(f"{label}.{key}", space[key])

    def _object(self, label: str, value: Any) -> None:
        cls = type(value)
        try:
            space = object.__getattribute__(value, "__dict__")  # past a `__getattr__` that raises what it likes
        except AttributeError:
            space = None
        space = space if isinstance(space, dict) else None
        if of_class(cls) is Origin.LIBRARY:
            self._foreign(label, value, space)
            return
        self._class(label, cls, space)
        bytes_of = foreign.memory(label, value)
        if bytes_of is not None:
            self.watches.append(bytes_of)
        if space is not None:
            self.spaces.append((lambda key: f"{label}.{key}", space, _NONE))
            if _unwalked(cls, _PLAIN_BASES):
                self._entries(label, space, list(space))
            else:
                self._named_entries(label, space)
            self.watches.append(watch.appeared(label, space, self._names))
        names = tuple(n for c in cls.__mro__ for n in _slots(c) if n in self._names)
        if names:
            self.watches.append(watch.slots(label, value, names))
            self.fields.append((label, value, names))
            for name in names:
                self._visit(f"{label}.{name}", getattr(value, name, None))

    def _foreign(self, label: str, value: Any, space: dict[str, Any] | None) -> None:
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
        if wrapped is not None:  # functools.cache
            self._visit(label, wrapped)
        elif isinstance(value, (*_CONTAINERS, *SCALARS)) or foreign.fixed(value):
            return
        if space is not None:
            self.spaces.append((lambda key: f"{label}.{key}", space, _NONE))
        if type(value).__module__.split(".")[0] == "torch":
            if space is not None:
                self._scalars(label, space)
        else:
            if space is not None:
                self._entries(label, space, list(space))
                self.watches.append(watch.appeared(label, space, self._names))
            watches, children = foreign.inner(label, value, space is not None)
            self.watches += watches
            for name, child in children:
                self._visit(name, child)

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

    # ---- torch -------------------------------------------------------------------------------------

    def _hooks(self, label: str, hooks: dict[Any, Any]) -> None:
        self.watches.append(watch.values(label, hooks))
        self._items(label, [(key, hook) for key, hook in hooks.items() if hook is not before_forward])

    def _module(self, label: str, module: torch.nn.Module) -> None:
        if type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None:
            raise CaptureError(
                f"{label} was compiled with torch.compile: {COMPILED}",
                "submit the uncompiled model (compiled._orig_mod)",
            )
        self.modules.append(module)
        space = module.__dict__
        self.spaces.append((lambda key: f"{label}.{key}", space, _STRUCTURE))
        if "training" in space:
            self.watches.append(watch.entries(label, space, ["training"], flag=True))
        else:  # a wrapper that shows another module's
            self.watches.append(watch.slots(label, module, ("training",)))
        for kind in ("_parameters", "_buffers", "_modules"):
            if space[kind] or kind == "_modules":
                self.watches.append(watch.values(f"{label}.{kind}", space[kind]))
        for kind in _HOOKS:
            self._hooks(f"{label}.{kind}", space[kind])
        cls = type(module)
        if of_class(cls) is Origin.LIBRARY:
            self._scalars(label, space, _STRUCTURE | {"training"})
            self._named_callables(label, space)
        else:
            self._class(label, cls, space)
            all_of_it = _unwalked(cls, _PLAIN_MODULES)
            rest = [k for k in space if k not in _STRUCTURE and k != "training"]
            self._entries(label, space, [k for k in rest if k in self._names or all_of_it])
            self.watches.append(watch.appeared(label, space, self._names))
        for name, child in module._modules.items():
            self._visit(f"{label}.{name}", child)

    def _named_callables(self, label: str, space: dict[str, Any]) -> None:
        """A library module's replaceable functions (`activation`), and what users put on it."""
        keys = [
            k for k, v in space.items()
            if k not in _STRUCTURE and k != "training" and not isinstance(v, (torch.nn.Module, tuple, *SCALARS))
            and v is not None and (callable(v) or k in self._names)
        ]  # fmt: skip
        self._entries(label, space, keys)

    def _optimizer(self, label: str, optimizer: Any) -> None:
        if not any(optimizer is o for o in self._given):
            self.strangers.append((label, optimizer))
        self.watches.append(watch.groups(label, optimizer))
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    self._group_value(f"{label}.param_groups[{i}][{key!r}]", value)
        self._dictionary(f"{label}.defaults", optimizer.defaults)
        cls, space = type(optimizer), optimizer.__dict__
        self.spaces.append((lambda key: f"{label}.{key}", space, _OF_OPTIMIZERS))
        if of_class(cls) is not Origin.LIBRARY:
            self._class(label, cls, space)
            self._named_entries(label, space, _OF_OPTIMIZERS)
        for kind in _STEP_HOOKS:
            self._hooks(f"{label}.{kind}", getattr(optimizer, kind))

    def _group_value(self, label: str, value: Any) -> None:
        """Numbers in lists and tuples are lifted, as those in the group itself are."""
        if type(value) in (list, tuple):
            for i, item in enumerate(value):
                self._visit(f"{label}[{i}]", item)
        else:
            self._visit(label, value)


def _unwalked(cls: type, plain: tuple[type, ...]) -> bool:
    """Whether attributes of a user's class may be read by names no walked code has: by a library's methods,
    or by a class that answers for names of its own making."""
    for base in cls.__mro__:
        if of_class(base) is Origin.LIBRARY:
            if base not in plain and base.__module__ != "builtins":
                return True
        elif "__getattr__" in vars(base) or "__getattribute__" in vars(base):
            return True
    return False


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)
