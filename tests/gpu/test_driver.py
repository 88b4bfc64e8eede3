"""The rules the fake driver keeps, asked of the real one, and what only a real one has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from time import monotonic, sleep

import pytest

from gpumux.device.cuda.driver import GREEN_SINCE, STICKY, CudaDriver, GpuProperties, bindings
from gpumux.errors import ConfigError
from tests.device.cuda.driver_rules import *  # noqa: F403  its tests run here on the card below
from tests.device.cuda.driver_rules import Card


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[CudaDriver, GpuProperties]]:
    driver = CudaDriver()
    facts = driver.open(0)
    yield driver, facts
    driver.close()


@pytest.fixture
def card(opened: tuple[CudaDriver, GpuProperties]) -> Card:
    driver, facts = opened
    return Card(driver, lambda: settle(driver), facts.priorities)


def settle(driver: CudaDriver) -> None:
    """Wait for all streams of the context: these tests may, the device never does."""
    driver._call("cuCtxSynchronize")


def test_the_facts_are_of_a_gpu(opened: tuple[CudaDriver, GpuProperties]) -> None:
    _, facts = opened
    assert facts.name
    assert facts.memory_bytes > 1 << 30
    assert facts.multiprocessors > 0
    assert facts.driver_version >= 12000


def test_a_gpu_that_is_not_there_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigError, match="no such GPU") as raised:
        CudaDriver().open(99)
    assert "--gpu" in raised.value.remedy


def test_every_error_that_only_a_new_process_helps_against_is_known_for_one() -> None:
    """By what the bindings say of each, which may be more with each of their versions."""
    told = {result.name for result in bindings().CUresult if "terminated and relaunched" in (result.__doc__ or "")}
    assert told - STICKY.keys() == set()


def test_work_may_be_confined_to_a_share(opened: tuple[CudaDriver, GpuProperties]) -> None:
    driver, facts = opened
    if facts.driver_version < GREEN_SINCE:
        pytest.skip("green contexts need a driver of CUDA 12.4")
    partition, has = driver.partition(facts.multiprocessors // 2)
    assert facts.multiprocessors // 2 <= has <= facts.multiprocessors
    stream = driver.confined_stream(partition, facts.priorities[0])
    event = driver.event(timed=False)
    driver.record(event, stream)
    deadline = monotonic() + 10
    while not driver.reached(event) and monotonic() < deadline:
        sleep(1e-3)
    assert driver.reached(event)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.destroy_partition(partition)


def test_a_context_that_a_kernel_ended_is_noticed_though_nothing_more_is_launched() -> None:
    """In a process of its own, whose context it ends: an index out of bounds, which torch's kernel asserts."""
    script = """
from time import monotonic, sleep
import torch
from gpumux.device.cuda.driver import CudaDriver
from gpumux.device.cuda.launches import LaunchTracker
from gpumux.errors import DeviceLost
driver = CudaDriver()
facts = driver.open(0)
torch.cuda.set_device(0)
table, index = torch.zeros(4, device="cuda"), torch.tensor([1 << 20], device="cuda")
table[index[:0]]
torch.cuda.synchronize()
tracker = LaunchTracker(driver, monotonic, facts.priorities[1])
stream = driver.stream(facts.priorities[0])

def work():
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        torch.index_select(table, 0, index)

tracker.launch("one", stream, 1e-3, work)
end = monotonic() + 60
try:
    while monotonic() < end:
        assert tracker.completed() == []
        sleep(1e-3)
except DeviceLost as lost:
    print("noticed:", lost)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert "noticed:" in done.stdout, done.stderr[-2000:]
