"""One daemon for all tests of this folder. Each test opens jobs of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from microbench.daemon import running_daemon


@pytest.fixture(autouse=True)
def as_many_threads_as_the_daemon(one_thread: None) -> None:
    """Equal bits need equal numbers of threads."""


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with running_daemon(threads=1) as daemon:
        yield daemon.endpoint
