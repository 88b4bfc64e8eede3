"""The executor's side of a lent lane (device.contract.Lending): steps taken from the client without the daemon.

A token, an eventfd that holds 1, says whether steps may start. To start one is to take the token, to end
it is to put it back; the daemon ends it all by taking it. What the process is about to do stands on the
shared page before it reaches for the token. So whoever has the token knows what the other did, whatever
the kernel makes of their order, and nobody waits for anybody.

Whatever is out of the ordinary is the daemon's to judge: it gets the lane back, with the packet.
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from gpumux.device.base import LaneReturned, Launch, LaunchDone, LoanTerms, StepRan
from gpumux.device.run.schedule import Schedule
from gpumux.device.workers.channel import (
    COUNT,
    PACKET,
    RAN_AT,
    READ_AT,
    RING_AT,
    RING_ENTRY,
    RING_STEPS,
    RING_STRIDE,
    TAKEN_AT,
    Descriptors,
)
from gpumux.types import JobId, LaunchId

if TYPE_CHECKING:
    from gpumux.device.base import DeviceEvent
    from gpumux.device.cpu.jobs import Command, Errand, Executor


TELL_EVERY = 16  # steps between two words to the daemon, which then has so much to catch up on
IDLE_S = 2  # after this long without a message, collect garbage
_SMALL = 4096  # bytes: what a longer one holds is the daemon's to unpack, with its limits
_MAX_INT = 2**63 - 1
_LIST_OF_5 = b"\x95"
_UNPACKABLE = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)
_KINDS: dict[str, type] = {"float": float, "int": int}


class Taken(NamedTuple):
    step: int
    program: int
    cut: int
    slot: int
    scalars: Sequence[float | int]
    submitted: float


class LentLane:
    """`lane` and `token` are used, not owned; `channel` is where the daemon may say something."""

    def __init__(
        self,
        channel: int,
        lane: socket.socket,
        token: int,
        page: mmap.mmap,
        head: bytes,
        last: int,
        terms: Any,
        first: bytes,
    ) -> None:
        self.packet = first  # what was taken from the lane and not acted on yet
        self._receive = lane.recv
        self._lane = lane.fileno()
        self._token = token
        self._page = page
        self._head = head
        self._rest = len(head)
        self._last = last
        self._terms = {
            program: (cut, slots, tuple([_KINDS[kind] for kind in kinds])) for program, cut, slots, kinds in terms
        }
        self._count: int = COUNT.unpack_from(page, RAN_AT)[0]
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(self._lane, select.POLLIN)

    def ready(self) -> bool:
        """Wait; whether the lane has something, and the daemon has not."""
        if self.packet:
            return True
        events = self._poller.poll(IDLE_S * 1000)
        if not events:
            gc.collect()
            events = self._poller.poll()
        return len(events) == 1 and events[0][0] == self._lane

    def take(self) -> Taken | None:
        """The client's next step, which is to be run and then said to have `ended`. None: the lane goes back."""
        packet = self.packet
        if not packet:
            try:
                packet = self._receive(PACKET + 1, socket.MSG_DONTWAIT)
            except OSError:
                return None
        found = self._read(packet, monotonic())
        if found is not None and self._begin(found):
            self.packet = b""
            return found
        self.packet = packet
        return None

    def _read(self, packet: bytes, submitted: float) -> Taken | None:
        if len(packet) > _SMALL or not packet.startswith(self._head):
            return None
        try:
            step, program, slot, scalars, frames = msgpack.unpackb(_LIST_OF_5 + packet[self._rest :])
        except _UNPACKABLE:
            return None
        if not (type(step) is type(program) is type(slot) is type(frames) is int and type(scalars) is list):
            return None
        terms = self._terms.get(program)
        if terms is None or frames or not (self._last < step <= _MAX_INT and 0 <= slot < terms[1]):
            return None
        if scalars or terms[2]:
            if any(type(value) is int and not -_MAX_INT - 1 <= value <= _MAX_INT for value in scalars):
                return None
            if tuple(map(type, scalars)) != terms[2]:
                return None
        return Taken(step, program, terms[0], slot, scalars, submitted)

    def _begin(self, taken: Taken) -> bool:
        """Say what is about to run, and take the token for it."""
        page, count = self._page, self._count
        if count - COUNT.unpack_from(page, READ_AT)[0] >= RING_STEPS:
            return False  # the daemon has not come to read for long
        at = RING_AT + count % RING_STEPS * RING_STRIDE
        RING_ENTRY.pack_into(page, at, taken.step, taken.program, taken.slot, taken.submitted, 0.0, 0.0, False)
        COUNT.pack_into(page, TAKEN_AT, count + 1)
        try:
            os.eventfd_read(self._token)
        except BlockingIOError:
            COUNT.pack_into(page, TAKEN_AT, count)
            return False
        self._taken = taken
        return True

    def ended(self, started: float, ended: float, answered: bool) -> bool:
        """The step taken last has run. Whether it is time to tell the daemon."""
        page, count, (step, program, _, slot, _, submitted) = self._page, self._count, self._taken
        at = RING_AT + count % RING_STEPS * RING_STRIDE
        RING_ENTRY.pack_into(page, at, step, program, slot, submitted, started, ended, answered)
        self._count = count = count + 1
        COUNT.pack_into(page, RAN_AT, count)
        self._last = step
        os.eventfd_write(self._token, 1)
        return count % TELL_EVERY == 0


# ---- The daemon's side of a lent lane (lending.py, device.contract.Lending). No torch.


@dataclass(frozen=True, slots=True)
class Lend:
    """A lane on its way to the executor that answers there already; the token goes with it."""

    held: Descriptors
    head: bytes
    last: int
    terms: tuple[LoanTerms, ...]
    first: bytes


@dataclass(frozen=True, slots=True)
class Recall:
    """The lane is wanted back."""


class Loan:
    """A lane an executor reads now. `adopted` is the launch its last step was made; `stopped`: no step of it is left
    that nobody was told of."""

    def __init__(self, page: mmap.mmap, terms: Sequence[LoanTerms]) -> None:
        self.cuts = {program.program: program.cut for program in terms}
        self.token = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.adopted: Launch | None = None
        self.stopped = False
        self._page = page
        self._limit = -1  # the number of the step that ran when the lane was recalled: not told before that is over

    def close(self) -> None:
        os.close(self.token)

    def stop(self) -> StepRan | None:
        """Let no further step start; the one that runs."""
        self.stopped = True
        try:
            os.eventfd_read(self.token)
        except BlockingIOError:
            (count,) = COUNT.unpack_from(self._page, RAN_AT)
            running = self._running(count)
            if running is not None:
                self._limit = count  # it may end at any moment, and is to be told once
            return running
        return None

    def over(self) -> list[StepRan]:
        """What has ended and was not told, the step that ran at the end included."""
        self._limit = -1
        return self.ran()

    def ran(self) -> list[StepRan]:
        """What has ended since this was asked last."""
        page = self._page
        (read,), (count,) = COUNT.unpack_from(page, READ_AT), COUNT.unpack_from(page, RAN_AT)
        if 0 <= self._limit < count:
            count = self._limit
        if read == count:
            return []
        found = [self._entry(number) for number in range(read, count)]
        COUNT.pack_into(page, READ_AT, count)
        return found

    def running(self) -> StepRan | None:
        """The step that was begun and has not ended. Of a process that may start no other."""
        return self._running(COUNT.unpack_from(self._page, RAN_AT)[0])

    def _running(self, count: int) -> StepRan | None:
        return self._entry(count) if COUNT.unpack_from(self._page, TAKEN_AT)[0] > count else None

    def _entry(self, number: int) -> StepRan:
        return StepRan._make(RING_ENTRY.unpack_from(self._page, RING_AT + number % RING_STEPS * RING_STRIDE))


def returned(executor: Executor, schedule: Schedule[Command], packet: bytes) -> list[DeviceEvent]:
    """The executor reads the lane no more, because it said so or died."""
    loan, executor.loan = executor.loan, None
    if loan is None:
        return []
    ran: list[StepRan] = loan.over()
    ends: list[DeviceEvent] = []
    adopted = loan.adopted
    if adopted is not None and ran and ran[-1].step == adopted.step:
        last = ran.pop()
        schedule.done(executor.job)
        ends.append(LaunchDone(LaunchId(adopted.launch), last.started, last.ended, last.answered))
    if executor.ended and not loan.stopped and (running := loan.running()) is not None:
        ran.append(running)
        program, cut = running.program, loan.cuts[running.program]
        executor.at = Launch(LaunchId(0), executor.job, running.step, program, cut, 0, running.slot, (), 0)
    loan.close()
    return [LaneReturned(executor.job, packet, tuple(ran)), *ends]


class Lender:
    """The part of CpuDevice that lends lanes."""

    _schedule: Schedule[Command]

    def _live(self, job: JobId) -> Executor | None:
        raise NotImplementedError

    def _send(self, executor: Executor, command: Command | Errand) -> None:
        raise NotImplementedError

    def lend(self, job: JobId, head: bytes, last: int, terms: Sequence[LoanTerms], first: bytes) -> None:
        executor = self._live(job)
        if executor is not None:
            executor.loan = loan = Loan(executor.page, terms)
            self._send(executor, Lend(Descriptors((os.dup(loan.token),)), head, last, tuple(terms), first))

    def ran(self, job: JobId) -> list[StepRan]:
        executor = self._live(job)
        return executor.loan.ran() if executor is not None and executor.loan is not None else []

    def recall(self, job: JobId) -> StepRan | None:
        executor = self._live(job)
        if executor is None or executor.loan is None:
            return None
        self._send(executor, Recall())  # before the token is gone: it is read before the next step is looked for
        return executor.loan.stop()

    def adopt(self, launch: Launch) -> None:
        executor = self._live(launch.job)
        if executor is not None and executor.loan is not None:
            executor.loan.adopted = launch
            self._schedule.adopt(launch.job, launch, launch.stream)
