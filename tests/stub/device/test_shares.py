"""Pieces on shares of the multiprocessors, on the stand-in: streams and captures of green contexts, events of the
primary one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.device.cuda.streams import DEFAULT_SHARES
from gpumux.types import ProgramReady
from tests.device.cuda.running import crossing, cut_fine, step
from tests.device.harness import Case, Driver, floats, numbers
from tests.stub.device.compute import stub_device
from tests.stub.inside.stub import Stub


@pytest.fixture
def driver(case: Case) -> Iterator[Driver]:
    greens = Stub().live("context")
    device = stub_device(shares=DEFAULT_SHARES)
    info = device.open()
    assert info.shares == (1.0, 72 / 132, 40 / 132)
    made = Driver(case, device)
    yield made
    made.finish()
    device.close()
    assert Stub().live("context") == greens


def test_a_step_runs_on_any_shares(driver: Driver) -> None:
    job = driver.open()
    number = job.load(crossing())
    cut_fine(driver.device, job, number)
    for _ in range(2):
        job.step(number, [1.0])
    driver.until(ProgramReady, job.job)
    assert len(job.pieces[number]) > 2
    _, half, quarter = driver.device._partitions.shares
    for shares in ([1.0], [half], [half, quarter, 1.0]):
        job.put(number, 0, floats(1, 2, 3, 4))
        step(driver, job, number, 0.5, shares)
        expected = [x + 40 * 0.5 - 2 * (x + 1) for x in (1, 2, 3, 4)]
        assert numbers(job.get(number, 0, 16)) == pytest.approx(expected), shares
