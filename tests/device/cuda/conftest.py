"""One device on a fake GPU for all tests of this folder, and a driver for it; one daemon that has such a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.device.cuda.device import CudaDevice
from tests.device.cuda.fake import FakeDriver, broken_rules, fake_device, poll_wait
from tests.device.cuda.running import compute_of, gpu_of
from tests.device.cuda.serving import serving
from tests.device.harness import Case, Driver


@pytest.fixture(scope="session")
def shared() -> Iterator[CudaDevice]:
    device = fake_device()
    device.open()
    compute = compute_of(device)
    yield device
    device.close()
    gpu = device._driver
    assert isinstance(gpu, FakeDriver)
    assert [gpu.streams, gpu.events, gpu.pinned, gpu.registered] == [{}] * 4  # all of it was given back
    assert not gpu.opened
    assert not compute.held
    assert broken_rules == []


@pytest.fixture
def driver(shared: CudaDevice) -> Iterator[Driver]:
    driver = Driver(Case("cuda", lambda: shared, lambda: shared, wait=poll_wait), shared)
    yield driver
    gpu_of(shared).auto = True
    driver.finish()


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with serving() as (endpoint, _):
        yield endpoint
