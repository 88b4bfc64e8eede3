"""Tensors that a step meets by a Python variable and that belong to no model of the job: class weights, a frozen
teacher, a mask, averaged weights.

A tensor that steps only read stays the script's: the script may write it or put another in its place, and the next step
is run with that. So the job must notice writes. Between steps these tensors have a class that tells when Python touches
them (fetching.py); only then their bytes are compared at the next step. A tensor that a step writes becomes state of
the job, like a model's buffer.
"""

from __future__ import annotations

import collections
import re
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter, getitem, is_
from typing import Any, Protocol, TypeAlias

import torch

from gpumux.capture.fetching import (
    Aliases,
    ReadHandler,
    fetch_arguments,
    is_lost,
    is_stale,
    mark_stale,
    stale_mark,
    unmark,
    watch_modules,
    without_fetching,
    without_modes,
)
from gpumux.capture.side_effects import MOST_ITEMS, TupleEntry
from gpumux.capture.state import Followed, Part, Place, StateTable, has_memory
from gpumux.capture.watch.checksums import Checksums
from gpumux.capture.watch.fingerprint import Fingerprint
from gpumux.capture.watch.watches import gradients_there, gradients_wanted
from gpumux.errors import CaptureError

_VERSION, _BASE, _SHAPE = attrgetter("_version"), attrgetter("_base"), attrgetter("shape")
_TENSOR: Any = torch.Tensor
_use_count: Callable[[torch.Tensor], int] = _TENSOR._use_count
_ALONE = _use_count(torch.empty(0))  # of a tensor that one Python object holds
_ENTRY = re.compile(r"\._(?:parameters|buffers)\['([^']*)'\]")
_lock = threading.RLock()
COUNTER = "variable.counter"  # begins the names of tensors that are numbers of each step


class _Variable:
    """A closure variable as a dictionary with one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value


class _Attributes:
    """The attributes of an object or class as a dictionary."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, key: Any) -> Any:
        return vars(self.owner)[key] if isinstance(self.owner, type) else getattr(self.owner, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        setattr(self.owner, key, value)


def _identity(owner: Any, key: Any) -> tuple[int, Any]:
    if isinstance(owner, TupleEntry):
        return _identity(owner.owner, owner.key)[0], (_identity(owner.owner, owner.key)[1], key)
    inner = owner.cell if isinstance(owner, _Variable) else owner.owner if isinstance(owner, _Attributes) else owner
    return id(inner), key


def _places(fingerprint: Fingerprint, names: Iterable[str], inside: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """(name, owner, key) of the variables with these names that may be bound anew. `inside`: those of the names that
    are of items of tuples."""
    known, any_inside = frozenset(names), bool(inside)
    for name, owner, key in _variables(fingerprint):
        if name in known:
            yield name, owner, key
        elif any_inside:
            yield from _entries(name, owner, key, known)
    for module in fingerprint.modules:
        for kind in (module._parameters, module._buffers):
            yield from (("", kind, entry) for entry in list(kind))


def _entries(name: str, owner: Any, key: Any, known: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    try:
        held = owner[key]
    except (KeyError, IndexError, AttributeError, ValueError):  # a variable without a value
        return
    if type(held) is tuple and len(held) <= MOST_ITEMS:
        for i in range(len(held)):
            if f"{name}[{i}]" in known:
                yield f"{name}[{i}]", TupleEntry(owner, key), i
            else:
                yield from _entries(f"{name}[{i}]", TupleEntry(owner, key), i, known)


def _variables(fingerprint: Fingerprint) -> Iterator[tuple[str, Any, Any]]:
    """(name, owner, key) of all variables that may be bound anew."""
    for name, space, skip, _ in fingerprint.spaces:
        yield from ((name(key), space, key) for key in list(space) if key not in skip)
    for label, owner, fields in fingerprint.fields:
        yield from ((f"{label}.{name}", _Attributes(owner), name) for name in fields)
    for label, items in fingerprint.lists:
        yield from ((f"{label}[{i}]", items, i) for i in range(len(items)))
    yield from ((name, _Variable(cell), 0) for name, cell in fingerprint.cells)


def _held(owner: Any, key: Any) -> Any:
    """What a variable holds, None if it has no value."""
    try:
        return owner[key]
    except (KeyError, IndexError, AttributeError, ValueError):
        return None


_CONTAINERS = (list, dict, collections.OrderedDict)
_Places: TypeAlias = "dict[tuple[int, Any], tuple[Any, Any]]"  # (owner, key) by identity


def _outer_first(found: dict[int, tuple[Any, _Places]]) -> list[tuple[Any, _Places]]:
    """These containers, by id, each behind those that it lies in."""
    ordered: list[tuple[Any, _Places]] = []
    seen: set[int] = set()

    def put(container: int) -> None:
        if container in found and container not in seen:
            seen.add(container)
            for owner, _ in found[container][1].values():
                put(id(owner))
            ordered.append(found[container])

    for container in found:
        put(container)
    return ordered


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({(s := t.untyped_storage())._cdata: s for t in tensors}.values())


def _foreign(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of these tensors that lie in memory that another library may write: a numpy array made from one, or
    that it was made from. A file that was mapped for reading weights (safetensors) is not, because it is the tensors'
    alone."""
    found = [t for t in tensors if t.device.type == "cpu" and not t.untyped_storage().resizable()]
    files = _private_files() if found else []
    alone = [t for t in found if any(start <= t.data_ptr() < end for start, end in files)]
    return {t.untyped_storage()._cdata for t in found} - {t.untyped_storage()._cdata for t in alone}


def _private_files() -> list[tuple[int, int]]:
    """The addresses at which this process has files in private memory."""
    found = []
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, mode, _, _, inode = line.split(maxsplit=5)[:5]
            if mode[3] == "p" and inode != "0":
                start, end = (int(bound, 16) for bound in span.split("-"))
                found.append((start, end))
    return found


def _unwatchable(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of these tensors, which are all that Python holds over them, that may be written without a touch of
    one: by other libraries, or by what holds them without a Python object (a DLPack capsule, autograd's graphs)."""
    views = Counter(id(base) for t in tensors if (base := _BASE(t)) is not None)
    bases = [base for t in tensors if (base := _BASE(t)) is not None]
    everything = {id(t): t for t in [*tensors, *bases]}.values()
    known = Counter(t.untyped_storage()._cdata for t in everything)
    foreign = _foreign(tensors)
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        holders = _use_count(tensor) - _ALONE - views[id(tensor)]
        beyond = torch._C._storage_Use_Count(storage._cdata) - 1 - known[storage._cdata]
        if holders > 0 or beyond > 0 or storage._cdata in foreign:
            found[storage._cdata] = storage
    return list(found.values())


class _Hooks(ReadHandler, Protocol):
    """The StalenessHooks of the job's models."""

    stale: frozenset[Part]

    def joined(self) -> None: ...
    def rewritten(self, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]: ...
    def took(self, old: torch.Tensor, new: torch.Tensor) -> None: ...


class _Watcher:
    """The handler of the marks (fetching.ReadHandler). One for all jobs, because a tensor that several jobs read has
    one mark."""

    has_newer = False

    def fetch(self, parts: frozenset[Part]) -> None:
        let_all_go()

    def mark_stale(self, tensor: torch.Tensor, part: Part | None, index: int = -1) -> None:
        mark_stale(tensor, self, part, index)

    def gradient(self, index: int) -> torch.Tensor | None:
        raise AssertionError("these tensors have gradients of their own")

    def gradient_set(self, index: int, value: torch.Tensor | None) -> None:
        raise AssertionError("these tensors have gradients of their own")

    def gradient_zeroed(self, index: int, value: torch.Tensor) -> None:
        raise AssertionError("these tensors have gradients of their own")

    def has(self, module: torch.nn.Module) -> bool:
        return any(outside.has(module) for outside in list(_all))


_watcher = _Watcher()
_all: weakref.WeakSet[Outside] = weakref.WeakSet()


def let_all_go() -> None:
    """Make the tensors of all jobs plain, because Python touches one of them."""
    with _lock, without_modes():
        for outside in list(_all):
            outside.let_go()
        watch_modules(_watcher, False)


class Outside:
    """The tensors of no model of one job. `hooks`: of the job's local model. `load`: called with the name and the
    tensor when one becomes state."""

    def __init__(self, table: StateTable, hooks: _Hooks, load: Callable[[str, torch.Tensor], None]) -> None:
        self._table = table
        self._hooks = hooks
        self._load = load
        self.changed: set[int] = set()  # buffers whose local bytes are newer than the daemon's
        self._shared: set[int] = set()  # buffers whose tensors are held where they can't be followed
        self._aliases = Aliases()
        self._marked: list[torch.Tensor] = []
        self._watching = False
        self._read: list[torch.Tensor] = []
        self._seen: tuple[list[int], list[int]] = ([], [])  # versions and addresses
        self._layouts: list[Any] = []  # shapes and strides
        # Other tensors of variables over memory of the job, by fingerprint.
        self.views: dict[Fingerprint, list[tuple[str, torch.Tensor, Place]]] = {}
        self._sums = Checksums()  # of what may have been written unseen: all while they are plain
        self._owners: tuple[list[Any], list[Any], list[torch.Tensor]] = ([], [], [])
        # (owner, key, tensor) of variables that held a tensor of another layout before, as a smaller last batch.
        self._earlier: list[tuple[Any, Any, torch.Tensor]] = []
        # Containers that hold such tensors, the outer ones first, each with the variables that hold it: (owner, key).
        self._containers: list[tuple[Any, _Places]] = []
        self._has: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        _all.add(self)

    # ---- entering tensors, while a step is traced

    def adopt(self, tensor: torch.Tensor, names: Sequence[str]) -> None:
        """Enter a tensor that a step reads under these names. Raises CaptureError."""
        name = _ENTRY.sub(r".\1", names[0])
        if tensor.requires_grad and not tensor.is_leaf:
            raise CaptureError(
                f"{name} was computed outside the step from tensors that require grad",
                "detach() it (x = x.detach().requires_grad_() where the step takes gradients by it), or compute it"
                " inside the step",
            )
        self._table.add_outside(name, tensor)

    def note(self, fingerprint: Fingerprint) -> None:
        """Note where the variables of a captured step hold these tensors, and have it watch which of them require grad
        or have a gradient."""
        table = self._table
        self._note_views(fingerprint)
        if not (table.only_read or table.written or self.views):
            return
        self._take_present()
        with without_fetching():
            mine = {id(t): t for _, t in [*table.only_read, *table.written]}
            held: dict[str, torch.Tensor] = {}
            inside: set[str] = set()  # names of what lies in tuples
            for name, tensor, fixed in fingerprint.named_tensors():
                if fixed:
                    inside.add(name)
                found = table.lookup(tensor)
                if id(tensor) in mine:
                    held[name] = tensor
                elif found is not None:
                    self._shared.add(found[0])  # by a view
            met = Followed(t for t in {id(t): t for t in held.values()}.values() if table.param_index(t) is None)
            table.followed.add(met)
            fingerprint.watch_also([gradients_wanted(met), gradients_there(met)])
            followed: set[int] = set()
            for name, owner, key in _places(fingerprint, held, inside):
                value = owner[key]
                if id(value) in mine:
                    table.holders_outside[_identity(owner, key)] = (owner, key, value)
                    followed.add(id(value))
                    inside.discard(name)
            for name, tensor in held.items():
                if id(tensor) not in followed or name in inside:
                    found = table.lookup(tensor)
                    if found is not None:
                        self._shared.add(found[0])
            self._take_holders()
            self._note_containers(fingerprint)

    def _note_containers(self, fingerprint: Fingerprint) -> None:
        """Note which variables hold the lists and dictionaries in which these tensors lie: the script may make them
        anew, with other tensors (`self.inputs = {...}` before each step)."""
        variables = [
            (owner, key, held)
            for _, owner, key in _variables(fingerprint)
            if type(held := _held(owner, key)) in _CONTAINERS
        ]
        found = {id(container): (container, dict(places)) for container, places in self._containers}
        wanted = {id(owner) for owner, _, _ in self._table.holders_outside.values()}
        seen: set[int] = set()
        while wanted:
            seen |= wanted
            more = [one for one in variables if id(one[2]) in wanted]
            for owner, key, held in more:
                found.setdefault(id(held), (held, {}))[1][_identity(owner, key)] = owner, key
            wanted = {id(owner) for owner, _, _ in more} - seen
        self._containers = _outer_first(found)

    def note_views(self, fingerprint: Fingerprint, before: Fingerprint) -> None:
        """A fingerprint took the place of another one: it has its views."""
        views = self.views.pop(before, None)
        if views is not None:
            self.views[fingerprint] = views

    def _note_views(self, fingerprint: Fingerprint) -> None:
        """Note where in the job's memory the other tensors lie that variables hold. Their values follow, and which
        memory they are over must stay."""
        table = self._table
        known = [t for _, t in [*table.tensors, *table.only_read]]
        whole = set(map(id, known))
        with without_fetching():
            buffers = {found[0] for t in known if (found := table.lookup(t)) is not None}
            self.views.pop(fingerprint, None)
            for name, tensor, _ in fingerprint.named_tensors():
                place = table.place(tensor) if id(tensor) not in whole else None
                if place is not None and place.buffer in buffers:
                    self.views.setdefault(fingerprint, []).append((name, tensor, place))

    def written_by(self, buffers: Iterable[int]) -> None:
        """A step writes these buffers: what lies there is state of the job from now on. Raises CaptureError."""
        wanted = set(buffers)
        for name, tensor in self._table.only_read:
            found = self._table.lookup(tensor)
            if found is not None and found[0] in wanted and (tensor.is_inference() or _foreign([tensor])):
                raise CaptureError(
                    f"the step writes {name}, which lies in memory of another library (numpy), where what it writes"
                    " would not be seen, or which was made in inference mode",
                    "let the step write a tensor of its own: x.clone()",
                )
        if any((f := self._table.lookup(t)) is not None and f[0] in wanted for _, t in self._table.only_read):
            self._become_state(lambda: self._table.make_state(wanted))

    def trained(self, tensors: Sequence[torch.Tensor]) -> None:
        """These get gradients from a step: they are parameters of the job from now on."""
        self._become_state(lambda: self._table.make_parameters(tensors))

    def count(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are numbers of each step from now on, which steps read and write here, because Python decides by
        them. No Program may use them yet."""
        table, wanted = self._table, set(map(id, tensors))
        of_models = any(id(tensor) in wanted for _, tensor in table.tensors)
        if of_models:
            self._make_plain()
        found = [one for one in [*table.only_read, *table.tensors] if id(one[1]) in wanted]
        table.only_read = [one for one in table.only_read if id(one[1]) not in wanted]
        table.tensors = [one for one in table.tensors if id(one[1]) not in wanted]
        table.counters += found
        for name, tensor in found:
            with torch.no_grad():
                self._load(name, tensor)
        if of_models:
            self._hooks.joined()
        self._take_present()

    def numbers(self) -> dict[str, int]:
        """The present values of these numbers."""
        return {f"{COUNTER}{i}": int(tensor) for i, (_, tensor) in enumerate(self._table.counters)}

    def _become_state(self, make: Callable[[], Any]) -> None:
        before = {id(t) for _, t in self._table.tensors}
        self._make_plain()
        make()
        with torch.no_grad():
            for name, tensor in self._table.tensors:
                if id(tensor) not in before:
                    self._load(name, tensor)
        self._hooks.joined()
        self._take_present()

    def _make_plain(self) -> None:
        let_all_go()
        if Part.MODEL in self._hooks.stale:
            with torch._C._EnableTorchFunction():
                self._hooks.fetch(frozenset({Part.MODEL}))

    def whole(self, old: torch.Tensor, places: Sequence[tuple[str, Any, Any]], names: Iterable[str]) -> bool:
        """Whether these places, (name, owner, key), are all in which variables of the job's steps hold a tensor of this
        object. `names`: by which the present step holds it."""
        if not any(old is t for _, t in [*self._table.only_read, *self._table.written]):
            return False
        place = self._table.place(old)
        given = {_identity(owner, key) for _, owner, key in places}
        if place is None or place.buffer in self._shared or not {name for name, _, _ in places}.issuperset(names):
            return False
        return all(at in given for at, (_, _, held) in self._table.holders_outside.items() if held is old)

    # ---- between steps

    def _take_present(self) -> None:
        self._read = [t for _, t in self._table.only_read]
        with without_fetching():
            self._seen, self._layouts = self._now(), self._layouts_now()
            if self._watching:
                self._sums.renew()
            else:
                self._sums.forget()
                self._sums.note(_storages(self._read))
        self._has.clear()

    def _take_holders(self) -> None:
        found = list(self._table.holders_outside.values())
        self._owners = [o for o, _, _ in found], [k for _, k, _ in found], [t for _, _, t in found]

    def _now(self) -> tuple[list[int], list[int]]:
        try:
            versions = list(map(_VERSION, self._read))
        except RuntimeError:  # tensors made in inference mode count no versions
            versions = [0 if t.is_inference() else t._version for t in self._read]
        return versions, list(map(torch.Tensor.data_ptr, self._read))

    def _layouts_now(self) -> list[Any]:
        return [*map(_SHAPE, self._read), *map(torch.Tensor.stride, self._read)]

    def prepare(self, fingerprint: Fingerprint) -> None:
        """Make the tensors plain and up to date, for a trace. Raises CaptureError, or StaleState."""
        self.follow()
        let_all_go()
        with without_fetching():
            named = [t for _, t, _ in fingerprint.named_tensors() if is_stale(t) and not is_lost(t)]
            others = [t for t in named if (mark := stale_mark(t)) is not None and mark.handler is not self._hooks]
            others = [t for t in others if self._table.lookup(t) is None]
        if others:  # another job trains them
            with torch._C._EnableTorchFunction():
                fetch_arguments(others)

    def follow(self) -> None:
        """Find what the script changed since the last step, and enter it into `changed`. Raises CaptureError."""
        with without_fetching():
            self._follow_containers()
            owners, keys, objects = self._owners
            try:
                same = all(map(is_, map(getitem, owners, keys), objects))
            except (KeyError, IndexError, AttributeError, ValueError):
                same = False
            self._follow_state()
            if self._read:
                now = self._now()
                moved = not self._watching and self._layouts_now() != self._layouts
                if moved or now != self._seen or self._sums.changed():
                    self._written(now)
            if not same:
                self._bound_anew()
            self._follow_views()

    def _follow_containers(self) -> None:
        """Look for tensors in the containers that took the place of those in which they were."""
        if all(_held(*place) is container for container, places in self._containers for place in places.values()):
            return
        new: dict[int, Any] = {}  # by the id of the old one
        gone: set[int] = set()  # ids of those that are held no longer
        present: list[tuple[Any, _Places]] = []
        for old, before in self._containers:
            places = [(new.get(id(owner), owner), key) for owner, key in before.values() if id(owner) not in gone]
            held = [_held(owner, key) for owner, key in places]
            if all(one is not old for one in held):
                if not held or type(held[0]) is not type(old):
                    gone.add(id(old))
                    continue
                new[id(old)] = held[0]
            present.append((new.get(id(old), old), {_identity(owner, key): (owner, key) for owner, key in places}))
        holders = self._table.holders_outside
        for at, (owner, key, tensor) in list(holders.items()):
            if id(owner) in new:
                del holders[at]
                owner = new[id(owner)]
                holders[_identity(owner, key)] = owner, key, tensor
        self._earlier = [(new.get(id(owner), owner), key, tensor) for owner, key, tensor in self._earlier]
        self._containers = present  # only now, as ids are those of objects that are there
        self._take_holders()

    def _follow_views(self) -> None:
        """Raises CaptureError where a variable's view is over other memory than at capture."""
        if not self.views or (Part.MODEL in self._hooks.stale and (self._watching or not self._read)):
            return  # nothing touched a tensor of the job
        for fingerprint, views in list(self.views.items()):
            for name, tensor, place in views:
                if self._table.place(tensor) == place:
                    continue
                if not any(tensor is t for _, t, _ in fingerprint.named_tensors()):
                    self._table.lay(tensor, place)  # another one is in its variable, which the fingerprint notices
                    continue
                raise CaptureError(
                    f"{name}, which lay in memory that the job holds, lies elsewhere or has another shape than when the"
                    " step was captured",
                    "close the job and submit the step again",
                )

    def _bound_anew(self) -> None:
        """A variable holds another object than at the last step."""
        table = self._table
        now: dict[int, list[Any]] = {}
        before = list(table.holders_outside.items())
        for at, (owner, key, tensor) in before:
            value = _held(owner, key)
            now.setdefault(id(tensor), []).append(value)
            if value is not tensor:
                known = isinstance(value, torch.Tensor) and any(value is t for t in [*self._read, *self._states()])
                if known:
                    table.holders_outside[at] = (owner, key, value)
        for _, old in [*table.only_read, *table.written]:
            values = now.get(id(old), [])
            new = values[0] if values else old
            if new is old or any(value is not new for value in values) or not isinstance(new, torch.Tensor):
                continue
            place = table.place(old)
            if place is None or place.buffer in self._shared or not has_memory(new):
                continue
            if any(old is p for p in table.params):
                continue
            self._rebind(old, new, place.buffer)
        self._take_back()
        kept = {id(t) for _, t in [*table.only_read, *table.written]}
        read = {id(t) for _, t in table.only_read}
        for at, (owner, key, old) in before:
            value = _held(owner, key)
            if value is not old and id(old) in read:
                self._earlier.append((owner, key, old))
            if id(value) in kept:
                table.holders_outside[at] = (owner, key, value)
            else:  # the fingerprints notice it
                del table.holders_outside[at]
        self._take_holders()

    def _take_back(self) -> None:
        """A variable that holds a tensor of a layout that it had before gets the buffer of that time, so that the step
        is the one that was captured then."""
        self._earlier = [one for one in self._earlier if _held(*one[:2]) is not one[2]]
        held = {
            id(tensor) for owner, key, tensor in self._table.holders_outside.values() if _held(owner, key) is tensor
        }
        for old in [t for _, t in self._table.only_read if id(t) not in held]:
            values = [_held(owner, key) for owner, key, tensor in self._earlier if tensor is old]
            place = self._table.place(old)
            if not values or place is None or place.buffer in self._shared:
                continue
            new = values[0]
            whole = isinstance(new, torch.Tensor) and all(value is new for value in values) and has_memory(new)
            if whole and self._table.lookup(new) is None and self._rebind(old, new, place.buffer):
                for owner, key, _ in [one for one in self._earlier if one[2] is old]:
                    self._table.holders_outside[_identity(owner, key)] = (owner, key, new)
                self._earlier = [one for one in self._earlier if one[2] is not old]

    def _rebind(self, old: torch.Tensor, new: torch.Tensor, buffer: int) -> bool:
        state = any(old is t for t in self._states())
        let_all_go()
        if state and Part.MODEL in self._hooks.stale:
            with torch._C._EnableTorchFunction():
                self._hooks.fetch(frozenset({Part.MODEL}))  # the script keeps the old tensor
        if stale_mark(new) is not None:
            with torch._C._EnableTorchFunction():
                fetch_arguments([new])
        if not self._table.rebind(old, new):
            return False
        self.changed.add(buffer)
        if state:
            self._hooks.took(old, new)
        self._take_present()
        return True

    def _states(self) -> list[torch.Tensor]:
        return [t for _, t in self._table.written]

    def _follow_state(self) -> None:
        states = [t for t in self._states() if self._table.param_index(t) is None]
        if states and Part.MODEL not in self._hooks.stale:
            others = [t for t in states if is_stale(t)]
            if others:
                with torch._C._EnableTorchFunction():  # the newest values are another job's
                    fetch_arguments(others)
        for tensor in self._hooks.rewritten(states) if states else ():
            found = self._table.lookup(tensor)
            assert found is not None
            self.changed.add(found[0])

    def _written(self, now: tuple[list[int], list[int]]) -> None:
        table = self._table
        others = [t for t in self._read if is_stale(t)]
        if others:
            with torch._C._EnableTorchFunction():  # the newest values are another job's
                fetch_arguments(others)
        for i, (name, tensor) in enumerate(table.only_read[: len(self._read)]):
            if not table.moved(tensor):
                raise CaptureError(
                    f"{name} has another shape, other strides, or memory of another size or of another tensor than when"
                    " the step was captured",
                    "close the job and submit the step again",
                )
            counted = now[0][i] != self._seen[0][i] or now[1][i] != self._seen[1][i]
            if counted or self._sums.differs(tensor.untyped_storage()):
                found = table.lookup(tensor)
                assert found is not None
                self.changed.add(found[0])
        self._take_present()

    def stepped(self, replaced: bool) -> None:
        """A step was sent. `replaced`: whether it puts new tensors in the place of some."""
        if replaced:
            self._take_holders()
        if self._read:
            self.hold()

    def buffers(self) -> set[int]:
        """The buffers that steps only read. Local memory has their values."""
        places = [self._table.lookup(tensor) for _, tensor in self._table.only_read]
        return {found[0] for found in places if found is not None}

    # ---- marks, which tell when Python touches a tensor

    def hold(self) -> None:
        """Mark the tensors that steps only read."""
        if self._watching or not self._read:
            return
        with _lock, without_fetching(), torch.inference_mode(False):
            found = [*self._read, *(t for t, _ in self._aliases.of(self._read))]
            self._marked = [t for t in found if stale_mark(t) is None and not is_lost(t)]
            for tensor in self._marked:
                _watcher.mark_stale(tensor, Part.MODEL)
            self._watching = True
            self._sums.forget()
            self._sums.note(_unwatchable(found))
            watch_modules(_watcher, True)

    def let_go(self) -> None:
        """Make the tensors plain, and note their bytes."""
        if not self._watching:
            return
        self._watching = False
        for tensor in self._marked:
            mark = stale_mark(tensor)
            if mark is not None and mark.handler is _watcher:
                unmark(tensor)
        self._marked = []
        self._sums.note_more(_storages(self._read))

    def has(self, module: torch.nn.Module) -> bool:
        """Whether the module, called, may read one of the tensors."""
        known = self._has.get(module)
        if known is None:
            mine = set(map(id, self._read))
            known = any(id(t) in mine for t in [*module.parameters(), *module.buffers()])
            self._has[module] = known
        return known

    def remove(self) -> None:
        """The job is over."""
        with _lock, without_modes():
            self.let_go()  # no longer in `_all` if the job is dropped
        _all.discard(self)
        let_all_go()
