"""The fake driver keeps the rules that the real one is held to (driver_rules.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
