"""The thread that asks the daemon: questions, losses and ends, with connections that a test controls."""

from __future__ import annotations

import os
import select
from queue import SimpleQueue

import pytest

from gpumux.cli.top.feed import Broke, Feed, Lost, Question, StatusAnswer
from gpumux.errors import DaemonGone, NotOwner

SOON_S = 30.0


class FakeControl:
    """A connection. Its answers are taken from `answers`: a body, or an error to raise; at the end it waits until the
    feed is woken."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.closed = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed += 1

    def status(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, seconds, watch):
        return bool(select.select([watch], [], [], None if not self.answers else 0)[0])


@pytest.fixture
def heard():
    return SimpleQueue()


@pytest.fixture
def feeding(heard):
    """A function that starts a feed over these connections, in turn; the last one is used again."""
    made = []

    def start(*controls):
        left = list(controls)

        def connect():
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, Exception):
                raise found
            return found

        feed = Feed(connect, 1.0)
        made.append(feed)
        feed.start(heard.put)
        return feed

    yield start
    for feed in made:
        feed.close()


def question(put, heard):
    return Question(put, lambda answer: heard.put(("answer", answer)), lambda error: heard.put(("refused", error)))


def test_every_interval_has_an_answer(feeding, heard):
    control = FakeControl([{"n": 1}, {"n": 2}, {"n": 3}])
    feed = feeding(control)
    assert [heard.get(timeout=SOON_S) for _ in range(3)] == [StatusAnswer({"n": n}) for n in (1, 2, 3)]
    feed.close()
    assert control.closed == 1
    assert heard.empty()


def test_a_question_is_put_at_once_and_the_next_answer_is_early(feeding, heard):
    control = FakeControl([{"n": 1}])
    feed = feeding(control)
    assert heard.get(timeout=SOON_S) == StatusAnswer({"n": 1})
    control.answers.append({"n": 2})
    feed.ask(question(lambda asked: asked is control, heard))
    assert heard.get(timeout=SOON_S) == ("answer", True)
    assert heard.get(timeout=SOON_S) == StatusAnswer({"n": 2}, early=True)


def test_a_refusal_is_told_and_the_connection_stays(feeding, heard):
    control = FakeControl([{"n": 1}])
    feed = feeding(control)
    heard.get(timeout=SOON_S)
    control.answers.append({"n": 2})
    error = NotOwner("not yours", "")

    def refuse(_):
        raise error

    feed.ask(question(refuse, heard))
    assert heard.get(timeout=SOON_S) == ("refused", error)
    assert heard.get(timeout=SOON_S) == StatusAnswer({"n": 2}, early=True)
    assert control.closed == 0


def test_a_daemon_that_goes_is_told_and_the_next_one_is_found(feeding, heard, monkeypatch):
    monkeypatch.setattr("gpumux.cli.top.feed.RETRY_S", 0.0)
    gone = DaemonGone("it left", "")
    first, second = FakeControl([{"n": 1}, gone]), FakeControl([{"n": 2}])
    feeding(first, gone, gone, second)
    found = [heard.get(timeout=SOON_S) for _ in range(5)]
    assert found == [StatusAnswer({"n": 1}), Lost(gone), Lost(gone), Lost(gone), StatusAnswer({"n": 2})]
    assert first.closed == 1


def test_questions_are_refused_while_the_daemon_is_away(feeding, heard):
    gone = DaemonGone("nothing is there", "start one")
    feed = feeding(gone)
    assert heard.get(timeout=SOON_S) == Lost(gone)
    feed.ask(question(lambda _: None, heard))  # also ends the wait for the next try
    found = {heard.get(timeout=SOON_S) for _ in range(2)}
    assert found == {("refused", gone), Lost(gone)}


def test_a_daemon_that_goes_during_a_question_refuses_it(feeding, heard, monkeypatch):
    monkeypatch.setattr("gpumux.cli.top.feed.RETRY_S", 0.0)
    gone = DaemonGone("it left", "")
    first, second = FakeControl([{"n": 1}]), FakeControl([{"n": 2}])
    feed = feeding(first, second)
    heard.get(timeout=SOON_S)

    def lose(_):
        raise gone

    feed.ask(question(lose, heard))
    assert [heard.get(timeout=SOON_S) for _ in range(3)] == [("refused", gone), Lost(gone), StatusAnswer({"n": 2})]


def test_a_bug_is_told(feeding, heard):
    bug = ZeroDivisionError()
    feeding(FakeControl([bug]))
    assert heard.get(timeout=SOON_S) == Broke(bug)


def test_a_feed_that_never_started_closes():
    feed = Feed(lambda: FakeControl([]), 1.0)
    feed.close()
    with pytest.raises(OSError):
        os.eventfd_write(feed._woken, 1)
