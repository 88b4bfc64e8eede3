"""The local model and optimizers as a copy of what the daemon holds: what is behind, and what was written.

While the daemon holds newer state, whatever reads a parameter, a buffer, the optimizers' state or a gradient has it
fetched first (fetching.py). Between a fetch and the next step local tensors are plain, and must stay as they are: at
the job's next verb LocalWrite says that one was written or replaced, by version counter, address, identity and the sums
of its bytes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from operator import attrgetter, is_
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gpumux.capture import fetching
from gpumux.capture.fetching import (
    Aliases,
    FetchingState,
    Held,
    Keeper,
    held_of,
    hold,
    is_lost,
    let_go,
    lose,
    outdate,
    plainly,
    search,
    watch_modules,
)
from gpumux.capture.lower import Replaces
from gpumux.capture.recorder import Recorder
from gpumux.capture.state import ALL, Part, Place, StateTable
from gpumux.capture.structure import Structure
from gpumux.errors import LocalWrite, StaleGradient, StaleState

# ---- Sums over the bytes of storages: they show writes that leave no other trace.
#
# A write through `p.data`, a numpy array or a DLPack capsule changes no version counter of the parameter. Between a
# fetch and the next step the local bytes must stay what the daemon holds, so they are summed after the one and compared
# at the other.


_ROW = 1024  # words of eight bytes


class Checksums:
    """The sums of some storages, as they were when last noted."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[torch.UntypedStorage, tuple[torch.Tensor, ...]]] = {}

    def note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """From now on these storages are watched, as they are now."""
        for storage in storages:
            self._noted[storage._cdata] = (storage, sums(storage))

    def forget(self) -> None:
        self._noted.clear()

    def changed(self) -> bool:
        """Whether the bytes of a noted storage are others now."""
        return any(
            len(before) != len(now := sums(storage)) or not all(map(torch.equal, before, now))
            for storage, before in self._noted.values()
        )


def sums(storage: torch.UntypedStorage) -> tuple[torch.Tensor, ...]:
    """The storage as rows of words, added up by row and by column, and the bytes that fill no row. A word that changes
    shows in both, and so do two that change places: they share a row or a column, not both."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    whole = flat.numel() // (8 * _ROW) * (8 * _ROW)
    rest = flat[whole:].clone()
    if not whole or flat.data_ptr() % 8:
        return (rest,) if not whole else (flat.clone(),)
    rows = flat[:whole].view(torch.int64).view(-1, _ROW)
    return rows.sum(1), rows.sum(0), rest


# ---- The gradients as the script sees them between two steps: what `p.grad` gives, and what the script made of it.
#
# A gradient that the job keeps is fetched when it is read. One that was there only inside the step exists in the plain
# loop, so `p.grad` is not None, and reading it raises StaleGradient. What the script does to gradients (None, zeros,
# values of its own) is told to the job at the next verb, which goes on from there.


class Noted:
    """Tensors as they are now, to be compared with what they are later."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = {id(t): (t, t._version, t.data_ptr()) for t in tensors}
        storages = {(s := t.untyped_storage())._cdata: s for t, _, _ in self._tensors.values()}
        self._sums = {key: (storage, sums(storage)) for key, storage in storages.items()}

    def changed(self) -> set[int]:
        """The ids of those that are others now, or share memory with one that was written."""
        written = {
            key for key, (storage, before) in self._sums.items() if not all(map(torch.equal, before, sums(storage)))
        }
        return {
            key for key, (t, version, address) in self._tensors.items()
            if t._version != version or t.data_ptr() != address or t.untyped_storage()._cdata in written
        }  # fmt: skip


class Gradients:
    """`structure()` says which gradients there are. `keeper` is the guard of the job."""

    def __init__(self, table: StateTable, keeper: Keeper, structure: Callable[[], Structure]) -> None:
        self._table = table
        self._keeper = keeper
        self._structure = structure
        self._read: Structure | None = None
        self._places: dict[int, tuple[Place, bool]] = {}
        self.stale = False  # those that are kept
        self._shown: set[int] = set()
        self._given: dict[int, torch.Tensor | None] = {}  # by the script, since the last step
        self._told: dict[int, torch.Tensor | None] = {}  # of these, what the job knows, as they were then:
        self._told_noted = Noted(())
        self._fetched: dict[int, torch.Tensor] = {}
        self._fetched_noted = Noted(())
        # Given earlier, and copied: in the plain loop the script's own memory is the gradient.
        self._copied: dict[int, torch.Tensor] = {}
        self._copied_noted = Noted(())
        # Kept ones that are behind, as the plain parameters have them.
        self._put: dict[int, tuple[torch.Tensor, int]] = {}

    def of(self, index: int) -> torch.Tensor | None:
        """What `p.grad` is."""
        if index in self._given:
            return self._given[index]
        structure = self._structure()
        if structure is not self._read:
            self._places = {i: (place, False) for i, place in structure.dropped}
            self._places |= {i: (place, True) for i, place in structure.kept}
            self._read = structure
        found = self._places.get(index)
        if found is None:
            return None
        place, kept = found
        tensor = self._table.local(place)
        if (self.stale or not kept) and held_of(tensor) is None:
            self._keeper.hold(tensor, Part.GRADIENTS if kept else None, index)
        return tensor

    def show(self, index: int) -> torch.Tensor | None:
        """`of`, to the script, which may hold on to it. Raises StaleGradient."""
        with plainly():
            if self._table.params[index].grad is not None:
                self.accumulated()
        self._shown.add(index)
        return self.of(index)

    def stepped(self, before: Structure, remade: frozenset[int], changed: frozenset[int]) -> None:
        """A step ran, from `before`. It made the gradients of `remade` anew, and its operators wrote to these buffers
        in place."""
        entry, kept = dict(before.kept), dict(self._structure().kept)
        over = frozenset(i for i, place in entry.items() if i in remade or kept.get(i) != place)
        if over or remade & self._shown:
            # Where the step added to a gradient before it took another one, or none, the sum was never here.
            self.part(over | remade, [*entry.items(), *kept.items()], changed)
        if self._copied:
            with plainly():
                added = {i for i in self._copied if i in entry and entry[i].buffer in changed}
                _lose_all({self._copied[i].untyped_storage()._cdata for i in added})
            self._copied = {i: v for i, v in self._copied.items() if i not in added | over and i in kept}

    def part(
        self, indices: frozenset[int], places: Iterable[tuple[int, Place]] | None = None,
        changed: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """These gradients become others, which lay at `places`. The tensors that they were are the script's, with their
        values: so the job takes other memory. They are lost where `changed` says that the values are elsewhere; of
        those that are behind, `settle` finds that out."""
        if not indices & self._shown:
            return
        structure = self._structure()
        shared = structure.buffers(self._table, {Part.OPTIMIZER})  # an optimizer may hold on to a gradient
        at = [(i, p.buffer) for i, p in (structure.kept if places is None else places) if p.buffer not in shared]
        buffers = {buffer for i, buffer in at if i in indices and i in self._shown}
        if not buffers:
            return
        self._shown -= indices
        others = any(buffer in buffers and i not in indices for i, buffer in at)
        with plainly(), torch.inference_mode(False):
            gone = self._table.renew(buffers - changed, keep=others)
            elsewhere = self._table.renew(buffers & changed, keep=others)
            _lose_all(gone | elsewhere if others else elsewhere)
            if self._fetched:  # others of the same memory have other tensors now, with the same values
                now = {i: self.of(i) for i in self._fetched if i not in indices}
                self._fetched = {i: tensor for i, tensor in now.items() if tensor is not None}
                self._fetched_noted = Noted(self._fetched.values())

    def gone(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of these in whose memory no gradient of the job lies, or none that was ever brought here."""
        here = {place.buffer for _, place in self._structure().kept if self._table.buffers[place.buffer].filled}
        return [t for t in tensors if (found := self._table.lookup(t)) is None or found[0] not in here]

    def give(self, index: int, value: torch.Tensor | None) -> None:
        """The script set it, of a parameter that is behind."""
        with plainly():
            if value is not None and index not in self._given and value is self.of(index):
                self._table.params[index].grad = None  # what is there already, set again
            else:
                self._given[index] = value

    def written_to(self, index: int, value: torch.Tensor) -> None:
        """The script gives it new values, in its own memory."""
        self._given[index] = value

    def adopted(self, index: int) -> None:
        """What the script gave lies where steps read and write it: the script holds it."""
        self._shown.add(index)

    def copied(self, index: int, value: torch.Tensor) -> None:
        """The job has a copy of what the script gave, and steps go on with that."""
        self._copied[index] = value

    def overlapping(self, indices: Iterable[int]) -> int | None:
        """The first of these whose gradient, given by the script, shares memory with another that was: the copies would
        not."""
        values = self._copied | {i: value for i, value in self._given.items() if value is not None}
        with plainly():
            spans = sorted((*_span(value), i) for i, value in values.items())
        found = {i for (_, end, i), (start, _, j) in pairwise(spans) if start < end for i in (i, j)}
        return next((i for i in indices if i in found), None)

    def clear(self) -> None:
        """The parameters fall behind: what they hold as `.grad` themselves, only autograd sees from now on."""
        for parameter in self._table.params:
            if parameter.grad is not None:
                parameter.grad = None

    def accumulated(self) -> None:
        """Take what backward() of a graph from before the last step left, while the parameters are behind. Raises
        StaleGradient where it belongs on top of a gradient that the daemon has; the job can go on without it."""
        with plainly():
            found = {i: p.grad for i, p in enumerate(self._table.params) if p.grad is not None}
            found = {i: grad for i, grad in found.items() if self._given.get(i) is not grad}
            kept = dict(self._structure().kept)
            lost = [i for i in found if i not in self._given and i in kept]
            for i, grad in found.items():
                if not lost and (i in self._given or self.of(i) is None):
                    self._given[i] = grad
                else:  # of one that was not kept, reading it raises
                    self._table.params[i].grad = self._given.get(i)
            if lost:
                what = "backward() of a graph from before the job's last step"
                raise _added(self._table.param_names[lost[0]], what)

    def settle(self, adopted: bool) -> None:
        """What is there now is what the job holds, but for what the script gave; that as well if `adopted`."""
        if adopted:
            self._given, self._told, self._copied = {}, {}, {}
        self._fetched = {}
        if not self.stale:
            found = {i: self.of(i) for i, _ in self._structure().kept if i not in self._given}
            self._fetched = {i: tensor for i, tensor in found.items() if tensor is not None}
        self._fetched_noted = Noted(self._fetched.values())

    def put(self) -> None:
        """The parameters are plain, and have the gradients that they have in the plain loop."""
        with plainly():
            for i, parameter in enumerate(self._table.params):
                grad, now = self.of(i), parameter.grad
                if now is not grad and not (
                    is_lost(now) and is_lost(grad)
                ):  # another job's, which had no values either
                    parameter.grad = grad
                if grad is not None:
                    self._shown.add(i)
            kept = [(i, self.of(i)) for i, _ in self._structure().kept if self.stale]
            self._put = {i: (grad, grad._version) for i, grad in kept if grad is not None and held_of(grad) is not None}

    def added_to(self) -> None:
        """Raises StaleGradient where backward() on the local model added to a gradient that is behind: its memory holds
        nothing yet, and autograd asks no tensor's class. The job can go on without it."""
        with plainly():
            changed = [i for i, (grad, v) in self._put.items() if grad._version != v and held_of(grad) is not None]
            self._put = {i: (grad, grad._version) for i, (grad, _) in self._put.items()}
        if changed:
            raise _added(self._table.param_names[changed[0]], "backward() on the local model")

    def changes(self, plain: bool) -> dict[int, torch.Tensor | None]:
        """What the script made of them since the job was told. `plain`: the parameters are, and say so themselves.
        Raises StaleGradient."""
        if plain:
            self.added_to()
        else:
            self.accumulated()
        with plainly():
            if plain:
                for i, parameter in enumerate(self._table.params):
                    mine, now = self.of(i), parameter.grad
                    if now is not mine and not (is_lost(now) and is_lost(mine)):
                        self._given[i] = now
            changed = self._fetched_noted.changed()
            for i, tensor in self._fetched.items():
                if id(tensor) in changed and self.of(i) is tensor:
                    self._given[i] = tensor
            changed = self._copied_noted.changed()
            for i, tensor in self._copied.items():
                if id(tensor) in changed and i not in self._given:
                    self._given[i] = tensor
            changed = self._told_noted.changed()
            return {
                i: value for i, value in self._given.items()
                if i not in self._told or self._told[i] is not value or id(value) in changed
            }  # fmt: skip

    @property
    def given(self) -> frozenset[int]:
        """The parameters whose gradients the script set since the last step."""
        return frozenset(self._given)

    def written(self) -> set[int]:
        """Buffers of the job whose local bytes the script wrote, without a fetch before: zeros. A fetch leaves them
        alone."""
        values = [v for v in self._given.values() if v is not None and v.layout is torch.strided and held_of(v) is None]
        places = [self._table.place(v) for v in values]
        return {place.buffer for place in places if place is not None}

    def lost(self) -> dict[int, Place]:
        """Gradients that are there in the plain loop, and have no values here: parameter -> place."""
        return {i: place for i, place in self._structure().dropped if i not in self._given}

    def told(self) -> None:
        """The job knows of all changes."""
        with plainly():
            self._told = dict(self._given)
            self._told_noted = Noted(value for value in self._told.values() if value is not None)
            self._fetched = {i: found for i, found in self._fetched.items() if i not in self._given}
            self._copied = {i: found for i, found in self._copied.items() if self._given.get(i, found) is found}
            self._copied_noted = Noted(self._copied.values())

    def passed(self) -> None:
        """A step has run: what the script gave was for it."""
        given, fetched = self._given, self._fetched
        self.stale = True
        with plainly():
            for i in given:
                self._table.params[i].grad = None
        if given or fetched:
            self._given, self._told, self._fetched = {}, {}, {}
            self._told_noted = self._fetched_noted = Noted(())
            for i in {*given, *fetched}:
                self.of(i)


def _lose_all(storages: set[int]) -> None:
    """Whatever the script holds of this memory, it has not the plain loop's values any more. Needs torch functions to
    be off."""
    for tensor, _ in search(storages) if storages else ():
        lose(tensor)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it begins in memory, and where it ends."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size() * (tensor.numel() > 0)


def _added(name: str, what: str) -> StaleGradient:
    return StaleGradient(
        f"{what} adds to the gradient of {name}, which the daemon has",
        "call job.sync() after the step and before such a backward()",
    )


# ----


_NESTED = (dict, list, tuple)
_VERSION, _STATE = attrgetter("_version"), attrgetter("state")  # of many tensors or optimizers, without a call each


class Words(NamedTuple):
    """How a guard speaks of what holds the state, and of what helps."""

    holder: str
    where: str
    sync: str
    load: str


def of_job(name: str) -> Words:
    return Words(
        f"job {name!r}",
        " in the daemon",
        "call job.sync() first; to evaluate in the daemon use job.add(...)",
        "call job.load_state() to take the change into the job, or job.sync() to drop it and bring the daemon's state"
        " back",
    )


class Source(Protocol):
    """What holds the newer state."""

    def structure(self) -> Structure:
        """Of the newest state."""

    def fetch(self, parts: frozenset[Part]) -> None:
        """Install these parts in the local objects, and say so (`StaleGuard.fetched`). Raises StaleState."""


class StaleGuard:
    """`table` says which tensors are the job's."""

    def __init__(self, words: Words, table: StateTable, source: Source) -> None:
        fetching.install()
        self.words = words
        self._table = table
        self._source = source
        self.stale: frozenset[Part] = frozenset()
        self._mine: dict[int, torch.Tensor] = {}  # what is behind
        self._inner: list[torch.Tensor] = []  # of the optimizers' state
        self._shown: set[int] | None = set()  # the buffers in which these lie; None: not looked up yet
        self._leaving: dict[tuple[int, int], frozenset[int]] = {}
        self._aliases = Aliases()
        self._modules = {id(m) for model in table.models for m in model.modules()}
        self._others: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self.gradients = Gradients(table, self, source.structure)
        self._sums = {part: Checksums() for part in Part}
        self._process = os.getpid()
        self._removed = False
        self.fetched(ALL)

    # ---- what is behind fetches

    def fetch(self, parts: frozenset[Part]) -> None:
        """Bring these parts of the local state up to date. Raises StaleState where that can't be, and StaleGradient."""
        parts &= self.stale
        if not parts:
            return
        if os.getpid() != self._process:
            self.refuse("the local model was read in a forked process, which has no connection")
        if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
            self.refuse("a step that is captured reads the local model of another job")
        if Part.MODEL in parts:
            self.gradients.accumulated()
            if torch.is_grad_enabled() and self._source.structure().kept:
                parts |= self.stale & {Part.GRADIENTS}  # a backward pass may follow, which adds to them
        if Part.OPTIMIZER in parts and Part.GRADIENTS in self.stale and self._keeps_gradients():
            parts |= {Part.GRADIENTS}
        if Part.GRADIENTS in parts:
            self.gradients.added_to()
        self._source.fetch(parts)

    def _keeps_gradients(self) -> bool:
        """Whether gradients lie in the memory of the optimizers' state."""
        structure = self._source.structure()
        if not structure.kept:
            return False
        gradients = {place.buffer for _, place in structure.kept}
        return not gradients.isdisjoint(structure.buffers(self._table, {Part.OPTIMIZER}))

    def refuse(self, what: str, because: BaseException | None = None) -> None:
        """Raises StaleState."""
        raise StaleState(
            f"{what} while {self.words.holder} holds newer state{self.words.where}", self.words.sync
        ) from because

    def gradient(self, index: int) -> torch.Tensor | None:
        return self.gradients.show(index)

    def gradient_set(self, index: int, value: torch.Tensor | None) -> None:
        self.gradients.give(index, value)

    def gradient_zeroed(self, index: int, value: torch.Tensor) -> None:
        self.gradients.written_to(index, value)

    def has(self, module: torch.nn.Module) -> bool:
        """Whether calling the module may read the job's parameters."""
        if id(module) in self._modules:
            return True
        known = self._others.get(module)
        if known is None:
            mine = {id(t) for _, t in self._table.tensors}
            known = self._others[module] = any(id(p) in mine for p in module.parameters())
        return known

    def replaced(self, what: Replaces, before: Structure, after: Structure) -> None:
        """A step has put others in the places of some tensors, or left the places: the old ones are the script's from
        now on."""
        left = frozenset[int]() if before is after else self._left(before, after)
        if not (what.model or what.optimizer or left):
            return
        table = self._table
        with plainly(), torch.inference_mode(False):
            if self._shown is None:
                self._shown = {found[0] for t in self._inner if (found := table.lookup(t)) is not None}
            buffers = (what.optimizer | left) & self._shown
            self._shown -= buffers
            pairs = table.put_anew(what.model) if what.model else []
            behind = {old.untyped_storage()._cdata for old, _ in pairs if Part.MODEL in self.stale}
            for buffer in sorted(buffers):
                gone = table.renew([buffer], keep=buffer in what.beside)
                if Part.OPTIMIZER in self.stale or buffer in what.written or buffer in what.beside:
                    behind |= gone
            spoiled = [old for old, new in pairs if (table.lookup(new) or (-1,))[0] in what.written]
            behind |= {old.untyped_storage()._cdata for old in spoiled}
            if behind:
                known = [*(old for old, _ in pairs), *self._inner]
                known = [tensor for tensor in known if tensor.untyped_storage()._cdata in behind]
                for tensor in [*known, *(t for t, _ in Aliases().of(known))]:
                    self._mine.pop(id(tensor), None)
                    outdate(tensor)
            self._inner = [t for t in self._inner if table.lookup(t) is not None]
            if pairs:
                self._tensors = [t for _, t in table.tensors]
                self._model = self._model_now()
                for _, new in pairs if Part.MODEL in self.stale else ():
                    self.hold(new, Part.MODEL)

    def _left(self, before: Structure, after: Structure) -> frozenset[int]:
        """Buffers of the optimizers' state in which nothing lies any more."""
        key = (id(before), id(after))
        if key not in self._leaving:
            left = before.buffers(self._table, {Part.OPTIMIZER}) - {place.buffer for place in after.places()}
            self._leaving[key] = frozenset(left - after.buffers(self._table, {Part.MODEL}) if left else ())
        return self._leaving[key]

    def newer(self) -> None:
        """A step has changed the state in the daemon."""
        self.gradients.passed()
        if self.stale is not ALL:
            self._fall_behind(ALL - self.stale)

    def _fall_behind(self, fresh: frozenset[Part]) -> None:
        table = self._table
        with plainly(), torch.inference_mode(False):
            tensors: list[torch.Tensor] = []
            if Part.MODEL in fresh:
                tensors += [t for _, t in table.tensors]
                torch.autograd.graph.increment_version(tensors)  # as the step does in the plain loop
                self.gradients.clear()
                self._model = self._model_now()
            if Part.OPTIMIZER in fresh:
                tensors += self._inner
            kept = [t for i, _ in self._source.structure().kept if (t := self.gradients.of(i)) is not None]
            self._hold(tensors + (kept if Part.GRADIENTS in fresh else []))
            self.stale = ALL
            for part in fresh:
                self._sums[part].forget()
            if Part.OPTIMIZER in fresh:
                for optimizer in table.optimizers:
                    optimizer.state = FetchingState(self, optimizer)
                self._states = list(map(_STATE, table.optimizers))
            if Part.MODEL in fresh:
                watch_modules(self, True)

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        """These, and all others over their storages, fetch from now on."""
        index = {id(p): i for i, p in enumerate(self._table.params)}
        part = dict.fromkeys(map(id, self._inner), Part.OPTIMIZER) | {id(t): Part.MODEL for _, t in self._table.tensors}
        where = {t.untyped_storage()._cdata: part.get(id(t), Part.GRADIENTS) for t in reversed(tensors)}
        own = [(tensor, tensor.untyped_storage()._cdata) for tensor in tensors]
        for tensor, storage in [*own, *self._aliases.of(tensors)]:
            if held_of(tensor) is None:
                self.hold(tensor, where[storage], index.get(id(tensor), -1))

    def hold(self, tensor: torch.Tensor, part: Part | None, index: int = -1) -> None:
        """From now on the tensor is behind."""
        hold(tensor, self, part, index)
        self._mine[id(tensor)] = tensor

    def _held(self) -> list[tuple[torch.Tensor, Held]]:
        """The tensors that are behind; those that were let go are forgotten."""
        found = [(t, held) for t in list(self._mine.values()) if (held := held_of(t)) is not None]
        self._mine = {id(t): t for t, _ in found}
        return found

    def fetched(self, parts: frozenset[Part], *, adopted: bool = False) -> None:
        """These parts of the local state are what the daemon holds. `adopted`: gradients of the script's, too."""
        with plainly(), torch.inference_mode(False):
            if Part.GRADIENTS in parts:
                self._lose_gone()
            self._let_go(parts)
            self.stale -= parts
            if Part.GRADIENTS in parts:
                self.gradients.stale = False
                self.gradients.settle(adopted)
            if Part.MODEL in parts:
                self.gradients.put()
            self._settle()
            self._note(parts)

    def _let_go(self, parts: frozenset[Part]) -> None:
        for tensor, held in self._held():
            if held.part in parts:
                let_go(tensor)
        if Part.OPTIMIZER in parts:
            for optimizer in self._table.optimizers:
                if isinstance(optimizer.state, FetchingState):
                    optimizer.state = optimizer.state.plain
        if Part.MODEL in parts:
            watch_modules(self, False)

    def _lose_gone(self) -> None:
        """Tensors that were gradients, or windows onto some, and are none now: no fetch has their values."""
        behind = [tensor for tensor, held in self._held() if held.part is Part.GRADIENTS]
        for tensor in self.gradients.gone(behind):
            lose(tensor)

    @contextmanager
    def quiet(self, *, writes: bool = False) -> Iterator[None]:
        """gpumux itself is at work, on plain tensors: nothing is fetched. Raises LocalWrite for a write made before,
        unless `writes`."""
        if not writes:
            self.check_writes()
        behind, held = self.stale, self._held()
        states = list(map(_STATE, self._table.optimizers))
        self._let_go(ALL)
        for tensor, _ in held:
            let_go(tensor)
        self.stale = frozenset()
        try:
            yield
        finally:
            self.stale = behind
            for tensor, one in held:
                self.hold(tensor, one.part, one.index)
            if Part.OPTIMIZER in behind:
                for optimizer, state in zip(self._table.optimizers, states, strict=True):
                    optimizer.state = state
            watch_modules(self, Part.MODEL in behind)
            with plainly():
                self._settle()

    # ---- what was written

    def _settle(self) -> None:
        """What is there now is what we expect to see next time."""
        self._tensors = [t for _, t in self._table.tensors]
        self._stateless = not (self._tensors or self._table.optimizers or self._table.models)
        self._model = self._model_now()
        if Part.OPTIMIZER in self.stale:
            return  # a state that was put in the place of one that is behind stays a write
        self._states = [o.state for o in self._table.optimizers]
        entries = [entry for state in self._states for entry in state.values()]
        self._flat = all(type(e) is dict and not any(isinstance(v, _NESTED) for v in e.values()) for e in entries)
        self._leaves = self._leaves_now()
        self._inner = [t for t in self._leaves if isinstance(t, torch.Tensor)]
        self._shown = None
        self._optimizer = self._optimizer_now()

    def _note(self, parts: frozenset[Part]) -> None:
        if Part.MODEL in parts:
            self._sums[Part.MODEL].forget()
            self._sums[Part.MODEL].note({(s := t.untyped_storage())._cdata: s for t in self._tensors}.values())
        if Part.OPTIMIZER in parts:
            self._sums[Part.OPTIMIZER].forget()
            self._sums[Part.OPTIMIZER].note({(s := t.untyped_storage())._cdata: s for t in self._inner}.values())

    def _model_now(self) -> tuple[list[int], list[int]]:
        """(versions, addresses)."""
        return list(map(_VERSION, self._tensors)), list(map(torch.Tensor.data_ptr, self._tensors))

    def _optimizer_now(self) -> tuple[list[int], list[int]]:
        inner = self._inner
        return list(map(_VERSION, inner)), [*map(torch.Tensor.data_ptr, inner), *map(len, self._states)]

    def check_writes(self, *, bytes_too: bool = False) -> None:
        """Raises LocalWrite when local state was written or replaced since the last verb; a write that was taken back
        since (an average put in for an evaluation) is none. `bytes_too`: also where no counter shows it."""
        if self._stateless:
            return
        with plainly():
            versions, addresses = self._model_now()
            counted = versions != self._model[0]
            written = addresses != self._model[1] or self._table.replaced() or self._optimizer_written()
            written = written or (counted and Part.MODEL in self.stale)
            if Part.OPTIMIZER not in self.stale and not written:
                counted = counted or self._optimizer_now()[0] != self._optimizer[0]
            if written or ((bytes_too or counted) and any(s.changed() for s in self._sums.values())):
                self._refuse_write()
            if counted:
                self._settle()

    def check_states(self) -> None:
        """Raises LocalWrite when an optimizer holds another dictionary than the one that is behind: fetching another
        optimizer's state would overwrite it."""
        if not self._same_states():
            self._refuse_write()

    def _same_states(self) -> bool:
        return all(map(is_, map(_STATE, self._table.optimizers), self._states))

    def _refuse_write(self) -> None:
        raise LocalWrite(
            f"the local model or optimizer was changed while {self.words.holder} holds its state{self.words.where}",
            self.words.load,
        )

    def _optimizer_written(self) -> bool:
        """Whether an optimizer holds other state than it did."""
        if not self._same_states():
            return True
        if Part.OPTIMIZER in self.stale:
            return False
        if self._optimizer_now()[1] != self._optimizer[1]:
            return True
        try:
            leaves = self._leaves_now()
        except TypeError:
            return True  # an entry is no dictionary any more
        if len(leaves) == len(self._leaves) and all(map(is_, leaves, self._leaves)):
            return False
        return len(leaves) != len(self._leaves) or not all(map(_alike, leaves, self._leaves))

    def _leaves_now(self) -> list[Any]:
        entries = [entry for state in self._states for entry in state.values()]
        if self._flat:  # as every optimizer of torch's keeps it
            return list(chain.from_iterable(map(dict.values, entries)))
        return list(_leaves(entries))

    def gradient_changes(self) -> dict[int, torch.Tensor | None]:
        """What the script made of the gradients since the last step or verb: None, or a tensor of values."""
        return self.gradients.changes(Part.MODEL not in self.stale)

    def remove(self) -> None:
        """The job is over, and the local objects are what they were before it: plain. A gradient that was not kept
        stays one that can't be read."""
        if self._removed:
            return
        self._removed = True
        with plainly():
            if Part.MODEL in self.stale:
                with suppress(StaleGradient):  # there is no job that could hear of it
                    self.gradients.accumulated()
                self.gradients.put()
            for tensor, held in self._held():
                if held.part is None:
                    lose(tensor)
            self._lose_gone()
            self._let_go(ALL)
            self._mine = {}
        self.stale = frozenset()
        for sums in self._sums.values():
            sums.forget()


def _leaves(entry: Any) -> Iterator[Any]:
    if isinstance(entry, dict):
        for value in entry.values():
            if isinstance(value, _NESTED):
                yield from _leaves(value)
            else:
                yield value
    elif isinstance(entry, (list, tuple)):
        for value in entry:
            yield from _leaves(value)
    else:
        yield entry


def _alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and repr(a) == repr(b))
