"""Devices for the contract suite: add a Case here and every contract test runs on it too."""

from __future__ import annotations

import os
from math import inf

import pytest

from gpumux.device.base import Device
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.sim.device import SimDevice
from tests.device.cuda.fake import fake_device, poll_wait
from tests.device.fixtures import driver, narrow, narrow_device, wide_device  # noqa: F401
from tests.device.harness import Case

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
