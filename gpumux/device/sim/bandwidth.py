"""Memory bandwidth, shared: how fast groups of resident blocks run when they ask for more than there is.

A kernel that by itself would use the part m of the bandwidth (1 when it would use more than all) spends
that part of its block time waiting for memory. When all groups together ask for more than there is,
each gets the same part f of what it asks for, and only the memory-bound part of its time stretches:

    rate = 1 / ((1 - m) + m / f),   f the largest at which the rates move no more than the bandwidth

Alone, a group with m = 1 so takes bytes / bandwidth, and one with m < 1 is not slowed at all.
"""

from __future__ import annotations

from collections.abc import Sequence

_NEAR = 1e-9  # relative; what is left unused of the bandwidth
_MOST_ROUNDS = 64


def granted(groups: Sequence[tuple[float, float]], bandwidth: float) -> float:
    """The part f of what they ask for that `groups` get. A group is (bytes a second its blocks move at
    full speed, its memory-bound part m). 1.0 when they ask for no more than `bandwidth`."""
    if sum(demand for demand, _ in groups) <= bandwidth:
        return 1.0
    # What moves is concave in f and at most f * sum(demand / m): Newton's steps from where that bound meets
    # the bandwidth rise to the answer from below, so no step moves too much.
    f = bandwidth / sum(demand / bound for demand, bound in groups if demand > 0.0)
    for _ in range(_MOST_ROUNDS):
        moved = slope = 0.0
        for demand, bound in groups:
            if demand > 0.0:
                under = (1.0 - bound) * f + bound
                moved += demand * f / under
                slope += demand * bound / (under * under)
        if bandwidth - moved <= _NEAR * bandwidth:
            break
        f += (bandwidth - moved) / slope
    return min(f, 1.0)


def rate(bound: float, f: float) -> float:
    """How fast a group with memory-bound part `bound` runs when it gets the part `f` of its demand."""
    return f / ((1.0 - bound) * f + bound)
