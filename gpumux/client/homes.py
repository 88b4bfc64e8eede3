"""Where each thing that a step leaves behind lies from then on: which of the job's buffers, and the copies that takes.

What lies on the job's memory already stays there. Anything else goes to a buffer of its own, known by its path, so that a step that
makes it anew finds the same place each time. Things that overlap in the memory the step made share one buffer, each at its
own offset: what a later step writes to one of them, the others have too, as in the plain loop. No two things that share nothing
are given the same place, whatever shared it before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from gpumux.client.ledger import Record
from gpumux.client.state import Place, StateTable
from gpumux.client.structure import frozen_leaves, path_name
from gpumux.client.trace import DeviceExit, RawTrace
from gpumux.errors import CaptureError
from gpumux.program.ir import ITEM_BYTES, View, extent

_ALIGNED = 16  # bytes: the largest element


def place_of(record: Record, view: int) -> Place | None:
    """The job buffer place of a view that lies on state, else None."""
    v = record.views[view]
    storage = record.storages[v.storage]
    if storage.kind != "state":
        return None
    return Place(storage.key, getattr(torch, v.dtype), v.size, v.stride, v.offset)


@dataclass(slots=True, eq=False)
class _Leaf:
    path: tuple[Any, ...]
    name: str
    view: int
    place: Place | None = None

    @property
    def gradient(self) -> bool:
        return bool(self.path[0] == "grad")


Span = tuple[int, int]  # first byte, and the one behind the last


class _Taken:
    """Which parts of which buffers are somebody's."""

    def __init__(self) -> None:
        self._spans: defaultdict[int, list[Span]] = defaultdict(list)

    def add(self, place: Place) -> None:
        self._spans[place.buffer].append(_span(place))

    def overlaps(self, place: Place) -> bool:
        return place.buffer in self._spans and any(_meet(_span(place), span) for span in self._spans[place.buffer])


class Homes:
    """`keep`: the parameters whose gradients the job keeps. Raises CaptureError for a buffer of a module that shares memory with
    something else the step leaves behind: its place is given."""

    def __init__(self, raw: RawTrace, table: StateTable, keep: frozenset[int]) -> None:
        self._record = raw.record
        self._table = table
        self._leaves = {leaf.path: leaf for leaf in self._found(raw)}
        self._copied: list[tuple[_Leaf, list[_Leaf]]] = []  # what is copied, and who needs it
        for leaf in self._leaves.values():
            leaf.place = place_of(self._record, leaf.view)
        self._refuse_shared_buffers(raw)
        fresh = [leaf for leaf in self._leaves.values() if leaf.place is None]
        self._settle()
        self.anew = frozenset([*(self.of(leaf.path) for leaf in fresh), *(place for place, _ in raw.replaced)])
        self.kept = self._kept(keep)

    def of(self, path: tuple[Any, ...]) -> Place:
        place = self._leaves[path].place
        assert place is not None
        return place

    def copies(self) -> list[tuple[Place, int]]:
        """(place, view) of all that must be brought to its place; gradients that are not kept need not be."""
        wanted = [
            leaf for leaf, users in self._copied
            if any(not one.gradient or one.path[1] in self.kept for one in users)
        ]  # fmt: skip
        return [(self.of(leaf.path), leaf.view) for leaf in wanted]

    def _found(self, raw: RawTrace) -> Iterator[_Leaf]:
        for optimizer in raw.optimizers:
            for _, tree in optimizer:
                for leaf in frozen_leaves(tree):
                    if isinstance(leaf, DeviceExit):
                        yield _Leaf(leaf.path, path_name(leaf.path, self._table), leaf.view)
        for index, view in sorted(raw.gradients.items()):
            yield _Leaf(("grad", index), f"grad.{self._table.param_names[index]}", view)

    def _settle(self) -> None:
        taken = _Taken()
        for _, tensor in self._table.tensors:
            place = self._table.place(tensor)
            if place is not None:
                taken.add(place)
        fresh: defaultdict[int, list[_Leaf]] = defaultdict(list)
        for leaf in self._leaves.values():
            if leaf.place is not None:
                taken.add(leaf.place)
            else:
                fresh[self._record.views[leaf.view].storage].append(leaf)
        groups = {leaf.path: group for found in fresh.values() for group in self._overlapping(found) for leaf in group}
        for leaf in self._leaves.values():  # in their order, by which buffers are numbered
            if leaf.place is None:
                group = groups[leaf.path]
                if len(group) == 1:
                    self._alone(leaf, taken)
                else:
                    self._together(group, taken)

    def _overlapping(self, leaves: list[_Leaf]) -> list[list[_Leaf]]:
        """Leaves on one storage, in groups that have no byte in common."""
        if len(leaves) == 1:
            return [leaves]
        groups: list[list[_Leaf]] = []
        end = 0
        for start, stop, order in sorted((*self._bytes(leaf), i) for i, leaf in enumerate(leaves)):
            if groups and start < end:
                groups[-1].append(leaves[order])
            else:
                groups.append([leaves[order]])
            end = max(end, stop)
        return [sorted(group, key=leaves.index) for group in groups]

    def _bytes(self, leaf: _Leaf) -> Span:
        view = self._record.views[leaf.view]
        return view.offset * ITEM_BYTES[view.dtype], extent(view)

    def _alone(self, leaf: _Leaf, taken: _Taken) -> None:
        view = self._record.views[leaf.view]
        layout = getattr(torch, view.dtype), view.size, view.stride
        leaf.place = self._free(leaf.path, leaf.name, layout, taken)
        taken.add(leaf.place)
        self._copied.append((leaf, [leaf]))

    def _together(self, group: list[_Leaf], taken: _Taken) -> None:
        spans = [self._bytes(leaf) for leaf in group]
        base = min(start for start, _ in spans) // _ALIGNED * _ALIGNED
        views = [self._record.views[leaf.view] for leaf in group]
        key = tuple(
            (leaf.path, v.dtype, v.size, v.stride, start - base)
            for leaf, v, (start, _) in zip(group, views, spans, strict=True)
        )
        nbytes = max(end for _, end in spans) - base
        whole = self._free(("together", key), group[0].name, (torch.uint8, (nbytes,), (1,)), taken)
        for leaf, view in zip(group, views, strict=True):
            offset = view.offset - base // ITEM_BYTES[view.dtype]
            leaf.place = Place(whole.buffer, getattr(torch, view.dtype), view.size, view.stride, offset)
        taken.add(whole)
        copied: list[tuple[Span, bool]] = []
        for leaf, (start, end) in sorted(zip(group, spans, strict=True), key=lambda one: one[1][0] - one[1][1]):
            view = self._record.views[leaf.view]
            if not any(dense and a <= start and end <= b for (a, b), dense in copied):
                copied.append(((start, end), _dense(view)))
                self._copied.append((leaf, group))

    def _free(self, path: tuple[Any, ...], name: str, layout: Any, taken: _Taken) -> Place:
        """The place known by this path. While something else lies there, another one, as a history has that is passed on."""
        for turn in count():
            tensor = self._table.placeholder((*path, "turn", turn) if turn else path, name, *layout)
            place = self._table.place(tensor)
            assert place is not None
            if not taken.overlaps(place):
                return place
        raise AssertionError("a new buffer is nobody's")

    def _kept(self, keep: frozenset[int]) -> frozenset[int]:
        """The gradients whose values the job has: also those in memory that it keeps for another's sake."""
        places = {leaf.path[1]: self.of(leaf.path) for leaf in self._leaves.values() if leaf.gradient}
        kept = keep & places.keys()
        if len(kept) == len(places):
            return kept
        needed = _Taken()
        for leaf in self._leaves.values():
            if not leaf.gradient:
                needed.add(self.of(leaf.path))
        for _, tensor in self._table.tensors:
            if (place := self._table.place(tensor)) is not None:
                needed.add(place)
        for index in kept:
            needed.add(places[index])
        while True:
            more = {i for i in places.keys() - kept if needed.overlaps(places[i])}
            if not more:
                return kept
            kept |= more
            for index in more:
                needed.add(places[index])

    def _refuse_shared_buffers(self, raw: RawTrace) -> None:
        """A buffer of a module stays where it is, so what takes its place is copied there, and shares nothing."""
        if not raw.replaced:
            return
        table, views = self._table, self._record.views
        names = {p: name for name, tensor in table.tensors if (p := table.place(tensor)) is not None}
        left = [(leaf.name, leaf.view) for leaf in self._leaves.values()]
        staying = names.keys() - {place for place, _ in raw.replaced}
        for at, (place, view) in enumerate(raw.replaced):
            name, v, lies = names.get(place, "a buffer"), views[view], place_of(self._record, view)
            others = left + [(names.get(p, "a buffer"), w) for p, w in raw.replaced[:at]]
            shared = [
                one for one, w in others if views[w].storage == v.storage and _meet(_span_of(views[w]), _span_of(v))
            ]
            shared += [
                n for p, n in names.items() if p.buffer == place.buffer and p != place and _meet(_span(p), _span(place))
            ]
            if lies is not None:
                shared += [names[p] for p in staying if p.buffer == lies.buffer and _meet(_span(p), _span(lies))]
            if shared:
                raise CaptureError(
                    f"the step replaces the buffer {name} by a tensor that shares memory with {shared[0]}",
                    f"give {name} a copy of its own: .clone()",
                )


def _span(place: Place) -> Span:
    return _span_of(View(0, str(place.dtype).removeprefix("torch."), place.size, place.stride, place.offset))


def _span_of(view: View) -> Span:
    return view.offset * ITEM_BYTES[view.dtype], extent(view)


def _meet(a: Span, b: Span) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def _dense(view: View) -> bool:
    """Whether its elements are all that its bytes hold."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(view.size, view.stride, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True
