"""What `gpumux plan memory` says: all figures for scripts, a table for people, and one sentence of advice."""

from __future__ import annotations

from math import isfinite
from typing import Any

from gpumux.plan.memory.ways import MemoryComparison, StepMemory

SAID = {
    "whole": "the batch as it is",
    "doubled": "a doubled batch",
    "microbatches": "doubled, microbatches=2",
    "checkpointing": "doubled, checkpointed",
    "waves": "waves=2",
}


def body(found: MemoryComparison, within: float) -> dict[str, Any]:
    """All of it, for scripts: sizes in bytes, times in seconds."""
    return {
        "model": found.model,
        "batch": found.batch,
        "optimizer": found.optimizer,
        "device": found.device,
        "within": within,
        "advice": found.best(within).way,
        "sentence": sentence(found, within),
        "ways": {
            each.way: {
                "samples": each.samples,
                "state_bytes": each.state_bytes,
                "batch_bytes": each.batch_bytes,
                "temporary_bytes": each.temporary_bytes,
                "total_bytes": each.total_bytes,
                "seconds": each.seconds,
                "relative_time": found.relative(each.way),
            }
            for each in found.ways
        },
        "left_out": found.left_out,
        "notes": found.notes,
    }


def sentence(found: MemoryComparison, within: float) -> str:
    """Which way to take, in one sentence."""
    best, doubled = found.best(within), found.way("doubled")
    bound = f" within {within:g} times the predicted time of a doubled batch" if isfinite(within) else ""
    fewer = [
        f"{SAID[each.way]} takes {_less(each, best)} at x {found.relative(each.way):.2f}"
        for each in found.ways
        if each.way != "whole" and each.total_bytes < best.total_bytes
    ]
    more = f"; beyond that, {' and '.join(fewer)}" if fewer else ""
    if best is doubled:
        return f"Take the doubled batch as it is: no other way{bound} takes fewer bytes{more}."
    gain = f"{_less(best, doubled)} than a doubled batch"
    if not bound:
        return f"Take {SAID[best.way]}: it takes the fewest bytes of all, {gain}, at x {found.relative(best.way):.2f}."
    return f"Take {SAID[best.way]}: of the ways{bound} it takes the fewest bytes, {gain}{more}."


def _less(each: StepMemory, other: StepMemory) -> str:
    return f"{1 - each.total_bytes / other.total_bytes:.0%} less"
