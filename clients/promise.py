"""The demo's second part: a high job next to a greedy low one, without the guard and with it.

`fifo` shares the device as it would be shared without gpumux: in the order of arrival. `guarded` holds the
high job to its promise. What the figures are depends on the machine; that the second is the better one does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from microbench import priority

MAX_SLOWDOWN = 1.10


@dataclass(frozen=True)
class Part:
    """One policy's run: turns alone and shared, of so many high steps each. Under fifo a step takes so
    long next to the low job that few must do. `low_s`: seconds of a plain step of the low job."""

    policy: str
    repeats: int
    steps: int
    low_s: float = priority.LOW_S
    warmup: int | None = None  # steps: a guard learns in the first hundreds


def parts(quick: bool) -> tuple[Part, Part]:
    if quick:
        return Part("fifo", 1, 4, 0.008), Part("guarded", 1, 12, 0.008)
    return (Part("fifo", 2, 12), Part("guarded", 5, 60, warmup=250))


def measure(quick: bool) -> dict[str, dict[str, Any]]:
    """What microbench/priority.py finds under each policy. The device is the last core; the clients keep off it."""
    torch.set_num_threads(1)
    every = os.sched_getaffinity(0)
    device = max(every)
    os.sched_setaffinity(0, every - {device} or every)
    try:
        return {
            part.policy: priority.measure(
                part.policy,
                device,
                part.repeats,
                part.steps,
                low_s=part.low_s,
                max_slowdown=MAX_SLOWDOWN,
                warmup=part.warmup,
            )
            for part in parts(quick)
        }
    finally:
        os.sched_setaffinity(0, every)


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Medians of the turns; but of low steps the mean, since in a turn of half a second one or none may end."""
    lines = [f"{'policy':<10}{'high step alone ms':>20}{'next to greedy low':>20}{'slowdown':>10}{'low steps/s':>13}"]
    for policy, found in measured.items():
        lines.append(
            f"{policy:<10}{1e3 * found['alone_s'].median:>20.2f}{1e3 * found['shared_s'].median:>20.2f}"
            f"{found['slowdown'].median:>10.2f}{fmean(found['samples']['low_steps_per_s']):>13.1f}"
        )
    return "\n".join(lines)


def verdict(measured: dict[str, dict[str, Any]]) -> str:
    """Whether the promise was kept, whatever the answer is."""
    slowdown = measured["guarded"]["slowdown"].median
    kept = "kept" if slowdown <= MAX_SLOWDOWN else "not kept on this machine"
    return f"promised: at most {MAX_SLOWDOWN:.2f} of the time alone; with the guard {slowdown:.2f}: {kept}"


def complaints(measured: dict[str, dict[str, Any]]) -> list[str]:
    """What did not hold, in words."""
    fifo, guarded = (measured[policy]["slowdown"].median for policy in ("fifo", "guarded"))
    if guarded < fifo:
        return []
    return [f"the high job was slowed down {guarded:.2f} times with the guard, {fifo:.2f} times without"]
