"""Random histories of a cluster hold what the placement promises, repeat by their seed, and show mistakes put in."""

from __future__ import annotations

import pytest

from tests.cluster.mistakes import MISTAKES, put_in
from tests.cluster.world import World

HISTORIES = 60
SEARCHED = 100  # histories in which a mistake has to show
# Where to begin, for mistakes that the first histories do not show: seeds that did when they were searched for.
FIRST = {
    "reservations are not released": 76,
    "a gang that may not be made smaller is": 30,
    "a gang that was made smaller begins small for ever": 23,
    "ranks are asked to stop only once": 4,
}
MET = {
    "cancelled", "done", "drained", "failed", "failed to start", "lost", "refused", "refused a reservation",
    "restarted", "made smaller", "whole again", "calm", "rough", "crowded",
}  # fmt: skip


def test_histories_hold_and_meet_everything():
    met: set[str] = set()
    for seed in range(HISTORIES):
        world = World(seed)
        world.run()
        met |= {world.kind, *world.met}
    assert met >= MET


def test_a_seed_repeats_its_history():
    first, again, other = World(5), World(5), World(6)
    for world in (first, again, other):
        world.run()
    assert first.happened == again.happened != other.happened


@pytest.mark.every(6)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str):
    first = FIRST.get(mistake, 0)
    with put_in(mistake):
        assert any(breaks(seed) for seed in range(first, first + SEARCHED))
    assert not breaks(first)  # the placement is right again


def breaks(seed: int) -> bool:
    try:
        World(seed).run()
    except Exception:  # noqa: BLE001 - an invariant, or an error in the placement itself
        return True
    return False
