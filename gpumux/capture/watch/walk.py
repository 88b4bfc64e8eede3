"""Finds everything that a step's Python code could read, and the watches for it."""

from __future__ import annotations

import abc
import argparse
import builtins
import collections
import dataclasses
import enum
import functools
import gc
import os
import random
import sys
import sysconfig
import threading
import types
import typing
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache, partial, partialmethod
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch.nn.parallel import DistributedDataParallel

import gpumux
from gpumux.capture import fetching
from gpumux.capture.fetching import before_forward
from gpumux.capture.source import Executed, code_names, codes_in, global_names
from gpumux.capture.state import PLAIN, SCALARS, Watch, wrapped_optimizer
from gpumux.capture.watch import watches
from gpumux.errors import CaptureError

# ---- the origin of a file, a function or a class: the user's code, an installed package, or a library
#
# Libraries are torch, the standard library, numpy, gpumux itself and a few large packages that no model is written in.
# Their Python code is assumed to do the same whenever it gets the same arguments. All other code may decide what a step
# computes. Of the user's own code every path is walked; of installed packages (transformers has a million lines) only
# the functions that ran while the step was traced.


class Origin(enum.Enum):
    OWN = "own"
    INSTALLED = "installed"
    LIBRARY = "library"


_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
# Packages that run, test, show or store what others compute, or whose arrays a step can't use.
_LARGE = frozenset(
    (
        "scipy",
        "pandas",
        "sklearn",
        "matplotlib",
        "PIL",
        "sympy",
        "networkx",
        "pytest",
        "_pytest",
        "pluggy",
        "hypothesis",
        "tqdm",
        "zmq",
        "msgpack",
        "requests",
        "urllib3",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "typing_extensions",
        "jinja2",
        "functorch",
        "torchgen",
        "triton",
    )
)


def _folder(path: str) -> str:
    return os.path.join(os.path.abspath(path), "")


_LIBRARIES = tuple(_folder(os.path.dirname(m.__file__ or "")) for m in (torch, numpy, gpumux))
_STANDARD = tuple(
    {_folder(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")} | {_folder(os.path.dirname(os.__file__))}
)


@cache
def of_path(path: str | None) -> Origin:
    """The origin of a source file. Code without one ("<stdin>", "<ipython-input-1>", exec) is the user's."""
    if path is None or path.startswith("<frozen ") or path.startswith(_LIBRARIES):
        return Origin.LIBRARY
    for folder in _INSTALLED:
        if folder in path:
            package = path.rsplit(folder, 1)[1].split(os.sep, 1)[0].removesuffix(".py")
            return Origin.LIBRARY if package in _LARGE else Origin.INSTALLED
    return Origin.LIBRARY if path.startswith(_STANDARD) else Origin.OWN


def of_code(code: types.CodeType, space: dict[str, Any] | None = None) -> Origin:
    """The origin of a function's code. `space`: its globals, which decide for code that a library generated (a
    dataclass's `__eq__`, a namedtuple's `__new__`)."""
    if code.co_filename.startswith("<") and space is not None:
        module = sys.modules.get(space.get("__name__", ""))
        if module is not None and getattr(module, "__dict__", None) is space:
            return _of_module(module)
    return of_path(code.co_filename)


def of_class(cls: type) -> Origin:
    if str(cls.__module__).startswith("torch._C."):  # in C: it has no file, if it is in sys.modules at all
        return Origin.LIBRARY
    module = sys.modules.get(cls.__module__)
    if module is None or (module in _MAKERS and vars(module).get(cls.__name__) is not cls):
        return Origin.OWN if any(map(_made_in_python, cls.__mro__)) else Origin.LIBRARY
    return _of_module(module)


# The module of a class that `exec` makes without `__name__`, and of those that `types.new_class` makes.
_MAKERS = (builtins, types)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_BY_A_STATEMENT = frozenset(("__dict__", "__weakref__", "__slots__"))  # C's types rarely have one


def _made_in_python(cls: type) -> bool:
    """Whether a class was made by Python, not by C, whose types may say any module. A metaclass has all of these from
    `type`."""
    return bool(cls.__flags__ & _HEAP_TYPE) and (issubclass(cls, type) or not _BY_A_STATEMENT.isdisjoint(vars(cls)))


def holds_attributes_alone(cls: type) -> bool:
    """Whether the objects of a class are what their attributes in `__dict__` hold: Python made it and all its bases,
    and none has slots."""
    bases = cls.__mro__[:-1]
    by_python = bool(bases) and _made_in_python(bases[-1]) and any("__dict__" in vars(c) for c in bases)
    return by_python and all(c.__flags__ & _HEAP_TYPE and not vars(c).get("__slots__") for c in bases)


def _of_module(module: types.ModuleType) -> Origin:
    if module.__name__ == "__main__":
        return Origin.OWN
    file = getattr(module, "__file__", None)
    if file is None:
        return Origin.LIBRARY if module.__name__ in sys.builtin_module_names else Origin.OWN
    return of_path(file)


def of_module(module: types.ModuleType) -> Origin:
    """The origin of a module object. Namespace packages have no file and no code."""
    return _of_module(module)


# ---- the walk


_STRUCTURE = frozenset(torch.nn.Module().__dict__) - {"training"}
OF_OPTIMIZERS = frozenset(("state", "param_groups", "defaults"))
_NONE: frozenset[str] = frozenset()
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What decides what a DistributedDataParallel computes. It notes from call to call how its reducer stands, too.
_OF_PARALLEL = ("_comm_hooks", "mixed_precision")
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
_AS_WRITTEN = ", or run the script as it is with TORCHDYNAMO_DISABLE=1, where torch.compile returns what it is given"


# The names in the code decide what is watched. Starting from the step, every user function reached by a name is walked,
# with the names in it. So is every function that ran while the step was traced (`capture/source.py`). An attribute of a
# user's object is watched if a walked function names it: `trainer.epoch += 1` outside the step has no effect, unless
# the step reads `epoch`. All attributes of modules and objects of libraries are watched, because their code is not
# walked.


_GLOBAL_HOOKS = [
    (name, hooks)
    for owner in (modules, optimizers)
    for name, hooks in vars(owner).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(hooks, dict)
]
_CONSTANTS = (bool, int, float, str, type(None))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


# Python's ways to names that no code has as such.
_BY_COMPUTED_NAMES = frozenset(
    ("setattr", "delattr", "__setattr__", "__delattr__", "vars", "__dict__", "globals", "exec")
)
# Ways to modules that code does not name, whose attributes are globals: sys.modules[__name__].scale.
_TO_MODULES = frozenset(("modules", "import_module", "__import__", "__globals__", "f_globals"))


class Entries(NamedTuple):
    """A dictionary in which a step may leave something: attributes, globals, or a dictionary of the user's. `name`: of
    an entry; `skip`: keys that are handled elsewhere; `own`: attributes of the user's own objects, or globals of the
    user's code, not all of which are watched."""

    name: Callable[[Any], str]
    entries: dict[Any, Any]
    skip: frozenset[str] = frozenset()
    own: bool = False


class Walk:
    """The walk from one step function and the models and optimizers it was submitted with. Collects watches, and the
    places in which a step may leave tensors. Raises CaptureError for an object that can't be watched."""

    def __init__(
        self, fn: Any, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], params: Sequence[torch.Tensor],
        *, executed: Executed, names: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """`names`: those that an earlier walk of the step found; knowing them saves a second round."""
        self._roots: list[tuple[str, Any]] = [
            ("model" if len(models) == 1 else f"model{i}", m) for i, m in enumerate(models)
        ]
        self._roots += [("optimizer" if len(optimizers) == 1 else f"optimizer{i}", o) for i, o in enumerate(optimizers)]
        self._roots.append((getattr(fn, "__qualname__", type(fn).__name__), fn))
        self._params = list(params)
        self._executed = executed
        self._optimizers = list(optimizers)
        self._names: set[str] = {"forward", "__call__", "step", *names}
        self._clear()
        self._walk_until_complete()
        while missing := [found for i, found in executed.items() if i not in self.walked]:
            self._roots += _owners(missing)
            self._walk_until_complete()
        if self._params:
            self.watches += [watches.gradients_wanted(self._params), watches.parameter_hooks(self._params)]
        self.watches += [watches.modes(), watches.precisions()]
        if {"environ", "getenv"} & self._names:
            self.watches.append(watches.values("os.environ", os.environ._data))  # type: ignore[attr-defined]

    @property
    def names(self) -> frozenset[str]:
        """The names in the step's code."""
        return frozenset(self._names)

    @property
    def computes_names(self) -> bool:
        """Whether the step's code may write attributes or globals whose names it does not have."""
        return not _BY_COMPUTED_NAMES.isdisjoint(self._names)

    @property
    def _reaches_modules(self) -> bool:
        """Whether any attribute in the step's code may be a global. Most code with `modules` calls model.modules()."""
        found = self._names & _TO_MODULES
        return bool(found - {"modules"}) or (bool(found) and "sys" in self._names)

    @staticmethod
    def matters(code: types.CodeType, space: dict[str, Any]) -> bool:
        """Whether a function that ran must be walked."""
        return of_code(code, space) is not Origin.LIBRARY

    def _walk_until_complete(self) -> None:
        known = -1
        while known != len(self._names):  # each walk may reach functions with more names
            known = len(self._names)
            self._walk()

    def _clear(self) -> None:
        self.watches: list[Watch] = []
        self.modules: list[torch.nn.Module] = []
        self.other_optimizers: list[tuple[str, Any]] = []  # optimizers that are reached but were not submitted
        # Places in which a step may leave tensors. Fields: slots and attributes of classes.
        self.spaces: list[Entries] = []
        self.fields: list[tuple[str, Any, tuple[str, ...]]] = []
        self.lists: list[tuple[str, Any]] = []
        self.listed: list[tuple[dict[str, Any], str]] = []  # libraries' attributes that hold numbers
        self.cells: list[tuple[str, types.CellType]] = []
        self.generators: list[tuple[str, Any]] = []
        self._functions: list[types.FunctionType] = []
        self._objects: list[tuple[str, Any]] = []  # the user's, with their names

    def _walk(self) -> None:
        self._clear()
        self.walked: set[int] = set()
        self._seen: dict[int, Any] = {}
        self._globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        for label, root in self._roots:
            self._visit(label, root)
        for i, p in enumerate(self._params):
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                self._items(f"a hook of parameter {i}", list((getattr(p, kind, None) or {}).items()))
        for name, hooks in _GLOBAL_HOOKS:
            self._hooks(f"torch's {name}", hooks)
        for i, p in enumerate(self._params):
            self._named_entries(f"parameter {i}", p.__dict__)
        for space, names in list(self._globals.values()):
            if names:
                self.watches.append(watches.entries("", space, list(names)))
        if self.modules:
            self.watches.append(watches.structures(self.modules, (*_OF_MODULES, *_HOOKS)))
        if self._functions:
            self.watches.append(watches.codes(self._functions))
        if self._objects:
            self.watches.append(watches.types_of(self._objects))
            dictionaries = watches.dictionaries_of(self._objects)
            if dictionaries is not None:
                self.watches.append(dictionaries)

    def _visit(self, label: str, value: Any) -> None:
        if type(value) in PLAIN or isinstance(value, torch.Tensor) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > MOST:
            raise CaptureError(
                f"the step reaches more than {MOST} Python objects, by way of {label}",
                "keep data out of what the step's code names: pass tensors as arguments",
            )
        if isinstance(value, types.FunctionType):
            self._function(label, value)
        elif isinstance(value, types.MethodType):
            step = value is self._roots[-1][1]
            owner = "self" if step else f"{label}.self" if label.isidentifier() else label
            self._visit(owner, value.__self__)
            self._visit(label, value.__func__)
        elif isinstance(value, (partial, partialmethod)):
            self._visit(label, value.func)
            self._visit(f"{label}.args", list(value.args))
            self._dictionary(f"{label}.keywords", value.keywords)
        elif isinstance(value, (property, classmethod, staticmethod, functools.cached_property)):
            for part in ("fget", "fset", "__func__", "func"):
                self._visit(label, getattr(value, part, None))
        elif isinstance(value, torch.nn.Module):
            self._module(label, value)
        elif isinstance(value, torch.optim.Optimizer) and wrapped_optimizer(value) is None:
            self._optimizer(label, value)
        elif isinstance(value, types.ModuleType):
            if of_module(value) is not Origin.LIBRARY:
                self._named_entries(label, value.__dict__)
        elif isinstance(value, type):
            self._class(label, value)
        elif isinstance(value, _Ownerless):
            self._code(value.code, value.space)
        else:
            self._data(label, value)

    # ---- data --------------------------------------------------------------------------------------

    def _data(self, label: str, value: Any) -> None:
        if isinstance(value, (random.Random, numpy.random.Generator, numpy.random.RandomState)):
            self.generators.append((label, value))
        elif isinstance(value, numpy.ndarray):
            self._bounded(label, value.nbytes // 64)
            self.watches.append(watches.array(label, value))
            if value.dtype.hasobject:
                self._items(label, enumerate(value.flat))
        elif isinstance(value, dict):
            self._dictionary(label, value)
        elif isinstance(value, (list, set, collections.deque, tuple, frozenset)):
            kind = watches.kind_of(value)
            self._bounded(label, kind.__len__(value))
            if kind in (list, set, collections.deque):
                self.watches.append(watches.sequence(label, value))
                if kind is not set and watches.shows_all(value, kind):
                    self.lists.append((label, value))
            self._items(label, enumerate(kind.__iter__(value)))
        if type(value) not in _CONTAINERS and not isinstance(value, (numpy.ndarray, random.Random)):
            self._object(label, value)  # a subclass may have attributes as well

    def _bounded(self, label: str, size: int) -> None:
        if size > MOST:
            raise CaptureError(f"{label} is too large to watch for changes", "pass it to the step as a tensor argument")

    def _items(self, label: str, items: Iterable[tuple[Any, Any]]) -> None:
        for key, item in items:
            self._visit(f"{label}[{key!r}]", item)

    def _dictionary(self, label: str, value: dict[Any, Any]) -> None:
        self._bounded(label, dict.__len__(value))
        kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        if watches.shows_all(value, kind):
            self.spaces.append(Entries(lambda key: f"{label}[{key!r}]", value))
        self.watches.append(watches.items(label, value))
        self._items(label, list(dict.items(value)))

    def _named_entries(self, label: str, space: dict[Any, Any], skip: frozenset[str] = frozenset()) -> None:
        self._entries(label, space, [k for k in space if k in self._names and k not in skip])

    def _entries(self, label: str, space: dict[Any, Any], keys: list[Any]) -> None:
        if keys:
            self.watches.append(watches.entries(label, space, keys))
            for key in keys:
                self._visit(f"{label}.{key}", space[key])

    def _object(self, label: str, value: Any) -> None:
        cls, space = type(value), watches.dictionary_of(value)
        if of_class(cls) is Origin.LIBRARY:
            self._foreign(label, value, space)
            return
        self._objects.append((label, value))
        self._class(label, cls, space)
        bytes_of = watches.memory_of_value(label, value)
        if bytes_of is not None:
            self.watches.append(bytes_of)
        whole = dataclasses.is_dataclass(cls) and not self._names.isdisjoint(_ALL_FIELDS)
        if space is not None:
            self.spaces.append(Entries(lambda key: f"{label}.{key}", space, own=True))
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
                replaced = self._lists_of_numbers(label, space)
                self._entries(label, space, [k for k in space if k not in replaced])
            elif _unwalked(cls, _PLAIN_BASES) or whole:
                self._entries(label, space, list(space))
            else:  # the names that a package's wrapper of a schedule uses are known once it has run: too late
                steps = [k for k, v in space.items() if isinstance(v, torch.optim.lr_scheduler.LRScheduler)]
                self._entries(label, space, [k for k in space if k in self._names or k in steps])
            self.watches.append(watches.appeared(label, space, self._names))
        names = tuple(n for c in cls.__mro__ for n in _slots(c) if n in self._names or whole)
        if names:
            self.watches.append(watches.slots(label, value, names))
            self.fields.append((label, value, names))
            for name in names:
                self._visit(f"{label}.{name}", getattr(value, name, None))

    def _foreign(self, label: str, value: Any, space: dict[str, Any] | None) -> None:
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
        if wrapped is not None:  # functools.cache
            self._visit(label, wrapped)
        elif isinstance(value, threading.local):  # what this thread has in it
            self._named_entries(label, value.__dict__)
            self.watches.append(watches.appeared(label, value.__dict__, self._names))
            return
        elif isinstance(value, (*_CONTAINERS, *SCALARS)) or watches.fixed(value):
            return
        if space is not None:
            self.spaces.append(Entries(lambda key: f"{label}.{key}", space, own=isinstance(value, _NAMESPACES)))
        if type(value).__module__.split(".")[0] == "torch":
            if isinstance(value, torch.amp.GradScaler) and space and value.is_enabled() and space["_scale"] is None:
                # As its first use makes it, so that a trace finds it made.
                value._lazy_init_scale_growth_tracker(torch.device(space["_device"]))
            if space is not None:
                self._scalars(label, space, lists=True)
        else:
            if space is not None:
                self._entries(label, space, list(space))
                self.watches.append(watches.appeared(label, space, self._names))
            inner, children = watches.inner(label, value, space is not None)
            self.watches += inner
            for name, child in children:
                self._visit(name, child)

    def _scalars(
        self, label: str, space: dict[Any, Any], skip: frozenset[str] = frozenset(), lists: bool = False
    ) -> None:
        """Watch all plain values of a library's object, and its lists of them. `lists`: it is no module, so that its
        tensors are attributes, and its methods make new lists of numbers in place of those (a scheduler's
        `_last_lr`)."""
        kinds = (tuple, *SCALARS, torch.Tensor) if lists else (tuple, *SCALARS)
        keys = [k for k, v in space.items() if k not in skip and (v is None or isinstance(v, kinds))]
        if keys:
            self.watches.append(watches.entries(label, space, keys))
        replaced = self._lists_of_numbers(label, space) if lists else ()
        for key, item in list(space.items()):
            if key in replaced:
                continue
            if (
                (key not in skip and isinstance(item, (list, dict)) and len(item) <= 64)
                or (type(item) is tuple and any(type(x) not in PLAIN for x in item))
                or type(item).__name__.endswith("Config")
            ):
                self._visit(f"{label}.{key}", item)

    def _lists_of_numbers(self, label: str, space: dict[Any, Any]) -> Container[str]:
        """Watch the attributes that hold lists of numbers, which methods replace by new lists. Returns their names."""
        found = [k for k, v in space.items() if type(v) is list and v and all(type(x) in (int, float) for x in v)]
        for key in found:
            self.watches.append(watches.listed(label, space, key))
            self.listed.append((space, key))
        return found

    # ---- torch -------------------------------------------------------------------------------------

    def _hooks(self, label: str, hooks: dict[Any, Any]) -> None:
        self.watches.append(watches.values(label, hooks))
        self._items(label, [(key, hook) for key, hook in hooks.items() if hook is not before_forward])

    def _module(self, label: str, module: torch.nn.Module) -> None:
        call = module.__dict__.get("_compiled_call_impl")  # where torch's compiler is off, the module's own method
        if type(module).__name__ == "OptimizedModule" or (call is not None and call != module._call_impl):
            raise CaptureError(
                f"{label} was compiled with torch.compile: {COMPILED}",
                "submit the uncompiled model, and call it in the step (compiled._orig_mod)" + _AS_WRITTEN,
            )
        self.modules.append(module)
        space = module.__dict__
        own = of_class(type(module)) is not Origin.LIBRARY
        self.spaces.append(Entries(lambda key: f"{label}.{key}", space, _STRUCTURE, own))
        if "training" in space:
            self.watches.append(watches.entries(label, space, ["training"], flag=True))
        else:  # a wrapper that returns another module's
            self.watches.append(watches.slots(label, module, ("training",)))
        for kind in _OF_MODULES:
            if space[kind] or kind == "_modules":
                self.watches.append(watches.values(f"{label}.{kind}", space[kind], buffers=kind == "_buffers"))
        for kind in _HOOKS:
            self._hooks(f"{label}.{kind}", space[kind])
        cls = type(module)
        if isinstance(module, DistributedDataParallel):
            self._entries(label, space, [key for key in _OF_PARALLEL if key in space])
        elif of_class(cls) is Origin.LIBRARY:
            self._scalars(label, space, _STRUCTURE | {"training"})
            self._named_callables(label, space)
            self.watches.append(watches.appeared(label, space, {"forward"}))  # torch's own forward may be replaced
        else:
            self._objects.append((label, module))
            self._class(label, cls, space)
            all_of_it = _unwalked(cls, _PLAIN_MODULES)
            rest = [k for k in space if k not in _STRUCTURE and k != "training"]
            self._entries(label, space, [k for k in rest if k in self._names or all_of_it])
            self.watches.append(watches.appeared(label, space, self._names))
        for name, child in module._modules.items():
            self._visit(f"{label}.{name}", child)

    def _named_callables(self, label: str, space: dict[str, Any]) -> None:
        """Watch a library module's replaceable functions (`activation`), and the attributes that users set on it."""
        keys = [
            k for k, v in space.items()
            if k not in _STRUCTURE and k != "training" and not isinstance(v, (torch.nn.Module, tuple, *SCALARS))
            and v is not None and (callable(v) or k in self._names)
        ]  # fmt: skip
        self._entries(label, space, keys)

    def _optimizer(self, label: str, optimizer: Any) -> None:
        if not any(optimizer is o for o in self._optimizers):
            self.other_optimizers.append((label, optimizer))
        self.watches.append(watches.groups(label, optimizer))
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    self._group_value(f"{label}.param_groups[{i}][{key!r}]", value)
        if hasattr(optimizer, "defaults"):  # a wrapper's constructor may leave out that of Optimizer
            self._dictionary(f"{label}.defaults", optimizer.defaults)
        cls, space = type(optimizer), optimizer.__dict__
        self.spaces.append(Entries(lambda key: f"{label}.{key}", space, OF_OPTIMIZERS))
        if of_class(cls) is not Origin.LIBRARY:
            self._class(label, cls, space)
            self._named_entries(label, space, OF_OPTIMIZERS)
        for kind in _STEP_HOOKS:
            if hasattr(optimizer, kind):
                self._hooks(f"{label}.{kind}", getattr(optimizer, kind))

    def _group_value(self, label: str, value: Any) -> None:
        """Watch a value of a group, except numbers, also in lists and tuples, which are lifted to host scalars."""
        if type(value) in (list, tuple):
            for i, item in enumerate(value):
                self._visit(f"{label}[{i}]", item)
        else:
            self._visit(label, value)

    # ---- code --------------------------------------------------------------------------------------

    def _function(self, label: str, fn: types.FunctionType) -> None:
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self._visit(label, wrapped)
        origin = of_code(fn.__code__, fn.__globals__)
        if hasattr(fn, "_torchdynamo_orig_callable") and not getattr(fn, "_torchdynamo_disable", False):
            raise CaptureError(
                f"the step calls {label}, made by torch.compile: {COMPILED}",
                "call the function that was compiled, without @torch.compile" + _AS_WRITTEN,
            )
        if origin is Origin.LIBRARY or (origin is Origin.INSTALLED and id(fn.__code__) not in self._executed):
            return  # a decorator, whose function was visited, or code that did not run
        self._functions.append(fn)
        self._code(fn.__code__, fn.__globals__)
        if fn.__dict__:
            self.spaces.append(
                Entries(lambda key: f"{label}.{key}", fn.__dict__, frozenset(("__wrapped__",)), own=True)
            )
            self._named_entries(label, fn.__dict__, frozenset(("__wrapped__",)))
        for name, box in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            self.cells.append((name, box))
            self.watches.append(watches.cell(name, box))
            found = self.watches[-1].read()
            self._visit(name, found[0] if found else None)
        for default in fn.__defaults__ or ():
            self._visit(f"{label}'s default", default)
        if fn.__kwdefaults__ is not None:
            self._dictionary(f"{label}'s defaults", fn.__kwdefaults__)

    def _code(self, code: types.CodeType, space: dict[str, Any]) -> None:
        self.walked.update(map(id, codes_in(code)))
        found = dict.fromkeys(code_names(code))
        self._names.update(found)
        globals_of = found if self._reaches_modules else global_names(code)
        names = [n for n in found if n in space and n in globals_of]
        for name in found:
            self._imported(name, space)
        if names or "globals" in found:
            if id(space) not in self._globals:
                self._globals[id(space)] = (space, {})
                self.spaces.append(Entries(str, space, own=of_code(code, space) is Origin.OWN))
            self._globals[id(space)][1].update(dict.fromkeys(names))
            for name in names:
                self._visit(name, space[name])

    def _imported(self, name: str, space: dict[str, Any]) -> None:
        """Visit the module that an `import` inside a function names."""
        for full in (name, f"{space.get('__package__')}.{name}"):
            module = sys.modules.get(full)
            if isinstance(module, types.ModuleType):
                self._visit(full, module)

    def _runs(self, item: Any) -> bool:
        """Whether a class's entry is a function that ran."""
        fn = getattr(item, "fget", None) or getattr(item, "__func__", None) or item
        return id(getattr(fn, "__code__", None)) in self._executed

    def _class(self, label: str, cls: type, space: dict[str, Any] | None = None) -> None:
        """Visit the methods and attributes of a user's class and its user bases that walked code names or that ran, and
        the entries of an instance's `space` that hide them."""
        if type(cls) is not type:
            self._visit(f"type({cls.__name__})", type(cls))
        for base in cls.__mro__:
            if base is object or of_class(base) is Origin.LIBRARY or (base is not cls and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            named = [k for k, v in vars(base).items() if k in self._names or self._runs(v)]
            data = [k for k in named if not isinstance(vars(base)[k], _METHODS)]
            if named:
                self.watches.append(watches.class_attributes(base.__name__, base, named))
            constants = [k for k, v in vars(base).items() if k not in named and type(v) in _CONSTANTS and k[:2] != "__"]
            if data or constants:
                self.fields.append((base.__name__, base, (*data, *constants)))
            if data and space is not None:
                self.watches.append(watches.optional(label, space, data))
            for key in named:
                self._visit(f"{base.__name__}.{key}", vars(base)[key])


_ALL_FIELDS = frozenset({"asdict", "astuple", "fields", "replace", "vars"})  # read all fields of a dataclass


def _unwalked(cls: type, plain: tuple[type, ...]) -> bool:
    """Whether attributes of a user's class may be read by names that no walked code has: by a library's methods, or
    by the class's own attribute look-up."""
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


class _Ownerless:
    """Code that ran and whose function no object holds."""

    def __init__(self, code: types.CodeType, space: dict[str, Any]) -> None:
        self.code = code
        self.space = space


_METHODS = (
    types.FunctionType,
    property,
    classmethod,
    staticmethod,
    types.MemberDescriptorType,
    functools.cached_property,
)


def _owners(missing: list[tuple[types.CodeType, dict[str, Any]]]) -> list[tuple[str, Any]]:
    """The functions that have this code, searched among all objects."""
    wanted = {id(code) for code, _ in missing}
    fetching.undo_freeze()
    found = [
        (fn.__qualname__, fn)
        for fn in gc.get_referrers(*(code for code, _ in missing))
        if type(fn) is types.FunctionType and id(fn.__code__) in wanted
    ]
    return found or [(code.co_name, _Ownerless(code, space)) for code, space in missing]
