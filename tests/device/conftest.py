"""Devices for the contract suite: add a Case here and every contract test runs on it too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpumux.device.contract import Device
from gpumux.device.cpu.device import CpuDevice
from tests.device.harness import Case, Driver

CORES = len(os.sched_getaffinity(0))
CASES = [Case("cpu", wide=lambda: CpuDevice(threads=1, cores=2), narrow=lambda: CpuDevice(threads=1, cores=1))]


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
