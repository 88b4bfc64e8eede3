"""A job's two waves, as the client follows them: which one is next, and the host side of each replica's state.

Step m belongs to wave m mod 2 (gpumux/waves/trace.py). What the local model shows after it, and what is fetched, is the
replica of the newest step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from gpumux.capture.state import StateTable
from gpumux.capture.step import StepProgram
from gpumux.capture.structure import State
from gpumux.errors import NotSplittable
from gpumux.program.ir import aligned
from gpumux.program.memory import message_bytes, wave_plan
from gpumux.waves.trace import WavePrograms

log = logging.getLogger("gpumux.client")

Write = Callable[[int, torch.Tensor], None]


class Pull(Protocol):
    """Remote.pull."""

    def __call__(self, write: Write, wanted: Collection[int] | None = None) -> None: ...


class Waves:
    """`step`: the number m of the next step, since the state was last loaded."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._states: list[State] = []  # the host side of each replica's state
        self._trains = False  # whether the call that is under way is a step of a wave
        self.step = 0

    @property
    def newest(self) -> int:
        """The lane of the newest step."""
        return (self.step + 1) % 2 if self.step else 0

    def state_of(self, lane: int) -> State:
        """The host side of a replica's state, once steps have run."""
        return self._states[lane]

    def of_lane(self, places: Mapping[int, int], lane: int) -> dict[int, int]:
        """Of what is known by buffers of both replicas, that of one replica, by the buffers of the first."""
        mine = {b: self._table.replica(b) if lane else b for b in self._table.first_wave}
        return {b: places[replica] for b, replica in mine.items() if replica in places}

    # ---- steps

    def state(self, present: State) -> State:
        """The host side of the state from which the next step of a wave begins. `present`: of the local model."""
        if self.step == 0:
            self._states = [present, present]
        return self._states[self.step % 2]

    def trains(self, captured: StepProgram) -> bool:
        """Whether a captured Program is a step of a wave."""
        return _waves(captured).trains

    def program(self, captured: StepProgram, main: bool) -> StepProgram:
        """What the next call runs of a captured Program. `main`: of the submitted step. Raises NotSplittable."""
        self._trains = self._may_train(captured, main)
        return self._of(captured, (self.step % 2, self.step == 0) if self._trains else (self.newest, False))

    def ahead(self, captured: StepProgram, first_phase: bool, main: bool) -> list[StepProgram]:
        """The Programs to load when a step is submitted. `first_phase`: the job's first step is of this phase; `main`:
        as in `program`. Raises NotSplittable."""
        trains = self._may_train(captured, main)
        wanted = [(0, trains and first_phase), *([(1, False)] if trains else [])]
        return [self._of(captured, one) for one in wanted]

    def _may_train(self, captured: StepProgram, main: bool) -> bool:
        if self.trains(captured) and not main:
            raise NotSplittable(
                "a job of two waves trains by its submitted step alone, and this one changes state, too",
                "let an added step change nothing (an evaluation), or submit the job without waves=2",
            )
        return self.trains(captured)

    def stepped(self, after: State) -> None:
        """The chosen Program was sent, and `after` is the host side of the state after it."""
        if self._trains:
            self._states[self.step % 2] = after
            self.step += 1

    def warn(self, captured: StepProgram, name: str) -> None:
        """Say what the waves take on a device, and what the same samples a step would take in two microbatches, which
        several daemons do not take."""
        waves = _waves(captured)
        if not waves.trains:
            return
        ranked = waves.ranked.get((0, False))
        lowered = waves.lowered[0, False] if ranked is None else ranked.ranks[0].lowered
        gradients = set(self._table.gradients_between_waves.values())
        sizes = {b: aligned(self._table.buffers[b].nbytes) for b in lowered.binding}
        of_gradients = sum(nbytes for b, nbytes in sizes.items() if b in gradients)
        state = sum(sizes.values()) - of_gradients
        arena, planned = wave_plan(lowered.program)
        takes = 2 * state + of_gradients + arena + message_bytes(lowered.program)
        if ranked is not None:
            log.warning(
                "job %r: two waves take about %.0f MiB of each device. See docs/waves.md, and `gpumux plan memory`",
                name, takes / 2**20,
            )  # fmt: skip
            return
        log.warning(
            "job %r: two waves take about %.0f MiB of a device; a doubled batch with microbatches=2 would take about"
            " %.0f MiB, and trains as one batch. See docs/waves.md, and `gpumux plan memory`",
            name, takes / 2**20, (state + of_gradients + planned.peak_bytes) / 2**20,
        )  # fmt: skip

    def _of(self, captured: StepProgram, key: tuple[int, bool]) -> StepProgram:
        waves = _waves(captured)
        if key not in waves.made:
            lowered = replace(waves.lowered[key], exit=captured.lowered.exit)
            waves.made[key] = replace(captured, lowered=lowered, number=None, ranked=waves.ranked.get(key))
        return waves.made[key]

    # ---- state

    def pull(
        self, pull: Pull, write: Write, wanted: Collection[int] | None = None, lane: int | None = None
    ) -> None:  # fmt: skip
        """`pull` of one wave's replica, by default that of the newest step, written as that of the first wave."""
        lane = self.newest if lane is None else lane
        some = self._table.first_wave if wanted is None else wanted
        of = {self._table.replica(b) if lane else b: b for b in some}
        pull(lambda buffer, data: write(of[buffer], data), of)

    def pushed(self, buffers: Collection[int], lane: int | None) -> list[int]:
        """Of these buffers, those of one wave; None: of both."""
        if lane is None:
            return list(buffers)
        first = set(self._table.first_wave)
        return [b for b in buffers if (b in first) is (lane == 0)]

    def other(self, dictionaries_of: Callable[[State, int], dict[str, Any]], pull: Pull) -> dict[str, Any]:
        """What the next steps depend on besides the replica of the newest step: the entry "waves" of state_dict().
        `dictionaries_of`: the dictionaries of a replica."""
        gradients: dict[str, torch.Tensor] = {}
        names = {buffer: name for name, buffer in self._table.gradients_between_waves.items()}
        pull(lambda buffer, data: gradients.__setitem__(names[buffer], data.clone()), names)
        lane = 1 - self.newest
        return {"step": self.step, "other": dictionaries_of(self._states[lane], lane), "gradients": gradients}

    def loaded(self, other: State | None = None, newest: State | None = None, step: int = 0) -> None:
        """State was loaded: that of a job that has run so many steps. Without steps, both replicas have it, and the
        next step is the first of all."""
        self.step, self._states = step, []
        if step:
            assert other is not None
            assert newest is not None
            self._states = [other, newest] if self.newest else [newest, other]


def _waves(captured: StepProgram) -> WavePrograms:
    found: Any = captured.ranked
    assert isinstance(found, WavePrograms)
    return found
