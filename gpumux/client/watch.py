"""Single things watched for change: a dictionary's entries, a list, a closure cell, a flag.

A reading holds the very objects it saw, so an address can't be used again while it is compared.
Unchanged readings compare by identity, in C; only what differs is looked at closely.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy
import torch

from gpumux.client.numerics import precisions
from gpumux.errors import NotRepeatable

SCALARS = (bool, int, float, str, bytes, complex, torch.dtype, torch.device, numpy.generic)
Reading = tuple[Any, ...]
_WANTS_GRAD = attrgetter("requires_grad")


@dataclass(slots=True)
class Watch:
    """`read()` gives the present values; `names` label them; `restore(old)` puts a reading back.
    `flag`: training and requires_grad flags, which a step may leave changed. `identity`: tensors
    matter by identity (parameters, buffers); elsewhere a tensor or None decides nothing by itself."""

    label: str
    read: Callable[[], Reading]
    names: Callable[[int], str]
    restore: Callable[[Reading], None]
    flag: bool = False
    identity: bool = False

    def same(self, old: Reading, new: Reading) -> bool:
        if len(old) != len(new):
            return False
        if all(map(is_, old, new)):
            return True
        return all(self._equal(a, b) for a, b in zip(old, new, strict=True))

    def _equal(self, a: Any, b: Any) -> bool:
        if a is b:
            return True
        if not self.identity and _idle(a) and _idle(b):
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, SCALARS):
            return repr(a) == repr(b)  # tells 0.0 from -0.0, and nan is nan
        if isinstance(a, tuple):
            return len(a) == len(b) and all(self._equal(x, y) for x, y in zip(a, b, strict=True))
        return isinstance(a, types.MethodType) and a.__func__ is b.__func__ and a.__self__ is b.__self__

    def differences(self, old: Reading, new: Reading) -> list[tuple[str, Any, Any]]:
        """(name, old value, new value) of what changed."""
        if len(old) != len(new):
            return [(f"len({self.label})", len(old), len(new))]
        found = [(self.names(i), a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)) if not self._equal(a, b)]
        return found[:1] if found and found[0][0] == found[-1][0] else found


def _idle(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)


_ABSENT = object()


class Gone(NotRepeatable):
    """A watched name does not exist any more."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} existed when the step was captured and is gone", "submit the step again")


def entries(label: str, space: Any, keys: Sequence[Any], *, flag: bool = False) -> Watch:
    """Chosen entries of a dictionary (attributes of an object, globals)."""
    names = tuple(keys)
    getter = itemgetter(*names) if len(names) > 1 else itemgetter(names[0], names[0])  # always a tuple

    def read() -> Reading:
        try:
            return getter(space)  # type: ignore[no-any-return]
        except KeyError as error:
            raise Gone(f"{label}.{error.args[0]}" if label else str(error.args[0])) from None

    def name(i: int) -> str:
        key = names[i % len(names)]
        return f"{label}.{key}" if label else str(key)

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=False):
            space[key] = value

    return Watch(label, read, name, restore, flag)


def class_attributes(label: str, cls: type, keys: Sequence[str]) -> Watch:
    """Class attributes, which every instance sees."""
    names = tuple(keys)
    space = cls.__dict__

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=False):
            setattr(cls, key, value)

    return Watch(
        label, lambda: tuple([space.get(k) for k in names]), lambda i: f"{label}.{names[i]}", restore
    )  # fmt: skip


def values(label: str, space: dict[Any, Any], *, identity: bool = False) -> Watch:
    """Every entry of a module's parameters, children or hooks, by order."""
    view = space.values()

    def restore(old: Reading, keys: tuple[Any, ...] = tuple(space)) -> None:
        space.clear()
        space.update(zip(keys, old, strict=False))

    return Watch(
        label, partial(tuple, view), lambda i: f"{label}[{list(space)[i]!r}]", restore, identity=identity
    )  # fmt: skip


def items(label: str, space: Any) -> Watch:
    """A user's dictionary: its keys and values, but for tensors (a hook may collect activations)."""

    def read() -> Reading:
        return tuple([x for k, v in space.items() if not isinstance(v, torch.Tensor) for x in (k, v)])

    def restore(old: Reading) -> None:
        tensors = {k: v for k, v in space.items() if isinstance(v, torch.Tensor)}
        space.clear()
        space.update(tensors)
        space.update(zip(old[::2], old[1::2], strict=True))

    return Watch(label, read, lambda i: f"{label}[{list(space)[min(i // 2, len(space) - 1)]!r}]", restore)


def optional(label: str, space: dict[Any, Any], keys: Sequence[Any]) -> Watch:
    """Entries that may come and go: an attribute that would hide one of the class."""
    names = tuple(keys)

    def restore(old: Reading) -> None:
        for key, value in zip(names, old, strict=True):
            if value is _ABSENT:
                space.pop(key, None)
            else:
                space[key] = value

    return Watch(
        label, lambda: tuple([space.get(k, _ABSENT) for k in names]), lambda i: f"{label}.{names[i]}", restore
    )  # fmt: skip


def sequence(label: str, items: Any) -> Watch:
    """A list, deque or set, element by element."""

    def restore(old: Reading) -> None:
        items.clear()
        items.update(old) if isinstance(items, set) else items.extend(old)

    return Watch(label, partial(tuple, items) if not isinstance(items, set) else lambda: tuple(sorted(items, key=repr)),
                 lambda i: f"{label}[{i}]", restore)  # fmt: skip


def array(label: str, data: numpy.ndarray[Any, Any]) -> Watch:
    """A numpy array, by its bytes."""

    def restore(old: Reading) -> None:
        data[...] = numpy.frombuffer(old[0], dtype=data.dtype).reshape(data.shape)

    return Watch(label, lambda: (data.tobytes(),), lambda i: label, restore)


def cell(label: str, box: types.CellType) -> Watch:
    """A closure variable."""

    def read() -> Reading:
        try:
            return (box.cell_contents,)
        except ValueError:
            return ()

    def restore(old: Reading) -> None:
        if old:
            box.cell_contents = old[0]

    return Watch(label, read, lambda i: label, restore)


def gradients_wanted(params: Sequence[torch.Tensor]) -> Watch:
    def restore(old: Reading) -> None:
        for p, value in zip(params, old, strict=True):
            if p.requires_grad != value:
                p.requires_grad_(value)

    return Watch(
        "requires_grad", lambda: tuple(map(_WANTS_GRAD, params)), lambda i: "requires_grad", restore, flag=True
    )  # fmt: skip


def slots(label: str, owner: Any, names: tuple[str, ...]) -> Watch:
    """Attributes of an object without a dictionary."""

    def restore(old: Reading) -> None:
        for name, value in zip(names, old, strict=True):
            setattr(owner, name, value)

    return Watch(
        label, lambda: tuple([getattr(owner, n, None) for n in names]), lambda i: f"{label}.{names[i]}", restore
    )


def groups(label: str, optimizer: Any) -> Watch:
    """Which groups and parameters an optimizer has, its flags, and whether a number is a tensor (the
    numbers themselves are lifted to host scalars)."""

    def read() -> Reading:
        out: list[Any] = []
        for group in optimizer.param_groups:
            out += group["params"]
            out += [_kind(v) for key, v in group.items() if key != "params"]
        return tuple(out)

    return Watch(f"{label}.param_groups", read, lambda i: f"{label}.param_groups", lambda old: None, identity=True)


def _kind(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        return "number"
    return value.dtype if isinstance(value, torch.Tensor) else type(value)


def modes() -> Watch:
    """Torch's own settings that decide which operators run, asked below torch's Python functions: they
    are read at every call."""
    c, mha = torch._C, torch.backends.mha
    grad, inference, autocast, dtype = (
        torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype
    )  # fmt: skip
    deterministic, default = c._get_deterministic_algorithms, torch.get_default_dtype
    mkldnn, flash, efficient, plain = (
        c._get_mkldnn_enabled, c._get_flash_sdp_enabled, c._get_mem_efficient_sdp_enabled, c._get_math_sdp_enabled
    )  # fmt: skip

    def read() -> Reading:
        return (
            grad(), inference(), autocast("cpu"), dtype("cpu"), deterministic(), default(),
            mkldnn(), flash(), efficient(), plain(), mha._is_fastpath_enabled, *precisions(),
        )  # fmt: skip

    return Watch("torch's modes", read, lambda i: "torch's modes (autocast, grad mode, precision)", lambda old: None)


def generator_state(source: Any) -> str:
    """Where one of Python's or numpy's random generators stands."""
    if isinstance(source, numpy.random.Generator):
        return repr(source.bit_generator.state)
    if hasattr(source, "getstate"):
        return repr(source.getstate())
    return repr([v.tolist() if isinstance(v, numpy.ndarray) else v for v in source.get_state()])
