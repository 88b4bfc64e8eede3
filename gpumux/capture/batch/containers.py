"""Batches and results as lists of leaves: containers that torch's pytree knows, and objects that hold values.

An object (a dataclass, a namespace, a mapping of a class of its own, an object of a plain class all of whose attributes
are values) is opened to its attributes and entries. Made again, it is another object of the same class. The class's
code runs for neither. Classes are not registered with torch, which would change what they are to the rest of the
process.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy
import torch
import torch.utils._pytree as pytree

from gpumux.errors import CaptureError

_LEAVES = frozenset({torch.Tensor, numpy.ndarray, bool, int, float, str, type(None)})
_VALUES = (torch.Tensor, bool, int, float, str)
_ARRAYS = (torch.Tensor, numpy.ndarray)

# Every class that was opened, by which two of one name differ in a description. Kept, because the number must never
# mean another class.
_kinds: dict[type, int] = {}


class _Opened:
    """In the place of an object while a value is flattened. `entries`: those of a dictionary of a class of its own,
    else None. `hidden`: attributes that a step does not get."""

    __slots__ = ("attributes", "entries", "hidden", "kind")

    def __init__(
        self, kind: type, attributes: dict[str, Any], entries: dict[Any, Any] | None, hidden: tuple[str, ...]
    ) -> None:
        self.kind = kind
        self.attributes = attributes
        self.entries = entries
        self.hidden = hidden


def _contents(opened: _Opened) -> tuple[list[Any], Any]:
    number = _kinds.setdefault(opened.kind, len(_kinds))
    return [opened.attributes, opened.entries], (opened.kind, opened.hidden, number)


def _made(contents: Any, context: Any) -> Any:
    attributes, entries = contents
    kind, hidden, _ = context
    plain = _plain_base(kind)
    made = plain.__new__(kind)
    for key, value in ({} if entries is None else entries).items():
        plain.__setitem__(made, key, value)
    for name in hidden:
        object.__setattr__(made, name, _hidden(f"{kind.__name__}.{name}"))
    for name, value in attributes.items():
        object.__setattr__(made, name, value)  # also of a frozen one
    return made


pytree.register_pytree_node(_Opened, _contents, _made)


def flatten(value: Any, *, hiding: bool = False) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a value in order, and what `unflatten` makes it again from. `hiding`: leave out attributes of
    mappings that hold something else than values, as a tokenizer's own records of the texts."""
    leaves, spec = pytree.tree_flatten(value)
    if any(type(leaf) not in _LEAVES and _opens(leaf) for leaf in leaves):
        leaves, spec = pytree.tree_flatten(pytree.tree_map(partial(_opened, hiding), value))
    return leaves, spec


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """The value with other leaves: new containers and objects of the same classes."""
    return pytree.tree_unflatten(leaves, spec)


def _opens(leaf: Any) -> bool:
    if isinstance(leaf, str):  # also a text that a trace must not read, which only says that it is one
        return False
    kind = type(leaf)
    opens = isinstance(leaf, (dict, UserDict, SimpleNamespace)) or is_dataclass(kind) or _consists_of_values(leaf)
    return opens and not isinstance(leaf, type) and _plain_base(kind) in (object, dict, OrderedDict, SimpleNamespace)


def _consists_of_values(leaf: Any) -> bool:
    """Whether an object of a plain class holds tensors or arrays, and nothing but values beside them."""
    if isinstance(leaf, (torch.nn.Module, torch.Tensor)) or not type(leaf).__flags__ & _HEAP_TYPE:
        return False
    held = pytree.tree_leaves(getattr(leaf, "__dict__", {}))
    return any(isinstance(each, _ARRAYS) for each in held) and all(
        each is None or isinstance(each, (*_VALUES, *_ARRAYS)) for each in held
    )


def _plain_base(kind: type) -> Any:
    """The first base class that is not written in Python, which makes the object."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _opened(hiding: bool, leaf: Any) -> Any:
    if type(leaf) in _LEAVES or not _opens(leaf):
        return leaf
    names = [field.name for field in fields(leaf)] if is_dataclass(leaf) else []
    attributes = {name: getattr(leaf, name) for name in names if hasattr(leaf, name)} | getattr(leaf, "__dict__", {})
    hidden = tuple(name for name, value in attributes.items() if issubclass(type(value), _Hidden))
    attributes = {name: value for name, value in attributes.items() if name not in hidden}
    deeper = {name: pytree.tree_map(partial(_opened, hiding), value) for name, value in attributes.items()}
    if hiding and isinstance(leaf, (dict, UserDict)):
        hidden += tuple(name for name, value in deeper.items() if name != "data" and not _of_values(value))
    entries = (
        {key: pytree.tree_map(partial(_opened, hiding), value) for key, value in dict.items(leaf)}
        if isinstance(leaf, dict)
        else None
    )
    return _Opened(type(leaf), {n: v for n, v in deeper.items() if n not in hidden}, entries, hidden)


def _of_values(value: Any) -> bool:
    return all(leaf is None or isinstance(leaf, _VALUES) for leaf in pytree.tree_leaves(value))


# ---- attributes that a step does not get


class _Hidden:
    """An object that can't be read."""


def _hidden(name: str) -> Any:

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CaptureError(
            f"the step reads {name} of the batch, which holds something else than tensors, numbers and texts",
            "read it outside the step, and pass what the step needs of it as tensors and numbers",
        )

    return type("Hidden", (_Hidden,), {f"__{method}__": refuse for method in _READS})()


_READS = (
    "getattribute", "eq", "ne", "hash", "len", "iter", "getitem", "setitem", "contains", "str", "repr", "format",
    "bool", "call", "copy", "deepcopy", "reduce_ex", "enter", "exit", "setattr",
)  # fmt: skip


def other_batch(old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    """How the description of a batch (batch_key in step.py) differs from that of another one."""
    if len(old) != len(new):
        return "another structure of the batch"
    before, now = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(before, type) and isinstance(now, type):
        return f"a value of type {now.__name__} in the batch, where one of type {before.__name__} was"
    tensors = [isinstance(one, tuple) and isinstance(one[0], torch.dtype) for one in (before, now)]
    if all(tensors):
        if before[0] != now[0]:
            return f"a batch tensor of type {now[0]}, where one of {before[0]} was"
        if before[1] != now[1]:
            return f"a batch tensor of shape {tuple(now[1])}, where one of {tuple(before[1])} was"
        return "a batch tensor with other strides, or that requires grad where it did not"
    if all(isinstance(one, tuple) and isinstance(one[0], type) for one in (before, now)):
        return f"{now[1]:.60} in the batch, where {before[1]:.60} was"
    return "another structure of the batch"
