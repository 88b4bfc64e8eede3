"""What Python could change between two calls of a step, read cheaply at every call.

A captured step is replayed without running its Python again. So everything its Python may have
decided by is found once, at capture (`walk.py`), and watched (`watch.py`). A reading that differs means
another variant must be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpumux.capture.source import Executed
from gpumux.capture.state import Identity, Pulse, Reading, layout
from gpumux.capture.watch.walk import Walk
from gpumux.capture.watch.watches import random_states
from gpumux.errors import NotRepeatable


@dataclass(slots=True)
class Change:
    """A value that differs between two readings, and how to put either back."""

    name: str
    old: Any
    new: Any
    flag: bool  # a training flag: may be carried over; anything else may not
    restore: Callable[[], None]
    again: Callable[[], None]


class Fingerprint:
    """Built for one step function and the models and optimizers it was submitted with. `executed`: code
    that is known to run in it; `identity`: which of the job's tensors one is. Raises CaptureError for
    what can't be watched."""

    def __init__(
        self, fn: Any, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], params: Sequence[torch.Tensor],
        executed: Executed | None = None, identity: Identity = layout,
    ) -> None:  # fmt: skip
        self._given = (fn, models, optimizers, params)
        self._executed = executed if executed is not None else {}
        self._identity = identity
        self._walk()

    def _walk(self) -> None:
        walk = Walk(*self._given, self._executed)
        self.watches = walk.watches
        self.modules = walk.modules
        self.strangers = walk.strangers
        self.spaces = walk.spaces
        self.fields = walk.fields
        self.lists = walk.lists
        self.cells = walk.cells
        self._generators = walk.generators
        self._walked = walk.walked
        self._pulse = Pulse(self.watches)

    def extend(self, executed: Executed) -> bool:
        """Watch what newly seen code reads too. False when it was all known."""
        fresh = {i: found for i, found in executed.items() if i not in self._walked and Walk.matters(*found)}
        if not fresh:
            return False
        self._executed.update(fresh)
        self._walk()
        return True

    # ---- reading -----------------------------------------------------------------------------------

    def read(self) -> list[Reading]:
        """The present values. Raises NotRepeatable when a name has gone."""
        try:
            return [w.read() for w in self.watches]
        except (KeyError, AttributeError) as gone:
            raise NotRepeatable(
                f"{gone.args[0] if gone.args else gone} existed when the step was captured and is gone",
                "submit the step again",
            ) from None

    def settle(self) -> None:
        """What is there now is what `holds` compares with."""
        self._settled = self.read()
        self._pulse.settle()

    def holds(self) -> bool:
        """Whether everything is as it was at the last `settle`."""
        try:
            if self._pulse.steady():
                return True
            if not self._same(self._settled, self.read()):
                return False
        except (KeyError, AttributeError, NotRepeatable):
            return False  # a name it watched has gone
        self._pulse.settle()
        return True

    def _same(self, old: list[Reading], new: list[Reading]) -> bool:
        return all(w.same(a, b, self._identity) for w, a, b in zip(self.watches, old, new, strict=True))

    def random_states(self) -> list[tuple[str, Any]]:
        """Python's and numpy's generators, which no Program can draw from."""
        return random_states(self._generators)

    def changes(self, before: list[Reading] | None = None) -> list[Change]:
        """What differs now from an earlier reading (the settled one by default): a step that changes it
        while it is traced."""
        found: list[Change] = []
        for w, old, new in zip(self.watches, self._settled if before is None else before, self.read(), strict=True):
            if not w.same(old, new, self._identity):
                put, again = partial(w.restore, old), partial(w.restore, new)
                found += [
                    Change(name, a, b, w.flag, put, again) for name, a, b in w.differences(old, new, self._identity)
                ]
        return found
