"""Tests that need an NVIDIA GPU. They skip for want of one and for nothing else: a machine that has a GPU and lacks
cuda-bindings, or has a torch that can't use it, fails them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.driver import bindings
from gpumux.errors import ConfigError
from tests.conftest import PREFIX
from tests.daemon.live import LiveDaemon
from tests.device.fixtures import driver, narrow, narrow_device, wide_device  # noqa: F401
from tests.device.harness import Case, wait_polled


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


@pytest.fixture(scope="session")
def case() -> Case:
    return Case("cuda", wide=CudaDevice, narrow=lambda: CudaDevice(parallel=1), wait=wait_polled)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A daemon on the GPU, of a file's own: two at a time would share it."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        daemon = LiveDaemon(Path(directory), "--device", "cuda")  # the last --device counts
        yield daemon.endpoint
        assert daemon.stop() == 0, daemon.log
        for path in Path(directory).glob("*.lock"):
            path.unlink()
