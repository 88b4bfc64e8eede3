"""The replay log: it gives exactly the entries after each point that it offers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpumux.client.replay import BEGINNING, ReplayEntry, ReplayLog

BIG = 1 << 40


def steps(log: ReplayLog, *numbers: int, nbytes: int = 10) -> None:
    for number in numbers:
        log.add(ReplayEntry(number, nbytes, f"step {number}"))


def after(log: ReplayLog, point: int) -> list[int]:
    return [entry.step for entry in log.since(point)]


def test_before_the_first_snapshot_the_log_has_everything():
    log = ReplayLog(BIG, 1000)
    log.add(ReplayEntry(-1, 0, "load"))
    steps(log, 0, 1)
    assert log.candidates(None) == [BEGINNING]
    assert [entry.what for entry in log.since(BEGINNING)] == ["load", "step 0", "step 1"]


def test_the_log_reaches_back_to_the_snapshot_before_the_newest():
    log = ReplayLog(BIG, 1000)
    for number in (1, 2, 3):
        steps(log, 2 * number, 2 * number + 1)
        log.mark(number)
        log.saved(number)
    steps(log, 8)
    assert log.candidates(None) == [3, 2]
    assert after(log, 3) == [8]
    assert after(log, 2) == [6, 7, 8]
    assert len(log) == 3


def test_where_one_copy_is_kept_the_log_reaches_back_to_the_newest_snapshot():
    log = ReplayLog(BIG, 1000)
    for number in (1, 2):
        steps(log, 2 * number, 2 * number + 1)
        log.mark(number)
        log.saved(number, alone=True)
    steps(log, 6)
    assert log.candidates(None) == [2]
    assert after(log, 2) == [6]
    assert len(log) == 1


def test_an_unconfirmed_snapshot_may_be_used_unless_answers_before_it_are_missing():
    log = ReplayLog(BIG, 1000)
    steps(log, 0, 1)
    log.mark(1)
    log.saved(1)
    steps(log, 2, 3)
    log.mark(2)
    steps(log, 4)
    assert log.candidates(None) == [2, 1, BEGINNING]
    assert log.candidates(4) == [2, 1, BEGINNING]  # step 4 is unanswered, and runs again from 2 as well
    assert log.candidates(3) == [1, BEGINNING]  # step 3's answer is lost: it must run again


def test_a_failed_snapshot_costs_nothing():
    log = ReplayLog(BIG, 1000)
    steps(log, 0)
    log.mark(1)
    steps(log, 1)
    log.failed(1)
    assert log.candidates(None) == [BEGINNING]
    assert after(log, BEGINNING) == [0, 1]


def test_beyond_its_bounds_the_older_part_goes_first():
    log = ReplayLog(100, 1000)
    steps(log, 0, 1)
    log.mark(1)
    log.saved(1)
    steps(log, *range(2, 9))
    assert not log.full
    assert log.candidates(None) == [1, BEGINNING]
    steps(log, 9)  # 100 bytes in all
    assert not log.full
    assert log.candidates(None) == [1]
    steps(log, 10, 11)
    assert log.full
    log.mark(2)
    log.saved(2)
    assert not log.full


def test_given_up_the_log_holds_nothing_until_a_snapshot_succeeds():
    log = ReplayLog(20, 1000)
    steps(log, 0, 1)
    assert log.full
    log.give_up()
    assert not log.full
    assert not log.recoverable
    assert log.candidates(None) == []
    steps(log, 2, 3, 4)
    assert len(log) == 0
    assert log.wants_point
    log.mark(7)
    steps(log, 5)
    assert not log.recoverable
    log.saved(7)
    assert log.recoverable
    assert after(log, 7) == [5]


def test_early_snapshots_are_wanted_by_bytes_and_by_count():
    log = ReplayLog(400, 1000)
    steps(log, *range(10))
    assert not log.wants_point
    steps(log, 10)
    assert log.wants_point
    log.mark(1)
    assert not log.wants_point
    log = ReplayLog(BIG, 8)
    steps(log, 0, 1, 2)
    assert log.wants_point


def test_dropped_entries_are_reported_once():
    gone: list[int] = []
    log = ReplayLog(BIG, 1000, lambda entry: gone.append(entry.step))
    steps(log, 0)
    last = ReplayEntry(1, 10, "x")
    log.add(last)
    log.remove_newest(last)
    assert gone == [1]
    for number in (1, 2):
        log.mark(number)
        log.saved(number)
    assert gone == [1, 0]
    assert log.nbytes == 0


def test_coming_back_from_an_older_point_forgets_the_damaged_one():
    log = ReplayLog(BIG, 1000)
    for number in (1, 2):
        steps(log, number)
        log.mark(number)
        log.saved(number)
    steps(log, 3)
    log.recovered(1, [2])
    assert log.candidates(None) == [1]
    assert after(log, 1) == [2, 3]
    log.mark(3)
    log.saved(3)
    assert log.candidates(None) == [3, 1]


class History(RuleBasedStateMachine):
    """Any history: the entries that the log gives are those that followed."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ReplayLog(300, 12)
        self.told: list[ReplayEntry] = []
        self.at: dict[int, int] = {BEGINNING: 0}  # point -> number of entries before it
        self.number = 0
        self.pending: int | None = None
        self.step = 0

    @rule(nbytes=st.integers(0, 60), is_step=st.booleans())
    def add(self, nbytes: int, is_step: bool) -> None:
        if self.log.full:
            self.log.give_up()
        entry = ReplayEntry(self.step if is_step else -1, nbytes, len(self.told))
        self.step += is_step
        self.log.add(entry)
        self.told.append(entry)

    @rule()
    def add_and_remove(self) -> None:
        if not self.log.full:
            entry = ReplayEntry(-1, 5, "never told")
            self.log.add(entry)
            self.log.remove_newest(entry)

    @precondition(lambda self: self.pending is None)
    @rule()
    def mark(self) -> None:
        self.number += 1
        self.pending = self.number
        self.at[self.number] = len(self.told)
        self.log.mark(self.number)

    @precondition(lambda self: self.pending is not None)
    @rule(well=st.booleans())
    def answered(self, well: bool) -> None:
        (self.log.saved if well else self.log.failed)(self.pending)
        self.pending = None

    @precondition(lambda self: self.log.recoverable)
    @rule(data=st.data())
    def daemon_dies(self, data: st.DataObject) -> None:
        candidates = self.log.candidates(None)
        at = data.draw(st.integers(0, len(candidates) - 1))
        self.log.recovered(candidates[at], candidates[:at])
        self.pending = None

    @invariant()
    def every_point_leads_to_the_head(self) -> None:
        for point in self.log.candidates(None):
            assert list(self.log.since(point)) == self.told[self.at[point] :]

    @invariant()
    def the_books_are_right(self) -> None:
        held = list(self.log._entries)
        assert self.log.nbytes == sum(entry.nbytes for entry in held)
        assert held == self.told[len(self.told) - len(held) :]


TestHistory = History.TestCase


@given(first_open=st.integers(0, 30))
def test_no_candidate_has_an_unanswered_step_behind_it(first_open: int):
    log = ReplayLog(BIG, 1000)
    for step in range(30):
        steps(log, step)
        if step % 10 == 9:
            log.mark(step // 10 + 1)
            log.saved(step // 10 + 1)
    for point in log.candidates(first_open):
        assert [number for number in range(first_open, 30) if number not in after(log, point)] == []
