"""Four daemons for all tests of this folder. Each test opens jobs of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from microbench.daemon import RunningDaemon, running_daemon


@pytest.fixture(scope="session")
def daemons() -> Iterator[list[RunningDaemon]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_daemon(policy="guarded")) for _ in range(4)]


@pytest.fixture
def endpoints(daemons: list[RunningDaemon]) -> list[str]:
    return [daemon.endpoint for daemon in daemons]
