"""A kernel as the simulator sees one: equal blocks, and the memory traffic they share."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from gpumux.device.sim.spec import GpuSpec
from gpumux.errors import ConfigError

MAX_PER_SM = 32  # resident blocks a multiprocessor, compute capability 8.0 and 9.0
MIN_BLOCK_S = 1e-8  # a nanosecond is the same instant to the engine


class Kernel(NamedTuple):
    """One kernel. Its blocks are equal: `block_s` is what one takes alone, with all the bandwidth it asks
    for; a multiprocessor holds `per_sm` of them at once; all of them together move `nbytes`.
    `sensitivity` multiplies the block time while another job has blocks on the device."""

    name: str
    blocks: int
    block_s: float
    per_sm: int
    nbytes: int
    sensitivity: float = 1.0


def checked(kernel: Kernel) -> Kernel:
    """`kernel`, or ConfigError saying which of its figures can't be."""
    name, blocks, block_s, per_sm, nbytes, sensitivity = kernel
    for wrong, what in (
        (blocks < 1, f"{blocks} blocks"),
        (not (isfinite(block_s) and block_s >= MIN_BLOCK_S), f"a block of {block_s} s"),
        (not 1 <= per_sm <= MAX_PER_SM, f"{per_sm} blocks a multiprocessor"),
        (nbytes < 0, f"{nbytes} bytes"),
        (not (isfinite(sensitivity) and sensitivity >= 1.0), f"a sensitivity of {sensitivity}"),
    ):
        if wrong:
            raise ConfigError(
                f"kernel {name!r} has {what}",
                f"a kernel has at least 1 block of at least {MIN_BLOCK_S} s, 1 to {MAX_PER_SM} of them on a "
                "multiprocessor, no negative bytes and a sensitivity of 1 or more",
            )
    return kernel


def wave(kernel: Kernel, spec: GpuSpec, share: float = 1.0) -> tuple[int, float]:
    """Blocks of it that run at once when it is alone, and the seconds such a full wave takes."""
    at_once = min(kernel.blocks, kernel.per_sm * spec.share_sms(share))
    return at_once, wave_seconds(kernel, spec, at_once)


def wave_seconds(kernel: Kernel, spec: GpuSpec, blocks: int) -> float:
    """Seconds `blocks` of its blocks take when they run at once and nothing else does: their own time,
    or what moving their bytes takes."""
    return max(kernel.block_s, blocks * kernel.nbytes / kernel.blocks / spec.bandwidth)


def solo_seconds(kernel: Kernel, spec: GpuSpec, share: float = 1.0) -> float:
    """Seconds from its first block's start to its last one's end, alone on the device: full waves, then
    what is left. Never under `kernel.nbytes / spec.bandwidth`."""
    at_once, full = wave(kernel, spec, share)
    waves, rest = divmod(kernel.blocks, at_once)
    return waves * full + (wave_seconds(kernel, spec, rest) if rest else 0.0)
