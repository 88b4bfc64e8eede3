"""The devices of a `case` and what drives them: a conftest.py that has a `case` imports these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.device.base import Device
from tests.device.harness import Case, Driver


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
