"""Fingerprint of everything that Python could change between two calls of a step; checked cheaply at every call.

A captured step is replayed without running its Python code again. So everything that the code may have decided by is
found once, at capture (`walk.py`), and watched (`watches.py`). If a reading differs, another variant must be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import call, is_
from typing import Any

import torch

from gpumux.capture.source import Executed
from gpumux.capture.state import UNRETURNED, Identity, Reading, Watch, layout
from gpumux.capture.watch.walk import Walk
from gpumux.capture.watch.watches import random_states
from gpumux.errors import NotRepeatable


@dataclass(slots=True)
class Change:
    """A value that differs between two readings, with functions that restore either."""

    name: str
    old: Any
    new: Any
    flag: bool  # whether it is a training flag, which a step may change
    restore: Callable[[], None]
    again: Callable[[], None]


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

    def unchanged(self) -> bool:
        """Whether all objects are the same as at the last `remember`. Raises KeyError if a watched name is gone."""
        if self._seen is None:
            return False
        objects, lengths, contents = self._now()
        old_objects, old_lengths, old_contents = self._seen
        return lengths == old_lengths and contents == old_contents and all(map(is_, old_objects, objects))


class Fingerprint:
    """The fingerprint of one step function and the models and optimizers it was submitted with. `executed`: code that
    is known to run in it; `identity`: see StateTable.identity. Raises CaptureError for an object that can't be
    watched."""

    def __init__(
        self, fn: Any, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], params: Sequence[torch.Tensor],
        *, executed: Executed | None = None, identity: Identity = layout,
    ) -> None:  # fmt: skip
        self._given = (fn, models, optimizers, params)
        self._executed = executed if executed is not None else {}
        self._identity = identity
        self._walk()

    def _walk(self) -> None:
        walk = Walk(*self._given, executed=self._executed)
        self.watches = walk.watches
        self.modules = walk.modules
        self.other_optimizers = walk.other_optimizers
        self.spaces = walk.spaces
        self.fields = walk.fields
        self.lists = walk.lists
        self.cells = walk.cells
        self._generators = walk.generators
        self._walked = walk.walked
        self._identity_check = IdentityCheck(self.watches)

    def extend(self, executed: Executed) -> bool:
        """Add what this code reads to what is watched. False if all of it was known."""
        fresh = {i: found for i, found in executed.items() if i not in self._walked and Walk.matters(*found)}
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
        self._identity_check.remember()

    def holds(self) -> bool:
        """Whether all values are the same as at the last `remember`."""
        try:
            if self._identity_check.unchanged():
                return True
            if not self._same(self._remembered, self.read()):
                return False
        except (KeyError, AttributeError, NotRepeatable):
            return False  # a watched name is gone
        self._identity_check.remember()
        return True

    def _same(self, old: list[Reading], new: list[Reading]) -> bool:
        return all(w.same(a, b, self._identity) for w, a, b in zip(self.watches, old, new, strict=True))

    def values(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of the Python variables that the step's code reads, except modules' buffers."""
        for watch, reading in zip(self.watches, self.read(), strict=True):
            for i, value in enumerate(reading if not watch.buffers else ()):
                yield watch.names(i), value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors among `values` that have memory."""
        for name, value in self.values():
            known = isinstance(value, torch.Tensor) and not isinstance(value, UNRETURNED)
            if known and value.layout is torch.strided:
                yield name, value

    def random_states(self) -> list[tuple[str, Any]]:
        """(name, state) of Python's and numpy's generators, from which no Program can draw."""
        return random_states(self._generators)

    def changes(self, before: list[Reading] | None = None) -> list[Change]:
        """The values that differ from an earlier reading (default: that of `remember`), such as those that a step
        changes while it is traced."""
        found: list[Change] = []
        for w, old, new in zip(self.watches, self._remembered if before is None else before, self.read(), strict=True):
            if not w.same(old, new, self._identity):
                put, again = partial(w.restore, old), partial(w.restore, new)
                found += [
                    Change(name, a, b, w.flag, put, again) for name, a, b in w.differences(old, new, self._identity)
                ]
        return found
