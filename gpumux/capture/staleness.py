"""The local model and optimizers as a copy of the daemon's state: which tensors are stale, and which were written.

While the daemon holds newer state, code that reads a parameter, a buffer, the optimizers' state or a gradient has it
fetched first (fetching.py). Between a fetch and the next step local tensors are plain and must not be changed. The
job's next verb raises LocalWrite if one was written or replaced, by version counter, address, identity and checksums.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
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
    ReadHandler,
    StaleMark,
    fetch_arguments,
    is_lost,
    is_stale,
    mark_lost,
    mark_replaced,
    mark_stale,
    plain_state,
    search,
    stale_mark,
    unmark,
    watch_modules,
    without_fetching,
)
from gpumux.capture.lower import Replaces
from gpumux.capture.recorder import Recorder
from gpumux.capture.state import ALL, Part, Place, StateTable
from gpumux.capture.structure import Structure
from gpumux.capture.watch.checksums import Checksums, sums
from gpumux.errors import GpumuxError, LocalWrite, StaleGradient, StaleState

# ---- the gradients as the script sees them between two steps
#
# A gradient that the job keeps is fetched when it is read. One that existed only inside the step exists in the plain
# loop as well, so `p.grad` is not None, and reading it raises StaleGradient. The job takes over the script's changes of
# gradients (None, zeros, values of its own) at its next verb.


class ChangeDetector:
    """Finds out which of some tensors have changed since it was made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = {id(t): (t, t._version, t.data_ptr()) for t in tensors}
        storages = {(s := t.untyped_storage())._cdata: s for t, _, _ in self._tensors.values()}
        self._sums = {key: (storage, sums(storage)) for key, storage in storages.items()}

    def changed(self) -> set[int]:
        """The ids of the tensors that have changed, or share a storage with one that was written."""
        written = {
            key for key, (storage, before) in self._sums.items() if not all(map(torch.equal, before, sums(storage)))
        }
        return {
            key for key, (t, version, address) in self._tensors.items()
            if t._version != version or t.data_ptr() != address or t.untyped_storage()._cdata in written
        }  # fmt: skip


class Gradients:
    """The gradients of a job's parameters. `structure()`: which of them exist. `handler`: the job's StalenessHooks."""

    def __init__(self, table: StateTable, handler: ReadHandler, structure: Callable[[], Structure]) -> None:
        self._table = table
        self._handler = handler
        self._structure = structure
        self._read: Structure | None = None
        self._places: dict[int, tuple[Place, bool]] = {}
        self.stale = False  # whether the kept ones are
        self._exposed: set[int] = set()
        self._set_by_script: dict[int, torch.Tensor | None] = {}  # since the last step
        self._reported: dict[int, torch.Tensor | None] = {}  # changes that the job has taken over
        self._reported_detector = ChangeDetector(())
        self._fetched: dict[int, torch.Tensor] = {}
        self._fetched_detector = ChangeDetector(())
        # Tensors that the script set and the job copied. In the plain loop they are the gradients themselves.
        self._copied: dict[int, torch.Tensor] = {}
        self._copied_detector = ChangeDetector(())

    def of(self, index: int) -> torch.Tensor | None:
        """The value of `p.grad`."""
        if index in self._set_by_script:
            return self._set_by_script[index]
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
        if (self.stale or not kept) and not is_stale(tensor):
            self._handler.mark_stale(tensor, Part.GRADIENTS if kept else None, index)
        return tensor

    def expose(self, index: int) -> torch.Tensor | None:
        """`of`, for the script, which may keep the tensor. Raises StaleGradient."""
        with without_fetching():
            if self._table.params[index].grad is not None:
                self.accumulated()
        self._exposed.add(index)
        return self.of(index)

    def stepped(self, before: Structure, remade: frozenset[int], changed: frozenset[int]) -> None:
        """Update for a step that ran from the structure `before`. It replaced the gradients of `remade` by new tensors,
        and wrote to the buffers in `changed` in place."""
        entry, kept = dict(before.kept), dict(self._structure().kept)
        over = frozenset(i for i, place in entry.items() if i in remade or kept.get(i) != place)
        if over or remade & self._exposed:
            # The step may have added to a gradient before it replaced it; that sum was never fetched.
            self.detach(over | remade, [*entry.items(), *kept.items()], changed)
        if self._copied:
            with without_fetching():
                added = {i for i in self._copied if i in entry and entry[i].buffer in changed}
                _lose_all({self._copied[i].untyped_storage()._cdata for i in added}, live=True)
            self._copied = {i: v for i, v in self._copied.items() if i not in added | over and i in kept}

    def detach(
        self, indices: frozenset[int], places: Iterable[tuple[int, Place]] | None = None,
        changed: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Give these gradients, which lay at `places`, other memory, because they are replaced and the script may hold
        the old tensors with their values. Old tensors on buffers in `changed` are lost, because their last values are
        not here. For stale ones `note_fetched` finds that out."""
        if not indices & self._exposed:
            return
        structure = self._structure()
        kept_on = structure.buffers(
            self._table, {Part.OPTIMIZER}
        )  # a step may leave a gradient to the optimizer's state
        at = [(i, p.buffer) for i, p in (structure.kept if places is None else places) if p.buffer not in kept_on]
        buffers = {buffer for i, buffer in at if i in indices and i in self._exposed}
        if not buffers:
            return
        self._exposed -= indices
        others = any(buffer in buffers and i not in indices for i, buffer in at)
        with without_fetching(), torch.inference_mode(False):
            gone = self._table.renew(buffers - changed, keep=others)
            elsewhere = self._table.renew(buffers & changed, keep=others)
            _lose_all(gone | elsewhere if others else elsewhere)
            if self._fetched:  # gradients that shared the memory have new tensors with the same values
                now = {i: self.of(i) for i in self._fetched if i not in indices}
                self._fetched = {i: tensor for i, tensor in now.items() if tensor is not None}
                self._fetched_detector = ChangeDetector(self._fetched.values())

    def gone(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of these tensors in whose memory no gradient of the job lies, or only one that was never fetched."""
        here = {place.buffer for _, place in self._structure().kept if self._table.buffers[place.buffer].filled}
        return [t for t in tensors if (found := self._table.lookup(t)) is None or found[0] not in here]

    def assign(self, index: int, value: torch.Tensor | None) -> None:
        """The script set the gradient of a stale parameter."""
        with without_fetching():
            if value is not None and index not in self._set_by_script and value is self.of(index):
                self._table.params[index].grad = None  # the present gradient, set again
            else:
                self._set_by_script[index] = value

    def written_to(self, index: int, value: torch.Tensor) -> None:
        """The script overwrites the gradient in its own memory."""
        self._set_by_script[index] = value

    def adopted(self, index: int) -> None:
        """Steps now read and write the tensor that the script set, which the script may hold."""
        self._exposed.add(index)

    def copied(self, index: int, value: torch.Tensor) -> None:
        """Steps now use a copy of the tensor that the script set."""
        self._copied[index] = value

    def overlapping(self, indices: Iterable[int]) -> int | None:
        """The first of these whose gradient, set by the script, shares memory with another that the script set. Copies
        of them would not share it."""
        values = self._copied | {i: value for i, value in self._set_by_script.items() if value is not None}
        with without_fetching():
            spans = sorted((*_span(value), i) for i, value in values.items())
        found = {i for (_, end, i), (start, _, j) in pairwise(spans) if start < end for i in (i, j)}
        return next((i for i in indices if i in found), None)

    def clear(self) -> None:
        """Clear the parameters' own `.grad`, because they become stale; from now on only autograd uses it."""
        for parameter in self._table.params:
            if parameter.grad is not None:
                parameter.grad = None

    def accumulated(self) -> None:
        """Take over what backward() of a graph from before the last step left while the parameters were stale. Raises
        StaleGradient if it must be added to a gradient in the daemon; the job can go on without it."""
        with without_fetching():
            found = {i: p.grad for i, p in enumerate(self._table.params) if p.grad is not None}
            found = {i: grad for i, grad in found.items() if self._set_by_script.get(i) is not grad}
            kept = dict(self._structure().kept)
            lost = [i for i in found if i not in self._set_by_script and i in kept]
            for i, grad in found.items():
                if not lost and (i in self._set_by_script or self.of(i) is None):
                    self._set_by_script[i] = grad
                else:  # reading a gradient that was not kept raises
                    self._table.params[i].grad = self._set_by_script.get(i)
            if lost:
                what = "backward() of a graph from before the job's last step"
                raise _added(self._table.param_names[lost[0]], what)

    def note_fetched(self, adopted: bool) -> None:
        """The present gradients are those of the job, except those that the script set; with `adopted` these as
        well."""
        if adopted:
            self._set_by_script, self._reported, self._copied = {}, {}, {}
        self._fetched = {}
        if not self.stale:
            found = {i: self.of(i) for i, _ in self._structure().kept if i not in self._set_by_script}
            self._fetched = {i: tensor for i, tensor in found.items() if tensor is not None}
        self._fetched_detector = ChangeDetector(self._fetched.values())

    def put(self) -> None:
        """Set the `.grad` that the parameters have in the plain loop, because they are plain now."""
        with without_fetching():
            for i, parameter in enumerate(self._table.params):
                grad, now = self.of(i), parameter.grad
                if now is not grad and not (is_lost(now) and is_lost(grad)):  # lost by another job
                    parameter.grad = grad
                if grad is not None:
                    self._exposed.add(i)

    def changes(self, plain: bool) -> dict[int, torch.Tensor | None]:
        """The script's changes of gradients that the job has not taken over. `plain`: the parameters are plain, so
        their own `.grad` counts. Raises StaleGradient."""
        if not plain:
            self.accumulated()
        with without_fetching():
            if plain:
                for i, parameter in enumerate(self._table.params):
                    mine, now = self.of(i), parameter.grad
                    if now is not mine and not (is_lost(now) and is_lost(mine)):
                        self._set_by_script[i] = now
            changed = self._fetched_detector.changed()
            for i, tensor in self._fetched.items():
                if id(tensor) in changed and self.of(i) is tensor:
                    self._set_by_script[i] = tensor
            changed = self._copied_detector.changed()
            for i, tensor in self._copied.items():
                if id(tensor) in changed and i not in self._set_by_script:
                    self._set_by_script[i] = tensor
            changed = self._reported_detector.changed()
            return {
                i: value for i, value in self._set_by_script.items()
                if i not in self._reported or self._reported[i] is not value or id(value) in changed
            }  # fmt: skip

    @property
    def set_by_script(self) -> frozenset[int]:
        """The parameters whose gradients the script set since the last step."""
        return frozenset(self._set_by_script)

    def written(self) -> set[int]:
        """Buffers of the job whose local bytes the script wrote without a fetch before (zeros). A fetch must not
        overwrite them."""
        values = [
            v for v in self._set_by_script.values() if v is not None and v.layout is torch.strided and not is_stale(v)
        ]
        places = [self._table.place(v) for v in values]
        return {place.buffer for place in places if place is not None}

    def lost(self) -> dict[int, Place]:
        """Gradients that exist in the plain loop and have no values here: parameter -> place."""
        return {i: place for i, place in self._structure().dropped if i not in self._set_by_script}

    def changes_taken(self) -> None:
        """The job has taken over all changes."""
        with without_fetching():
            self._reported = dict(self._set_by_script)
            self._reported_detector = ChangeDetector(value for value in self._reported.values() if value is not None)
            self._fetched = {i: found for i, found in self._fetched.items() if i not in self._set_by_script}
            self._copied = {i: found for i, found in self._copied.items() if self._set_by_script.get(i, found) is found}
            self._copied_detector = ChangeDetector(self._copied.values())

    def step_ran(self) -> None:
        """A step has run, and has used the gradients that the script set."""
        by_script, fetched = self._set_by_script, self._fetched
        self.stale = True
        with without_fetching():
            for i in by_script:
                self._table.params[i].grad = None
        if by_script or fetched:
            self._set_by_script, self._reported, self._fetched = {}, {}, {}
            self._reported_detector = self._fetched_detector = ChangeDetector(())
            for i in {*by_script, *fetched}:
                self.of(i)


def _lose_all(storages: set[int], *, live: bool = False) -> None:
    """Mark all tensors over these storages as lost, because they do not have the values of the plain loop. `live`: in
    the plain loop the gradients still lie there. Must be called with torch functions disabled."""
    for tensor, _ in search(storages) if storages else ():
        mark_lost(tensor, live=live)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses at which a tensor begins and ends."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size() * (tensor.numel() > 0)


def _added(name: str, what: str) -> StaleGradient:
    return StaleGradient(
        f"{what} adds to the gradient of {name}, which the daemon has",
        "call job.sync() after the step and before such a backward()",
    )


# ---- the hooks


_NESTED = (dict, list, tuple)
_VERSION, _STATE, _SHAPE = (
    attrgetter("_version"),
    attrgetter("state"),
    attrgetter("shape"),
)  # for `map`, without a Python call each


class Wording(NamedTuple):
    """The words of error messages: the holder of the newer state, and remedies."""

    holder: str
    where: str
    sync: str
    load: str


def of_job(name: str) -> Wording:
    return Wording(
        f"job {name!r}",
        " in the daemon",
        "call job.sync() first; to evaluate in the daemon use job.add(...)",
        "call job.load_state() to take the change into the job, or job.sync() to drop it and bring the daemon's state"
        " back",
    )


_REPLACED = (
    "a module holds another tensor than it had: put that one back and write into it (copy_), or close the job and"
    " submit the step again; a new buffer is taken over by job.load_state()"
)


class Source(Protocol):
    """The holder of the newer state."""

    def structure(self) -> Structure:
        """The structure of the newest state."""

    def fetch(self, parts: frozenset[Part]) -> None:
        """Install these parts in the local objects and call `StalenessHooks.fetched`. Raises StaleState."""


class StalenessHooks:
    """Marks local tensors as stale, fetches them when they are read, and finds local writes. `table`: the job's
    tensors."""

    has_newer = True

    def __init__(self, words: Wording, table: StateTable, source: Source) -> None:
        fetching.install()
        self.words = words
        self._table = table
        self._source = source
        self.stale: frozenset[Part] = frozenset()
        self._mine: dict[int, torch.Tensor] = {}  # stale tensors, by id
        self._inner: list[torch.Tensor] = []  # tensors of the optimizers' state
        self._inner_buffers: set[int] | None = set()  # the buffers in which they lie; None: not looked up yet
        self._leaving: dict[tuple[int, int], frozenset[int]] = {}
        self._aliases = Aliases()
        self._modules = {id(m) for model in table.models for m in model.modules()}
        self._others: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self.gradients = Gradients(table, self, source.structure)
        self._sums = {part: Checksums() for part in Part}
        self._process = os.getpid()
        self._removed = False
        self.fetched(ALL)

    # ---- fetching

    def fetch(self, parts: frozenset[Part]) -> None:
        """Fetch the stale ones of these parts. Raises StaleState if they can't be fetched, and StaleGradient."""
        parts &= self.stale
        if not parts:
            return
        if os.getpid() != self._process:
            self.refuse("the local model was read in a forked process, which has no connection")
        if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
            raise StaleState(
                f"a step that is captured reads the local model of {self.words.holder}, which is another job",
                "steps that use one model belong in one job, in model=[...] and optimizer=[...] of it: job.add(step)",
            )
        if Part.MODEL in parts:
            self.gradients.accumulated()
            if self._source.structure().kept:
                parts |= self.stale & {Part.GRADIENTS}  # a later backward pass would add to them
        self._source.fetch(parts)

    def refuse(self, what: str, because: GpumuxError | None = None) -> None:
        """Raises StaleState, with the remedy of its cause if that has one."""
        remedy = because.remedy if because is not None and because.remedy else self.words.sync
        raise StaleState(f"{what} while {self.words.holder} holds newer state{self.words.where}", remedy) from because

    def gradient(self, index: int) -> torch.Tensor | None:
        return self.gradients.expose(index)

    def gradient_set(self, index: int, value: torch.Tensor | None) -> None:
        self.gradients.assign(index, value)

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
        """Update for a step that put new tensors in the place of some, or left places empty. The old tensors belong to
        the script from now on."""
        left = frozenset[int]() if before is after else self._left(before, after)
        if before is not after:
            self._hand_over(after)
        if not (what.model or what.optimizer or left):
            return
        table = self._table
        with without_fetching(), torch.inference_mode(False):
            if self._inner_buffers is None:
                self._inner_buffers = {found[0] for t in self._inner if (found := table.lookup(t)) is not None}
            buffers = (what.optimizer | left) & self._inner_buffers
            self._inner_buffers -= buffers
            pairs = table.replace_tensors(what.model) if what.model else []
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
                    mark_replaced(tensor)
            self._inner = [t for t in self._inner if table.lookup(t) is not None]
            if pairs:
                self._tensors = [t for _, t in table.tensors]
                self._model, self._layouts = self._model_now(), self._layouts_now()
                for _, new in pairs if Part.MODEL in self.stale else ():
                    self.mark_stale(new, Part.MODEL)

    def _hand_over(self, after: Structure) -> None:
        """Mark tensors as optimizer state that were gradients and that a step left to the optimizer."""
        buffers = after.buffers(self._table, {Part.OPTIMIZER})
        with without_fetching():
            for tensor, mark in self._held():
                found = self._table.lookup(tensor) if mark.part in (Part.GRADIENTS, None) else None
                if found is not None and found[0] in buffers:
                    self.mark_stale(tensor, Part.OPTIMIZER)

    def _left(self, before: Structure, after: Structure) -> frozenset[int]:
        """Buffers of the optimizers' state that are empty after the step."""
        key = (id(before), id(after))
        if key not in self._leaving:
            left = before.buffers(self._table, {Part.OPTIMIZER}) - {place.buffer for place in after.places()}
            self._leaving[key] = frozenset(left - after.buffers(self._table, {Part.MODEL}) if left else ())
        return self._leaving[key]

    def loaded(self, before: Structure, after: Structure) -> None:
        """Update after load_state(): tensors that are not in the new state belong to the script."""
        with without_fetching(), torch.inference_mode(False):
            self._table.renew(self._left(before, after), keep=False)

    def newer(self) -> None:
        """A step has changed the state in the daemon."""
        self.gradients.step_ran()
        if self.stale is not ALL:
            self._fall_behind(ALL - self.stale)

    def _fall_behind(self, fresh: frozenset[Part]) -> None:
        table = self._table
        with without_fetching(), torch.inference_mode(False):
            tensors: list[torch.Tensor] = []
            if Part.MODEL in fresh:
                tensors += [t for _, t in table.tensors]
                torch.autograd.graph.increment_version(tensors)  # as the step does in the plain loop
                self.gradients.clear()
            if Part.OPTIMIZER in fresh:
                tensors += self._inner
            kept = [t for i, _ in self._source.structure().kept if (t := self.gradients.of(i)) is not None]
            self._hold(tensors + (kept if Part.GRADIENTS in fresh else []))
            if Part.MODEL in fresh:
                self._model = self._model_now()
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
        """Mark these tensors, and all others over their storages, as stale."""
        index = {id(p): i for i, p in enumerate(self._table.params)}
        part = dict.fromkeys(map(id, self._inner), Part.OPTIMIZER) | {id(t): Part.MODEL for _, t in self._table.tensors}
        where = {t.untyped_storage()._cdata: part.get(id(t), Part.GRADIENTS) for t in reversed(tensors)}
        own = [(tensor, tensor.untyped_storage()._cdata) for tensor in tensors]
        own += self._aliases.of(tensors)
        for tensor, storage in own:
            mark = stale_mark(tensor)
            if mark is not None and not isinstance(mark.handler, weakref.ref) and not mark.handler.has_newer:
                mark.handler.fetch(ALL)  # another job, which only reads it, must look at it again
            if not is_stale(tensor):
                self.mark_stale(tensor, where[storage], index.get(id(tensor), -1))
        # Another job may know the memory by one of these, whose versions count apart (`x.data`).
        others = [t for t, storage in own[len(tensors) :] if where[storage] is Part.MODEL and not t.is_inference()]
        torch.autograd.graph.increment_version(others)

    def mark_stale(self, tensor: torch.Tensor, part: Part | None, index: int = -1) -> None:
        """Mark a tensor as stale."""
        mark_stale(tensor, self, part, index)
        self._mine[id(tensor)] = tensor

    def _set(self, mark: StaleMark) -> bool:
        """Whether this is a mark of this object, and not one of another job."""
        handler = mark.handler() if isinstance(mark.handler, weakref.ref) else mark.handler
        return handler is self

    def _held(self) -> list[tuple[torch.Tensor, StaleMark]]:
        """The stale tensors with their marks. Forgets those that are plain."""
        found = [
            (t, held) for t in list(self._mine.values()) if (held := stale_mark(t)) is not None and self._set(held)
        ]
        self._mine = {id(t): t for t, _ in found}
        return found

    def fetched(self, parts: frozenset[Part], *, adopted: bool = False) -> None:
        """These parts of the local state now equal the daemon's. `adopted`: also the gradients that the script set."""
        with without_fetching(), torch.inference_mode(False):
            if Part.GRADIENTS in parts:
                self._lose_gone()
            self._let_go(parts)
            self.stale -= parts
            if Part.GRADIENTS in parts:
                self.gradients.stale = False
                self.gradients.note_fetched(adopted)
            if Part.MODEL in parts:
                self.gradients.put()
            self._take_present(parts)  # in the other parts, the script's changes still count as writes
            self._note(parts)

    def _let_go(self, parts: frozenset[Part]) -> None:
        for tensor, held in self._held():
            if held.part in parts:
                unmark(tensor)
        if Part.OPTIMIZER in parts:
            for optimizer in self._table.optimizers:
                state = optimizer.state
                if isinstance(state, FetchingState) and state.is_of(self):  # a later job may use the optimizer as well
                    optimizer.state = state.plain
        if Part.MODEL in parts:
            watch_modules(self, False)

    def _lose_gone(self) -> None:
        """Mark tensors as lost that were gradients or views of them and no longer are: no fetch has their values."""
        behind = [tensor for tensor, held in self._held() if held.part is Part.GRADIENTS]
        gone = self.gradients.gone(behind)
        for tensor in gone:
            mark_lost(tensor)
        self._table.forsake(gone)  # a later gradient of the same parameter lies in the same place

    @contextmanager
    def suspended(self, *, writes: bool = False) -> Iterator[None]:
        """Inside, all tensors are plain and nothing is fetched, for gpumux's own work. Raises LocalWrite for an earlier
        write, unless `writes`."""
        if not writes:
            self.check_writes()
        behind, held = self.stale, self._held()
        states = list(map(_STATE, self._table.optimizers))
        self._let_go(ALL)
        for tensor, _ in held:
            unmark(tensor)
        self.stale = frozenset()
        failed = writes  # what was refused still counts as a write
        try:
            yield
            failed = False
        finally:
            self.stale = behind
            for tensor, one in held:
                self.mark_stale(tensor, one.part, one.index)
            if Part.OPTIMIZER in behind:
                for optimizer, state in zip(self._table.optimizers, states, strict=True):
                    optimizer.state = state
            watch_modules(self, Part.MODEL in behind)
            if not failed:
                with without_fetching():
                    self._take_present()

    # ---- local writes

    def _take_present(self, parts: frozenset[Part] = ALL) -> None:
        """Take the present tensors of these parts as those that the next check expects."""
        if Part.MODEL in parts:
            self._tensors = [t for _, t in self._table.tensors]
            self._stateless = not (self._tensors or self._table.optimizers or self._table.models)
            self._model, self._layouts = self._model_now(), self._layouts_now()
        if Part.OPTIMIZER not in parts or Part.OPTIMIZER in self.stale:
            return  # a state put in the place of a stale one still counts as a write
        self._states = [o.state for o in self._table.optimizers]
        entries = [entry for state in self._states for entry in state.values()]
        self._flat = all(type(e) is dict and not any(isinstance(v, _NESTED) for v in e.values()) for e in entries)
        self._leaves = self._leaves_now()
        self._dictionaries = [
            (space, dict(space))
            for state in self._states
            for space in (state, *state.values())
            if isinstance(space, dict)
        ]
        self._inner = [t for t in self._leaves if isinstance(t, torch.Tensor)]
        self._inner_buffers = None
        self._optimizer = self._optimizer_now()

    def _note(self, parts: frozenset[Part]) -> None:
        if Part.MODEL in parts:
            self._sums[Part.MODEL].forget()
            self._sums[Part.MODEL].note({(s := t.untyped_storage())._cdata: s for t in self._tensors}.values())
        if Part.OPTIMIZER in parts:
            self._sums[Part.OPTIMIZER].forget()
            self._sums[Part.OPTIMIZER].note({(s := t.untyped_storage())._cdata: s for t in self._inner}.values())

    def _model_now(self) -> tuple[list[int], list[int]]:
        """(versions, addresses) of parameters and buffers."""
        return list(map(_VERSION, self._tensors)), list(map(torch.Tensor.data_ptr, self._tensors))

    def _layouts_now(self) -> list[Any]:
        """Of parameters and buffers. While these are stale, no script changes it: it would touch them."""
        return [*map(_SHAPE, self._tensors), *map(torch.Tensor.stride, self._tensors)]

    def _optimizer_now(self) -> tuple[list[int], list[int]]:
        inner = self._inner
        return list(map(_VERSION, inner)), list(map(torch.Tensor.data_ptr, inner))

    def joined(self) -> None:
        """Tensors have become part of the model, which is plain."""
        parts = frozenset({Part.MODEL})
        with without_fetching():
            self._take_present(parts)
            self._note(parts)

    def rewritten(self, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Those of these tensors of the model that the script wrote in place since they were fetched. They don't count
        as writes from now on. Must be called with torch functions disabled."""
        if Part.MODEL in self.stale:
            return []
        found = []
        wanted = set(map(id, tensors))
        versions, addresses = self._model
        for i, tensor in enumerate(self._tensors):
            if id(tensor) not in wanted or tensor.data_ptr() != addresses[i]:
                continue
            storage = tensor.untyped_storage()
            if self._sums[Part.MODEL].differs(storage):
                found.append(tensor)
                self._sums[Part.MODEL].note([storage])
                versions[i] = tensor._version
        return found

    def took(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """The script put a tensor in the place of one of the model's, which is plain, and the job takes it over."""
        at = next(i for i, tensor in enumerate(self._tensors) if tensor is old)
        self._tensors[at] = new
        self._model[0][at], self._model[1][at] = new._version, new.data_ptr()
        self._layouts = self._layouts_now()
        self._sums[Part.MODEL].replace(old.untyped_storage(), new.untyped_storage())

    def check_writes(self, *, bytes_too: bool = False) -> None:
        """Raises LocalWrite if local state was written or replaced since the last verb. A write that was undone since
        (averaged weights for an evaluation) does not count. `bytes_too`: compare checksums even if no counter
        changed."""
        if self._stateless:
            return
        with without_fetching():
            versions, addresses = self._model_now()
            counted = versions != self._model[0]
            if counted:
                self._refuse_another_job()
            written = addresses != self._model[1] or self._table.replaced() or self._optimizer_written()
            written = written or (counted if Part.MODEL in self.stale else self._layouts_now() != self._layouts)
            if Part.OPTIMIZER not in self.stale and not written:
                counted = counted or self._optimizer_now()[0] != self._optimizer[0]
            if written or ((bytes_too or counted) and any(s.changed() for s in self._sums.values())):
                self._refuse_write()
            if counted:
                self._take_present()

    def fetch_from_others(self) -> bool:
        """Fetch what other jobs, over the same model, have newer. Returns whether there was something."""
        others = [t for _, t in self._table.tensors if is_stale(t) and not self._set(stale_mark(t))]  # type: ignore[arg-type]
        if others:
            with torch._C._EnableTorchFunction():  # callers have switched it off
                fetch_arguments(others)
        return bool(others)

    def _refuse_another_job(self) -> None:
        """Raises LocalWrite if another job has newer values of these tensors, after fetching them. A step of the other
        job counts the tensors' versions on, like any write."""
        if self.fetch_from_others():
            raise LocalWrite(
                f"another job has trained tensors of {self.words.holder}, whose values{self.words.where} are older",
                "steps that use one model belong in one job, in model=[...] and optimizer=[...] of it: job.add(step);"
                " or call job.load_state() to take the newer values into this job",
            )

    def check_states(self) -> None:
        """Raises LocalWrite if an optimizer's stale dictionary, or an entry in it, was replaced, because a fetch would
        overwrite it."""
        if self._optimizer_written():
            self._refuse_write()

    @contextmanager
    def written_entries(self) -> Iterator[None]:
        """Inside, stale dictionaries of the optimizers' state are without what the script wrote into them by references
        of its own. Afterwards they have it again."""
        written = [
            (space, noted, dict(space)) for space, noted in self._dictionaries
            if len(space) != len(noted) or not all(map(is_, space.values(), noted.values()))
        ] if Part.OPTIMIZER in self.stale else []  # fmt: skip
        for space, noted, _ in written:
            space.clear()
            space.update(noted)
        try:
            yield
        finally:
            for space, noted, content in written:
                fetched = dict(space)
                space.clear()
                mine = {key for key, value in content.items() if noted.get(key, _NESTED) is not value}
                space.update({key: content[key] if key in mine else fetched.get(key, content[key]) for key in content})

    def _same_states(self) -> bool:
        return all(map(is_, map(_STATE, self._table.optimizers), self._states))

    def _refuse_write(self) -> None:
        with without_fetching():
            now, before = zip(*self._model_now(), strict=True), zip(*self._model, strict=True)
            # Of the optimizer's state no name says more than "optimizer" does.
            names = [name for (name, _), a, b in zip(self._table.tensors, now, before, strict=False) if a != b]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        named = f" ({names[0]}{more})" if names else ""
        raise LocalWrite(
            f"the local model or optimizer was changed{named} while {self.words.holder} holds its state"
            f"{self.words.where}",
            _REPLACED if self._table.replaced() else self.words.load,
        )

    def _optimizer_written(self) -> bool:
        """Whether an optimizer holds other state than at the last check."""
        if not self._same_states():
            return True
        stale = Part.OPTIMIZER in self.stale
        if not stale and self._optimizer_now()[1] != self._optimizer[1]:
            return True
        try:
            leaves = self._leaves_now()
        except TypeError:
            return True  # an entry was replaced by something that is no dictionary
        if len(leaves) == len(self._leaves) and all(map(is_, leaves, self._leaves)):
            return False
        return stale or len(leaves) != len(self._leaves) or not all(map(_alike, leaves, self._leaves))

    def _leaves_now(self) -> list[Any]:
        entries = [entry for state in map(plain_state, self._states) for entry in state.values()]
        if self._flat:  # as with every optimizer of torch
            return list(chain.from_iterable(map(dict.values, entries)))
        return list(_leaves(entries))

    def gradient_changes(self) -> dict[int, torch.Tensor | None]:
        """The script's changes of gradients since the last step or verb: None, or a tensor of values."""
        return self.gradients.changes(Part.MODEL not in self.stale)

    def remove(self) -> None:
        """Make the local objects plain again, because the job is over. A gradient that was not kept still can't be
        read."""
        if self._removed:
            return
        self._removed = True
        with without_fetching():
            if Part.MODEL in self.stale:
                with suppress(StaleGradient):  # there is no job that could take it over
                    self.gradients.accumulated()
                self.gradients.put()
            for tensor, held in self._held():
                if held.part is None:
                    mark_lost(tensor)
            self._lose_gone()
            self._let_go(ALL)
            self._mine = {}
        self.stale = frozenset()
        for noted in self._sums.values():
            noted.forget()


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
