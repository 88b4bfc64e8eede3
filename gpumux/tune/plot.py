"""A picture of a sweep. matplotlib is imported when one is drawn."""

from __future__ import annotations

from itertools import accumulate
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from gpumux.simulate.result import HIGH_COLOR, LINE_COLOR, LOW_COLOR, check, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpumux.tune.run import SweepResult


SMALL = 8

__all__ = ["check", "draw"]


def draw(found: SweepResult, path: Path) -> None:
    """Scores over steps, a line a trial, and the best score over the device seconds spent. Raises ConfigError."""
    drawn = figure(10.0, 4.0)
    left, right = drawn.subplots(1, 2)
    _curves(left, found)
    _spent(right, found)
    drawn.suptitle(f"{found.task}: {found.algorithm}, {found.scheduler}", fontsize=10)
    save(drawn, path)


def _curves(axes: Axes, found: SweepResult) -> None:
    best = found.best.number if found.best is not None else None
    for entry in found.entries:
        points = sorted((steps, score) for steps, score in entry.scores.items() if not isnan(score))
        color = HIGH_COLOR if entry.number == best else LOW_COLOR if entry.state == "complete" else LINE_COLOR
        axes.plot(
            [steps for steps, _ in points], [score for _, score in points], marker="o", ms=3, lw=0.8, color=color,
            zorder=3 if entry.number == best else 2, label=f"trial {best}, the best" if entry.number == best else None,
        )  # fmt: skip
    axes.set_xlabel("steps", fontsize=SMALL)
    axes.set_ylabel(f"score ({found.direction})", fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    if best is not None:
        axes.legend(fontsize=7)


def _spent(axes: Axes, found: SweepResult) -> None:
    better = max if found.direction == "maximize" else min
    done = [e for e in found.entries if not isnan(e.score)]
    spent = list(accumulate(e.device_s for e in done))
    axes.step(spent, list(accumulate((e.score for e in done), better)), where="post", color=HIGH_COLOR, lw=1.0)
    axes.plot(spent, [e.score for e in done], ls="", marker="o", ms=3, color=LINE_COLOR)
    axes.set_xlabel("device seconds of the trials up to it, by number", fontsize=SMALL)
    axes.set_ylabel("latest score, and the best so far", fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
