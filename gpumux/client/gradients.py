"""The gradients as the script sees them between two steps: what `p.grad` gives, and what the script made of it.

A gradient that the job keeps is fetched when it is read. One that was there only inside the step exists in the plain loop, so
`p.grad` is not None, and reading it raises StaleGradient. What the script does to gradients (None, zeros, values of its own) is told
to the job at the next verb, which goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch

from gpumux.client.aliases import search
from gpumux.client.checksums import sums
from gpumux.client.fetching import Keeper, held_of, is_lost, lose, plainly
from gpumux.client.state import Part, Place, StateTable
from gpumux.client.structure import Structure
from gpumux.errors import StaleGradient


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
        """A step ran, from `before`. It made the gradients of `remade` anew, and its operators wrote to these buffers in place."""
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
        """These gradients become others, which lay at `places`. The tensors that they were are the script's, with their values: so
        the job takes other memory. They are lost where `changed` says that the values are elsewhere; of those that are behind,
        `settle` finds that out."""
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
        """The first of these whose gradient, given by the script, shares memory with another that was: the copies would not."""
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
        """Take what backward() of a graph from before the last step left, while the parameters are behind. Raises StaleGradient
        where it belongs on top of a gradient that the daemon has; the job can go on without it."""
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
        """Raises StaleGradient where backward() on the local model added to a gradient that is behind: its memory holds nothing
        yet, and autograd asks no tensor's class. The job can go on without it."""
        with plainly():
            changed = [i for i, (grad, v) in self._put.items() if grad._version != v and held_of(grad) is not None]
            self._put = {i: (grad, grad._version) for i, (grad, _) in self._put.items()}
        if changed:
            raise _added(self._table.param_names[changed[0]], "backward() on the local model")

    def changes(self, plain: bool) -> dict[int, torch.Tensor | None]:
        """What the script made of them since the job was told. `plain`: the parameters are, and say so themselves. Raises
        StaleGradient."""
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
        """Buffers of the job whose local bytes the script wrote, without a fetch before: zeros. A fetch leaves them alone."""
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
    """Whatever the script holds of this memory, it has not the plain loop's values any more. Needs torch functions to be off."""
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
