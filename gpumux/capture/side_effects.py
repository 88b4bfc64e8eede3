"""Tensors that a traced step leaves in attributes, variables and containers, and restoring what was there before.

A buffer that the step replaces (`self.running = 0.9 * self.running + ...`) is state: the new value is copied to the
place of the old one. Any other tensor that the step leaves in an attribute, a variable, a dictionary or a list stays
there until the second trace of the step, in which reading it is an error that names it; then the old value is restored.
Each step that runs puts an `Unreturned` tensor there, which names the place when its value is read (state.py).

Numbers that the trace has a formula for (a counter, a learning rate that is kept for the log) are put back after the
trace, and each step that runs puts their new values there: a `LeftNumbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from gpumux.capture import source
from gpumux.capture.state import ABSENT, SCALARS, StateTable, unreturned
from gpumux.capture.symbols import Expr, Number, Scope, is_symbol
from gpumux.capture.watch.fingerprint import Change, Fingerprint
from gpumux.capture.watch.walk import holds_attributes_alone
from gpumux.errors import CaptureError, NotRepeatable, UnknownTensor

_MISSING = ABSENT
MOST_ITEMS = 100  # of a tuple whose tensors are followed
_Setter: TypeAlias = Callable[[Any, Any, Any], Callable[[], None]]


class _Place(NamedTuple):
    """A place in which a step left tensors. `space`: the dictionary (of attributes, of globals), the variable's cell,
    or the object or class that owns the slot or attribute. `setter`: makes a function that puts a value there."""

    name: str
    space: Any
    key: Any
    value: Any
    old: Any
    setter: _Setter

    def with_value(self, value: Any) -> Callable[[], None]:
        """A function that puts this value there."""
        return self.setter(self.space, self.key, value)


class LeftConstant(NamedTuple):
    """A tensor that the trace left in these places, whose value does not depend on the step's data."""

    places: Sequence[_Place]
    value: torch.Tensor
    fake: FakeTensor

    @property
    def first(self) -> bool:
        """Whether there was no tensor of this shape before."""
        return any(not isinstance(p.old, torch.Tensor) or p.old.shape != self.value.shape for p in self.places)

    def put(self) -> torch.Tensor:
        """Put a copy there, as the script may write into what a step left."""
        copy = self.value.clone()
        for place in self.places:
            place.with_value(copy)()
        return copy

    def restore(self) -> None:
        for place in self.places:
            place.with_value(place.old)()


class LeftValue(NamedTuple):
    """A value with tensors that a trace left in a place, where `old` was before."""

    name: str
    value: Any
    old: Any

    def path_to(self, tensor: torch.Tensor) -> str | None:
        """The place of a tensor in a container, "" if the value is the tensor itself."""
        return _path_to(tensor, self.value)


class TupleEntry:
    """A tuple in a variable, as a dictionary of its items: a new item is put there in a new tuple."""

    def __init__(self, owner: Any, key: Any) -> None:
        self.owner = owner
        self.key = key

    def __getitem__(self, key: int) -> Any:
        held = self.owner[self.key]
        if type(held) is not tuple:
            raise KeyError(self.key)
        return held[key]

    def __setitem__(self, key: int, value: Any) -> None:
        held = self.owner[self.key]
        self.owner[self.key] = (*held[:key], value, *held[key + 1 :])


class FilledTuple(TupleEntry):
    """A tuple that a step puts where there was none, whose tensors are put there one by one."""

    def __init__(self, place: _Place) -> None:
        super().__init__(place.space, place.key)
        self._place = place
        self._items = [None if isinstance(item, torch.Tensor) else item for item in place.value]

    def __setitem__(self, key: int, value: Any) -> None:
        self._items[key] = value
        self._place.with_value(tuple(self._items))()

    def pop(self, key: int, default: Any) -> None:
        """Put back what was there before the step."""
        self._place.with_value(self._place.old)()


def _constant_tensors(place: _Place) -> list[_Place]:
    """The place, if the step left a tensor there; those in a tuple of tensors and constants, if it left such a one
    where there was none."""
    value = place.value
    if type(value) is not tuple or type(place.old) is tuple or len(value) > MOST_ITEMS:
        return [place]
    tensors = [(i, item) for i, item in enumerate(value) if isinstance(item, FakeTensor)]
    memory = {item.untyped_storage()._cdata for _, item in tensors if not item.requires_grad}
    if len(memory) < len(tensors) or not all(isinstance(item, FakeTensor) or _constant(item) for item in value):
        return []
    filled = FilledTuple(place)
    return [_Place(f"{place.name}[{i}]", filled, i, item, _MISSING, _put_back) for i, item in tensors]


def _parts(place: _Place) -> Iterator[_Place]:
    """The places of the tensors that a step replaces by others there: the place itself, or the items of a tuple."""
    value, old = place.value, place.old
    if isinstance(old, torch.Tensor) and isinstance(value, FakeTensor):
        yield place
    elif type(old) is tuple and type(value) is tuple and len(old) == len(value) <= MOST_ITEMS:
        owner = TupleEntry(place.space, 0 if place.key is None else place.key)
        items = [
            _Place(f"{place.name}[{i}]", owner, i, new, was, place.setter)
            for i, (new, was) in enumerate(zip(value, old, strict=True))
            if new is not was
        ]
        parts = [list(_parts(item)) for item in items]
        if all(parts):
            yield from chain.from_iterable(parts)


def _path_to(tensor: torch.Tensor, value: Any, depth: int = 3) -> str | None:
    if value is tensor:
        return ""
    if depth and isinstance(value, (tuple, list, dict)) and len(value) <= 1000:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            path = _path_to(tensor, item, depth - 1)
            if path is not None:
                return f"[{key!r}]{path}"
    return None


def _pairs(name: str, value: Any, old: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, new, old) of the tensors in a value or in a tuple where there were others before."""
    if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
        yield name, value, old
    elif type(value) is type(old) is tuple:
        for i, (new, was) in enumerate(zip(value, old, strict=False)):
            yield from _pairs(f"{name}[{i}]", new, was)


class _Rebound(NamedTuple):
    name: str
    old: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True, slots=True)
class LeftNumbers:
    """A place in which a step leaves numbers. `leaves`: those of the value there, which are formulas or constants."""

    put: Callable[[Any], None]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def exprs(self) -> tuple[Expr, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Expr))

    def run(self, values: Iterator[Number]) -> None:
        """Put the value there, with the next of `values` in place of each formula."""
        self.put(
            pytree.tree_unflatten([next(values) if isinstance(x, Expr) else x for x in self.leaves], self.spec)
        )  # fmt: skip


def of_numbers(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number or another constant, or with a `depth` of 1 a list of them."""
    if is_symbol(value) or value is None or type(value) in (bool, int, float, str):
        return True
    return depth > 0 and type(value) is list and all(map(of_numbers, value))


def _has_symbol(value: Any) -> bool:
    return is_symbol(value) or (type(value) is list and any(map(is_symbol, value)))


def replay_of(put: Callable[[Any], None], value: Any, scope: Scope) -> LeftNumbers:
    """What a trace left in a place, which `put` fills. `value`: as for `of_numbers`."""
    leaves, spec = pytree.tree_flatten(value)
    return LeftNumbers(put, tuple(scope.lift(leaf) if is_symbol(leaf) else leaf for leaf in leaves), spec)


def alike(old: Any, new: Any, depth: int = 4) -> bool:
    """Whether an object is a copy of another one, of the same class and with the same content. A step that puts such a
    copy in an object's place changes nothing (einx copies the registry of its backends at every call)."""
    if old is new:
        return True
    if type(old) is not type(new) or isinstance(old, torch.Tensor) or not depth:
        return False
    if isinstance(old, SCALARS):
        return repr(old) == repr(new)
    if isinstance(old, (set, frozenset)):
        return len(old) == len(new) and set(map(id, old)) == set(map(id, new))
    if type(old) in (list, tuple, dict):
        pairs = (old, new) if type(old) is not dict else ([*old.items()], [*new.items()])
        return len(old) == len(new) and all(alike(a, b, depth - 1) for a, b in zip(*pairs, strict=True))
    return holds_attributes_alone(type(old)) and alike(vars(old), vars(new), depth)


# ---- errors about what a step leaves


_IN_PLACE = (
    "keep tensors in variables or in a tuple of them (self.hidden = (h.detach(), c.detach())) that are there before you"
    " submit, each of its own memory, or write them into a list or dictionary that is there before you submit and"
    " stays: state[0] = h.detach(), P[k] = P[k] - lr * g[k]"
)


def changes_variables(changes: Sequence[Change]) -> NotRepeatable:
    nothing = (type(None), type(ABSENT))
    anew = [c for c in changes if type(c.new) in (list, tuple, dict) and type(c.old) in (type(c.new), *nothing)]
    held = [c for c in anew if any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(c.new))]
    if held:
        names = ", ".join(f"a new {type(c.new).__name__} of tensors into {c.name}" for c in held[:3])
        return NotRepeatable(f"the step puts {names}", _IN_PLACE)
    names = ", ".join(f"{c.name} ({_shown(c.old)} -> {_shown(c.new)})" for c in changes[:3])
    grown = next((c.name[4:-1] for c in changes if c.name.startswith("len(") and type(c.new) is int), None)
    if grown is not None:
        return NotRepeatable(
            f"the step changes the length of a container while it runs: {names}",
            "gpumux runs a step's Python only when it captures it: return the value from the step, and put it there in"
            f" the loop (a list: {grown}.append(step(x, y)); what a step returns is a tensor that is already detached)",
        )
    of_objects = [c for c in changes if c.name.endswith("'s attributes") and type(c.old) is type(c.new) is tuple]
    first = next((name for c in of_objects for name in c.new if name not in c.old), None)
    if first is not None:
        return NotRepeatable(
            f"the step changes Python variables while it runs: {names}",
            f"give an attribute that the step makes a first value, of its type, before you submit (self.{first} = 0.0"
            " in __init__): a number may then change from step to step",
        )
    if all(map(_of_texts, (c.new for c in changes))):
        return NotRepeatable(
            f"the step changes Python variables while it runs: {names}",
            "gpumux runs a step's Python only when it captures it: set these in the loop, beside the step (a method"
            " that takes the batch apart, such as set_input(batch), may be called there as a whole)",
        )
    return NotRepeatable(
        f"the step changes Python variables while it runs: {names}",
        "gpumux runs a step's Python only when it captures it: count, and step schedulers,"
        " outside the step, return from it what the script is to have, or keep the value in a tensor buffer",
    )


def _of_texts(value: Any) -> bool:
    """Whether a value is a text or holds nothing but texts, as the names of a batch's files."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, str) for leaf in leaves)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else f"another {type(value).__name__}"


def first_call_differs(changes: Sequence[Change]) -> NotRepeatable:
    """The error of a step that does something else at its first call because of what it changes there."""
    if changes:
        names = ", ".join(f"{c.name} ({_shown(c.old)} -> {_shown(c.new)})" for c in changes[:3])
        what = f"changes {names}, and does something else from then on"
    else:
        what = "does something else when it is traced again, by a variable that its code reaches by no name"
    return NotRepeatable(
        f"the step {what}",
        "do what it does only once before you submit, or let a flag decide that is there (self.first = False in the"
        " step is replayed)",
    )


def left_by_another_call(
    lefts: Sequence[LeftValue], tensor: torch.Tensor, table: StateTable, fn: Callable[..., Any]
) -> UnknownTensor:
    """The error of a step that reads what an earlier call left in a Python variable."""
    found = ((one, path) for one in lefts if (path := one.path_to(tensor)) is not None)
    left, path = next(found, (None, ""))
    name = source.name_of(tensor, fn) if left is None else left.name + path
    pairs = [] if left is None else list(_pairs(left.name, left.value, left.old))
    if tensor.layout is not torch.strided:
        return UnknownTensor(
            f"{source.user_line()} uses {name}, a tensor laid out as {str(tensor.layout).removeprefix('torch.')}",
            "keep it dense, .to_dense(), or, of a graph, sum over its edges: out.index_add(0, target, x[origin])",
        )
    others = [one for one in pairs if (one[1].shape, one[1].dtype) != (one[2].shape, one[2].dtype)]
    mine = [one for one in pairs if one[1] is tensor]
    if left is not None and path and not mine:
        return UnknownTensor(
            f"{source.user_line()} uses {name}, a tensor that an earlier call of the step left in a new"
            f" {type(left.value).__name__}",
            _IN_PLACE,
        )
    if not mine:
        return UnknownTensor(
            f"{source.user_line()} uses {name}, a tensor that an earlier call of the step left where there was none"
            " before",
            "put a tensor of this shape there before you submit (self.average = torch.zeros(())), pass it as an"
            " argument of the step, or make it a buffer of a module",
        )
    name, _, old = next(iter([*others, *mine]))  # the items of a tuple are followed all together
    if others:
        kind = f"of shape {tuple(old.shape)} and type {str(old.dtype).removeprefix('torch.')}"
    else:
        place = table.lookup(old)
        known = table.buffers[place[0]].name if place is not None else name
        kind = "that shares memory with another tensor"
        kind += f", {known}" if known != name else ", or is held in several places"
    return UnknownTensor(
        f"{source.user_line()} uses {name}, a tensor that an earlier call of the step put in the place of one {kind}",
        "put a tensor of the same shape and type there before you submit, of its own memory: .clone() it"
        " (copy.deepcopy of a state_dict)",
    )


# ---- places before and after a trace


class SideEffects:
    """Compares the places that a fingerprint found before and after a trace."""

    def __init__(
        self, fingerprint: Fingerprint, number: Callable[[Any], bool] = lambda value: False,
        state: Callable[[torch.Tensor], bool] = lambda tensor: True,
    ) -> None:  # fmt: skip
        """`number`: whether a value is a number of the trace that differs from step to step. `state`: whether a tensor
        is one of the job's models."""
        self._number = number
        self._state = state
        self._listed = {(id(space), key) for space, key in fingerprint.listed}
        self._fingerprint = fingerprint
        self._buffers = [(m, dict(m._buffers)) for m in fingerprint.modules]
        self._params = [(m, dict(m._parameters)) for m in fingerprint.modules]
        self._spaces = [(space, dict(space.entries)) for space in fingerprint.spaces]
        self._fields = [(label, o, {n: _field(o, n) for n in names}) for label, o, names in fingerprint.fields]
        self._lists = [(label, items, list(items)) for label, items in fingerprint.lists]
        self._cells = [(name, c, _content(c)) for name, c in fingerprint.cells]
        self._others = [(o, dict(o.state)) for _, o in fingerprint.other_optimizers]
        self.homes: set[int] = set()  # ids of the objects into which a replay puts something

    def _into(self, place: _Place) -> _Place:
        """The place, into which a replay puts something."""
        space = place.space
        while isinstance(space, TupleEntry):
            space = space.owner
        self.homes.add(id(space))
        return place

    def replaced_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(old, new) of every buffer that the step replaced. Restores the old ones. Raises CaptureError if a new one
        differs in shape or type, or if a parameter was replaced."""
        found = []
        for module, before in self._buffers:
            for name, old in before.items():
                new = module._buffers.get(name)
                if new is old or self._is_made(old, new):
                    continue
                module._buffers[name] = old
                if new is None or old is None or old.shape != new.shape or old.dtype != new.dtype:
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

    def rebound(self, whole: Callable[[torch.Tensor, list[tuple[str, Any, Any]]], bool]) -> list[_Rebound]:
        """The tensors that variables held before the trace and in whose places the step puts new ones of the same kind.
        `whole`: whether these places, (name, owner, key), are all that hold a tensor. Restores the old ones. Raises
        CaptureError."""
        places = [*self._places(), *self._items()]
        parts = {id(place): list(_parts(place)) for place in places}
        found: dict[int, list[tuple[_Place, _Place]]] = {}  # of each old tensor: (part, place)
        for place in places:
            for part in parts[id(place)]:
                found.setdefault(id(part.old), []).append((part, place))
        stays = {key for key, group in found.items() if not self._alike([part for part, _ in group], whole)}
        while True:  # a tuple is bound anew as a whole, or not at all
            kept = {id(place) for key in stays for _, place in found[key]}
            more = {key for key, group in found.items() if any(id(place) in kept for _, place in group)}
            if more == stays:
                break
            stays = more
        pairs = []
        for key, group in found.items():
            if key in stays:
                continue
            name, new, old = group[0][0].name, group[0][0].value, group[0][0].old
            for _, place in group:
                place.with_value(place.old)()
            if new.requires_grad != old.requires_grad:
                raise CaptureError(
                    f"the step puts a tensor that keeps its graph in the place of {name}",
                    "detach() it: the graph of each step would be kept for all later ones",
                )
            pairs.append(_Rebound(name, old, new))
        return pairs

    @staticmethod
    def _alike(parts: Sequence[_Place], whole: Callable[[torch.Tensor, list[tuple[str, Any, Any]]], bool]) -> bool:
        """Whether these places all get one tensor of the same kind as the old one, which nothing else holds."""
        new, old = parts[0].value, parts[0].old
        alike = (new.shape, new.dtype) == (old.shape, old.dtype) and all(p.value is new for p in parts)
        return alike and whole(old, [(p.name, p.space, 0 if p.key is None else p.key) for p in parts])

    def constants(self, value: Callable[[FakeTensor], torch.Tensor | None]) -> list[LeftConstant]:
        """The tensors that the trace left and whose value is known. What was in their places before is restored, so
        that the next trace makes them as well."""
        whole = [(new, places, value(new)) for new, places in self._whole()]
        tuples = {id(p.space) for _, places, known in whole if known is None for p in places}  # can't be filled
        found = [
            LeftConstant(places, known, new)
            for new, places, known in whole
            if known is not None and tuples.isdisjoint(id(p.space) for p in places if isinstance(p.space, FilledTuple))
        ]
        for one in found:
            one.restore()
            for place in one.places:
                self._into(place)
        return found

    def buffer_made_of(self, tensor: FakeTensor) -> str | None:
        """The name of the module's buffer that the trace left the tensor in, where there was none before."""
        return next((place.name for place in self._made_buffers() if place.value is tensor), None)

    def refuse_buffers(self) -> None:
        """Raises CaptureError if the trace left a tensor whose value is not known in a buffer that was not there."""
        made = next(self._made_buffers(), None)
        if made is not None:
            raise CaptureError(
                f"the step makes {made.name}, of which there was none of this shape before",
                "run the model once before you submit, so that the buffer is there",
            )

    def _is_made(self, old: Any, new: Any) -> bool:
        """Whether a buffer is made by the step, there being none before, or one of another shape that it made."""
        if not isinstance(new, FakeTensor) or (old is not None and self._state(old)):
            return False
        return old is None or (old.shape, old.dtype) != (new.shape, new.dtype)

    def _made_buffers(self) -> Iterator[_Place]:
        for module, before in self._buffers:
            for name, value in list(module._buffers.items()):
                if self._is_made(before.get(name), value):
                    label = f"the buffer {type(module).__name__}.{name}"
                    yield _Place(label, module._buffers, name, value, before.get(name, _MISSING), _put_back)

    def _whole(self) -> list[tuple[FakeTensor, list[_Place]]]:
        """The tensors without a graph that the trace left, each with its places. Not those that share memory with
        what the trace left elsewhere: a copy of the value would be written to alone."""
        places = self._places()
        holders: dict[int, set[int]] = {}
        for holder in [
            *(p.value for p in places),
            *(items for _, items, old in self._lists if self._changed(items, old)),
        ]:
            for leaf in pytree.tree_leaves(holder):
                if isinstance(leaf, FakeTensor):
                    holders.setdefault(leaf.untyped_storage()._cdata, set()).add(id(holder))
        found: dict[int, tuple[FakeTensor, list[_Place]]] = {}
        for place in chain.from_iterable(map(_constant_tensors, places)):
            new = place.value
            if not isinstance(new, FakeTensor) or new.requires_grad:
                continue
            if len(holders[new.untyped_storage()._cdata]) == 1:
                found.setdefault(id(new), (new, []))[1].append(place)
        return list(found.values())

    def refuse_other_optimizers(self) -> None:
        """Raises CaptureError if the step used an optimizer that was not submitted."""
        for label, optimizer in self._fingerprint.other_optimizers:
            if _holds_fake(list(optimizer.state.values()), 4):
                raise CaptureError(
                    f"the step uses the optimizer {label} ({type(optimizer).__name__}), which was not given",
                    "pass it in optimizer=, alone or in a list with the others; for one that takes the place of another"
                    " midway, close the job and submit the step again",
                )

    def restorers(self) -> list[tuple[Callable[[], None], Callable[[], None]]]:
        """Two functions for every place that holds a tensor of the trace now: one restores its old value, and one puts
        the present value there again."""
        found = [(place.with_value(place.old), place.with_value(place.value)) for place in self._places()]
        return found + [
            (_relist(items, old), _relist(items, list(items)))
            for _, items, old in self._lists
            if self._changed(items, old)
        ]

    def names(self) -> Iterator[str]:
        """The names of the attributes, variables and items of lists that hold a tensor of the trace now."""
        yield from (place.name for place in self._places())
        for label, items, old in self._lists:
            if self._changed(items, old):
                yield from (f"{label}[{i}]" for i, item in enumerate(items) if self._holds(item))

    def present(self) -> list[LeftValue]:
        """What the trace left, and where."""
        return [LeftValue(p.name, p.value, p.old) for p in [*self._places(), *self._items()]]

    def left(self, home: torch.device | None) -> list[Callable[[], None]]:
        """A function for each of these places, which puts an `Unreturned` there. `home`: the device of the job's
        tensors. Raises CaptureError for a list whose other items the step moves."""
        found = [self._into(p).with_value(unreturned(p.name, p.value, home, self._number)) for p in self._places()]
        for label, items, old in self._lists:
            if not self._changed(items, old):
                continue
            self.homes.add(id(items))
            pairs = list(zip(items, old, strict=False))
            if len(items) != len(old) or any(new is not was and not self._holds(new) for new, was in pairs):
                raise CaptureError(
                    f"the step moves what {label} holds, to leave a tensor there",
                    "return the tensor from the step, and keep it outside",
                )
            found += [
                _put_back(items, i, unreturned(f"{label}[{i}]", new, home, self._number))
                for i, (new, was) in enumerate(pairs)
                if self._holds(new) and new is not was
            ]
        return found

    def replays(self, scope: Scope) -> list[LeftNumbers]:
        """The places in which the trace left numbers. Puts back what was there. Raises CaptureError where a number of
        each step gave way to something else."""
        found = []
        for place in [*self._places(), *self._items()]:
            depth = 1 if (id(place.space), place.key) in self._listed else 0
            if not (of_numbers(place.value, depth) and of_numbers(place.old, depth)):
                if _has_symbol(place.old):
                    raise CaptureError(
                        f"the step puts a {type(place.value).__name__} into {place.name}, which is a number",
                        "give it a variable of its own",
                    )
                continue
            found.append(replay_of(_setter(self._into(place)), place.value, scope))
            place.with_value(place.old)()
        for label, items, old in self._lists:
            if any(map(is_symbol, old)) and self._changed(items, old):
                raise CaptureError(f"the step puts something into {label}, which holds numbers", "use another list")
        return found

    def _items(self) -> Iterator[_Place]:
        for label, items, old in self._lists:
            if len(items) == len(old):
                for i, (value, was) in enumerate(zip(list(items), old, strict=True)):
                    place = _Place(f"{label}[{i}]", items, i, value, was, _put_back)
                    number = is_symbol(was) or (of_numbers(value) and self._holds(value))
                    if value is not was and (number or any(_parts(place))):
                        yield place

    def _changed(self, items: Any, old: list[Any]) -> bool:
        """Whether the trace left a tensor or a number in a list."""
        same = len(items) == len(old) and all(new is was for new, was in zip(items, old, strict=True))
        return not same and any(map(self._holds, items))

    def _holds(self, value: Any) -> bool:
        return _holds_fake(value, also=self._number)

    def _left(self, value: Any, old: Any) -> bool:
        """Whether a place holds a tensor or a number of the trace, or held such a number before."""
        return value is not old and (self._holds(value) or _has_symbol(old))

    def take_computed(self, computed: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Put fake tensors where the trace left local ones whose values are not in them. `computed`: the fake one, or
        None."""
        for place in [*self._places(), *self._items()]:
            place.with_value(_with_computed(place.value, computed))()
        for _, items, old in self._lists:
            if self._changed(items, old):
                for i, item in enumerate(list(items)):
                    items[i] = _with_computed(item, computed)

    def refuse_deleted(self) -> None:
        """Raises NotRepeatable if the step deletes an attribute or a global that was there before it."""
        for place in self._constants():
            if place.value is _MISSING:
                raise NotRepeatable(
                    f"the step deletes {place.name} while it runs",
                    "put None, or False, there instead, and have it there before you submit",
                )

    def unwatched(self) -> list[Change]:
        """The numbers, flags and texts that the trace changed in attributes and globals which are not watched, because
        code has them that was not known or because their names are computed."""
        found = list(self._constants())
        known = {name for name, _ in self._fingerprint.values()} if found else set()
        return [
            Change(p.name, p.old, p.value, False, p.with_value(p.old), p.with_value(p.value))
            for p in found
            if p.name not in known
        ]

    def _constants(self, everywhere: bool = False) -> Iterator[_Place]:
        """The attributes and globals that the trace deleted, or in which it put a constant in the place of another or
        of nothing. `everywhere`: also those of libraries, and entries of dictionaries."""
        for (name, space, skip, own), before in self._spaces:
            if own or everywhere:
                for key in [key for key in dict.fromkeys([*before, *space]) if key not in skip]:
                    old, value = before.get(key, _MISSING), space.get(key, _MISSING)
                    if old is not value and _constant(value) and (_constant(old) or value is _MISSING):
                        yield _Place(name(key), space, key, value, old, _put_back)
        for label, owner, fields in self._fields:
            for key, old in fields.items():
                value = _field(owner, key)
                if old is not value and _constant(value) and _constant(old):
                    yield _Place(f"{label}.{key}", owner, key, value, old, _assign)

    def _places(self) -> list[_Place]:
        return [*self._entries(), *self._variables(), *self._attributes(), *self._made_buffers()]

    def _entries(self) -> Iterator[_Place]:
        for (name, space, skip, _), before in self._spaces:
            for key, value in list(space.items()):
                old = before.get(key, _MISSING)
                if key not in skip and self._left(value, old):
                    yield _Place(name(key), space, key, value, old, _put_back)

    def _attributes(self) -> Iterator[_Place]:
        for label, owner, before in self._fields:
            for name, old in before.items():
                value = _field(owner, name)
                if self._left(value, old):
                    yield _Place(f"{label}.{name}", owner, name, value, old, _assign)

    def _variables(self) -> Iterator[_Place]:
        for name, cell, old in self._cells:
            value = _content(cell)
            if self._left(value, old):
                yield _Place(name, cell, None, value, old, _refill)

    def restore(self) -> None:
        """Restore everything after a failed trace."""
        for module, before in self._buffers:
            module._buffers.clear()
            module._buffers.update(before)
        for module, params in self._params:
            module._parameters.update(params)
        for optimizer, state in self._others:
            optimizer.state.clear()
            optimizer.state.update(state)
        for put, _ in self.restorers():
            put()
        for place in list(self._constants(everywhere=True)):
            place.with_value(place.old)()


def _constant(value: Any) -> bool:
    return value is None or value is _MISSING or type(value) in (bool, int, float, str)


def _holds_fake(value: Any, depth: int = 3, also: Callable[[Any], bool] = lambda value: False) -> bool:
    if isinstance(value, FakeTensor) or also(value):
        return True
    if depth == 0 or not isinstance(value, (tuple, list, dict)) or len(value) > 1000:
        return False
    return any(_holds_fake(v, depth - 1, also) for v in (value.values() if isinstance(value, dict) else value))


def _with_computed(value: Any, computed: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """A value, or a container of values that is changed in place, with fake tensors for local ones."""
    if isinstance(value, torch.Tensor):
        fake = computed(value)
        return value if fake is None else fake
    if type(value) in (list, dict):
        for key, item in list(enumerate(value) if type(value) is list else value.items()):
            value[key] = _with_computed(item, computed)
    if type(value) is tuple:
        items = tuple(_with_computed(item, computed) for item in value)
        return value if all(map(is_, items, value)) else items
    return value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _field(owner: Any, name: str) -> Any:
    return vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING)


def _setter(place: _Place) -> Callable[[Any], None]:
    return lambda value: place.with_value(value)()


def _assign(owner: Any, name: str, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is not _MISSING:
            setattr(owner, name, old)
        elif _field(owner, name) is not _MISSING:
            delattr(owner, name)

    return put


def _put_back(space: Any, key: Any, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is _MISSING:
            space.pop(key, None)
        else:
            space[key] = old

    return put


def _relist(items: Any, old: list[Any]) -> Callable[[], None]:
    def put() -> None:
        items.clear()
        items.extend(old)

    return put


def _refill(cell: Any, key: None, old: Any) -> Callable[[], None]:
    def put() -> None:
        if old is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = old

    return put
