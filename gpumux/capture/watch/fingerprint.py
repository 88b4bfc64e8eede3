"""Fingerprint of everything that Python could change between two calls of a step; checked cheaply at every call.

A captured step is replayed without running its Python code again. So everything that the code may have decided by is
found once, at capture (`walk.py`), and watched (`watches.py`). If a reading differs, another variant must be captured.
"""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import call, is_
from typing import Any

import torch

from gpumux.capture.source import Executed
from gpumux.capture.state import ABSENT, PLAIN, UNRETURNED, Identity, Reading, Watch, equal, has_memory, layout, left_at
from gpumux.capture.symbols import Number, of_python
from gpumux.capture.watch.walk import Walk
from gpumux.capture.watch.watches import random_states
from gpumux.errors import CaptureError, NotRepeatable


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that holds a Python number: the object that holds it, and its name or place there."""

    place: str
    home: Any = field(compare=False, repr=False)
    _id: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_id", id(self.home))


def _variable(watch: Watch, name: str) -> Variable:
    return Variable(name.removeprefix(watch.label), watch.home)  # the label may be another after another walk


@dataclass(slots=True)
class Change:
    """A value that differs between two readings, with functions that restore either."""

    name: str
    old: Any
    new: Any
    flag: bool  # whether it is a training flag, which a step may change
    restore: Callable[[], None]
    again: Callable[[], None]
    variable: Variable | None = None  # if it was a Python number


@dataclass(frozen=True, slots=True)
class Switch:
    """A variable of `home` that a step leaves True where it was False, or another constant where it was not."""

    put: Callable[[Any], None]
    old: Any
    new: Any
    home: Any


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How what a step reads differs from an earlier reading, if it does by lists, dictionaries and sets that gave way
    to others of the same content, and by numbers.

    containers: ids of those of the earlier reading.
    variables: those of numbers in them, and the ones that have their places now.
    lifted: present variables that are numbers of each step, as in `lift`.
    moved: present variables whose numbers are other ones.
    """

    containers: frozenset[int]
    variables: Mapping[Any, Variable]
    lifted: Mapping[Variable, str]
    moved: Sequence[Variable]


_FLAG = frozenset((bool,))
_NOTHING = frozenset((type(None), type(ABSENT)))
_CONSTANTS = frozenset((int, float, str))


def _turned(old: Any, new: Any, constants: bool) -> bool:
    """Whether a variable was turned like a switch. `constants`: also from None, or from nothing, to a constant."""
    before, now = type(old), type(new)
    if old is new or now is type(ABSENT):
        return False
    if now in _FLAG and (before in _FLAG or old is ABSENT):
        return True
    return constants and (
        (before in _NOTHING | _FLAG and now in _CONSTANTS | _NOTHING | _FLAG)
        or (before in _CONSTANTS and now in _NOTHING | _FLAG)
    )


_REBUILT = (list, dict, collections.OrderedDict, set, collections.deque)


class _Pairs:
    """Pairs of an old and a new container that hold the same place. Each has one partner: two variables that shared a
    list share one again."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._new: dict[int, tuple[Any, Any]] = {}
        self._old: dict[int, Any] = {}

    def same(self, old: Any, new: Any) -> bool:
        """Whether a step can't tell two values apart, as far as the content of containers, which is watched beside
        them, is the same."""
        kind = type(old)
        if kind is tuple and type(new) is tuple:
            return len(old) == len(new) and all(map(self.same, old, new))
        if kind not in _REBUILT:
            return equal(old, new, self._identity)
        if type(new) is not kind or getattr(old, "maxlen", None) != getattr(new, "maxlen", None):
            return False
        if kind is set and list(map(repr, old)) != list(map(repr, new)):
            return False  # a step may go over it in its order
        partner = self._new.setdefault(id(old), (old, new))[1]
        return partner is new and self._old.setdefault(id(new), old) is old

    def replaced(self) -> frozenset[int]:
        """Ids of the old containers that have another one as partner."""
        return frozenset(i for i, (old, new) in self._new.items() if old is not new)


class _Lifted:
    """The variables of one watch that are numbers of each step: only their types are compared."""

    def __init__(self, watch: Watch, names: Mapping[int, str]) -> None:
        self.watch = watch
        self.names = names
        self.seen: Reading = ()

    def unchanged(self) -> bool:
        """Whether all else is the same object as in `seen`."""
        now, names = self.watch.read(), self.names
        if len(now) != len(self.seen):
            return False
        differs = [i for i, (a, b) in enumerate(zip(now, self.seen, strict=True)) if a is not b]
        return all(i in names and type(now[i]) is type(self.seen[i]) for i in differs)

    def same(self, old: Reading, new: Reading, identity: Identity) -> bool:
        if len(old) != len(new) or any(type(old[i]) is not type(new[i]) for i in self.names):
            return False
        return self.watch.same(old, tuple([old[i] if i in self.names else x for i, x in enumerate(new)]), identity)


class IdentityCheck:
    """Compares all watches at once by identity, in C."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._parts = [part for w in watches for part in w.parts or ()]
        self._reads = [w.present for w in watches if w.parts is None and w.sized is None and not w.content]
        self._sized = [w.sized for w in watches if w.sized is not None]
        self._contents = [w.present for w in watches if w.content]
        self._seen: tuple[list[Any], list[int], list[Any]] | None = None

    def _now(self) -> tuple[list[Any], list[int], list[Any]]:
        read = list(map(tuple, map(call, self._reads)))
        lengths = [*map(len, self._parts), *map(len, self._sized), *map(len, read)]  # type: ignore[arg-type]
        everything = [*chain.from_iterable(read), *chain.from_iterable(self._parts)]
        return everything, lengths, list(map(tuple, map(call, self._contents)))

    def remember(self) -> None:
        """Take the present objects as those that `unchanged` compares with."""
        self._seen = self._now()

    def forget(self) -> None:
        """Objects may have become something else since the last `remember`."""
        self._seen = None

    def unchanged(self) -> bool:
        """Whether all objects are the same as at the last `remember`. Raises KeyError if a watched name is gone."""
        if self._seen is None:
            return False
        objects, lengths, contents = self._now()
        old_objects, old_lengths, old_contents = self._seen
        return lengths == old_lengths and contents == old_contents and all(map(is_, old_objects, objects))


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, the cyclic garbage collector does not run. A capture makes so many objects that it would run over all
    objects of the process several times, which takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Fingerprint:
    """The fingerprint of one step function and the models and optimizers it was submitted with. `executed`: code that
    is known to run in it; `identity`: see StateTable.identity; `names`: of an earlier fingerprint of this step. Raises
    CaptureError for an object that can't be watched."""

    def __init__(
        self, fn: Any, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], params: Sequence[torch.Tensor],
        *, executed: Executed | None = None, identity: Identity = layout, names: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._given = (fn, models, optimizers, params)
        self.names = names
        self._executed = executed if executed is not None else {}
        self._identity = identity
        self._wanted: Mapping[Variable, str] = {}
        self._more: list[Watch] = []
        # Names of the places in which the step itself leaves tensors. It writes them before it reads them, so that it
        # is the same step whatever was there before.
        self.leaves: set[str] = set()
        self._remembered: list[Reading] = []
        self._tensors: frozenset[int] = frozenset()  # by id, those in `_remembered`
        self._walk()

    @without_collection()
    def _walk(self) -> None:
        walk = Walk(*self._given, executed=self._executed, names=self.names)
        self.watches = [*walk.watches, *self._more]
        self.modules = walk.modules
        self.other_optimizers = walk.other_optimizers
        self.spaces = walk.spaces
        self.names = walk.names
        self.computes_names = walk.computes_names
        self.fields = walk.fields
        self.lists = walk.lists
        self.listed = walk.listed
        self.cells = walk.cells
        self._generators = walk.generators
        self._walked = walk.walked
        self.lift(self._wanted)

    # ---- variables that are numbers of each step ---------------------------------------------------

    def lift(self, wanted: Mapping[Variable, str]) -> None:
        """From now on these variables, those that there are, may have any value of their present type. `wanted`: the
        name by which `numbers` gives each."""
        self._wanted = wanted
        self._lifted: dict[int, _Lifted] = {}
        if wanted:
            for w in self.watches:
                found = {i: n for i, name in w.numbers(w.read()) if (n := wanted.get(_variable(w, name)))}
                if found:
                    self._lifted[id(w)] = _Lifted(w, found)
        self._identity_check = IdentityCheck([w for w in self.watches if id(w) not in self._lifted])

    @property
    def lifted(self) -> set[Variable]:
        """The variables that are numbers of each step."""
        return {_variable(one.watch, one.watch.names(i)) for one in self._lifted.values() for i in one.names}

    def variables(self) -> set[Variable]:
        """All variables that hold a Python number now."""
        return {_variable(w, name) for w in self.watches for _, name in w.numbers(w.read())}

    def numbers(self) -> dict[str, Number]:
        """The present values of these variables."""
        found: dict[str, Number] = {}
        for one in self._lifted.values():
            now = one.watch.read()
            for i, name in one.names.items():
                found[name] = of_python(now[i])
        return found

    @contextmanager
    def replaced(self, symbol: Callable[[str, Number], Any]) -> Iterator[None]:
        """Inside, these variables hold `symbol(name, value)`."""
        found: list[tuple[Watch, int, str, Any]] = []
        for one in self._lifted.values():  # all before the first is replaced: two watches may show one variable
            now = one.watch.read()
            found += [(one.watch, i, name, now[i]) for i, name in one.names.items()]
        done = 0
        try:
            for watch, i, name, value in found:
                try:
                    watch.put(i, symbol(name, value))  # type: ignore[misc]
                except Exception as error:
                    raise CaptureError(
                        f"{watch.names(i)} changes and can't be set ({error})", "pass it as an argument"
                    ) from error
                done += 1
            yield
        finally:
            for watch, i, _, value in found[:done]:
                watch.put(i, value)  # type: ignore[misc]

    def watch_also(self, watches: list[Watch]) -> None:
        """From now on have these watches beside those that were found, and none given before."""
        self.watches = [*self.watches[: len(self.watches) - len(self._more)], *watches]
        self._more = watches
        self.lift(self._wanted)

    @property
    def executed(self) -> Executed:
        """The code that is known to run in the step."""
        return dict(self._executed)

    def lacks(self, executed: Executed) -> bool:
        """Whether `extend` would add something."""
        return bool(self._fresh(executed))

    def _fresh(self, executed: Executed) -> Executed:
        return {i: found for i, found in executed.items() if i not in self._walked and Walk.matters(*found)}

    def extend(self, executed: Executed) -> bool:
        """Add what this code reads to what is watched. False if all of it was known."""
        fresh = self._fresh(executed)
        if not fresh:
            return False
        self._executed.update(fresh)
        self._walk()
        return True

    # ---- reading -----------------------------------------------------------------------------------

    def read(self) -> list[Reading]:
        """The present values. Raises NotRepeatable if a watched name is gone."""
        try:
            return [w.read() for w in self.watches]
        except (KeyError, AttributeError) as gone:
            raise NotRepeatable(
                f"{gone.args[0] if gone.args else gone} existed when the step was captured and is gone",
                "submit the step again",
            ) from None

    def remember(self) -> None:
        """Take the present values as those that `holds` compares with."""
        self._remembered = self.read()
        self._tensors = frozenset(id(t) for reading in self._remembered for t in _all_tensors(reading))
        self._remember_identities()

    def replace(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Put `stand_in` into the place of a tensor among the values that `holds` compares with."""
        self._identity_check.forget()
        for one in self._lifted.values():
            one.seen = ()
        if id(tensor) in self._tensors:
            self._tensors -= {id(tensor)}
            self._remembered = [_with(reading, tensor, stand_in) for reading in self._remembered]

    def _remember_identities(self) -> None:
        self._identity_check.remember()
        for one in self._lifted.values():
            one.seen = one.watch.read()

    def holds(self) -> bool:
        """Whether all values are the same as at the last `remember`."""
        try:
            if self._identity_check.unchanged() and all(one.unchanged() for one in self._lifted.values()):
                return True
            if not self._same(self._remembered, self.read()):
                return False
        except (KeyError, AttributeError, NotRepeatable):
            return False  # a watched name is gone
        self._remember_identities()
        return True

    def rebuilt(self, new: Fingerprint) -> Rebuilt | None:
        """How the present values, of which `new` was just made, differ from those of `remember`. None if they differ by
        more than what Rebuilt describes, or if the step may ask which object it is. Tensors in containers are followed
        before (outside/tensors.py)."""
        new.watch_also(self._more)
        if len(new.watches) != len(self.watches) or "id" in self.names:
            return None
        pairs = _Pairs(self._identity)
        variables: dict[Variable, Variable] = {}
        lifted: dict[Variable, str] = {}
        moved: list[Variable] = []
        for w, twin, old, now in zip(self.watches, new.watches, self._remembered, new.read(), strict=True):
            if len(old) != len(now) or w.label != twin.label:
                return None
            one = self._lifted.get(id(w))
            symbols = one.names if one is not None else {}
            numbers = {i for i, _ in w.numbers(old)}.union(symbols)
            for i, (a, b) in enumerate(zip(old, now, strict=True)):
                if i not in numbers:
                    if not pairs.same(a, b) or self._left_by_another(a, b):
                        return None
                    continue
                if type(a) is not type(b):
                    return None
                variable = _variable(twin, twin.names(i))
                if w.home is not twin.home:
                    variables[_variable(w, w.names(i))] = variable
                if i in symbols:
                    lifted[variable] = symbols[i]
                elif not equal(a, b, self._identity):
                    moved.append(variable)
        gone = pairs.replaced()
        if not gone.issubset({id(w.home) for w in self.watches}):
            return None
        return Rebuilt(gone, variables, lifted, moved)

    def take_place_of(self, other: Fingerprint, rebuilt: Rebuilt) -> None:
        """Watch for the traces of another fingerprint, which is `other.rebuilt(self)` apart."""
        self.leaves = other.leaves
        self.lift(rebuilt.lifted)
        self.remember()

    def _same(self, old: list[Reading], new: list[Reading]) -> bool:
        return all(self._alike(w, a, b) for w, a, b in zip(self.watches, old, new, strict=True))

    def _alike(self, watch: Watch, old: Reading, new: Reading) -> bool:
        lifted = self._lifted.get(id(watch))
        same = watch.same(old, new, self._identity) if lifted is None else lifted.same(old, new, self._identity)
        return same and not any(map(self._left_by_another, old, new))

    def _left_by_another(self, old: Any, new: Any) -> bool:
        """Whether another step left a tensor in the place of a value."""
        place = left_at(new)
        return place is not None and left_at(old) is None and place not in self.leaves

    def values(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of the Python variables that the step's code reads, except modules' buffers."""
        return self.holding(lambda value: True)

    def holding(self, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
        """Those among `values` for which `wanted` is true. Only they are named, as a name may take long to make."""
        for watch, reading in zip(self.watches, self.read(), strict=True):
            for i, value in enumerate(reading if not watch.buffers else ()):
                if wanted(value):
                    yield watch.names(i), value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors among `values` that have memory."""
        return self.holding(_strided)

    def named_tensors(self, readings: Sequence[Reading] | None = None) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name, tensor, whether it lies in a tuple) of all strided tensors that the step's code can read, those of
        modules included, now or in an earlier reading."""
        for watch, reading in zip(self.watches, self.read() if readings is None else readings, strict=True):
            for i, value in enumerate(reading):
                if isinstance(value, (torch.Tensor, tuple)):
                    for path, tensor in _tensors_in(value):
                        yield watch.names(i) + path, tensor, bool(path)

    def random_states(self) -> list[tuple[str, Any]]:
        """(name, state) of Python's and numpy's generators, from which no Program can draw."""
        return random_states(self._generators)

    def _variables(self, watch: Watch, reading: Reading) -> dict[str, Variable]:
        """The variables that held a number, or a symbol for one, by name."""
        lifted = self._lifted.get(id(watch))
        names = [name for _, name in watch.numbers(reading)] + [
            watch.names(i) for i in (lifted.names if lifted else ())
        ]
        return {name: _variable(watch, name) for name in names}

    def put(self, variable: Variable, value: Number) -> None:
        """Set a variable that holds a number."""
        for watch, reading in zip(self.watches, self.read(), strict=True):
            for i, name in watch.numbers(reading):
                if _variable(watch, name) == variable:
                    watch.put(i, value)  # type: ignore[misc]

    def switched(self, before: list[Reading], constants: bool = False) -> list[Switch]:
        """The variables that held True or False in an earlier reading and hold the other one now. A step may change
        them: there are few combinations of them, so its captures end. `constants`: also those that held nothing, or
        None, and hold a number or a text."""
        return [
            Switch(partial(w.put, i), a, b, w.home)
            for w, old, new in zip(self.watches, before, self.read(), strict=True)
            if w.put is not None and not w.flag and len(old) == len(new)
            for i, (a, b) in list(enumerate(zip(old, new, strict=True)))[w.at]
            if _turned(a, b, constants)
        ]

    def constants_since(self, before: Sequence[Reading]) -> list[tuple[int, int, Any]] | None:
        """The constants that differ from an earlier reading: (watch, position in its reading, present value). None if
        anything else differs."""
        found = []
        for i, (watch, old, new) in enumerate(zip(self.watches, before, self.read(), strict=True)):
            if watch.same(old, new, self._identity):
                continue
            if len(old) != len(new):
                return None
            for j, (a, b) in enumerate(zip(old, new, strict=True)):
                if a is not b and repr(a) != repr(b):
                    if type(a) not in PLAIN or type(b) not in PLAIN:
                        return None
                    found.append((i, j, b))
        return found

    def put_constants(self, constants: Iterable[tuple[int, int, Any]]) -> None:
        """Put there what `constants_since` found with equal watches."""
        for i, j, value in constants:
            reading = tuple(self.watches[i].read())
            self.watches[i].restore((*reading[:j], value, *reading[j + 1 :]))

    def changes(self, before: list[Reading] | None = None) -> list[Change]:
        """The values that differ from an earlier reading, such as those that a step changes while it is traced; by
        default those in which the present values differ from that of `remember`, as `holds` compares them."""
        found: list[Change] = []
        for w, old, new in zip(self.watches, self._remembered if before is None else before, self.read(), strict=True):
            if not (w.same(old, new, self._identity) if before is not None else self._alike(w, old, new)):
                put, again = partial(w.restore, old), partial(w.restore, new)
                numbers = self._variables(w, old) if len(old) == len(new) else {}
                found += [
                    Change(name, a, b, w.flag, put, again, numbers.get(name))
                    for name, a, b in w.differences(old, new, self._identity)
                ]
        return found


def _all_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _all_tensors(item)


def _with(value: Any, tensor: torch.Tensor, stand_in: torch.Tensor) -> Any:
    """A value, or a tuple of values, with another tensor in the place of one."""
    if value is tensor:
        return stand_in
    if not isinstance(value, tuple):
        return value
    return tuple.__new__(type(value), [_with(item, tensor, stand_in) for item in value])


def _strided(value: Any) -> bool:
    known = isinstance(value, torch.Tensor) and not isinstance(value, UNRETURNED)
    return known and value.layout is torch.strided


def _tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _tensors_in(item, f"{path}[{i}]")
    elif isinstance(value, torch.Tensor) and has_memory(value):
        yield path, value
