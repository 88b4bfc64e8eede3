"""One device for all tests of this folder, because a start takes seconds, and a driver for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.device.cpu.device import CpuDevice
from tests.device.cpu.support import CASE
from tests.device.harness import Driver


@pytest.fixture(scope="session")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1, cores=2)
    device.open()
    yield device
    device.close()


@pytest.fixture
def driver(device: CpuDevice) -> Iterator[Driver]:
    driver = Driver(CASE, device)
    yield driver
    driver.finish()
