"""The harness itself: a device that never does what it should fails a test, and does not stop the run."""

from __future__ import annotations

from typing import cast

import pytest

from gpumux.device.base import Device, DeviceEvent
from gpumux.types import JobId
from tests.device.harness import Case, Driver, wait_polled


class NeverDone:
    """It is to be looked at at once, all the time, as one whose counter never comes."""

    def due(self) -> float:
        return 0.0

    def filenos(self) -> list[int]:
        return []

    def poll(self) -> list[DeviceEvent]:
        return []

    def unload(self, job: JobId) -> None: ...


def test_an_event_that_never_comes_is_given_up() -> None:
    device = cast(Device, NeverDone())
    driver = Driver(Case("never", lambda: device, lambda: device, wait=wait_polled, give_up_s=0.05), device)
    with pytest.raises(AssertionError, match=r"did not come within 0\.05 s"):
        driver.wait_for(lambda event: True)


def test_what_a_test_left_is_given_up_as_well() -> None:
    device = cast(Device, NeverDone())
    driver = Driver(Case("never", lambda: device, lambda: device, wait=wait_polled, give_up_s=0.05), device)
    with pytest.raises(AssertionError, match="did not come"):
        driver.unload(JobId("a" * 32))
