"""The height of an arena that two waves of one Program share. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gpumux.program.memory import ArenaPlan, heights


def lock_step_bytes(planned: ArenaPlan, op_seconds: Sequence[float], behind_s: float = 0.0) -> int:
    """Bytes of an arena in which two waves of one Program fit that run at equal speed, the second one behind the first.

    Each wave lies as `planned` has it, the first from the arena's bottom up and the second from its top down, so they
    overlap unless the arena is as high as both together. `op_seconds`: the seconds of each operator of the Program.

    The second wave begins `behind_s` after the first has run its last peak: the last operator at which the plan's
    height is its peak. From then on both take as long for an operator as `op_seconds` says. While the second wave runs
    its operator i, up to its own last peak, it has taken the highest byte of its operators 0 to i, and the first wave
    still needs the highest byte of the operators that it has not finished when i begins. The result is the largest sum
    of the two, and at least one wave's peak. Where the first wave has ended before the second is at its peak, it needs
    nothing: its next step begins when the second wave has run its last peak, and the two have changed places. After
    its last peak a wave needs less and less, so that later sums are no larger.

    It says nothing of waves that run at other speeds: only a lease keeps those apart. Raises ValueError if there is not
    a time for each operator at which the plan has temporaries."""
    high = heights(planned)
    if len(op_seconds) < len(high) - 1:  # results live past the last operator, where nothing runs
        raise ValueError(f"{len(op_seconds)} times for {len(high)} operators")
    if not any(high):
        return 0
    peak = max(high[: len(op_seconds)])  # what lives after the last operator lived at it
    last_peak = max(at for at, height in enumerate(high[: len(op_seconds)]) if height == peak)
    high += [0] * (len(op_seconds) - len(high))
    needed = [*accumulate(reversed(high), max)][::-1]
    clock = [0.0, *accumulate(op_seconds)]
    most, first, taken = planned.peak_bytes, last_peak + 1, 0
    for index in range(last_peak + 1):
        now = clock[last_peak + 1] + behind_s + clock[index]
        while first < len(op_seconds) and clock[first + 1] <= now:
            first += 1  # the first wave has finished it
        taken = max(taken, high[index])
        most = max(most, taken + (needed[first] if first < len(needed) else 0))
    return most
