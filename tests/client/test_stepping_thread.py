"""A thread that waits for a low step tells the daemon which high jobs get no step meanwhile, except those that other
threads step."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from gpumux import client
from gpumux.client import session as patience
from gpumux.client.session import AT_ONCE, LONG_S, SAY_AFTER_S, SURE, Session, SteppingThread, Waits
from gpumux.wire import messages as m
from microbench.daemon import running_daemon
from tests.client.parity import THREADS

ROUNDS = 300
MOST_ROUNDS = 1500  # the guard begins to hold low work after about 200 where nothing disturbs it
X = torch.randn(64, 16)


class Wire:
    """A session that answers after a number of waits, and records the messages that it got."""

    holds_low_work = True

    def __init__(self, after: int = 1) -> None:
        self.after = after
        self.waits: list[float | None] = []
        self.said: list[m.StepAwaited] = []
        self.body: dict[str, Any] = {}

    def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return len(self.waits) > self.after

    def post(self, message: m.StepAwaited) -> None:
        self.said.append(message)

    def call(self, message: m.JobStats, timeout: float) -> tuple[m.Report, list[bytes]]:
        return m.Report(0, self.body), []


def wait(waits: Waits, wire: Wire, timeout: float | None = None, step: int | None = None) -> bool:
    return waits.wait(cast(Session, wire), lambda: False, timeout, step)


def elsewhere(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.fixture
def high() -> Iterator[SteppingThread]:
    """A high job that this thread steps."""
    thread = SteppingThread("high", True)
    thread.stepped(0)
    yield thread
    thread.forget()


@pytest.fixture
def low() -> Iterator[Waits]:
    waits = Waits("low", False)
    waits.thread.stepped(7)
    yield waits
    waits.thread.forget()


def test_a_wait_that_lasts_names_the_step_and_the_high_jobs_of_the_thread(high: SteppingThread, low: Waits) -> None:
    wire = Wire()
    assert wait(low, wire)
    assert wire.said == [m.StepAwaited(0, "low", 7, ["high"], False)]
    assert wire.waits == [SAY_AFTER_S[False], LONG_S]


def test_a_step_that_is_answered_soon_costs_no_message(high: SteppingThread, low: Waits) -> None:
    wire = Wire(after=0)
    assert wait(low, wire)
    assert wire.said == []


def test_the_step_that_is_waited_for_is_named(high: SteppingThread, low: Waits) -> None:
    wire = Wire()
    wait(low, wire, step=6)
    assert [said.step for said in wire.said] == [6]


def test_after_a_wait_that_had_to_be_told_of_the_next_ones_are_before_they_last(
    high: SteppingThread, low: Waits
) -> None:
    wait(low, Wire())
    for _ in range(AT_ONCE):
        wire = Wire()
        wait(low, wire)
        assert wire.waits == [0.0, LONG_S]
        assert len(wire.said) == 1
    wire = Wire()
    wait(low, wire)
    assert wire.waits[0] == SAY_AFTER_S[False], "now and then it is looked whether it still has to be told"


def test_a_wait_that_ends_without_an_answer_is_taken_back(
    high: SteppingThread, low: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([float(second) for second in range(99)])
    monkeypatch.setattr(patience.time, "monotonic", lambda: next(now))
    wire = Wire(after=99)
    assert not wait(low, wire, timeout=4.5)
    assert [said.over for said in wire.said] == [False, True]
    assert wire.said[0].before == wire.said[1].before == ["high"]


def test_a_wait_that_is_interrupted_is_taken_back(high: SteppingThread, low: Waits) -> None:
    class Interrupted(Wire):
        def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            if self.said:
                raise KeyboardInterrupt
            return False

    wire = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        wait(low, wire)
    assert [said.over for said in wire.said] == [False, True]


def test_looking_whether_it_is_done_says_nothing(high: SteppingThread, low: Waits) -> None:
    wire = Wire(after=99)
    assert not wait(low, wire, timeout=0.0)
    assert wire.said == []


@pytest.mark.parametrize("which", ["low alone", "high alone", "another thread", "a daemon that holds nothing"])
def test_nothing_is_said_where_no_high_job_gets_its_steps_from_the_thread(which: str, low: Waits) -> None:
    wire, waits = Wire(), low
    other = SteppingThread("other", which != "low alone")
    if which == "high alone":
        waits = Waits("other", True)
        waits.thread.stepped(0)
        low.thread.forget()
    elif which == "another thread":
        elsewhere(lambda: other.stepped(0))
    else:
        other.stepped(0)
        wire.holds_low_work = which == "low alone"
    assert wait(waits, wire)
    assert wire.said == []


def test_a_job_that_threads_step_in_turn_is_no_threads(high: SteppingThread, low: Waits) -> None:
    """For example of a pool: another thread could step the job while this one waits."""
    for _ in range(2 * SURE):
        elsewhere(lambda: high.stepped(1))
        high.stepped(2)
        wire = Wire()
        wait(low, wire)
        assert wire.said == []
    for _ in range(SURE):
        high.stepped(3)
    wire = Wire()
    wait(low, wire)
    assert [said.before for said in wire.said] == [["high"]]


def test_jobs_that_are_closed_or_dropped_are_not_named(low: Waits) -> None:
    closed, dropped = SteppingThread("closed", True), SteppingThread("dropped", True)
    closed.stepped(0)
    dropped.stepped(0)
    closed.forget()
    del dropped
    gc.collect()
    wire = Wire()
    wait(low, wire)
    assert wire.said == []


# ---- the warning

HELD = {
    "paused": False, "name": "little",
    "promise": {
        "held": "gap", "held_by": "j1", "held_by_name": "important", "held_by_job": "elsewhere", "held_s": {"gap": 4.9},
    },
}  # fmt: skip


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    ear = Ear()
    patience.log.addHandler(ear)
    yield found
    patience.log.removeHandler(ear)


def long_wait(waits: Waits, body: dict[str, Any]) -> None:
    wire = Wire(after=2)
    wire.body = body
    wait(waits, wire)


def test_a_step_that_is_held_long_names_itself_and_the_job_it_waits_for_once(low: Waits, lines: list[str]) -> None:
    long_wait(low, HELD)
    (line,) = lines
    assert line.startswith("step 7 of job 'little' waits for job 'important'")
    assert "\n" not in line
    long_wait(low, {**HELD, "promise": {**HELD["promise"], "held_s": {"gap": 50.0}}})
    assert len(lines) == 1
    long_wait(low, {**HELD, "promise": {**HELD["promise"], "held_by_name": "other", "held_s": {"gap": 99.0}}})
    assert len(lines) == 2


def test_many_waits_that_are_long_together_are_told_of_too(
    low: Waits, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Slow(Wire):
        def wait(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            nonlocal now
            now += 0.05
            return super().wait(predicate, timeout)

    monkeypatch.setattr(patience.time, "monotonic", lambda: now)
    for _ in range(49):
        wire = Slow(after=1)
        wire.body = HELD
        wait(low, wire)
    assert lines == []
    for _ in range(3):
        wire = Slow(after=1)
        wire.body = HELD
        wait(low, wire)
    assert len(lines) == 1


@pytest.mark.parametrize(
    "promise",
    [
        None,
        {**HELD["promise"], "held_s": {"tail": 4.9}},  # beside high work that runs
        {**HELD["promise"], "held_s": {"gap": 1.0}},
        {**HELD["promise"], "held_by": "", "held_by_name": ""},
    ],
)  # fmt: skip
def test_work_that_has_its_turn_or_makes_way_for_work_that_runs_is_no_news(
    promise: dict[str, Any] | None, low: Waits, lines: list[str]
) -> None:
    long_wait(low, {**HELD, "promise": promise})
    assert lines == []


def test_a_job_that_an_operator_made_a_high_one_is_told_of_from_then_on(low: Waits, lines: list[str]) -> None:
    other = SteppingThread("elsewhere", False)
    other.stepped(0)
    long_wait(low, HELD)
    assert lines == []
    wire = Wire()
    wait(low, wire)
    assert [said.before for said in wire.said] == [["elsewhere"]]


# ---- with a daemon


def submit(endpoint: str, name: str, priority: str, width: int) -> client.Job:
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return client.submit(
        step, example=(X,), model=model, optimizer=optimizer, priority=priority, name=name, endpoint=endpoint,
        max_slowdown=1.05,
    )  # fmt: skip


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with running_daemon(policy="guarded", threads=THREADS) as daemon:
        yield daemon.endpoint


@pytest.fixture
def jobs(guarded: str) -> Iterator[list[client.Job]]:
    """A small high job, and three low jobs with longer steps."""
    sizes = {"high": 16, "low0": 512, "low1": 512, "low2": 512}
    found = [submit(guarded, name, name.rstrip("012"), width) for name, width in sizes.items()]
    yield found
    for job in found:
        job.close(drain=False)


# On a busy machine it may take the guard very long to hold a step of the two in the middle, and what is tested is how a
# held one is released.
@pytest.mark.every(4)
@pytest.mark.parametrize("turn", ["each waited for", "all submitted first", "one more than may be in flight", "synced"])
def test_low_steps_run_when_the_loop_that_steps_the_high_job_waits_for_them(turn: str, jobs: list[client.Job]) -> None:
    for _ in range(MOST_ROUNDS):
        if turn == "each waited for":
            for job in jobs:
                job.step(X).result()
        elif turn == "all submitted first":
            for future in [job.step(X) for job in jobs]:
                future.result()
        elif turn == "synced":
            for job in jobs:
                job.step(X)
                job.sync()
        else:
            jobs[0].step(X).result()
            for job in jobs[1:]:
                job.step(X)
        if any(released(job) for job in jobs[1:]):
            return
    pytest.fail(f"in {MOST_ROUNDS} rounds no low step was held and released")


def test_a_high_job_of_another_thread_is_protected_from_low_steps_that_are_waited_for(jobs: list[client.Job]) -> None:
    high, low = jobs[:2]
    over = threading.Event()

    def important() -> None:
        try:
            for _ in range(ROUNDS):
                high.step(X).result()
        finally:
            over.set()

    thread = threading.Thread(target=important)
    thread.start()
    while not over.is_set():
        low.step(X).result()
        assert not any("ClientWaits" in line for line in story(low))
    thread.join()


def released(job: client.Job) -> bool:
    """Whether one of its newest launches was admitted because its client waits for it."""
    return any("launched" in line and "ClientWaits" in line for line in story(job))


def story(job: client.Job) -> list[str]:
    lines: list[str] = job._session.call(m.ExplainJob(0, job.id))[0].body["story"]
    return lines
