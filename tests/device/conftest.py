"""Devices for the contract suite: add a Case here and every contract test runs on it too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf

import pytest

from gpumux.device.contract import Device
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.sim.device import SimDevice
from tests.device.cuda.fake import fake_device, poll_wait
from tests.device.harness import Case, Driver

CORES = len(os.sched_getaffinity(0))


class Clock:
    """A virtual clock that all simulated devices of a test run share."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, device: Device) -> None:
        """Nothing happens by itself before the device is due."""
        due = device.due()
        assert due < inf, "the device would never say anything"
        self.now = max(self.now, due)


CLOCK = Clock()
CASES = [
    Case("cpu", wide=lambda: CpuDevice(threads=1, cores=2), narrow=lambda: CpuDevice(threads=1, cores=1)),
    Case(
        "sim",
        wide=lambda: SimDevice(clock=CLOCK),
        narrow=lambda: SimDevice(clock=CLOCK, parallel=1),
        wait=CLOCK.wait,
        computes=False,
    ),
    Case("cuda", wide=fake_device, narrow=lambda: fake_device(parallel=1), wait=poll_wait),
]


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="session")
def wide_device(case: Case) -> Iterator[Device]:
    device = case.wide()
    device.open()
    yield device
    device.close()


@pytest.fixture(scope="session")
def narrow_device(case: Case) -> Iterator[Device]:
    device = case.narrow()
    device.open()
    yield device
    device.close()


@pytest.fixture
def driver(case: Case, wide_device: Device) -> Iterator[Driver]:
    """Drives a device that may run two pieces at once."""
    driver = Driver(case, wide_device)
    yield driver
    driver.finish()


@pytest.fixture
def narrow(case: Case, narrow_device: Device) -> Iterator[Driver]:
    """Drives a device that runs one piece at a time."""
    driver = Driver(case, narrow_device)
    yield driver
    driver.finish()
