"""How fast blocks run that share memory, caches and multiprocessors with others.

**Memory.** Blocks that alone would demand the part x of the bandwidth reach the part 1 - (1 - x)^p of it: half of the
multiprocessors reach far more than half of it (`saturation` is p; 1 would be proportional). All kernels together have
one ceiling. A kernel that alone uses the part m of the bandwidth waits for memory during the part m of its blocks'
time, and only that part gets shorter or longer with what others demand:

    speed = 1 / ((1 - m) + m * s(m) / f)      s(x) = (1 - (1 - x)^p) / x

f is the same for all: s(x) if they demand the part x < 1 of the bandwidth together, otherwise the largest at which they
move no more than the bandwidth. Alone and with all its blocks a kernel runs at speed 1.

**L2.** What a kernel reads again from L2 counts there, by the same rule with L2's bandwidth. When the working sets of
all resident kernels exceed L2, all of them read it from memory instead: more than twice as slow as one after the other.

**Multiprocessors.** Blocks on one multiprocessor share its issue slots and pipes. When they need more than there is,
all of them on it slow down alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_NEAR = 1e-9  # part of the bandwidth that may be left unused
_MOST_ROUNDS = 64


class Demand(NamedTuple):
    """What one block demands of a memory: `rate` bytes a second at speed 1. Its speed is f / (free * f + bound)."""

    rate: float
    free: float
    bound: float


NO_DEMAND = Demand(0.0, 1.0, 0.0)


def stretch(x: float, saturation: float) -> float:
    """s(x): how much more of their demand blocks get that together demand the part x, at most 1, of the bandwidth, than
    blocks that demand all of it."""
    return (1.0 - (1.0 - x) ** saturation) / x if x > 1e-6 else saturation


def demand(block_bytes: float, block_s: float, blocks: int, bandwidth: float, saturation: float) -> Demand:
    """The demand of one block of a kernel that alone has `blocks` of them resident, each taking `block_s` seconds."""
    if not block_bytes:
        return NO_DEMAND
    rate = block_bytes / block_s
    m = min(1.0, blocks * rate / bandwidth)
    return Demand(rate, 1.0 - m, m * stretch(m, saturation))


def granted(groups: Sequence[tuple[int, Demand]], bandwidth: float, saturation: float) -> float:
    """f for groups of (resident blocks, what one of them demands)."""
    demanded = sum([blocks * one.rate for blocks, one in groups])
    if demanded < bandwidth:
        return stretch(demanded / bandwidth, saturation)
    # The traffic is concave in f and at most f * sum(rate / bound). Newton's steps from where that bound meets the
    # bandwidth rise to the answer from below, so no step moves too much.
    f = bandwidth / sum([blocks * one.rate / one.bound for blocks, one in groups if one.rate])
    for _ in range(_MOST_ROUNDS):
        moved = slope = 0.0
        for blocks, one in groups:
            if one.rate:
                under = one.free * f + one.bound
                moved += blocks * one.rate * f / under
                slope += blocks * one.rate * one.bound / (under * under)
        if bandwidth - moved <= _NEAR * bandwidth:
            break
        f += (bandwidth - moved) / slope
    return min(f, 1.0)


def speed(one: Demand, f: float) -> float:
    """How fast a block with this demand runs."""
    return f / (one.free * f + one.bound)


def crowded(needs: Sequence[tuple[float, int]]) -> float:
    """The speed of blocks on a multiprocessor with groups of (the part of its issue slots that one block needs, blocks
    there)."""
    needed = sum([need * blocks for need, blocks in needs])
    return 1.0 if needed <= 1.0 else 1.0 / needed
