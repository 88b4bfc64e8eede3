"""Finds all that a step's Python could read.

What counts is what the code names: starting from the step, every user function reached by a name is
walked, with the names in it, and so is every function that ran while the step was traced (`executed.py`);
an attribute of a user's object is watched if some walked function names it. So `trainer.epoch += 1`
outside the step changes nothing, unless the step reads `epoch`. Of modules and objects of libraries,
whose code is not walked (`origin.py`), all attributes are watched.
"""

from __future__ import annotations

import functools
import gc
import os
import types
from collections.abc import Sequence
from functools import partial, partialmethod
from typing import Any

import numpy
import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers

from gpumux.client import watch
from gpumux.client.blame import code_names, codes_in
from gpumux.client.executed import Executed
from gpumux.client.objects import COMPILED, MOST, Objects
from gpumux.client.origin import Origin, of_class, of_code, of_module
from gpumux.client.reading import SCALARS
from gpumux.errors import CaptureError

_GLOBAL_HOOKS = [
    (name, hooks)
    for owner in (modules, optimizers)
    for name, hooks in vars(owner).items()
    if name.startswith("_global_") and name.endswith("_hooks") and isinstance(hooks, dict)
]
_PLAIN = frozenset({type(None), *SCALARS} - {numpy.generic})


class Walk(Objects):
    """Of one step function and the models and optimizers it was submitted with. Raises CaptureError for
    what can't be watched."""

    def __init__(
        self, fn: Any, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], params: Sequence[torch.Tensor],
        executed: Executed,
    ) -> None:  # fmt: skip
        self._roots: list[tuple[str, Any]] = [
            ("model" if len(models) == 1 else f"model{i}", m) for i, m in enumerate(models)
        ]
        self._roots += [("optimizer" if len(optimizers) == 1 else f"optimizer{i}", o) for i, o in enumerate(optimizers)]
        self._roots.append((getattr(fn, "__qualname__", type(fn).__name__), fn))
        self._params = list(params)
        self._executed = executed
        super().__init__(optimizers)
        self._settle()
        while missing := [found for i, found in executed.items() if i not in self.walked]:
            self._roots += _owners(missing)
            self._settle()
        self.watches += [watch.gradients_wanted(self._params), watch.parameter_hooks(self._params), watch.modes()]
        if {"environ", "getenv"} & self._names:
            self.watches.append(watch.values("os.environ", os.environ._data))  # type: ignore[attr-defined]

    @staticmethod
    def matters(code: types.CodeType, space: dict[str, Any]) -> bool:
        """Whether a function that ran is one to walk."""
        return of_code(code, space) is not Origin.LIBRARY

    def _settle(self) -> None:
        known = -1
        while known != len(self._names):  # each walk may reach functions that name more
            known = len(self._names)
            self._walk()

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
        for space, names in list(self._globals.values()):
            self.watches.append(watch.entries("", space, list(names)))

    def _visit(self, label: str, value: Any) -> None:
        if type(value) in _PLAIN or isinstance(value, torch.Tensor) or id(value) in self._seen:
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
            self._visit(f"{label}.self" if label.isidentifier() else label, value.__self__)
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
        elif isinstance(value, torch.optim.Optimizer):
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

    # ---- code --------------------------------------------------------------------------------------

    def _function(self, label: str, fn: types.FunctionType) -> None:
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is not None:
            self._visit(label, wrapped)
        origin = of_code(fn.__code__, fn.__globals__)
        if hasattr(fn, "_torchdynamo_orig_callable") and not getattr(fn, "_torchdynamo_disable", False):
            raise CaptureError(
                f"the step calls {label}, made by torch.compile: {COMPILED}", "pass the function that was compiled"
            )
        if origin is Origin.LIBRARY or (origin is Origin.INSTALLED and id(fn.__code__) not in self._executed):
            return  # a decorator, whose function was visited, or nothing that ran
        self._code(fn.__code__, fn.__globals__)
        for name, box in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            self.cells.append((name, box))
            self.watches.append(watch.cell(name, box))
            found = self.watches[-1].read()
            self._visit(name, found[0] if found else None)
        for default in fn.__defaults__ or ():
            self._visit(f"{label}'s default", default)
        if fn.__kwdefaults__:
            self._dictionary(f"{label}'s defaults", fn.__kwdefaults__)

    def _code(self, code: types.CodeType, space: dict[str, Any]) -> None:
        self.walked.update(map(id, codes_in(code)))
        found = dict.fromkeys(code_names(code))
        self._names.update(found)
        names = [n for n in found if n in space]
        if names:
            if id(space) not in self._globals:
                self._globals[id(space)] = (space, {})
                self.spaces.append((str, space, frozenset()))
            self._globals[id(space)][1].update(dict.fromkeys(names))
            for name in names:
                self._visit(name, space[name])

    def _runs(self, item: Any) -> bool:
        """Whether a class's entry is a function that was seen to run."""
        fn = getattr(item, "fget", None) or getattr(item, "__func__", None) or item
        return id(getattr(fn, "__code__", None)) in self._executed

    def _class(self, label: str, cls: type, space: dict[str, Any] | None = None) -> None:
        """Methods and attributes that walked code names or that ran, of a user's class and its user
        bases, and the entries of an instance's `space` that hide them."""
        if type(cls) is not type:
            self._visit(f"type({cls.__name__})", type(cls))
        for base in cls.__mro__:
            if base is object or of_class(base) is Origin.LIBRARY or (base is not cls and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            named = [k for k, v in vars(base).items() if k in self._names or self._runs(v)]
            data = [k for k in named if not isinstance(vars(base)[k], _METHODS)]
            if data:
                self.watches.append(watch.class_attributes(base.__name__, base, data))
                self.fields.append((base.__name__, base, tuple(data)))
                if space is not None:
                    self.watches.append(watch.optional(label, space, data))
            for key in named:
                self._visit(f"{base.__name__}.{key}", vars(base)[key])


class _Ownerless:
    """Code that ran, of a function that nobody holds."""

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
    """The functions that have this code, wherever they are."""
    wanted = {id(code) for code, _ in missing}
    found = [
        (fn.__qualname__, fn)
        for fn in gc.get_referrers(*(code for code, _ in missing))
        if type(fn) is types.FunctionType and id(fn.__code__) in wanted
    ]
    return found or [(code.co_name, _Ownerless(code, space)) for code, space in missing]
