"""Devices by name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumux.config import DEVICES, GPU_MODELS, SIMULATED_GPUS
from gpumux.device import nvidia
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.nvidia import Nvidia, _value, look
from gpumux.device.registry import choose, make
from gpumux.device.sim.device import SimDevice
from gpumux.device.sim.spec import PRESETS, preset
from gpumux.errors import ConfigError
from tests.device.conftest import CASES

GPU = Nvidia("580.1", ("nvidia0",), False, "2.11.0+cu130", "13.0", True)  # a machine that has all that a GPU takes


def test_the_cpu_is_there() -> None:
    assert isinstance(make("cpu"), CpuDevice)


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"driver": ""}, "there is no NVIDIA driver on this machine"),
        ({"gpus": ()}, "no GPU in /dev"),
        ({"hidden": True}, "CUDA_VISIBLE_DEVICES hides every GPU"),
        ({"torch": "2.13.0+cpu", "torch_cuda": ""}, "torch 2.13.0+cpu is built without CUDA"),
    ],
)
def test_auto_takes_the_cpu_where_a_gpu_lacks_something_and_says_what(
    lacks: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(GPU, **lacks)
    name, why = choose("auto", 0, machine)
    assert (name, why.startswith("the CPU: "), says in why) == ("cpu", True, True)
    monkeypatch.setattr(nvidia, "look", lambda: machine)
    assert isinstance(make("auto"), CpuDevice)


def test_auto_takes_the_gpu_where_there_is_one_and_says_that_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "look", lambda: GPU)
    name, why = choose("auto")
    assert (name, "new and unproven" in why, "\n" in why) == ("cuda", True, False)
    assert isinstance(make("auto"), CudaDevice)


def test_a_device_that_is_named_is_taken_whatever_the_machine_has() -> None:
    assert choose("cpu", 0, GPU)[0] == "cpu"
    assert choose("cuda", 3, replace(GPU, driver=""))[0] == "cuda"


def test_what_the_machine_has_is_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    absent = look(tmp_path, {})
    assert (absent.driver, absent.gpus, absent.hidden) == ("", (), False)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  Thu\n")
    for node in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / node).write_text("")
    found = look(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert (found.driver, found.gpus, found.hidden) == ("580.1", ("nvidia0",), True)
    assert not look(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"}).hidden


def test_torchs_version_and_cuda_are_found_without_importing_it() -> None:
    code = (
        "import sys; from gpumux.device.nvidia import look; found = look(); assert 'torch' not in sys.modules;"
        "import torch; assert (found.torch, found.torch_cuda) == (torch.__version__, torch.version.cuda or '')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert _value("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda") == "13.0"
    assert _value("cuda: Optional[str] = None\n", "cuda") == ""


@pytest.mark.parametrize("model", SIMULATED_GPUS)
def test_every_model_can_be_simulated(model: str) -> None:
    device = make("sim", gpu_model=model)
    assert isinstance(device, SimDevice)
    assert device.spec == preset(model)


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


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "auto"])
def test_every_device_that_can_be_configured_is_made_and_has_a_case_for_the_contract(name: str) -> None:
    make(name)
    assert name in {case.name for case in CASES}, "tests/device/conftest.py"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'") as raised:
        make("tpu")
    assert all(name in raised.value.remedy for name in DEVICES)


def test_more_threads_than_cores_are_refused_at_open() -> None:
    device = CpuDevice(threads=4, cores=2)
    with pytest.raises(ConfigError, match="4 threads on 2 cores"):
        device.open()
    device.close()
