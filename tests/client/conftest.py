"""One daemon for all tests of this folder, because a start takes seconds. Each test opens jobs of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from microbench.daemon import running_daemon
from tests.client.parity import THREADS
from tests.compiler import COMPILER


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with running_daemon(threads=THREADS, settings=COMPILER) as daemon:
        yield daemon.endpoint
