"""Operators are timed on a core of their own: what a thread waits for one is taken off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from gpumux.device.run import interpreter as stopwatch
from gpumux.device.run.interpreter import CoreWaits, Stopwatch, waited
from tests.device.cpu.support import Bench, as_in_an_executor  # noqa: F401
from tests.program import samples

pytestmark = pytest.mark.usefixtures("as_in_an_executor")


@pytest.fixture
def statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "schedstat"
    file.write_text("5000000 0 1\n")
    monkeypatch.setattr(stopwatch, "_STATISTICS", str(file))
    stopwatch._counted.cache_clear()
    yield file
    stopwatch._counted.cache_clear()


def test_the_time_in_a_queue_for_a_core_is_taken_off(statistics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    watch.start()
    statistics.write_text("6000000 400000000 9\n")
    assert watch.stop() == pytest.approx(0.1)
    assert waited() == pytest.approx(0.4)


def test_where_the_kernel_counts_nothing_the_clock_is_believed(
    statistics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics.unlink()
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    watch.start()
    assert watch.stop() == 0.5


def test_repeated_questions_have_the_same_answer(statistics: Path) -> None:
    waits = CoreWaits()
    assert waits.seconds() == 0.0
    statistics.write_text("6000000 400000000 9\n")
    assert waits.seconds() == waited() == pytest.approx(0.4)
    stopwatch._counted.cache_clear()
    statistics.unlink()
    assert CoreWaits().seconds() == 0.0


def test_it_is_the_thread_that_asks_whose_waiting_counts() -> None:
    """A new one has not waited for as long as this process has run; and it never gets less."""
    found: list[float] = []

    def ask() -> None:
        found.extend(waited() for _ in range(50))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == sorted(found)
    assert all(each >= 0.0 for each in found)


def test_of_two_times_of_an_operator_the_lesser_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step something else delays another operator."""
    program = samples.sgd_linear()
    bench = Bench(program, [bytes(12)], [bytes(96), bytes(32)])
    operators, calls = len(program.ops), count()
    assert operators > 2

    def stop(watch: Stopwatch) -> float:
        step, operator = divmod(next(calls), operators)
        return 80.0 if operator == step else 1e-3

    monkeypatch.setattr(Stopwatch, "stop", stop)
    for _ in range(2):
        bench.step((0.1,))
    assert next(calls) == 2 * operators
    assert bench.loaded.recut() is not None
    assert [op.seconds for op in bench.loaded.profile().ops] == [1e-3] * operators
