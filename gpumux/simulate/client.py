"""A simulated job's client: when it submits steps, and what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Protocol

from gpumux.core import events as ev
from gpumux.device.sim.kernel import Kernel
from gpumux.device.sim.pieces import Pieces
from gpumux.device.sim.spec import GpuSpec
from gpumux.model import JobId, Priority, ProgramId, StepId
from gpumux.simulate.workload import Workload, cut_workload

PROGRAM = ProgramId(0)


class World(Protocol):
    """Where a client lives."""

    now: float
    client_s: float

    def feed(self, event: ev.Event) -> None:
        """The daemon hears of it now."""

    def push(self, when: float, act: Callable[[Any], None], argument: Any) -> None:
        """Call `act(argument)` at a virtual time."""


class Client:
    """One job's. Sums are over its whole life; `*_before_s` are what they were when the measured window began."""

    def __init__(self, index: int, workload: Workload, pieces: Pieces, seed: int) -> None:
        self.id = JobId(f"{index:032x}")
        self.workload = workload
        self.high = workload.priority is Priority.HIGH
        self.cuts: dict[int, Pieces] = {}  # what the device said, by cut
        self.kernels: dict[int, tuple[tuple[Kernel, ...], ...]] = {}  # what runs, by cut
        self.target_s = workload.target_s  # of the newest cut
        self.asked: tuple[float | None] | None = (
            None  # how long pieces of the next cut should be, if there is to be one
        )
        self._work: dict[
            int, tuple[float, ...]
        ] = {}  # by cut, what a piece counts: a step is the same work however it is cut
        self.step_seconds: list[float] = []
        self.step_ends: list[float] = []
        self.work_s = self.device_s = 0.0
        self.work_before_s = self.device_before_s = 0.0
        self._random = Random(f"{seed}/{index}/{workload.name}")
        self._next_step = 0
        self._inflight = 0
        self._backlog = 0  # arrivals that found `max_inflight` steps unanswered
        self._submitted: deque[float] = deque()  # of the steps whose last piece has not ended
        self.cut(pieces)

    @property
    def newest(self) -> int:
        """The cut that steps begin with."""
        return len(self.cuts) - 1

    def cut(self, pieces: Pieces) -> None:
        """Its program is cut like this from now on."""
        number = len(self.cuts)
        self.cuts[number], self.kernels[number] = pieces, pieces.kernels
        scale = self.cuts[0].step_s / pieces.step_s
        self._work[number] = tuple([scale * seconds for seconds in pieces.seconds])

    def cut_anew(self, cut: int, piece: int, spec: GpuSpec) -> bool:
        """After a piece: whether it is cut otherwise from now on, where that was asked for and a step of the newest cut has ended.
        None of an older one is under way then."""
        if self.asked is None or cut != self.newest or piece < len(self.cuts[cut].seconds) - 1:
            return False
        (target_s,), self.asked = self.asked, None
        self.target_s = self.workload.target_s if target_s is None else target_s
        pieces = cut_workload(replace(self.workload, target_s=self.target_s), spec)
        if pieces.bounds == self.cuts[cut].bounds:
            return False
        self.cut(pieces)
        return True

    def begin(self, world: World) -> None:
        """Its program is loaded."""
        workload = self.workload
        if workload.rate is not None:
            world.push(world.now + self._random.expovariate(workload.rate), self._arrive, world)
        else:
            for _ in range(1 if workload.think_s else workload.max_inflight):
                self._submit(world)

    def answered(self, world: World) -> None:
        """A step's answer is on its way to it."""
        if self.workload.rate is None:
            world.push(world.now + world.client_s + self.workload.think_s, self._submit_next, world)
        elif self._backlog:
            self._backlog -= 1
            world.push(world.now + world.client_s, self._submit_next, world)
        else:
            self._inflight -= 1

    def piece_ended(self, cut: int, piece: int, started: float, ended: float) -> None:
        pieces = self.cuts[cut]
        self.work_s += self._work[cut][piece]
        self.device_s += ended - started
        if piece == len(pieces.seconds) - 1:
            before = self.step_ends[-1] if self.step_ends else 0.0
            self.step_seconds.append(ended - max(self._submitted.popleft(), before))
            self.step_ends.append(ended)

    def begin_window(self) -> None:
        self.work_before_s, self.device_before_s = self.work_s, self.device_s

    def _arrive(self, world: World) -> None:
        assert self.workload.rate is not None
        world.push(world.now + self._random.expovariate(self.workload.rate), self._arrive, world)
        if self._inflight < self.workload.max_inflight:
            self._submit(world)
        else:
            self._backlog += 1

    def _submit_next(self, world: World) -> None:
        """In the place of one that was answered."""
        self._inflight -= 1
        self._submit(world)

    def _submit(self, world: World) -> None:
        step = StepId(self._next_step)
        self._next_step += 1
        self._inflight += 1
        self._submitted.append(world.now)
        world.feed(ev.StepSubmitted(self.id, step, PROGRAM))
