"""Plain runs with as many threads as the daemon."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_the_daemon(one_thread: None) -> None:
    pass
