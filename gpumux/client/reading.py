"""Readings of what is watched, and whether two of them are the same.

A reading holds the very objects it saw, so an address can't be used again while it is compared.
Unchanged readings compare by identity, in C (`Pulse`); only what differs is looked at closely.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import call, is_
from typing import Any

import numpy
import torch

from gpumux.client.unreturned import UNRETURNED

SCALARS = (bool, int, float, str, bytes, complex, torch.dtype, torch.device, numpy.generic)
Reading = tuple[Any, ...]
Identity = Callable[[torch.Tensor], Any]
ABSENT = object()  # read where there is no such name


def layout(tensor: torch.Tensor) -> Any:
    """What Python can tell of a tensor that is no state: a step can't compute with its values."""
    return (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad)


@dataclass(slots=True)
class Watch:
    """`read()` gives the present values; `names` label them; `restore(old)` puts a reading back.

    flag: training and requires_grad flags, which a step may leave changed.
    parts: what to compare by identity instead of calling `read`, as long as all of it is the same: iterables
        that show the present content. None: `read` itself gives the same objects while nothing changes.
    content: `read` makes its values anew each time; they are compared by equality.
    sized: something of which only the length is compared, as long as it is the same, instead of calling `read`.
    """

    label: str
    read: Callable[[], Reading]
    names: Callable[[int], str]
    restore: Callable[[Reading], None]
    flag: bool = False
    parts: tuple[Iterable[Any], ...] | None = None
    content: bool = False
    sized: Any = None

    def same(self, old: Reading, new: Reading, identity: Identity) -> bool:
        if len(old) != len(new):
            return False
        if all(map(is_, old, new)):
            return True
        return all(equal(a, b, identity) for a, b in zip(old, new, strict=True))

    def differences(self, old: Reading, new: Reading, identity: Identity) -> list[tuple[str, Any, Any]]:
        """(name, old value, new value) of what changed."""
        if len(old) != len(new):
            return [(f"len({self.label})", len(old), len(new))]
        pairs = enumerate(zip(old, new, strict=True))
        found = [(self.names(i), a, b) for i, (a, b) in pairs if not equal(a, b, identity)]
        return found[:1] if found and found[0][0] == found[-1][0] else found


def equal(a: Any, b: Any, identity: Identity) -> bool:
    """Whether a step could not tell two values apart. `identity` says which of the job's tensors one is,
    or its layout. One that a trace or a step left behind is nobody's (leftovers.py)."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if isinstance(a, UNRETURNED) or isinstance(b, UNRETURNED):
            return all(isinstance(x, torch.Tensor) or x is None or x is ABSENT for x in (a, b))
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return False
        return bool(identity(a) == identity(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, SCALARS):
        return repr(a) == repr(b)  # tells 0.0 from -0.0, and nan is nan
    if isinstance(a, tuple):
        return len(a) == len(b) and all(equal(x, y, identity) for x, y in zip(a, b, strict=True))
    return isinstance(a, types.MethodType) and a.__func__ is b.__func__ and a.__self__ is b.__self__


class Pulse:
    """All watches at once, in C: whether everything is the very object it was."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._parts = [part for w in watches for part in w.parts or ()]
        self._reads = [w.read for w in watches if w.parts is None and w.sized is None and not w.content]
        self._sized = [w.sized for w in watches if w.sized is not None]
        self._contents = [w.read for w in watches if w.content]
        self._seen: tuple[list[Any], list[int], list[Any]] | None = None

    def _now(self) -> tuple[list[Any], list[int], list[Any]]:
        read = list(map(call, self._reads))
        lengths = [*map(len, self._parts), *map(len, self._sized), *map(len, read)]  # type: ignore[arg-type]
        everything = [*chain.from_iterable(read), *chain.from_iterable(self._parts)]
        return everything, lengths, list(map(call, self._contents))

    def settle(self) -> None:
        """What is there now is what `steady` compares with."""
        self._seen = self._now()

    def steady(self) -> bool:
        """Raises KeyError when a watched name has gone."""
        if self._seen is None:
            return False
        objects, lengths, contents = self._now()
        old_objects, old_lengths, old_contents = self._seen
        return lengths == old_lengths and contents == old_contents and all(map(is_, old_objects, objects))
