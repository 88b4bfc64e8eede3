"""Random slots: an operator that names an earlier slot draws that slot's numbers again.

The executor's default generator is seeded with the job's seed and nothing else in the process draws
from it, so ordinary draws follow each other as in a plain run. Recomputation (checkpointing) repeats
draws: the generator is put back to where it stood, and afterwards to where it was before.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpumux.errors import JobFailed
from gpumux.model import GENERATOR_BYTES
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


@contextmanager
def drawing_from(stream: torch.Tensor) -> Iterator[None]:
    """Run one operator of a random stream inside this: it draws from the generator whose state `stream` holds, which
    moves on. Raises RuntimeError when the bytes are no generator's state."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.set_state(stream.clone())  # torch counts the offset of a view twice
    try:
        yield
        stream.copy_(generator.get_state())
    finally:
        generator.set_state(before)


def move_generator(generator: torch.Generator, memory: mmap.mmap, at: int, nbytes: int, into_device: bool) -> None:
    """Copy the state of a job's generator to or from a transfer's segment. Raises JobFailed for what is none."""
    if at + GENERATOR_BYTES > nbytes:
        raise JobFailed(f"the transfer's segment has {nbytes} bytes, too few for a generator", "make it larger")
    if not into_device:
        drawn = generator.get_state().numpy().tobytes()
        memory[at : at + 8 + len(drawn)] = len(drawn).to_bytes(8, "little") + drawn
        return
    length = int.from_bytes(memory[at : at + 8], "little")
    if length == 0:
        return
    if length > GENERATOR_BYTES - 8:
        raise JobFailed(f"a generator of {length} bytes", "put back what a snapshot holds")
    state = torch.frombuffer(bytearray(memory[at + 8 : at + 8 + length]), dtype=torch.uint8)
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobFailed("these bytes are no generator's state", "put back what a snapshot holds") from error
