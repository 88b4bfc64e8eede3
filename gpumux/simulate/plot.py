"""Pictures of simulations. matplotlib is an extra: it is imported here, when a picture is asked for, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumux.errors import ConfigError
from gpumux.model import Priority
from gpumux.simulate.result import JobResult, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HIGH_COLOR, LOW_COLOR, LINE_COLOR = "#c44e52", "#4c72b0", "#555555"
STEPS_SHOWN = 6  # of the slowest high job, in a timeline
DPI = 110
MOST_EDGED = 150  # bars; with more of them the edges would be all there is to see


def figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib", "pip install matplotlib") from None
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def check(path: Path) -> None:
    """Before a long run whose picture is to be saved there. Raises ConfigError where `figure` or `save` would."""
    figure(1.0, 1.0)
    why = "" if path.parent.is_dir() else f"there is no directory {path.parent}"
    if path.is_dir():
        why = "it is a directory"
    elif not why and not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "no permission"
    if why:
        raise ConfigError(f"can't write {path}: {why}", "choose a file in a directory you may write")


def save(drawn: Figure, path: Path) -> None:
    """Write it as PNG, the same bytes for the same picture. Raises ConfigError when the file can't be written."""
    try:
        drawn.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(
            f"can't write {path}: {error.strerror}", "choose a file in a directory you may write"
        ) from None


def timelines(results: Sequence[Result], path: Path) -> None:
    """For each run: its high jobs' slowdown step by step, and its latest launches as bars, a lane a job."""
    lanes = max(len(result.jobs) for result in results)
    drawn = figure(10.0, len(results) * (1.9 + 0.35 * lanes))
    axes = drawn.subplots(len(results), 2, squeeze=False, width_ratios=(1, 2))
    for row, result in zip(axes, results, strict=True):
        _slowdowns(row[0], result)
        _launches(row[1], result)
    save(drawn, path)


def _slowdowns(axes: Axes, result: Result) -> None:
    axes.set_title(f"{result.policy}: slowdown of high steps", fontsize=9)
    for job in result.of(Priority.HIGH) or result.jobs:
        axes.plot([seconds / job.solo.step_s for seconds in job.step_seconds], lw=0.8, label=job.name)
        axes.axhline(job.max_slowdown, color=LINE_COLOR, ls=":", lw=0.8)
        if job.warmup:
            axes.axvspan(0, job.warmup, color=LINE_COLOR, alpha=0.1, lw=0)
    axes.set_ylim(bottom=min(0.9, axes.get_ylim()[0]))
    axes.set_xlabel("step (shaded: left out of the figures)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7)


def _launches(axes: Axes, result: Result) -> None:
    """The end of the run, long enough for a few steps of the high job."""
    axes.set_title(f"{result.policy}: launches, the last few steps", fontsize=9)
    shown = _shown_seconds(result.of(Priority.HIGH) or result.jobs)
    last = max((row.ended for row in result.timeline), default=0.0)
    first = max(0.0, last - shown)
    for lane, job in enumerate(result.jobs):
        rows = [row for row in result.timeline if row.job == job.name and row.ended > first]
        color = HIGH_COLOR if job.priority is Priority.HIGH else LOW_COLOR
        for share in sorted({row.share for row in rows}):
            bars = [((r.started - first) * 1e3, (r.ended - r.started) * 1e3) for r in rows if r.share == share]
            height = 0.8 * share  # a launch confined to half of the device is drawn half as high
            edge = {"edgecolor": "white", "lw": 0.4} if len(bars) < MOST_EDGED else {"lw": 0}
            axes.broken_barh(bars, (lane - height / 2, height), facecolor=color, **edge)
    axes.set_yticks(range(len(result.jobs)), [job.name for job in result.jobs], fontsize=8)
    axes.set_ylim(len(result.jobs) - 0.4, -0.6)
    axes.set_xlim(0, max(last - first, 1e-9) * 1e3)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)


def _shown_seconds(jobs: Sequence[JobResult]) -> float:
    latest = [max(job.step_seconds[-STEPS_SHOWN:], default=0.0) for job in jobs]
    return STEPS_SHOWN * max(max(latest, default=0.0), max(job.solo.step_s for job in jobs))
