from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumux.device.cuda.driver import CudaDriver
from tests.device.fixtures import driver, narrow, narrow_device, wide_device  # noqa: F401
from tests.device.harness import Case, wait_polled
from tests.stub.device.compute import stub_device
from tests.stub.inside.stub import Stub

_stub = Stub()
_first = CudaDriver()
_first.open(0)  # what a first context opens stays for the process' life, and is no test's leak


@pytest.fixture(scope="session")
def case() -> Iterator[Case]:
    before = (
        _stub.live("stream"),
        _stub.live("event"),
        _stub.live("pinned"),
        _stub.live("registered"),
        _stub.live("exec"),
    )
    yield Case("cuda", wide=stub_device, narrow=lambda: stub_device(parallel=1), wait=wait_polled, shares_process=True)
    assert _stub.violations() == []  # while the devices of the session were closed, after the last test
    kinds = ("stream", "event", "pinned", "registered", "exec")
    assert tuple(map(_stub.live, kinds)) == before, f"{kinds}: what the devices made is not all given back"


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In place of the check of descriptors, which the same tests have on the fake GPU: spare processes that check
    programs come when they come, in the next test as well, on a machine that is busy. What the driver gave is checked
    above."""


@pytest.fixture(autouse=True)
def no_rule_is_broken(case: Case) -> Iterator[None]:
    _stub.reset()
    yield
    assert _stub.violations() == []
