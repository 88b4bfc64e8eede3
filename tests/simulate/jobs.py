"""Support: simulated jobs with kernels of given times."""

from __future__ import annotations

from typing import Any

from gpumux.device.sim.cost import Kernel
from gpumux.simulate.workload import Workload
from gpumux.types import Priority


def kernel(seconds: float = 1e-4, blocks: int = 108) -> Kernel:
    return Kernel("k", blocks, seconds, 1, 0)


def step(name: str, seconds: list[float], priority: Priority = Priority.HIGH, **rest: Any) -> Workload:
    """A job whose step has one kernel for each of `seconds`."""
    return Workload(name, priority, tuple(kernel(s) for s in seconds), **rest)
