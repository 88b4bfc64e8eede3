"""The plain runs have as many threads as the daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def as_the_daemon(one_thread: None) -> Iterator[None]:
    yield
