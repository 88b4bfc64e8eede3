"""Rules of the driver calls that the device relies on, as tests of a `card`. The fake driver is held to them, the real
one on a stand-in for libcuda, and the real one on a GPU: test modules with a `card` fixture import them. Needs no
torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from gpumux.device.cuda.driver import Driver, Pinned


@dataclass
class Card:
    """An open driver; `settle` has the GPU do all its work."""

    driver: Driver
    settle: Callable[[], None]
    priorities: tuple[int, int]


@pytest.fixture
def pinned(card: Card) -> Iterator[Callable[[int], Pinned]]:
    made: list[Pinned] = []

    def pin(nbytes: int) -> Pinned:
        made.append(card.driver.pin(nbytes))
        return made[-1]

    yield pin
    for memory in made:
        card.driver.unpin(memory)


def test_priorities_are_a_range_and_smaller_is_more(card: Card) -> None:
    least, greatest = card.priorities
    assert greatest < least
    for priority in (least, greatest):
        card.driver.destroy_stream(card.driver.stream(priority))


def test_a_value_is_stored_when_the_stream_gets_there(card: Card, pinned: Callable[[int], Pinned]) -> None:
    memory = pinned(64)
    numbers = memory.view().cast("I")
    numbers[3] = 0
    stream = card.driver.stream(card.priorities[0])
    card.driver.write_value(memory.device_address + 12, 0xFFFFFFFE, stream)
    card.settle()
    assert numbers[3] == 0xFFFFFFFE
    numbers.release()
    card.driver.destroy_stream(stream)


def test_an_event_holds_another_stream_back(card: Card, pinned: Callable[[int], Pinned]) -> None:
    """Stream b stores 2 after stream a stored 1 in the same place, though b has the higher priority."""
    memory = pinned(64)
    numbers = memory.view().cast("I")
    a, b = (card.driver.stream(priority) for priority in card.priorities)
    event = card.driver.event(timed=False)
    card.driver.write_value(memory.device_address, 1, a)
    card.driver.record(event, a)
    card.driver.wait(b, event)
    card.driver.write_value(memory.device_address, 2, b)
    card.settle()
    assert card.driver.reached(event)
    assert numbers[0] == 2
    numbers.release()
    for stream in (a, b):
        card.driver.destroy_stream(stream)
    card.driver.destroy_event(event)


def test_an_event_nobody_recorded_holds_nothing_back(card: Card, pinned: Callable[[int], Pinned]) -> None:
    memory = pinned(64)
    stream = card.driver.stream(card.priorities[0])
    event = card.driver.event(timed=False)
    assert card.driver.reached(event)
    card.driver.wait(stream, event)
    card.driver.write_value(memory.device_address, 5, stream)
    card.settle()
    assert memory.view().cast("I")[0] == 5
    card.driver.destroy_stream(stream)
    card.driver.destroy_event(event)


def test_times_between_events_go_forward(card: Card) -> None:
    stream = card.driver.stream(card.priorities[1])
    events = [card.driver.event(timed=True) for _ in range(3)]
    for event in events:
        card.driver.record(event, stream)
    card.settle()
    first, second, third = events
    assert card.driver.elapsed(first, second) >= 0
    assert card.driver.elapsed(first, third) >= card.driver.elapsed(first, second)
    for event in events:
        card.driver.destroy_event(event)
    card.driver.destroy_stream(stream)


def test_an_event_recorded_again_is_reached_again(card: Card) -> None:
    stream = card.driver.stream(card.priorities[0])
    event = card.driver.event(timed=False)
    for _ in range(2):
        card.driver.record(event, stream)
        card.settle()
        assert card.driver.reached(event)
    assert card.driver.idle(stream)
    card.driver.destroy_event(event)
    card.driver.destroy_stream(stream)
