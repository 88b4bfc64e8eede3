"""Devices by name. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from gpumux.device.contract import Device
from gpumux.device.cpu.device import CpuDevice
from gpumux.errors import ConfigError

NAMES = ("auto", "cpu", "cuda", "sim")


def make(name: str, *, threads: int = 0, low_nice: int = 0, allow_ops: Sequence[str] = ()) -> Device:
    """The device called `name`, not opened yet. `threads` are intra-op threads a piece (CPU; 0 leaves
    it to the device), `low_nice` the niceness of low jobs' processes there, `allow_ops` operators allowed beside the built-in list. Raises ConfigError."""
    if name in ("auto", "cpu"):  # auto: this version can run work on nothing else
        return CpuDevice(threads=threads, low_nice=low_nice, allow_ops=allow_ops)
    if name in ("cuda", "sim"):
        raise ConfigError(f"the {name} device is not built yet in this version", "use --device cpu")
    raise ConfigError(f"unknown device {name!r}", f"use one of {', '.join(NAMES)}")
