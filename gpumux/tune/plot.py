"""A picture of a sweep. matplotlib is imported when one is drawn."""

from __future__ import annotations

from itertools import accumulate
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from gpumux.pictures import BLUE, GREY, ORANGE, TITLE, WIDE, figure, label, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpumux.tune.run import SweepResult


def draw(found: SweepResult, path: Path) -> None:
    """Scores over steps, a line a trial, and the best score over the device seconds spent. Raises ConfigError."""
    drawn = figure(WIDE, 4.0)
    left, right = drawn.subplots(1, 2)
    _curves(left, found)
    _spent(right, found)
    drawn.suptitle(f"{found.task}: {found.algorithm}, {found.scheduler}", fontsize=TITLE)
    save(drawn, path)


def _curves(axes: Axes, found: SweepResult) -> None:
    best = found.best.number if found.best is not None else None
    for entry in found.entries:
        points = sorted((steps, score) for steps, score in entry.scores.items() if not isnan(score))
        first = entry.number == best
        color, dashes = (BLUE, "-") if first else (ORANGE, "--") if entry.state == "complete" else (GREY, ":")
        axes.plot(
            [steps for steps, _ in points], [score for _, score in points], marker="o", ms=3, color=color, ls=dashes,
            lw=1.6 if first else 0.8, zorder=3 if first else 2,
        )  # fmt: skip
    for name, color, dashes in (
        (f"trial {best}, the best", BLUE, "-"),
        ("completed", ORANGE, "--"),
        ("ended early", GREY, ":"),
    ):
        if best is not None or color != BLUE:
            axes.plot([], [], color=color, ls=dashes, marker="o", ms=3, label=name)
    label(axes, "steps", f"score ({found.direction})", legend=True)


def _spent(axes: Axes, found: SweepResult) -> None:
    better = max if found.direction == "maximize" else min
    done = [e for e in found.entries if not isnan(e.score)]
    spent = list(accumulate(e.device_s for e in done))
    axes.step(
        spent, list(accumulate((e.score for e in done), better)), where="post", color=BLUE, lw=1.2, label="best so far"
    )
    axes.plot(spent, [e.score for e in done], ls="", marker="o", ms=4, color=GREY, label="a trial's latest")
    label(axes, "device time of the trials up to it, by number (s)", f"score ({found.direction})", legend=True)
