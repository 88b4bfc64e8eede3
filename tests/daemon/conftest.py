"""One daemon on the CPU for the tests of this folder that don't end it, because a start takes seconds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.live import LiveDaemon, serving


@pytest.fixture(scope="session")
def daemon() -> Iterator[LiveDaemon]:
    path = Path(tempfile.mkdtemp(prefix="gmlive-"))
    with serving(path) as daemon:
        yield daemon
    left = [p.name for p in path.iterdir() if p.suffix != ".lock"]
    shutil.rmtree(path)
    assert daemon.process.returncode == 0, daemon.log
    assert left == []
