"""Simulated histories with faults hold what the daemon promises, repeat by their seed, and show mistakes put in."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.mistakes import MISTAKES
from tests.faults.world import FAULTS, World

ROOT = Path(__file__).parents[2]
HISTORIES = 60
SEARCHED = 100  # histories in which a mistake has to show


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_histories_hold_and_meet_every_fault_and_recover():
    met: set[str] = set()
    recoveries = 0
    for seed in range(HISTORIES):
        world = World(seed)
        world.run()
        met |= {what.split(maxsplit=1)[1] for what in world.happened}
        recoveries += sum(client.lives for client in world.clients)
    assert set(FAULTS) <= met
    assert recoveries > HISTORIES / 2


def test_a_seed_repeats_its_history():
    first, again, other = World(5), World(5), World(6)
    assert first.run() == again.run() != other.run()
    assert first.happened == again.happened


@pytest.mark.every(6)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str):
    """In a process of its own, since a mistake may leave descriptors open."""
    command = [sys.executable, "-m", "tests.faults", "--mistake", mistake, "--histories", str(SEARCHED)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stderr
    assert "seed" in run.stdout
