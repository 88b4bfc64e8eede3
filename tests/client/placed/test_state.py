"""What a job knows of its devices, whatever the coordinator says, how often and in what order."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpumux.client.placed.state import Notice, PlaceState
from gpumux.client.recovery import LeaveOrder
from gpumux.wire.messages import DevicesVacated, JobAnswered, JobNotStarted, JobPlaced, VacateDevices

JOB = "0" * 32
ATTEMPTS = st.integers(1, 6)


def placed(attempt: int) -> JobPlaced:
    return JobPlaced(JOB, attempt, [f"ipc:///{attempt}"], [f"node-{attempt}"], attempt > 1)


def vacate(attempt: int, keep: bool = True) -> VacateDevices:
    return VacateDevices(JOB, attempt, keep, "to make room")


def test_a_job_that_is_placed_moved_and_placed_again():
    state = PlaceState(JOB)
    assert state.attempt() == 0
    assert state.placed(placed(1)) == []
    assert state.attempt() == 1
    state.take()
    state.opened()
    assert (state.held, state.running, state.endpoints) == (1, True, ("ipc:///1",))
    assert state.vacate(vacate(1)) == []
    assert state.order == LeaveOrder(True, True, "to make room")
    assert state.left() == [DevicesVacated(JOB, 1)]
    assert state.vacate(vacate(1)) == [DevicesVacated(JOB, 1)], "it was lost, and is asked for again"
    assert state.order is None
    assert not state.may_take
    state.placed(placed(2))
    assert state.may_take


def test_a_node_that_is_lost_is_left_for_the_next_place():
    state = PlaceState(JOB)
    state.placed(placed(1))
    state.take()
    state.placed(placed(2))
    assert state.order == LeaveOrder(True, False, "node-1 was lost")
    assert not state.may_take
    state.left()
    assert state.may_take


def test_a_place_that_is_taken_back_before_the_job_is_opened_there():
    state = PlaceState(JOB)
    state.placed(placed(1))
    assert state.vacate(vacate(1)) == [DevicesVacated(JOB, 1)]
    assert not state.may_take
    assert state.placed(placed(1)) == [JobNotStarted(JOB, 1, 0, "the job does not need these devices")], "late"


def test_a_place_that_is_taken_back_while_the_job_is_opened_there():
    state = PlaceState(JOB)
    state.placed(placed(1))
    state.take()
    state.vacate(vacate(1))
    assert state.not_started(0, "no such daemon") == [DevicesVacated(JOB, 1)]
    assert state.order is None


def test_a_cancelled_job_takes_nothing_any_more():
    state = PlaceState(JOB)
    state.placed(placed(1))
    state.take()
    state.vacate(vacate(1, keep=False))
    assert state.order == LeaveOrder(False, True, "to make room")
    state.left()
    assert state.answer == JobAnswered(JOB, "cancelled", "to make room")
    state.placed(placed(2))
    assert not state.may_take


class Histories(RuleBasedStateMachine):
    """Messages in any order, twice and late; a client that does what it is told, whenever."""

    def __init__(self) -> None:
        super().__init__()
        self.state = PlaceState(JOB)
        self.taken: list[int] = []
        self.given_back: Counter[int] = Counter()
        self.asked: set[int] = set()  # attempts whose devices have to be left

    def _said(self, notices: list[Notice]) -> None:
        for notice in notices:
            assert notice.attempt != self.state.held, "it holds what it says that it does not"
            self.given_back[notice.attempt] += 1
            if isinstance(notice, DevicesVacated):
                self.asked.discard(notice.attempt)

    @rule(attempt=ATTEMPTS)
    def is_placed(self, attempt: int) -> None:
        self._said(self.state.placed(placed(attempt)))

    @rule(attempt=ATTEMPTS, keep=st.booleans())
    def is_to_vacate(self, attempt: int, keep: bool) -> None:
        self.asked.add(attempt)
        self._said(self.state.vacate(vacate(attempt, keep)))

    @rule(outcome=st.sampled_from(["refused", "failed", "cancelled"]))
    def is_answered(self, outcome: str) -> None:
        self._said(self.state.answered(JobAnswered(JOB, outcome, "")))

    @precondition(lambda self: self.state.may_take)
    @rule()
    def takes(self) -> None:
        assert self.state.answer is None
        assert self.state.order is None
        self.state.take()
        assert self.state.held not in self.taken, "opened twice under one attempt"
        assert self.state.held > max(self.taken, default=0)
        self.taken.append(self.state.held)

    @precondition(lambda self: self.state.held)
    @rule()
    def runs(self) -> None:
        self.state.opened()

    @precondition(lambda self: self.state.held)
    @rule()
    def fails_to_start(self) -> None:
        held = self.state.held
        self._said(self.state.not_started(0, "no"))
        assert self.given_back[held]

    @precondition(lambda self: self.state.order is not None)
    @rule()
    def leaves(self) -> None:
        held, goes_on = self.state.held, self.state.order is not None and self.state.order.goes_on
        self._said(self.state.left())
        assert self.given_back[held]
        assert goes_on or self.state.answer is not None

    @invariant()
    def what_has_to_be_left_is_held_and_ordered(self) -> None:
        """Nothing that the coordinator asked for is forgotten: it was given back at once, or the client is told to."""
        for attempt in self.asked:
            assert attempt == self.state.held
            assert self.state.order is not None

    @invariant()
    def an_order_is_about_what_is_held(self) -> None:
        assert self.state.order is None or self.state.held
        assert self.state.running <= bool(self.state.held)

    @invariant()
    def it_says_where_it_runs(self) -> None:
        assert self.state.attempt() == self.state.held or not self.state.held


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
