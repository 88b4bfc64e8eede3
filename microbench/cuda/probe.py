"""What GPU there is, found out in a process of its own, so that the caller holds no context and survives a driver that
crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from gpumux.device.cuda.driver import CudaDriver
from gpumux.errors import ConfigError

PROBE_S = 120.0


@dataclass(frozen=True)
class Found:
    """The first GPU. `card` is empty if torch can use none; `why`: the reason."""

    card: str = ""
    torch: str = ""
    capability: str = ""
    multiprocessors: int = 0
    memory_bytes: int = 0
    why: str = ""


def card() -> Found:
    """The first GPU. Raises ConfigError where there is none."""
    found = find()
    if not found.card:
        raise ConfigError(f"there is no CUDA device: {found.why}", "use --device cpu or sim, or a machine with a GPU")
    return found


def find(*, by_driver: bool = False) -> Found:
    """The first GPU, as a new process sees it: by torch, or by the driver alone."""
    command = [sys.executable, "-m", "microbench.cuda.probe", *(["--driver"] if by_driver else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return Found(why=f"asking for the device took more than {PROBE_S:.0f} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return Found(why=f"asking for the device failed: {last}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def look() -> Found:
    """The first GPU that this process sees."""
    import torch

    if torch.version.cuda is None:
        return Found(torch=torch.__version__, why=f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        return Found(
            torch=torch.__version__,
            why="torch finds no CUDA device (no GPU, no driver, or CUDA_VISIBLE_DEVICES is empty)",
        )
    of = torch.cuda.get_device_properties(0)
    capability = f"{of.major}.{of.minor}"
    return Found(of.name, torch.__version__, capability, of.multi_processor_count, of.total_memory)


def look_by_driver() -> Found:
    """The first GPU that this process sees without torch."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    try:
        of = CudaDriver().open(0)
    except ConfigError as error:
        return Found(torch=torch, why=error.message)
    return Found(of.name, torch, f"{of.capability[0]}.{of.capability[1]}", of.multiprocessors, of.memory_bytes)


if __name__ == "__main__":
    print(json.dumps(asdict(look_by_driver() if sys.argv[1:] == ["--driver"] else look())))
