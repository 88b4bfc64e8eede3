"""The structure of a job's optimizer state and gradients: which tensors exist, where they lie, which numbers there are.

`SGD` has no momentum before its first step, an accumulating step leaves gradients that another one reads, a custom
optimizer counts in a Python int. A trace begins with one Structure and ends with another. The client knows the present
Structure at every call, so it chooses the right trace without reading values. Structures are frozen and hashable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpumux.capture.fetching import is_lost
from gpumux.capture.state import Part, Place, StateTable
from gpumux.capture.symbols import Number, is_number, plain_number
from gpumux.errors import CaptureError


@dataclass(frozen=True, slots=True)
class DeviceLeaf:
    """A tensor in one of the job's buffers."""

    place: Place


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A number that the client keeps: index `var` of the structure's host values. `dtype`: None for a Python number,
    else the type of the 0-dim tensor that holds it."""

    var: int
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class ConstLeaf:
    value: Any


@dataclass(frozen=True, slots=True)
class Structure:
    """`optimizers`: one frozen tree each (see freeze). `kept`: parameters whose gradient is in the daemon, with its
    place. `dropped`: those whose gradient exists in the plain loop, but not in the daemon because no step reads it."""

    optimizers: tuple[Any, ...]
    kept: tuple[tuple[int, Place], ...]
    dropped: tuple[tuple[int, Place], ...]

    @property
    def gradients(self) -> tuple[tuple[int, Place], ...]:
        return self.kept + self.dropped

    def without_gradients(self, gone: Collection[int]) -> Structure:
        """This structure without the gradients of these parameters."""
        kept, dropped = (
            tuple((i, place) for i, place in found if i not in gone) for found in (self.kept, self.dropped)
        )
        return replace(self, kept=kept, dropped=dropped)

    def places(self) -> list[Place]:
        """The places of the optimizers' state and of the gradients."""
        leaves = [leaf for optimizer in self.optimizers for _, tree in optimizer for leaf in frozen_leaves(tree)]
        return [leaf.place for leaf in leaves if isinstance(leaf, DeviceLeaf)] + [place for _, place in self.gradients]

    def of_parameters(self) -> list[tuple[int, int]]:
        """(parameter, job buffer) of each gradient, and of each tensor that an optimizer keeps for one parameter."""
        found = [(i, place.buffer) for i, place in self.gradients]
        for optimizer in self.optimizers:
            for (kind, key), tree in optimizer:
                leaves = frozen_leaves(tree) if kind == "p" else ()
                found += [(key, leaf.place.buffer) for leaf in leaves if isinstance(leaf, DeviceLeaf)]
        return found

    def buffers(self, table: StateTable, parts: Collection[Part]) -> set[int]:
        """The job buffers that hold these parts of the state."""
        places: list[Place | None] = []
        if Part.MODEL in parts:
            places += [table.place(tensor) for _, tensor in table.tensors]
        if Part.OPTIMIZER in parts:
            leaves = [leaf for optimizer in self.optimizers for _, tree in optimizer for leaf in frozen_leaves(tree)]
            places += [leaf.place for leaf in leaves if isinstance(leaf, DeviceLeaf)]
        if Part.GRADIENTS in parts:
            places += [place for _, place in self.kept]
        return {place.buffer for place in places if place is not None}


def frozen_leaves(frozen: Any) -> Iterator[Any]:
    """The leaves of a frozen tree."""
    if isinstance(frozen, tuple):
        kind, items = frozen
        for item in items:
            yield from frozen_leaves(item[1] if kind == "d" else item)
    else:
        yield frozen


def freeze(value: Any, leaf: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...]) -> Any:
    """A nested container as nested tuples, its leaves replaced by `leaf(value, path)`. Keys that are numbers of the
    trace (a dictionary by momentum) are plain ones afterwards."""
    if isinstance(value, dict):
        named = [(plain_number(k), v) for k, v in value.items()]
        return ("d", tuple((k, freeze(v, leaf, (*path, k))) for k, v in named))
    if isinstance(value, (list, tuple)):
        kind = "l" if isinstance(value, list) else "t"
        return (kind, tuple(freeze(v, leaf, (*path, i)) for i, v in enumerate(value)))
    return leaf(value, path)


def thaw(frozen: Any, make: Callable[[Any], Any]) -> Any:
    """The containers of a frozen tree, with `make(leaf)` at the leaves."""
    if isinstance(frozen, tuple):
        kind, items = frozen
        if kind == "d":
            return {k: thaw(v, make) for k, v in items}
        values = [thaw(v, make) for v in items]
        return values if kind == "l" else tuple(values)
    return make(frozen)


def map_frozen(tree: Any, make: Callable[[Any], Any]) -> Any:
    """A frozen tree with `make(leaf)` at the leaves, frozen."""
    if isinstance(tree, tuple):
        kind, items = tree
        if kind == "d":
            return (kind, tuple((k, map_frozen(v, make)) for k, v in items))
        return (kind, tuple(map_frozen(v, make) for v in items))
    return make(tree)


def freeze_state(state: Any, table: StateTable, leaf: Callable[[Any, tuple[Any, ...]], Any], which: int) -> Any:
    """One optimizer's `.state`: keys that are parameters become ("p", index), others ("k", key)."""
    items = []
    for key, value in state.items():
        index = table.param_index(key)
        name = ("p", index) if index is not None else ("k", key)
        items.append((name, freeze(value, leaf, (which, name))))
    return tuple(items)


def path_name(path: tuple[Any, ...], table: StateTable) -> str:
    """A readable name of a path in an optimizer's state, for messages and buffers."""
    which, (kind, key), *rest = path
    owner = table.param_names[key] if kind == "p" else str(key)
    return ".".join([f"optimizer{which}", owner, *map(str, rest)])


_HOST_DTYPES = (torch.float32, torch.float64, torch.int64)


class HostClasses:
    """The host values of a structure. Numbers that are equal now and computed in the same way share one variable (every
    parameter's `step`)."""

    def __init__(self) -> None:
        self.values: list[Number] = []
        self._by_key: dict[Any, int] = {}

    def var(self, key: Any, value: Number) -> int:
        if key not in self._by_key:
            self._by_key[key] = len(self.values)
            self.values.append(value)
        return self._by_key[key]


def unusable(path: tuple[Any, ...], value: Any, table: StateTable) -> CaptureError:
    return CaptureError(
        f"{path_name(path, table)} is a {type(value).__name__}, which can't be part of a captured step",
        "keep only tensors, numbers, strings and None in the optimizer's state",
    )


def keeps_gradient(state: str, parameter: str) -> CaptureError:
    return CaptureError(
        f"{state} shares memory with the gradient of {parameter}, which is there after the step: what writes or clears"
        " that gradient changes the optimizer's state",
        "keep a copy in the state: p.grad.clone()",
    )


class Counters:
    """The step counters of an optimizer's state: tensors that hold a number for one parameter each."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._paths: dict[int, tuple[Any, ...]] = {}  # by storage

    def check(self, value: torch.Tensor, path: tuple[Any, ...]) -> None:
        """Raises CaptureError if two paths hold one tensor: the job would count it once for each."""
        other = self._paths.setdefault(value.untyped_storage()._cdata, path)
        if other != path:
            raise CaptureError(
                f"{path_name(other, self._table)} and {path_name(path, self._table)} are one tensor, which each of them"
                " counts up",
                "give each parameter a number of its own: value.clone()",
            )


def from_local(table: StateTable, lost: Mapping[int, Place] | None = None) -> tuple[Structure, list[Number]]:
    """The present structure of the local optimizers and gradients, and its host values. Adopts their tensors into the
    job's state. `lost`: gradients that exist but have no values. Raises CaptureError."""
    classes, counters = HostClasses(), Counters(table)
    inner: dict[int, str] = {}  # name of the optimizer state in each buffer

    def leaf(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if (
                value.dim() == 0
                and value.dtype in _HOST_DTYPES
                and table.lookup(value) is None
                and value.device.type == "cpu"
            ):
                counters.check(value, path)
                number = value.item()
                return HostLeaf(classes.var((value.dtype, repr(number)), number), value.dtype)
            place = table.adopt(path, path_name(path, table), value)
            inner[place.buffer] = path_name(path, table)
            return DeviceLeaf(place)
        if is_number(value):
            return HostLeaf(classes.var((type(value), repr(value)), value), None)
        if value is None or isinstance(value, (bool, str)):
            return ConstLeaf(value)
        raise unusable(path, value, table)

    if len({id(o.state) for o in table.optimizers}) < len(table.optimizers):
        raise CaptureError(
            "two of the optimizers have one state dictionary", "give each a state of its own, or submit one of the two"
        )
    optimizers = tuple(freeze_state(o.state, table, leaf, i) for i, o in enumerate(table.optimizers))
    kept, dropped = [], []
    model = {place.buffer for _, tensor in table.tensors if (place := table.place(tensor)) is not None}
    for i, p in enumerate(table.params):
        if lost and i in lost and p.grad is table.local(lost[i]):
            dropped.append((i, lost[i]))
        elif (g := p.grad) is not None and is_lost(g):  # lost by another job on the same model
            name = f"grad.{table.param_names[i]}"
            place = table.place(table.placeholder(("grad", i), name, g.dtype, tuple(g.shape), g.stride()))
            assert place is not None
            dropped.append((i, place))
        elif p.grad is not None:
            found = table.lookup(p.grad)
            if found is not None and found[0] in model:
                name = table.param_names[i]
                raise CaptureError(
                    f"the gradient of {name} lies in the memory of {table.buffers[found[0]].name}",
                    f"give it memory of its own: {name}.grad = {name}.grad.clone()",
                )
            if found is not None and found[0] in inner:
                raise keeps_gradient(inner[found[0]], table.param_names[i])
            kept.append((i, table.adopt(("grad", i), f"grad.{table.param_names[i]}", p.grad)))
    return Structure(optimizers, tuple(kept), tuple(dropped)), classes.values


@dataclass(slots=True)
class State:
    """The host side of a job's state between two steps. Structures are compared by identity: `LocalModel` interns
    them."""

    structure: Structure
    host: list[Number]
    keep: frozenset[int] = frozenset()  # parameters whose gradients the job keeps between steps


def without_steps(before: State, after: State, optimizers: Collection[int]) -> State:
    """The host side of the state after a step in which these optimizers' own steps were left out."""
    host: list[Number] = []
    numbers: dict[tuple[bool, int], int] = {}

    def trees(optimizer: int) -> Any:
        old = optimizer in optimizers
        state = before if old else after

        def leaf(value: Any) -> Any:
            if not isinstance(value, HostLeaf):
                return value
            var = numbers.setdefault((old, value.var), len(host))
            if var == len(host):
                host.append(state.host[value.var])
            return HostLeaf(var, value.dtype)

        return tuple((key, map_frozen(tree, leaf)) for key, tree in state.structure.optimizers[optimizer])

    structure = replace(after.structure, optimizers=tuple(map(trees, range(len(after.structure.optimizers)))))
    return State(structure, host, after.keep)


def moves_optimizer(entry: Structure, end: Structure, optimizer: int) -> bool:
    """Whether a step changes what the client keeps of an optimizer: its structure, or numbers in its state."""
    old, new = entry.optimizers[optimizer], end.optimizers[optimizer]
    return old != new or any(isinstance(leaf, HostLeaf) for _, tree in new for leaf in frozen_leaves(tree))
