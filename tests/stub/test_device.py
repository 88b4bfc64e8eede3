"""The whole device on the stand-in for libcuda, in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.stub import build
from tests.stub.running import TORCHS, bindings, run


@pytest.mark.slow
@pytest.mark.extended
def test_the_device_keeps_its_contract_on_the_stand_in(libraries: Path):
    """With the wrapper's own calls, from the threads that make them; operators run in host memory."""
    environment = build.environment(libraries, bindings(TORCHS))
    environment["OMP_NUM_THREADS"] = "1"
    done = run(["-m", "pytest", "-q", "-r", "N", "tests/stub/device"], environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 50
