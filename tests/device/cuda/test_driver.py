"""The fake driver keeps the rules that the real one is held to (driver_rules.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from gpumux.device.cuda.driver import CudaDriver
from tests.device.cuda.driver_rules import *  # noqa: F403  the tests, and what they need
from tests.device.cuda.driver_rules import Card
from tests.device.cuda.fake import FakeDriver


@pytest.fixture
def card() -> Iterator[Card]:
    driver = FakeDriver(auto=False)
    facts = driver.open(0)
    yield Card(driver, lambda: assert_done(driver), facts.priorities)
    assert not driver.pinned
    assert not driver.streams
    assert not driver.events


def assert_done(driver: FakeDriver) -> None:
    driver.advance()
    assert not any(stream.work for stream in driver.streams.values())


class Calls:
    """Stands in for the module of driver calls: every call succeeds, returns handles, and is written down with its
    thread."""

    class CUresult:
        CUDA_ERROR_NOT_READY = 600

    class CUdevResourceType:
        CU_DEV_RESOURCE_TYPE_SM = 1

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        if name == "cuDevSmResourceSplitByCount":
            group = SimpleNamespace(sm=SimpleNamespace(smCount=16))
            return lambda *_: (0, [group], 1, None)

        def call(*_: object) -> tuple[object, ...]:
            self.made.append(name)
            return 0, len(self.made)

        return call


def test_streams_of_a_green_context_are_used_with_the_primary_context_current() -> None:
    """A green context may be current in one thread only; the daemon's and the worker's both use its streams."""
    driver = CudaDriver()
    driver._api = calls = Calls()
    driver._hot = SimpleNamespace(streams={}, events={})
    partition, multiprocessors = driver.partition(16)
    stream = driver.confined_stream(partition, 0)
    driver.upload(7, stream)
    driver.destroy_stream(stream)
    driver.destroy_partition(partition)
    assert multiprocessors == 16
    contexts = ("cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxSetCurrent", "cuCtxFromGreenCtx")
    assert not set(contexts) & set(calls.made)
    assert calls.made[-1] == "cuGreenCtxDestroy"
