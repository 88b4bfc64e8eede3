"""Plain runs with as many threads as the daemon."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_many_threads_as_the_daemon(one_thread: None) -> None:
    """Equal bits need equal numbers of threads."""
