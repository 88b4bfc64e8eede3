"""Random slots and streams: which numbers each random operator of a step draws.

The executor's default generator is seeded with the job's seed, and nothing else in the process draws from it, so draws
follow each other as in a plain run. An operator that names an earlier operator's random slot draws that one's numbers
again (recomputation, checkpointing): the generator is set back to its state at that slot, and afterwards to its state
before.

A random stream is a generator in the job's state. Operators that name one draw from it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpumux.errors import JobFailed
from gpumux.program.ir import Program
from gpumux.types import GENERATOR_BYTES, generator_region, generator_state


def repeated_slots(program: Program) -> frozenset[int]:
    """Slots named by more than one operator. Only their states are kept."""
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
    def drawing(self, slot: int, generator: torch.Generator) -> Iterator[None]:
        """Run one operator of a repeated slot, which draws from `generator`, inside this context."""
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


class RandomStreams:
    """The generators of random streams during a step. Their state is read from the job's at the first draw, and written
    back when the step ends."""

    def __init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}  # by where the bytes lie
        self._drawn: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        self._drawn.clear()

    def of(self, stream: torch.Tensor) -> torch.Generator:
        """The generator whose state `stream` holds. Raises RuntimeError if these bytes are no generator's state."""
        key = stream.data_ptr()
        if key not in self._drawn:
            generator = self._generators.setdefault(key, torch.Generator())
            generator.set_state(stream.clone())  # torch counts the offset of a view twice
            self._drawn[key] = stream
        return self._generators[key]

    def finish(self) -> None:
        for key, stream in self._drawn.items():
            stream.copy_(self._generators[key].get_state())
        self._drawn.clear()


@contextmanager
def standing_in(generator: torch.Generator) -> Iterator[None]:
    """Inside this context an operator that takes no generator draws from `generator`."""
    usual = torch.default_generator
    before = usual.get_state()
    usual.set_state(generator.get_state())
    try:
        yield
        generator.set_state(usual.get_state())
    finally:
        usual.set_state(before)


def begin_from(state: torch.Tensor) -> None:
    """Set the job's generator to a state that came with a step. Raises JobFailed if it is no generator's state."""
    try:
        torch.default_generator.set_state(state.clone())  # the client could change the shared bytes meanwhile
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobFailed(
            "the bytes that came with the step are no state of this torch build's generator",
            "run the client and the daemon with the same torch build",
        ) from error


def move_generator(generator: torch.Generator, memory: mmap.mmap, at: int, nbytes: int, into_device: bool) -> None:
    """Copy the state of a job's generator to or from a transfer's segment. Raises JobFailed if the bytes are none."""
    if at + GENERATOR_BYTES > nbytes:
        raise JobFailed(f"the transfer's segment has {nbytes} bytes, too few for a generator", "make it larger")
    if not into_device:
        memory[at : at + GENERATOR_BYTES] = generator_region(generator.get_state().numpy().tobytes())
        return
    try:
        state = generator_state(memory[at : at + GENERATOR_BYTES])
        if state:
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobFailed("these bytes are no generator's state", "put back what a snapshot holds") from error
