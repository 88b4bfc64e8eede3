"""Devices by name. Nothing here imports torch."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumux.device.base import Device
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cuda.device import CudaDevice
from gpumux.device.cuda.streams import DEFAULT_SHARES
from gpumux.device.sim.device import SimDevice
from gpumux.errors import ConfigError
from gpumux.program.profile import StepProfile

# ---- What the CUDA device needs and this machine has, found without importing torch or loading the driver's library.
#
# `--device auto` decides by it, and `gpumux doctor` shows it. The device checks again when it is opened, through the
# driver.


_ASSIGNED = r"^{name}\s*(?::[^=]*)?=\s*(.+)$"


@dataclass(frozen=True, slots=True)
class Nvidia:
    """What a machine has. `driver`: its version, empty if there is none. `gpus`: names of device nodes in /dev.
    `hidden`: the environment hides every GPU. `torch`, `torch_cuda`: torch's version and that of the CUDA it was built
    for, each empty if there is none. `bindings`: cuda-bindings is installed."""

    driver: str
    gpus: tuple[str, ...]
    hidden: bool
    torch: str
    torch_cuda: str
    bindings: bool

    @property
    def missing(self) -> str:
        """Why `--device auto` takes the CPU; empty where it takes the GPU."""
        if not self.driver:
            return "there is no NVIDIA driver on this machine"
        if not self.gpus:
            return "there is an NVIDIA driver, but no GPU in /dev (/dev/nvidiaN)"
        if self.hidden:
            return "CUDA_VISIBLE_DEVICES hides every GPU"
        if not self.torch_cuda:
            return f"there is an NVIDIA driver, but torch {self.torch} is built without CUDA"
        return ""


def look(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Nvidia:
    """What this machine has. Tests pass another `root`, in place of "/", and another `environ`."""
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    torch, torch_cuda = _torch()
    return Nvidia(
        driver=_driver(root / "proc/driver/nvidia/version"),
        gpus=tuple(sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))),
        hidden=visible is not None and visible.split(",")[0].strip() in ("", "-1"),
        torch=torch,
        torch_cuda=torch_cuda,
        bindings=_has_bindings(),
    )


def _driver(version: Path) -> str:
    try:
        lines = version.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    words = lines[0].split("  ") if lines else []
    return words[1].strip() if len(words) > 1 else (lines[0] if lines else "")


def _torch() -> tuple[str, str]:
    """torch's version and its CUDA's, from a file: importing torch takes seconds, and the daemon does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "", ""
    return _value(text, "__version__"), _value(text, "cuda")


def _value(text: str, name: str) -> str:
    found = re.search(_ASSIGNED.format(name=name), text, re.MULTILINE)
    try:
        value = ast.literal_eval(found[1].strip()) if found else None
    except (ValueError, SyntaxError):
        return ""
    return value if isinstance(value, str) else ""


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ImportError:
        return False


# ---- Devices


NAMES = ("auto", "cpu", "cuda", "sim")


def choose(name: str, gpu: int = 0, nvidia: Nvidia | None = None) -> tuple[str, str]:
    """The device for `name`, which is another one only for auto, and the reason in words. `nvidia`: what the machine
    has, if that is known already."""
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
    threads, low_nice: intra-op threads for each piece (0: the device's choice) and the niceness of low jobs' processes,
        for cpu.
    gpu_model, profiles: the simulated GPU, and profiles whose times are used instead of its cost model's, for sim.
    allow_ops: operators allowed beside the built-in list.
    """
    name, _ = choose(name, gpu)
    if name == "cpu":
        return CpuDevice(threads=threads, low_nice=low_nice, allow_ops=allow_ops)
    if name == "sim":
        return SimDevice(gpu_model, known=profiles, allow_ops=allow_ops)
    if name == "cuda":
        return CudaDevice(gpu, shares=DEFAULT_SHARES if gpu_shares else (), allow_ops=allow_ops)
    raise ConfigError(f"unknown device {name!r}", f"use one of {', '.join(NAMES)}")
