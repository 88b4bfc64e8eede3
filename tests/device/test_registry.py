"""Devices by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpumux.config import GPU_MODELS
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.registry import NAMES, make
from gpumux.device.sim.device import SimDevice
from gpumux.device.sim.spec import PRESETS
from gpumux.errors import ConfigError


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_the_cpu_is_there(name: str) -> None:
    assert isinstance(make(name), CpuDevice)


@pytest.mark.parametrize("model", GPU_MODELS)
def test_every_model_can_be_simulated(model: str) -> None:
    device = make("sim", gpu_model=model)
    assert isinstance(device, SimDevice)
    assert device.spec is PRESETS[model]


def test_every_model_has_its_name_in_the_configuration() -> None:
    assert set(GPU_MODELS) == set(PRESETS)


def test_without_a_gpu_cuda_says_what_is_missing_when_it_is_opened() -> None:
    device = make("cuda", gpu=40)  # no machine has so many
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError) as raised:
        device.open()
    assert "--device cpu" in raised.value.remedy
    assert device.poll() == []
    device.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_importing_the_cuda_device_needs_neither_torch_nor_a_driver() -> None:
    code = (
        "import sys, gpumux.device.cuda.device; assert not {'torch', 'cuda'} & {m.split('.')[0] for m in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'") as raised:
        make("tpu")
    assert all(name in raised.value.remedy for name in NAMES)


def test_more_threads_than_cores_are_refused_at_open() -> None:
    device = CpuDevice(threads=4, cores=2)
    with pytest.raises(ConfigError, match="4 threads on 2 cores"):
        device.open()
    device.close()
