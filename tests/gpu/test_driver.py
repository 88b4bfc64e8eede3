"""The rules the fake driver keeps, asked of the real one, and what only a real one has."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic, sleep

import pytest

from gpumux.device.cuda.driver import GREEN_SINCE, CudaDriver, Facts
from gpumux.errors import ConfigError
from tests.device.cuda.test_driver import (  # noqa: F401  its tests run here on the card below
    Card,
    pinned,
    test_a_value_is_stored_when_the_stream_gets_there,
    test_an_event_holds_another_stream_back,
    test_an_event_nobody_recorded_holds_nothing_back,
    test_an_event_recorded_again_is_reached_again,
    test_priorities_are_a_range_and_smaller_is_more,
    test_times_between_events_go_forward,
)


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[CudaDriver, Facts]]:
    driver = CudaDriver()
    facts = driver.open(0)
    yield driver, facts
    driver.close()


@pytest.fixture
def card(opened: tuple[CudaDriver, Facts]) -> Card:
    driver, facts = opened
    return Card(driver, lambda: settle(driver), facts.priorities)


def settle(driver: CudaDriver) -> None:
    """Wait for all streams of the context: these tests may, the device never does."""
    driver._call("cuCtxSynchronize")


def test_the_facts_are_of_a_gpu(opened: tuple[CudaDriver, Facts]) -> None:
    _, facts = opened
    assert facts.name
    assert facts.memory_bytes > 1 << 30
    assert facts.multiprocessors > 0
    assert facts.driver_version >= 12000


def test_a_gpu_that_is_not_there_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigError, match="no such GPU") as raised:
        CudaDriver().open(99)
    assert "--gpu" in raised.value.remedy


def test_work_may_be_confined_to_a_share(opened: tuple[CudaDriver, Facts]) -> None:
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
