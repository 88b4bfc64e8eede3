"""Tests that need an NVIDIA GPU. They skip for want of one and for nothing else: a machine that has a GPU and lacks
cuda-bindings, or has a torch that can't use it, fails them."""

from __future__ import annotations

import select
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from gpumux.device.contract import Device
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.driver import bindings
from gpumux.errors import ConfigError
from tests.device.harness import GIVE_UP_S, Case, Driver


def gpus() -> int:
    """How many GPUs this process may use."""
    try:
        api = bindings()
        (status,) = api.cuInit(0)
        status, count = api.cuDeviceGetCount() if int(status) == 0 else (status, 0)
        return int(count) if int(status) == 0 else 0
    except ConfigError:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    except RuntimeError:  # there is no driver
        return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    absent = pytest.mark.skip(reason="there is no NVIDIA GPU on this machine")
    none = bool(here) and not gpus()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if none:
            item.add_marker(absent)


def gpu_wait(device: Device) -> None:
    """Wait as the daemon's loop does: a device that is due is looked at without a word."""
    if device.due() < inf:
        select.select(device.filenos(), [], [], 0)
        return
    ready, _, _ = select.select(device.filenos(), [], [], GIVE_UP_S)
    assert ready, "the device said nothing for too long"


@pytest.fixture(scope="session")
def case() -> Case:
    return Case("cuda", wide=CudaDevice, narrow=lambda: CudaDevice(parallel=1), wait=gpu_wait)


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
    driver = Driver(case, wide_device)
    yield driver
    driver.finish()


@pytest.fixture
def narrow(case: Case, narrow_device: Device) -> Iterator[Driver]:
    driver = Driver(case, narrow_device)
    yield driver
    driver.finish()
