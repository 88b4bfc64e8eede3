"""Devices by name."""

from __future__ import annotations

import pytest

from gpumux.device.cpu.device import CpuDevice
from gpumux.device.registry import NAMES, make
from gpumux.errors import ConfigError


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_the_cpu_is_there(name: str) -> None:
    assert isinstance(make(name), CpuDevice)


@pytest.mark.parametrize("name", ["cuda", "sim"])
def test_what_is_not_built_yet_says_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match="not built yet") as raised:
        make(name)
    assert "--device cpu" in raised.value.remedy


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'") as raised:
        make("tpu")
    assert all(name in raised.value.remedy for name in NAMES)


def test_more_threads_than_cores_are_refused_at_open() -> None:
    device = CpuDevice(threads=4, cores=2)
    with pytest.raises(ConfigError, match="4 threads on 2 cores"):
        device.open()
    device.close()
