"""Tests that need an NVIDIA GPU. They skip for want of one and for nothing else: a machine that has a GPU and lacks
cuda-bindings, or has a torch that can't use it, fails them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.driver import CudaDriver, bindings
from gpumux.errors import ConfigError, GpumuxError
from tests import conftest as root
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


GIVE_UP_S = 18.0  # a test's wait, and its teardown's, fit into the suite's limit of a test
SETTLE_S = 2.0  # nothing here takes longer to end, and a check that finds something costs as much each time


def prime() -> None:
    """Have the driver and torch's libraries open what they keep open for the process' life, so that it is no test's
    leak: a context, a stream, page-locked memory, and what cuBLAS and cuDNN make."""
    gpu = CudaDriver()
    facts = gpu.open(0)
    gpu.destroy_stream(gpu.stream(facts.priorities[0]))
    gpu.unpin(gpu.pin(4096))
    if torch.cuda.is_available():
        a = torch.ones(64, 64, device="cuda")
        image = torch.ones(1, 3, 8, 8, device="cuda")
        torch.nn.functional.conv2d(image, torch.ones(4, 3, 3, 3, device="cuda"))
        (a @ a).to(torch.bfloat16)
        torch.ones(64, pin_memory=True).to("cuda", non_blocking=True)
        torch.cuda.synchronize()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    absent = pytest.mark.skip(reason="there is no NVIDIA GPU on this machine")
    none = bool(here) and not gpus()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if none:
            item.add_marker(absent)
    if not here or none:
        return
    if len(here) == len(items):  # of other tests' daemons some take longer
        root.SETTLE_S = SETTLE_S
    try:
        prime()  # here, before any fixture has counted anything
    except (GpumuxError, RuntimeError) as error:  # the tests fail for it, and say so each
        print(f"no first context could be made: {error}")


@pytest.fixture(scope="session")
def case() -> Case:
    return Case(
        "cuda",
        wide=CudaDevice,
        narrow=lambda: CudaDevice(parallel=1),
        wait=wait_polled,
        give_up_s=GIVE_UP_S,
        shares_process=True,
    )


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A daemon on the GPU, of a file's own: two at a time would share it."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        daemon = LiveDaemon(Path(directory), "--device", "cuda")  # the last --device counts
        yield daemon.endpoint
        assert daemon.stop() == 0, daemon.log
        for path in Path(directory).glob("*.lock"):
            path.unlink()
