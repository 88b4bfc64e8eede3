"""What checks found is remembered by the bytes that were checked, and by no more of them than fit."""

from __future__ import annotations

from typing import Any

import pytest

from gpumux.device.base import ProgramChecked
from gpumux.device.workers import checks
from gpumux.device.workers.checks import Checks, digest
from gpumux.program.ir import ProgramLimits
from gpumux.types import Footprint, JobId, ProgramId

ONE, OTHER = JobId("1" * 32), JobId("2" * 32)


def passed(encoded: bytes, operators: int = 1) -> ProgramChecked:
    return ProgramChecked(ONE, ProgramId(0), Footprint(1, 2, 3), encoded.hex(), ("aten.add.Tensor",) * operators, ())


@pytest.fixture
def found() -> Checks:
    return Checks(2, ProgramLimits(), ())


def test_equal_bytes_are_known_from_any_client(found: Checks):
    assert found.known(ONE, ProgramId(0), b"a") is None
    found._remember(digest(b"a"), passed(b"a"))
    found.forget(ONE)
    assert found.footprint(OTHER, ProgramId(7), b"a") is None, "nobody has asked"
    answer = found.known(OTHER, ProgramId(7), b"a")
    assert answer is not None
    assert (answer.job, answer.program, answer.content_hash) == (OTHER, 7, b"a".hex())
    assert found.footprint(OTHER, ProgramId(7), b"a") == Footprint(1, 2, 3)
    assert found.footprint(OTHER, ProgramId(7), b"b") is None
    assert found.known(OTHER, ProgramId(7), b"b") is None


def test_those_asked_for_least_recently_go(found: Checks, monkeypatch: Any):
    monkeypatch.setattr(checks, "MAX_KNOWN", 2)
    for encoded in (b"a", b"b"):
        found._remember(digest(encoded), passed(encoded))
    assert found.known(ONE, ProgramId(0), b"a") is not None
    found._remember(digest(b"c"), passed(b"c"))
    assert [found.known(ONE, ProgramId(0), e) is not None for e in (b"a", b"b", b"c")] == [True, False, True]


def test_large_ones_make_room_for_each_other(found: Checks, monkeypatch: Any):
    monkeypatch.setattr(checks, "MAX_KNOWN_OPERATORS", 10)
    for encoded, operators in ((b"a", 4), (b"b", 4), (b"b", 4), (b"c", 4), (b"d", 11)):
        found._remember(digest(encoded), passed(encoded, operators))
    assert [found.known(ONE, ProgramId(0), e) is not None for e in (b"a", b"b", b"c", b"d")] == [
        False,
        True,
        True,
        False,
    ]
    assert found._known_operators == 8
