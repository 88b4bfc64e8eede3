"""A picture of the bytes alive over a step, a panel for each way to do it. matplotlib is imported when one is drawn."""

from __future__ import annotations

from itertools import accumulate, groupby
from pathlib import Path

from gpumux.plan.memory.ways import PHASES, MemoryComparison, StepMemory
from gpumux.simulate.result import HIGH_COLOR, LINE_COLOR, figure, save

COLORS = dict(zip(PHASES, ("#dce6f2", "#fbe3d6", "#e2efda"), strict=True))
GIB = 2**30


def draw(found: MemoryComparison, path: Path) -> None:
    """Write a PNG. Of waves one step of the first wave is shown, and what both hold; where the first wave's
    forward, backward and optimizer lie is marked. Raises ConfigError without matplotlib, or if it can't be written."""
    drawn = figure(9.0, 1.7 * len(found.ways))
    panels = drawn.subplots(len(found.ways), 1, sharex=True, sharey=True, squeeze=False)
    for axes, way in zip(panels[:, 0], found.ways, strict=True):
        clock = [0.0, *accumulate(seconds * 1e3 for seconds, _, _ in way.live)]
        for phase, begin, end in stretches(way):
            axes.axvspan(clock[begin], clock[end], color=COLORS[phase], lw=0)
        kept = way.state_bytes + way.batch_bytes
        held = [(kept + live) / GIB for _, _, live in way.live]
        axes.stairs(held, clock, baseline=kept / GIB, fill=True, color=HIGH_COLOR, alpha=0.8)
        axes.axhline(way.total_bytes / GIB, color=LINE_COLOR, lw=0.8, ls="--")
        axes.set_title(f"{way.way}: {way.samples} samples, {way.total_bytes / GIB:.2f} GiB", fontsize=8, loc="left")
        axes.set_ylabel("GiB", fontsize=8)
        axes.tick_params(labelsize=7)
    panels[0, 0].set_ylim(0, 1.05 * max(each.total_bytes for each in found.ways) / GIB)  # all panels have these
    panels[0, 0].set_xlim(0, max(sum(seconds for seconds, _, _ in each.live) for each in found.ways) * 1e3)
    panels[-1, 0].set_xlabel(f"predicted ms on an {found.device}", fontsize=8)
    for phase, color in COLORS.items():
        panels[0, 0].axvspan(0, 0, color=color, label=phase)
    drawn.suptitle(f"{found.model}, batch {found.batch}, {found.optimizer}", fontsize=9)
    drawn.legend(loc="outside upper right", ncols=len(COLORS), fontsize=7, frameon=False)
    save(drawn, path)


def stretches(way: StepMemory) -> list[tuple[str, int, int]]:
    """(phase, first operator, one past the last) for each run of operators of one phase."""
    found, at = [], 0
    for phase, group in groupby(way.live, key=lambda each: each[1]):
        count = len(list(group))
        found.append((phase, at, at + count))
        at += count
    return found
