"""What a job of a cluster knows of its devices: messages of the coordinator and the client's own deeds in, messages to
the coordinator out. No sockets, threads or clock.

A job holds the devices of one attempt at a time, from `take` to `left` or `not_started`. What the coordinator asks
about another attempt is answered at once, since nothing of it is held. So a message that comes twice, late, or after
the coordinator was started again does no harm, and one that was lost is made good when the coordinator asks again.
"""

from __future__ import annotations

from typing import TypeAlias

from gpumux.client.recovery import LeaveOrder
from gpumux.wire.messages import DevicesVacated, JobAnswered, JobNotStarted, JobPlaced, VacateDevices

Notice: TypeAlias = JobNotStarted | DevicesVacated
CANCELLED = "cancelled"  # outcome of a JobAnswered


class PlaceState:
    """Where one job is, and where it shall be.

    held: the attempt whose devices it has, or is being opened on; 0 for none. endpoints, nodes: those devices. running:
    whether it was opened there. answer: it gets no device any more, and why.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.held = 0
        self.endpoints: tuple[str, ...] = ()
        self.nodes: tuple[str, ...] = ()
        self.running = False
        self.answer: JobAnswered | None = None
        self._newest = 0  # attempt
        self._next: JobPlaced | None = None
        self._order: LeaveOrder | None = None  # about `held`

    # ---- what the coordinator says: each returns the messages to answer with

    def placed(self, message: JobPlaced) -> list[Notice]:
        attempt = message.attempt
        if self.answer is not None or attempt <= self._newest:
            known = attempt == self.held or (self._next is not None and attempt == self._next.attempt)
            return [] if known else [JobNotStarted(self.job, attempt, 0, "the job does not need these devices")]
        self._newest, self._next = attempt, message
        if self.held and (self._order is None or self._order.goes_on):  # those that it has are lost
            self._order = LeaveOrder(True, False, f"{', '.join(self.nodes) or 'its node'} was lost")
        return []

    def vacate(self, message: VacateDevices) -> list[Notice]:
        attempt = message.attempt
        self._newest = max(self._newest, attempt)
        if self.held and attempt == self.held:
            self._order = LeaveOrder(message.keep, True, message.reason)
            return []
        if self._next is not None and self._next.attempt <= attempt:
            self._next = None
            if not message.keep:
                self._is_answered(JobAnswered(self.job, CANCELLED, message.reason))
        return [DevicesVacated(self.job, attempt)]

    def answered(self, message: JobAnswered) -> list[Notice]:
        if self.answer is None:
            self._is_answered(message)
        return []

    def _is_answered(self, answer: JobAnswered) -> None:
        self.answer, self._next = answer, None
        if self.held:
            self._order = LeaveOrder(False, True, answer.reason or answer.outcome)

    # ---- what the client does

    @property
    def order(self) -> LeaveOrder | None:
        """Whether the devices that are held have to be left. The same object until the coordinator says more."""
        return self._order

    @property
    def may_take(self) -> bool:
        """Whether there are devices on which the job may be opened now."""
        return self._next is not None and not self.held

    def take(self) -> None:
        """The job is being opened on the devices that it was given."""
        assert self._next is not None
        assert not self.held
        self.held, self.running = self._next.attempt, False
        self.endpoints, self.nodes = tuple(self._next.endpoints), tuple(self._next.nodes)
        self._next = None

    def opened(self) -> None:
        """The job runs there."""
        self.running = bool(self.held)

    def not_started(self, nbytes: int, why: str) -> list[Notice]:
        """The job can't be opened on the devices that are held, and holds nothing of them. `nbytes`: see
        JobNotStarted."""
        if not self.held or self._order is not None:
            return self.left()
        attempt, self.held, self.running = self.held, 0, False
        return [JobNotStarted(self.job, attempt, nbytes, why)]

    def left(self) -> list[Notice]:
        """The job holds nothing any more of the devices that it held."""
        if not self.held:
            return []
        attempt, self.held, self.running = self.held, 0, False
        order, self._order = self._order, None
        if order is not None and not order.goes_on and self.answer is None:
            self._is_answered(JobAnswered(self.job, CANCELLED, order.reason))
        return [DevicesVacated(self.job, attempt)]

    def attempt(self) -> int:
        """The attempt to name in PlaceJob: under which the job runs, or is about to; 0 for none."""
        return self.held or (self._next.attempt if self._next is not None else 0)
