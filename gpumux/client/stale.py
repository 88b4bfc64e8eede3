"""The local model and optimizers as a copy of what the daemon holds: what is behind, and what was written.

While the daemon holds newer state, whatever reads a parameter, a buffer, the optimizers' state or a gradient has it fetched first
(fetching.py). Between a fetch and the next step local tensors are plain, and must stay as they are: at the job's next verb
LocalWrite says that one was written or replaced, by version counter, address, identity and the sums of its bytes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gpumux.client import overrides
from gpumux.client.aliases import Aliases
from gpumux.client.checksums import Checksums
from gpumux.client.fetching import Held, held_of, hold, let_go, lose, outdate, plainly, watch_modules
from gpumux.client.gradients import Gradients
from gpumux.client.optimizers import FetchingState
from gpumux.client.recorder import Recorder
from gpumux.client.replaced import Replaces
from gpumux.client.state import ALL, Part, StateTable
from gpumux.client.structure import Structure
from gpumux.errors import LocalWrite, StaleGradient, StaleState

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
        "call job.load_state() to take the change into the job, or job.sync() to drop it and bring the daemon's state back",
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
        overrides.install()
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
        """A step has put others in the places of some tensors, or left the places: the old ones are the script's from now on."""
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
        """gpumux itself is at work, on plain tensors: nothing is fetched. Raises LocalWrite for a write made before, unless
        `writes`."""
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
        """Raises LocalWrite when local state was written or replaced since the last verb; a write that was taken back since (an
        average put in for an evaluation) is none. `bytes_too`: also where no counter shows it."""
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
        """The job is over, and the local objects are what they were before it: plain. A gradient that was not kept stays
        one that can't be read."""
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
