"""The fork server's memory in huge pages."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumux.device.workers import fork_server_process
from gpumux.device.workers.channel import Channel, pair
from gpumux.device.workers.fork_server_process import (
    HUGE_PAGE_BYTES,
    LEAST_FREE_BYTES,
    ForkServerProcess,
    collapsing,
)

ROOT = Path(__file__).parents[3]
MAPS = """\
00600000-00a00000 rw-p 00000000 00:00 0                                  [heap]
00a10000-00e10000 rw-p 00000000 00:00 0
01000000-01400000 r--p 00000000 00:00 0
02000000-02400000 rw-p 00000000 fe:00 17                                 /usr/lib/libtorch_cpu.so
03000000-03400000 rw-s 00000000 00:01 18                                 /memfd:segment (deleted)
04000000-04400000 rw-p 00000000 00:00 0                                  [stack]
05000000-05200000 rw-p 00000000 00:00 0
06000000-061ff000 rw-p 00000000 00:00 0
"""
FILLED = """
import mmap
from gpumux.device.workers.fork_server_process import HUGE_PAGE_BYTES, collapsing
from pathlib import Path

def huge():
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("AnonHugePages:")[1].split()[0]) << 10

memory = mmap.mmap(-1, 8 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(b"x" * len(memory))
before = huge()
done = list(collapsing())
print(sum(done), huge() - before >= 4 * HUGE_PAGE_BYTES, memory[:].count(b"x") == len(memory))
"""


def has_huge_pages() -> bool:
    """Whether this kernel puts pages together when it is asked to."""
    with mmap.mmap(-1, 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        return any(collapsing())


def test_pages_within_writable_memory_of_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def collapse(start: int) -> bool:
        tried.append(start)
        return len(tried) > 1

    monkeypatch.setattr(fork_server_process, "collapse", collapse)
    monkeypatch.setattr(fork_server_process, "free_bytes", lambda: LEAST_FREE_BYTES)
    assert list(collapsing(MAPS.splitlines())) == [False, True, True, True]
    assert tried == [0x600000, 0x800000, 0xC00000, 0x5000000]


def test_it_ends_where_memory_gets_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a control group of 450 MiB it took the last 150, and no job was let in any more."""
    free = iter([LEAST_FREE_BYTES, LEAST_FREE_BYTES, LEAST_FREE_BYTES - 1])
    monkeypatch.setattr(fork_server_process, "free_bytes", lambda: next(free))
    monkeypatch.setattr(fork_server_process, "collapse", lambda start: True)
    assert list(collapsing(MAPS.splitlines())) == [True, True]


def test_nothing_is_done_where_nothing_says_how_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> int:
        raise OSError

    monkeypatch.setattr(fork_server_process, "free_bytes", unknown)
    assert list(collapsing(MAPS.splitlines())) == []


@pytest.mark.skipif(not has_huge_pages(), reason="this kernel puts no pages together: it is older than 6.1")
def test_memory_keeps_what_is_in_it() -> None:
    run = subprocess.run([sys.executable, "-c", FILLED], cwd=ROOT, capture_output=True, text=True, check=True)
    done, more, kept = run.stdout.split()
    assert int(done) >= 4
    assert (more, kept) == ("True", "True")


class Requests:
    """A poller that finds what a test says, and notes how long it was asked to wait (milliseconds)."""

    def __init__(self, found: Iterator[list[tuple[int, int]]]) -> None:
        self._found = found
        self.waits: list[int | None] = []

    def register(self, *_: object) -> None:
        """Nothing is watched."""

    def poll(self, wait: int | None) -> list[tuple[int, int]]:
        self.waits.append(wait)
        try:
            return next(self._found)
        except StopIteration:
            raise EOFError from None


def test_it_is_done_when_nothing_was_asked_for_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    with ours, theirs:
        server = ForkServerProcess(Channel(theirs))
        something = [(-1, 0)]  # of no descriptor: nothing follows
        poller = Requests(iter([something, [], [], something, [], [], something]))
        monkeypatch.setattr(server, "_poller", poller)
        left = iter([True] * 3)
        monkeypatch.setattr(server, "_collapsing", left)
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
        monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: -1)
        with pytest.raises(EOFError):
            server.serve()
        assert list(left) == []
        # Five seconds; at once while nothing comes; five again; when all is done, for ever.
        assert poller.waits == [5000, 5000, 0, 0, 5000, 0, None, None]
        for fd in (server._changed, server._changes):
            os.close(fd)
