"""A coordinator of its own for each test, and two daemons for those that kill none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from microbench.kills import Phoenix
from tests.client.placed.coordinator import FakeCoordinator, coordinating, serving


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Phoenix]]:
    with ExitStack() as stack:
        made = serving(stack, tmp_path_factory.mktemp("d"), 2)
        yield made
        for daemon in made:
            daemon.stop()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with coordinating(tmp_path) as made:
        yield made
