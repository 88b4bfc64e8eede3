"""Devices by name. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from gpumux.config import DEVICES
from gpumux.device import nvidia
from gpumux.device.base import Device
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.streams import DEFAULT_SHARES
from gpumux.device.nvidia import Nvidia
from gpumux.device.sim.device import SimDevice
from gpumux.device.workers.confinement import Confined
from gpumux.errors import ConfigError
from gpumux.program.profile import StepProfile


def choose(name: str, gpu: int = 0, machine: Nvidia | None = None) -> tuple[str, str]:
    """The device for `name`, which is another one only for auto, and the reason in words. `machine`: what it
    has, if that is known already."""
    if name == "cuda":
        return name, f"GPU {gpu}, as asked; the CUDA device is new and unproven"
    if name != "auto":
        return name, f"{name}, as asked"
    machine = machine or nvidia.look()
    if machine.missing:
        return "cpu", f"the CPU: {machine.missing}"
    has = f"driver {machine.driver} and torch {machine.torch} are there"
    return "cuda", f"GPU {gpu}: {has}; the CUDA device is new and unproven, and --device cpu takes the CPU"


def make(
    name: str,
    *,
    gpu: int = 0,
    threads: int = 0,
    low_nice: int = 0,
    gpu_shares: bool = False,
    gpu_model: str = "a100",
    profiles: Sequence[StepProfile] = (),
    allow_ops: Sequence[str] = (),
    confined: Confined | None = None,
    fuser: str = "",
) -> Device:
    """The device called `name`, not opened yet. Raises ConfigError.

    gpu: which GPU, for cuda: its number in nvidia-smi, among those this process may use.
    gpu_shares: whether low jobs may be confined to parts of a GPU, for cuda.
    threads, low_nice: intra-op threads for each piece (0: the device's choice) and the niceness of low jobs' processes,
        for cpu.
    gpu_model, profiles: the simulated GPU, and profiles whose times are used instead of its cost model's, for sim.
    allow_ops: operators allowed beside the built-in list.
    confined: what processes of jobs give up, None for all that is possible.
    fuser: what makes fused Programs of equal jobs, "module:function", for cpu.
    """
    name, _ = choose(name, gpu)
    if name == "cpu":
        return CpuDevice(threads=threads, low_nice=low_nice, allow_ops=allow_ops, confined=confined, fuser=fuser)
    if name == "sim":
        return SimDevice(gpu_model, known=profiles, allow_ops=allow_ops)
    if name == "cuda":
        shares = DEFAULT_SHARES if gpu_shares else ()
        return CudaDevice(gpu, shares=shares, allow_ops=allow_ops, confined=confined)
    raise ConfigError(f"unknown device {name!r}", f"use one of {', '.join(DEVICES)}")
