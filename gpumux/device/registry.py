"""Devices by name. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from gpumux.device.contract import Device
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.partitions import WANTED
from gpumux.device.nvidia import Nvidia, look
from gpumux.device.sim.device import SimDevice
from gpumux.errors import ConfigError
from gpumux.program.profile import StepProfile

NAMES = ("auto", "cpu", "cuda", "sim")


def choose(name: str, gpu: int = 0, nvidia: Nvidia | None = None) -> tuple[str, str]:
    """The device that `name` leads to, which is `name` itself unless that is auto, and why, in words. `nvidia`: what
    the machine has, if that is known already."""
    if name == "cuda":
        return name, f"GPU {gpu}, as asked; the CUDA device is new and unproven"
    if name != "auto":
        return name, f"{name}, as asked"
    nvidia = nvidia or look()
    if nvidia.missing:
        return "cpu", f"the CPU: {nvidia.missing}"
    has = f"driver {nvidia.driver} and torch {nvidia.torch} are there"
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
) -> Device:
    """The device called `name`, not opened yet. Raises ConfigError.

    gpu: which GPU, for cuda: its number in nvidia-smi, among those this process may use.
    gpu_shares: whether low jobs may be confined to parts of a GPU, for cuda.
    threads, low_nice: intra-op threads a piece (0 leaves it to the device) and the niceness of low jobs'
        processes, on the CPU.
    gpu_model, profiles: what a simulated GPU is, and profiles whose times count more than its cost model's.
    allow_ops: operators allowed beside the built-in list.
    """
    name, _ = choose(name, gpu)
    if name == "cpu":
        return CpuDevice(threads=threads, low_nice=low_nice, allow_ops=allow_ops)
    if name == "sim":
        return SimDevice(gpu_model, known=profiles, allow_ops=allow_ops)
    if name == "cuda":
        return CudaDevice(gpu, shares=WANTED if gpu_shares else (), allow_ops=allow_ops)
    raise ConfigError(f"unknown device {name!r}", f"use one of {', '.join(NAMES)}")
