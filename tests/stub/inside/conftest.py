from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.device.cuda.driver import CudaDriver
from tests.stub.inside.stub import Stub

_stub = Stub()
_first = CudaDriver()
_first.open(0)  # what a first context opens stays for the process' life, and is no test's leak


@pytest.fixture
def stub() -> Iterator[Stub]:
    """Fails a test that leaves a broken rule unread, or a handle that it made."""
    kinds = ("context", "stream", "event", "graph", "exec", "pinned", "registered", "device")
    _stub.reset()
    before = {kind: _stub.live(kind) for kind in kinds}
    yield _stub
    broken = _stub.violations()
    _stub.reset()
    assert broken == []
    checked, _stub.leaks = not _stub.leaks, False
    if checked:
        assert {kind: _stub.live(kind) for kind in kinds} == before


@pytest.fixture
def gpu(stub: Stub) -> Iterator[CudaDriver]:
    driver = CudaDriver()
    driver.open(0)
    yield driver
    stub.sticky(0)
    driver.close()
