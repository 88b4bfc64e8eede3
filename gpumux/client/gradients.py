"""The gradients as the script sees them between two steps: what `p.grad` gives, and what the script made of it.

A gradient that the job keeps is fetched when it is read. One that was there only inside the step exists in the plain loop, so
`p.grad` is not None, and reading it raises StaleGradient. What the script does to gradients (None, zeros, values of its own) is told
to the job at the next verb, which goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpumux.client.checksums import sums
from gpumux.client.fetching import Keeper, held_of, hold, leave_lost, let_go, plainly
from gpumux.client.state import Part, Place, StateTable
from gpumux.client.structure import Structure
from gpumux.errors import StaleGradient

_NEVER = (-1, -1)


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
        self._told: dict[int, tuple[int, int]] = {}  # of these, what the job knows
        self._fetched: dict[int, tuple[torch.Tensor, int, tuple[torch.Tensor, ...]]] = {}
        self._put: dict[
            int, tuple[torch.Tensor, int]
        ] = {}  # kept ones that are behind, as the plain parameters have them

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

    def remade(self, indices: frozenset[int]) -> None:
        """A step makes these anew. The script may still hold the tensors they were: those keep their values where they were
        fetched, and are lost where not."""
        if self._shown:
            kept = dict(self._structure().kept)
            for i in indices & self._shown:
                self._shown.discard(i)
                if i in kept:
                    with plainly(), torch.inference_mode(False):
                        old = self._table.local(kept[i])
                        behind = held_of(old) is not None
                        if self._table.renew(("grad", i), kept[i]) and behind:
                            self.leave(i, old)

    def leave(self, index: int, old: torch.Tensor) -> None:
        """The script's own tensor takes this one's place. What the script still holds of it keeps its values, if they are there."""
        if held_of(old) is not None:
            let_go(old)
            hold(old, self._keeper, None, index)
            leave_lost(old)

    def give(self, index: int, value: torch.Tensor | None) -> None:
        """The script set it."""
        self._given[index] = value

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
        self._fetched = {}
        if adopted:
            self._given, self._told = {}, {}
        if not self.stale:
            for i, _ in self._structure().kept:
                if i in self._given:
                    continue
                tensor = self.of(i)
                assert tensor is not None
                self._fetched[i] = (tensor, tensor._version, sums(tensor.untyped_storage()))

    def put(self) -> None:
        """The parameters are plain, and have the gradients that they have in the plain loop."""
        with plainly():
            for i, parameter in enumerate(self._table.params):
                grad = self.of(i)
                if parameter.grad is not grad:
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
                    now = parameter.grad
                    if now is not self.of(i):
                        self._given[i] = now
            for i, (tensor, version, bits) in self._fetched.items():
                changed = tensor._version != version or not all(map(torch.equal, bits, sums(tensor.untyped_storage())))
                if changed and self.of(i) is tensor:
                    self._given[i] = tensor
            return {i: value for i, value in self._given.items() if self._told.get(i, _NEVER) != _state(value)}

    @property
    def given(self) -> frozenset[int]:
        """The parameters whose gradients the script set since the last step."""
        return frozenset(self._given)

    def written(self) -> set[int]:
        """Buffers of the job whose local bytes the script wrote, without a fetch before: zeros. A fetch leaves them alone."""
        places = [self._table.place(value) for value in self._given.values() if value is not None]
        return {place.buffer for place in places if place is not None}

    def lost(self) -> dict[int, Place]:
        """Gradients that are there in the plain loop, and have no values here: parameter -> place."""
        return {i: place for i, place in self._structure().dropped if i not in self._given}

    def told(self) -> None:
        """The job knows of all changes."""
        with plainly():
            self._told = {i: _state(value) for i, value in self._given.items()}
            self._fetched = {i: found for i, found in self._fetched.items() if i not in self._given}

    def passed(self) -> None:
        """A step has run: what the script gave was for it."""
        given, fetched = self._given, self._fetched
        self.stale = True
        with plainly():
            for i in given:
                self._table.params[i].grad = None
        if given or fetched:
            self._given, self._told, self._fetched = {}, {}, {}
            for i in {*given, *fetched}:
                self.of(i)


def _added(name: str, what: str) -> StaleGradient:
    return StaleGradient(
        f"{what} adds to the gradient of {name}, which the daemon has",
        "call job.sync() after the step and before such a backward()",
    )


def _state(value: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if value is None else (id(value), value._version)
