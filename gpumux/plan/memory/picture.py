"""A picture of the bytes alive over a step, a panel for each way to do it. matplotlib is imported when one is drawn."""

from __future__ import annotations

from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from gpumux.pictures import BLUE, LINE_COLOR, TEXT, TITLE, WIDE, figure, label, save
from gpumux.plan.memory.ways import PHASES, MemoryComparison, StepMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

SHADES = dict(zip(PHASES, (("white", ""), ("lightgrey", ""), ("whitesmoke", "////")), strict=True))  # shade, hatch
GIB = 2**30


def draw(found: MemoryComparison, path: Path) -> None:
    """Write a PNG. Of waves one step of the first wave is shown, and what both hold; where the first wave's
    forward, backward and optimizer lie is marked. Raises ConfigError without matplotlib, or if it can't be written."""
    drawn = figure(WIDE, 1.8 * len(found.ways))
    panels = drawn.subplots(len(found.ways), 1, sharex=True, sharey=True, squeeze=False)
    for axes, way in zip(panels[:, 0], found.ways, strict=True):
        clock = [0.0, *accumulate(seconds * 1e3 for seconds, _, _ in way.live)]
        for phase, begin, end in stretches(way):
            shade(axes, phase, clock[begin], clock[end])
        kept = way.state_bytes + way.batch_bytes
        held = [(kept + live) / GIB for _, _, live in way.live]
        axes.stairs(held, clock, baseline=kept / GIB, fill=True, color=BLUE, alpha=0.8)
        axes.axhline(way.total_bytes / GIB, color=LINE_COLOR, lw=0.8, ls="--")
        label(axes, "", "GiB")
        axes.set_title(f"{way.way}: {way.samples} samples, {way.total_bytes / GIB:.2f} GiB", fontsize=TEXT, loc="left")
    panels[0, 0].set_ylim(0, 1.05 * max(each.total_bytes for each in found.ways) / GIB)  # all panels have these
    panels[0, 0].set_xlim(0, max(sum(seconds for seconds, _, _ in each.live) for each in found.ways) * 1e3)
    panels[-1, 0].set_xlabel(f"predicted time on an {found.device} (ms)", fontsize=TEXT)
    for phase in SHADES:
        shade(panels[0, 0], phase, 0, 0).set(label=phase, edgecolor=LINE_COLOR)
    drawn.suptitle(
        f"{found.model}, batch {found.batch}, {found.optimizer} (dashed: the most that is held)", fontsize=TITLE
    )
    drawn.legend(loc="outside lower center", ncols=len(SHADES), fontsize=TEXT, frameon=False)
    save(drawn, path)


def shade(axes: Axes, phase: str, begin: float, end: float) -> Rectangle:
    """Mark the time of a phase behind what is drawn."""
    color, hatch = SHADES[phase]
    return axes.axvspan(begin, end, facecolor=color, hatch=hatch, edgecolor="darkgrey", lw=0, zorder=0)


def stretches(way: StepMemory) -> list[tuple[str, int, int]]:
    """(phase, first operator, one past the last) for each run of operators of one phase."""
    found, at = [], 0
    for phase, group in groupby(way.live, key=lambda each: each[1]):
        count = len(list(group))
        found.append((phase, at, at + count))
        at += count
    return found
