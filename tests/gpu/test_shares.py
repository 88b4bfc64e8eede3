"""Low jobs on parts of a real GPU. Whether nodes run where they were captured, and what confining buys, no fake can
say."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest

from gpumux.device.base import Launch
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.driver import GREEN_SINCE, CudaDriver
from gpumux.device.cuda.streams import DEFAULT_SHARES
from gpumux.types import LaunchId, ProgramReady, StepId
from tests.device.cuda.running import crossing, ready, step
from tests.device.harness import Case, Driver, floats, wait_polled
from tests.gpu.test_programs import products


@pytest.fixture(scope="module")
def confining() -> Iterator[CudaDevice]:
    """Skips where the driver is too old for it, and fails where it is not and there are no shares."""
    driver = CudaDriver()
    if driver.open(0).driver_version < GREEN_SINCE:
        driver.close()
        pytest.skip("green contexts need a driver of CUDA 12.4")
    driver.close()
    device = CudaDevice(shares=DEFAULT_SHARES)
    info = device.open()
    assert len(info.shares) > 1
    yield device
    device.close()


@pytest.fixture
def driver(confining: CudaDevice) -> Iterator[Driver]:
    driver = Driver(Case("cuda", lambda: confining, lambda: confining, wait=wait_polled), confining)
    yield driver
    driver.finish()


def test_pieces_on_any_shares_in_any_order_give_the_same_bits(driver: Driver, confining: CudaDevice) -> None:
    job, number = ready(driver, confining, crossing())
    shares = list(confining._partitions.shares)
    seen = set()
    for order in ([1.0], shares, shares[::-1], shares[1:], [shares[-1]]):
        job.put(number, 0, floats(1, 2, 3, 4))
        step(driver, job, number, 0.5, order)
        seen.add(job.get(number, 0, 16))
    assert len(seen) == 1


def test_a_confined_piece_takes_longer_since_it_runs_on_less(driver: Driver, confining: CudaDevice) -> None:
    job = driver.open()
    number = job.load(products(4096, 8))
    for _ in range(2):
        job.step(number)
    driver.until(ProgramReady, job.job)
    launches = iter(range(1 << 41, 1 << 42))

    def seconds(share: float) -> float:
        job.steps += 1
        ids = [LaunchId(next(launches)) for _ in job.pieces[number]]
        for piece, launch in enumerate(ids):
            confining.launch(
                Launch(launch, job.job, StepId(job.steps), number, job.cut[number], piece, 0, (), 0, share)
            )
        done = [driver.done(launch) for launch in ids]
        return sum(event.ended - event.started for event in done)

    least = confining._partitions.shares[-1]
    whole, part = (median(seconds(share) for _ in range(9)) for share in (1.0, least))
    assert part > 1.5 * whole
