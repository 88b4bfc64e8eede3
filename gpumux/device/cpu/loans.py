"""The daemon's side of a lent lane (lending.py, device.contract.Lending). No torch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumux.device.contract import LaneReturned, Launch, LaunchDone, LoanTerms, StepRan
from gpumux.device.cpu.channel import COUNT, RAN_AT, READ_AT, RING_AT, RING_ENTRY, RING_STEPS, RING_STRIDE, TAKEN_AT
from gpumux.device.cpu.descriptors import Descriptors
from gpumux.device.cpu.schedule import Schedule
from gpumux.model import JobId, LaunchId

if TYPE_CHECKING:
    from gpumux.device.contract import DeviceEvent
    from gpumux.device.cpu.jobs import Command, Errand, Executor


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
