"""The worker's thread: the order of its work, errors, and a thread that can't begin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from gpumux.device.cuda.worker import PENDING, Worker
from gpumux.errors import DeviceLost, JobFailed


def finish(worker: Worker, bell: threading.Event, count: list[Any], wanted: int) -> None:
    while len(count) < wanted:
        assert bell.wait(60)
        bell.clear()
        worker.finished()


def test_important_work_comes_first_and_between_the_parts_of_other_work() -> None:
    bell, gate, done = threading.Event(), threading.Event(), []
    worker = Worker(nullcontext, bell.set)
    order: list[str] = []
    parts = iter(range(3))

    def long() -> object:
        assert gate.wait(60)
        order.append("part")
        return PENDING if next(parts) < 2 else "long"

    def note(name: str) -> Callable[[], str]:
        return lambda: order.append(name) or name  # type: ignore[func-returns-value]

    def reported(value: Any, error: BaseException | None) -> None:
        done.append((value, error))

    worker.submit(long, reported, 0)
    while worker._tasks:
        pass  # until the thread has taken it
    worker.submit(note("low"), reported, 0)
    worker.submit(note("high"), reported, 1)
    gate.set()
    finish(worker, bell, done, 3)
    assert order == ["part", "high", "part", "part", "low"]  # work of one class keeps its order
    assert [value for value, _ in done] == ["high", "long", "low"]
    assert worker.close(60)


def test_what_work_raises_is_reported_and_the_thread_goes_on() -> None:
    bell, done = threading.Event(), []
    worker = Worker(nullcontext, bell.set)

    def fail() -> None:
        raise ValueError("no")

    worker.submit(fail, lambda value, error: done.append(error), 0)
    worker.submit(lambda: 5, lambda value, error: done.append(value), 0)
    finish(worker, bell, done, 2)
    assert isinstance(done[0], ValueError)
    assert done[1] == 5
    assert worker.close(60)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (DeviceLost("the context is lost"), "^the context is lost$"),
        (JobFailed("no stream", "free some"), "no stream"),
    ],
)
def test_a_thread_that_cant_begin_is_the_end_of_the_device(
    error: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    bell = threading.Event()

    @contextmanager
    def inside() -> Iterator[None]:
        raise error
        yield

    worker = Worker(inside, bell.set)
    assert bell.wait(60)
    with pytest.raises(DeviceLost, match=text):
        worker.finished()
    assert worker.close(60)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
