"""Ranks that measure a network: what they measure, and that none is left behind or waited for without end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumux.errors import ConfigError, RankLost
from gpumux.plan.network import ranks
from gpumux.plan.network.measured import KINDS, loads
from gpumux.plan.network.ranks import Measurement, measure_as, measure_here

SMALL = Measurement(3, largest=4096, rounds=2, limit_s=60.0)


def children() -> set[int]:
    """Process ids of this process's children."""
    found = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        found.update(map(int, (task / "children").read_text().split()))
    return found


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


@pytest.fixture
def store() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


RANK = """
import sys
from gpumux.errors import GpumuxError
from gpumux.plan.network.measured import dumps
from gpumux.plan.network.ranks import Measurement, measure_as
try:
    found = measure_as(Measurement(2, largest=4096, rounds=int(sys.argv[3])), int(sys.argv[1]), sys.argv[2])
except GpumuxError as error:
    sys.exit(f"{error.code}: {error.message}")
print(dumps(found) if found else "")
"""


def started(rank: int, store: str, rounds: int = 1) -> subprocess.Popen[str]:
    """A process that is one of two ranks."""
    command = [sys.executable, "-c", RANK, str(rank), store, str(rounds)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_sizes_and_groups_that_are_measured() -> None:
    assert Measurement(2, largest=1000).sizes() == [8, 64, 512, 1000]
    assert Measurement(2, largest=4096).sizes() == [8, 64, 512, 4096]
    assert [Measurement(n).groups() for n in (2, 3, 4, 6, 8)] == [[2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.parametrize(
    "wrong", [{"ranks": 1}, {"largest": 8}, {"rounds": 0}, {"limit_s": 0.0}, {"limit_s": float("nan")}]
)
def test_what_can_not_be_measured_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Measurement(**{"ranks": 2} | wrong)  # type: ignore[arg-type]


def test_all_operations_are_measured_among_two_and_all_ranks_of_this_machine() -> None:
    told: list[tuple[int, int, str]] = []
    found = measure_here(SMALL, lambda *progress: told.append(progress))
    assert {(each.kind, each.ranks) for each in found.series} == {(kind, n) for kind in KINDS for n in (2, 3)}
    assert all([point.nbytes for point in each.points] == SMALL.sizes() for each in found.series)
    assert (found.backend, found.device, found.ranks, found.rounds) == ("gloo", "cpu", 3, 2)
    assert len(set(found.machines)) == 1
    assert [done for done, _, _ in told] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.extended
def test_an_interrupt_ends_all_ranks() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_here(SMALL, interrupt)


@pytest.mark.extended
def test_a_rank_that_is_killed_is_named() -> None:
    before = children()
    killed: list[int] = []

    def kill(*_: object) -> None:
        if not killed:
            names = {each: Path(f"/proc/{each}/cmdline").read_text() for each in children() - before}
            killed.extend(each for each, name in names.items() if '"rank": 2' in name)
            os.kill(killed[0], signal.SIGKILL)

    # Many rounds: the others still measure when rank 2 is gone.
    with pytest.raises(RankLost, match=r"rank (2 ended with code -9|\d lost another)"):
        measure_here(Measurement(3, largest=4096, rounds=10_000, limit_s=60.0), kill)
    assert killed


@pytest.mark.extended
def test_ranks_that_are_started_by_hand_meet_at_the_store(store: str) -> None:
    first, second = started(0, store), started(1, store)
    shown, _ = first.communicate(timeout=120)
    assert second.communicate(timeout=120)[0] == "\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert [(each.kind, each.ranks) for each in loads(shown).series] == [(kind, 2) for kind in KINDS]


def test_a_rank_that_does_not_come_is_an_error_within_the_limit(store: str) -> None:
    with pytest.raises(RankLost, match=r"ranks 1, 2 did not come within 0\.2 s"):
        measure_as(Measurement(3, limit_s=0.2), 0, store)
    with pytest.raises(RankLost, match=r"rank 0 did not come to 127\.0\.0\.1:\d+ within 0\.2 s"):
        measure_as(Measurement(3, limit_s=0.2), 1, store)


@pytest.mark.extended
def test_ranks_that_differ_in_what_they_measure_are_told(store: str) -> None:
    first, second = started(0, store, rounds=1), started(1, store, rounds=2)
    said = [each.communicate(timeout=120)[1] for each in (first, second)]
    assert (first.returncode, second.returncode) == (1, 1)
    assert "config: rank 1 measures with rounds 2, and rank 0 with 1" in said[0]
    # Rank 0 keeps the store, and may be gone with it before rank 1 has compared.
    assert "config: rank 0 measures with rounds 1, and rank 1 with 2" in said[1] or "rank 1 lost another" in said[1]


@pytest.mark.parametrize("store", ["nowhere", "host:", ":1", "127.0.0.1:70000", "127.0.0.1:x"])
def test_a_store_that_is_no_address_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        measure_as(SMALL, 0, store)


def test_a_rank_beyond_the_last_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 3 of 3"):
        measure_as(SMALL, 3, "127.0.0.1:1")


def test_a_note_says_that_ranks_share_cores() -> None:
    assert ranks.note([("m: CPU, 2 cores", 2)] * 2) == ""
    assert "3 ranks share 2 cores of m" in ranks.note([("m: CPU, 2 cores", 2)] * 3)
