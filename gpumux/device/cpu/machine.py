"""What this machine, or the container it runs in, is and has to give."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that could be allocated now: what the kernel calls available, or what is left of the
    container's limit if that is less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return min(int(rest.split()[0]) * 1024, _left_in_cgroup())
    raise OSError("/proc/meminfo has no MemAvailable")


def _left_in_cgroup() -> int:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return 1 << 62  # version 1, or no limit to be seen: the machine's own figure stands
    return (1 << 62) if limit == "max" else max(0, int(limit) - used)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "CPU"
