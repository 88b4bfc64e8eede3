"""Driving a device through its contract: open jobs, load programs, run steps, wait for events.

A `Case` is what the contract suite needs to know about one kind of device: how to make one (as wide
as the machine allows, or running one piece at a time) and how to wait until it has something to say.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic, sleep
from typing import TypeVar

from gpumux.device.base import (
    Device,
    DeviceEvent,
    Launch,
    ProcessGroups,
    ProgramChecked,
    ProgramRefused,
    SegmentHandle,
)
from gpumux.program.codec import encode
from gpumux.program.ir import ALIGN, Program, slot_layout
from gpumux.types import (
    Gang,
    JobDied,
    JobId,
    JobReleased,
    JobSpec,
    LaunchId,
    PieceDone,
    PieceFailed,
    Priority,
    ProgramId,
    ProgramReady,
    StepId,
    TransferEnded,
    TransferId,
)

GIVE_UP_S = 180.0  # a test that waits this long has failed; a start and a first check take a minute on a busy machine
E = TypeVar("E", bound=DeviceEvent)
_numbers = itertools.count(1)


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def numbers(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"{len(data) // 4}f", data)


def wait_polled(device: Device) -> None:
    """Wait as the daemon's loop does: a device that is due is looked at without a word."""
    if device.due() < inf:
        if not any(select.select(device.filenos(), [], [], 0)):
            sleep(50e-6)  # processes of the device's may be at work, and need the processor
        return
    ready, _, _ = select.select(device.filenos(), [], [], GIVE_UP_S)
    assert ready, "the device said nothing for too long"


def select_wait(device: Device) -> None:
    """Wait for a device that really runs."""
    ready, _, _ = select.select(device.filenos(), [], [], GIVE_UP_S)
    assert ready, "the device said nothing for too long"


@dataclass(frozen=True)
class Case:
    """`wide()` and `narrow()` make unopened devices; a narrow one has `parallel` 1. `computes`: results
    are real numbers (a simulated device only keeps time). `give_up_s`: how long an event is waited for.
    `shares_process`: a library of the device's opens descriptors of its own in this process."""

    name: str
    wide: Callable[[], Device]
    narrow: Callable[[], Device]
    wait: Callable[[Device], None] = select_wait
    computes: bool = True
    give_up_s: float = GIVE_UP_S
    shares_process: bool = False


class SharedMemory:
    """A segment as the daemon would make it, mapped here too."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("gpumux-test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.memory = mmap.mmap(self.fd, nbytes)
        self.segment = SegmentHandle(self.fd, nbytes)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@dataclass
class LoadedJob:
    """One job with one or more programs, and what the device says of them."""

    driver: Driver
    job: JobId
    programs: dict[ProgramId, Program] = field(default_factory=dict)
    data: dict[ProgramId, SharedMemory] = field(default_factory=dict)
    pieces: dict[ProgramId, tuple[float, ...]] = field(default_factory=dict)
    cut: dict[ProgramId, int] = field(default_factory=dict)
    gated: dict[ProgramId, tuple[int, ...]] = field(default_factory=dict)
    steps: int = 0

    def load(
        self, program: Program, new_buffers: Sequence[int] = (), binding: Sequence[int] | None = None, slots: int = 2
    ) -> ProgramId:
        """Check and load; its number. The data segment has `slots` slots."""
        number = self.try_load(program, new_buffers, binding, slots)
        answer = self.driver.wait_for(
            lambda e: (
                isinstance(e, ProgramReady | ProgramRefused | JobDied)
                and e.job == self.job
                and getattr(e, "program", number) == number
            )
        )
        assert isinstance(answer, ProgramReady), answer
        self.pieces[number], self.cut[number], self.gated[number] = answer.pieces, 0, answer.gated
        return number

    def try_load(
        self, program: Program, new_buffers: Sequence[int] = (), binding: Sequence[int] | None = None, slots: int = 2
    ) -> ProgramId:
        """Check, then ask to load, without waiting for that answer."""
        number = ProgramId(len(self.programs) + 1)
        encoded = encode(program)
        self.driver.device.check(self.job, number, encoded)
        checked = self.driver.until(ProgramChecked | ProgramRefused, self.job)
        assert isinstance(checked, ProgramChecked), checked
        self.programs[number] = program
        data = self.data[number] = SharedMemory(slot_layout(program).nbytes * slots)
        binding = list(range(len(new_buffers))) if binding is None else binding
        self.driver.device.load_program(self.job, number, encoded, new_buffers, binding, data.segment, slots)
        return number

    def put(self, program: ProgramId, position: int, data: bytes, slot: int = 0) -> None:
        layout = slot_layout(self.programs[program])
        start = slot * layout.nbytes + layout.inputs[position]
        self.data[program].memory[start : start + len(data)] = data

    def get(self, program: ProgramId, position: int, nbytes: int, slot: int = 0) -> bytes:
        layout = slot_layout(self.programs[program])
        start = slot * layout.nbytes + layout.results[position]
        return self.data[program].memory[start : start + nbytes]

    def launch(
        self,
        program: ProgramId,
        scalars: Sequence[float | int] = (),
        slot: int = 0,
        stream: int = 0,
        submitted: float | None = None,
    ) -> list[LaunchId]:
        """Ask for every piece of one step; with `submitted` the device may answer it."""
        pieces = self.pieces_of_step(program, scalars, slot, stream)
        for launch in pieces[:-1]:
            self.driver.device.launch(launch)
        self.driver.device.launch(pieces[-1]._replace(submitted=submitted))
        return [launch.launch for launch in pieces]

    def pieces_of_step(
        self, program: ProgramId, scalars: Sequence[float | int] = (), slot: int = 0, stream: int = 0
    ) -> list[Launch]:
        """The pieces of the next step, which are still to be asked for."""
        step, cut = StepId(self.steps), self.cut[program]
        self.steps += 1
        return [
            Launch(LaunchId(next(_numbers)), self.job, step, program, cut, piece, slot, tuple(scalars), stream)
            for piece in range(len(self.pieces[program]))
        ]

    def step(self, program: ProgramId, scalars: Sequence[float | int] = (), slot: int = 0) -> list[PieceDone]:
        """Run one step to its end, and use the newest cut from then on."""
        return [self.driver.done(launch) for launch in self.launch(program, scalars, slot)]

    def transfer(self, buffers: Sequence[int], sizes: Sequence[int], data: bytes | None = None) -> bytes:
        """Push `data` into buffers (laid end to end, each on 64 bytes), or pull them."""
        shared = SharedMemory(max(ALIGN, sum(-(-n // ALIGN) * ALIGN for n in sizes)))
        try:
            if data is not None:
                shared.memory[: len(data)] = data
            number = TransferId(next(_numbers))
            self.driver.device.transfer(self.job, number, buffers, shared.segment, data is not None)
            answer = self.driver.until(TransferEnded, self.job)
            assert answer.transfer == number
            assert answer.fault is None, answer.fault
            return bytes(shared.memory)
        finally:
            shared.close()


class Driver:
    """Waits for events, and keeps those that were not asked for yet."""

    def __init__(self, case: Case, device: Device) -> None:
        self.case = case
        self.device = device
        self.unread: list[DeviceEvent] = []
        self.jobs: dict[JobId, LoadedJob] = {}

    def open(
        self,
        seed: int = 0,
        priority: Priority = Priority.LOW,
        gang: Gang | None = None,
        user: int | None = None,
    ) -> LoadedJob:
        job = JobId(f"{next(_numbers):032x}")
        self.device.open_job(job, JobSpec(name="test", seed=seed, priority=priority, gang=gang, user=user))
        if gang is not None:
            assert isinstance(self.device, ProcessGroups)
            self.device.join(job, gang)
        self.jobs[job] = LoadedJob(self, job)
        return self.jobs[job]

    def poll(self) -> None:
        for event in self.device.poll():
            self.unread.append(event)
            if isinstance(event, ProgramReady) and event.job in self.jobs:
                held = self.jobs[event.job]
                held.pieces[event.program], held.cut[event.program] = event.pieces, event.cut
                held.gated[event.program] = event.gated

    def wait_for(self, wanted: Callable[[DeviceEvent], bool]) -> DeviceEvent:
        """The oldest unread event that is wanted; waited for, but not for ever: a device that is due all the time is
        never silent."""
        end = monotonic() + self.case.give_up_s
        while True:
            for index, event in enumerate(self.unread):
                if wanted(event):
                    return self.unread.pop(index)
            assert monotonic() < end, (
                f"what is waited for did not come within {self.case.give_up_s:g} s; unread: {self.unread}"
            )
            self.case.wait(self.device)
            self.poll()

    def until(self, kind: type[E], job: JobId) -> E:
        """The job's next event of a kind (or union of kinds); its loss ends the wait, and the test."""

        def wanted(event: DeviceEvent) -> bool:
            return isinstance(event, kind | JobDied) and getattr(event, "job", None) == job

        event = self.wait_for(wanted)
        assert isinstance(event, kind), event
        return event

    def done(self, launch: LaunchId) -> PieceDone:
        event = self.wait_for(lambda e: isinstance(e, PieceDone | PieceFailed) and e.launch == launch)
        assert isinstance(event, PieceDone), event
        return event

    def failed(self, launch: LaunchId) -> PieceFailed:
        event = self.wait_for(lambda e: isinstance(e, PieceDone | PieceFailed) and e.launch == launch)
        assert isinstance(event, PieceFailed), event
        return event

    def unload(self, job: JobId) -> None:
        self.device.unload(job)
        self.wait_for(lambda e: isinstance(e, JobReleased) and e.job == job)

    def finish(self) -> None:
        """Unload what the test left, and close its memory."""
        for job, held in self.jobs.items():
            self.unload(job)
            for data in held.data.values():
                data.close()
        self.jobs.clear()
