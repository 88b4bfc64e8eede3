"""Random slots: an operator that names an earlier slot draws that slot's numbers again.

The executor's default generator is seeded with the job's seed and nothing else in the process draws
from it, so ordinary draws follow each other as in a plain run. Recomputation (checkpointing) repeats
draws: the generator is put back to where it stood, and afterwards to where it was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpumux.program.ir import Program


def repeated_slots(program: Program) -> frozenset[int]:
    """Slots named by more than one operator: the only ones that cost anything."""
    seen: set[int] = set()
    repeated: set[int] = set()
    for op in program.ops:
        if op.random is not None:
            (repeated if op.random in seen else seen).add(op.random)
    return frozenset(repeated)


class Replays:
    """Generator states of one step, by random slot."""

    def __init__(self, slots: frozenset[int]) -> None:
        self.slots = slots
        self._states: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        self._states.clear()

    @contextmanager
    def drawing(self, slot: int) -> Iterator[None]:
        """Run one operator of a repeated slot inside this."""
        generator = torch.default_generator
        before = generator.get_state()
        first = self._states.get(slot)
        if first is None:
            self._states[slot] = before
            yield
            return
        generator.set_state(first)
        try:
            yield
        finally:
            generator.set_state(before)
