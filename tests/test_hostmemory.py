"""The free host memory, on invented machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumux import hostmemory

GIB = 1 << 30
V1, V2 = "4:cpu,memory:", "0::"
NAMES = {
    V1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    V2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {64 * GIB // 1024} kB\n")
    return tmp_path


def within(root: Path, version: str, path: str) -> None:
    (root / "proc/self/cgroup").write_text(f"9:cpuset:/elsewhere\n{version}{path}\n")


def group(root: Path, version: str, path: str, limit: int | str, used: int, cache: int | None = None) -> None:
    base, most, now, inactive = NAMES[version]
    where = root / base / path.lstrip("/")
    where.mkdir(parents=True, exist_ok=True)
    (where / most).write_text(f"{limit}\n")
    (where / now).write_text(f"{used}\n")
    if cache is not None:
        (where / "memory.stat").write_text(f"anon {used - cache}\nactive_file 7\n{inactive} {cache}\nslab 1\n")


def test_without_groups_it_is_what_the_kernel_calls_available(root: Path) -> None:
    assert hostmemory.free_bytes(root) == 64 * GIB
    within(root, V2, "/")
    assert hostmemory.free_bytes(root) == 64 * GIB


@pytest.mark.parametrize("version", [V1, V2])
def test_page_cache_that_gives_way_is_free(root: Path, version: str) -> None:
    within(root, version, "/box")
    group(root, version, "/box", 8 * GIB, 8 * GIB - (30 << 20), 6 * GIB)
    assert hostmemory.free_bytes(root) == 6 * GIB + (30 << 20)


@pytest.mark.parametrize("version", [V1, V2])
def test_the_tightest_group_above_counts(root: Path, version: str) -> None:
    within(root, version, "/slice/box/inner")
    group(root, version, "/slice/box/inner", 30 * GIB, 1 * GIB)
    group(root, version, "/slice/box", 20 * GIB, 18 * GIB, 1 * GIB)
    group(root, version, "/slice", 40 * GIB, 30 * GIB, 0)
    assert hostmemory.free_bytes(root) == 3 * GIB
    assert [g.limit for g in hostmemory.groups(root)] == [30 * GIB, 20 * GIB, 40 * GIB]


def test_a_container_that_sees_only_its_own_group_as_the_root(root: Path) -> None:
    within(root, V1, "/docker/0123")
    group(root, V1, "/", 4 * GIB, 3 * GIB, 2 * GIB)
    assert hostmemory.free_bytes(root) == 3 * GIB


def test_no_limit_is_none_and_more_use_than_limit_is_nothing(root: Path) -> None:
    within(root, V2, "/a/b")
    group(root, V2, "/a/b", "max", 5 * GIB)
    assert hostmemory.free_bytes(root) == 64 * GIB
    group(root, V2, "/a", 4 * GIB, 5 * GIB)
    assert hostmemory.free_bytes(root) == 0


def test_version_1_says_no_limit_with_a_very_large_one(root: Path) -> None:
    within(root, V1, "/a")
    group(root, V1, "/a", 9223372036854771712, 5 * GIB, GIB)
    assert list(hostmemory.groups(root)) == []


def test_a_machine_that_says_nothing_is_an_error(root: Path) -> None:
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\n")
    with pytest.raises(OSError, match="how much memory"):
        hostmemory.free_bytes(root)


def test_this_machine() -> None:
    assert hostmemory.free_bytes() > 0


BLOCKS = """
import ctypes, resource
from contextlib import nullcontext
from gpumux.hostmemory import freed_is_reused

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.malloc.argtypes, ctypes.memset.argtypes = (ctypes.c_size_t,), (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

def allocated(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

def faults(count, size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        libc.free(allocated(size))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


def run(script: str, **settings: str) -> list[int]:
    """The numbers that it prints, in a process of its own, whose memory nothing else changes."""
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | settings
    done = subprocess.run([sys.executable, "-c", BLOCKS + script], capture_output=True, text=True, check=True, env=env)
    return [int(word) for word in done.stdout.split()]


def test_what_was_freed_in_small_blocks_goes_back_to_the_kernel() -> None:
    script = """
with freed_is_reused():
    held = [allocated(100_000) for _ in range(1000)]
    for block in held[:-1]:  # the last one keeps all below it in the heap
        libc.free(block)
    before = resident()
print(before - resident())
"""
    (returned,) = run(script)
    assert returned > 50e6


LARGE = """
before = faults(8, 64 << 20)
with freed_is_reused():
    within = faults(8, 64 << 20)
    held = resident()
print(before, within, faults(8, 64 << 20), faults(8, 4 << 20), held - resident())
"""


def test_large_blocks_are_reused_within_and_mapped_after_it() -> None:
    before, within, after, small, returned = run(LARGE)
    assert within < before / 4
    assert after > before / 2
    assert small < before / 32  # blocks that a process with large tensors keeps
    assert returned > 60e6


def test_settings_of_the_users_own_stay() -> None:
    before, within, _, _, _ = run(LARGE, MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert within > before / 2
