"""Pictures of results. matplotlib is an extra (`pip install matplotlib`), imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumux.pictures import (
    DENSE,
    HIGH_COLOR,
    LINE_COLOR,
    LOOKS,
    LOW_COLOR,
    LOW_HATCH,
    NARROW,
    TEXT,
    TITLE,
    WIDE,
    figure,
    label,
    save,
)

COLUMNS = 3  # of a picture of several panels
MOST_MARKERS = 12  # on a curve


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves by name: (x, y, lowest, highest) each."""

    title: str
    curves: Mapping[str, Sequence[tuple[float, float, float, float]]]


def curves(
    path: Path,
    title: str,
    panels: Sequence[Panel],
    kinds: Mapping[str, str],
    names: tuple[str, str],
    *,
    columns: int = COLUMNS,
    doubling: bool = True,
    bottom: float | None = 0.0,
) -> None:
    """Panels side by side, each with its own scale. `kinds`: label by a curve's name, in the order of the legend, which
    also gives each its look. Where y was measured several times, a band goes from the lowest to the highest.
    `doubling`: x is in steps of a factor of two, each with a tick. `bottom`: where y begins, None for what suits the
    curves."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    drawn = figure(WIDE, 1.2 + 2.5 * rows)
    looks = dict(zip(kinds, LOOKS, strict=False))
    grid = drawn.subplots(rows, columns, squeeze=False)
    shown = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for name, points in panel.curves.items():
            xs, ys, low, high = zip(*points, strict=True)
            look = looks[name]
            every = max(1, len(xs) // MOST_MARKERS)
            (shown[kinds[name]],) = axes.plot(
                xs, ys, color=look.color, marker=look.marker, markevery=every, ms=4, ls=look.dashes, lw=1.4
            )
            axes.fill_between(xs, low, high, color=look.color, alpha=0.15, lw=0)
        label(axes, "", "", panel.title)
        if doubling:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in panel.curves.values() for x, *_ in points})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.minorticks_off()
        axes.set_ylim(bottom=bottom)
    for axes in grid[:, 0]:
        axes.set_ylabel(names[1], fontsize=TEXT)
    for axes in grid.flat[len(panels) - columns : len(panels)]:
        axes.set_xlabel(names[0], fontsize=TEXT)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    labels = [each for each in kinds.values() if each in shown]
    drawn.legend(
        [shown[each] for each in labels], labels, fontsize=TEXT, ncols=min(4, len(labels)), loc="outside lower center",
        handlelength=3.5,
    )  # fmt: skip
    drawn.suptitle(title, fontsize=TITLE)
    save(drawn, path)


def stacked_bars(path: Path, title: str, labels: Sequence[str], high: Sequence[float], low: Sequence[float]) -> None:
    """One bar a row, the first at the bottom: the high job's throughput over alone, then the low one's."""
    drawn = figure(WIDE, 1.0 + 0.45 * len(labels))
    axes = drawn.subplots()
    places = range(len(labels))
    axes.barh(places, high, color=HIGH_COLOR, label="high job", height=0.7)
    axes.barh(
        places,
        low,
        left=list(high),
        color=LOW_COLOR,
        hatch=LOW_HATCH,
        edgecolor="white",
        lw=0,
        label="low job",
        height=0.7,
    )
    for place, first, second in zip(places, high, low, strict=True):
        axes.text(first / 2, place, f"{first:.2f}", ha="center", va="center", color="white", fontsize=TEXT)
        if second > 0.05:
            axes.text(
                first + second / 2, place, f"{second:.2f}", ha="center", va="center", fontsize=TEXT,
                bbox={"facecolor": "white", "pad": 1.5, "lw": 0},
            )  # fmt: skip
    axes.axvline(1.0, color=LINE_COLOR, ls=":", lw=1)
    label(axes, "throughput over the job's own alone (times)", "", title)
    axes.set_yticks(places, labels)
    drawn.legend(fontsize=TEXT, ncols=2, loc="outside lower center", frameon=False)
    save(drawn, path)


def heat_map(
    path: Path,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    names: tuple[str, str],
    unit: str,
) -> None:
    """`values[row][column]` from 0 to 1, of `unit`; `names` are what rows and columns are."""
    drawn = figure(min(WIDE, 2.6 + 0.64 * len(columns)), 1.6 + 0.36 * len(rows))
    axes = drawn.subplots()
    image = axes.imshow(values, vmin=0.0, vmax=1.0, cmap="cividis", aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            color = "black" if value > 0.45 else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=DENSE, color=color)
    label(axes, names[1], names[0], title)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    drawn.colorbar(image, ax=axes, shrink=0.8).set_label(unit, fontsize=TEXT)
    save(drawn, path)


def scatter(
    path: Path,
    title: str,
    points: Sequence[Sequence[tuple[float, float]]],
    labels: Sequence[str],
    names: tuple[str, str],
    line: float,
) -> None:
    """Clouds of (x, y), a colour and a marker each; `line` is a bound on y."""
    drawn = figure(NARROW, 4.2)
    axes = drawn.subplots()
    for cloud, name, look in zip(points, labels, LOOKS, strict=False):
        xs, ys = [x for x, _ in cloud], [y for _, y in cloud]
        axes.scatter(xs, ys, s=16, label=name, color=look.color, marker=look.marker, alpha=0.7, lw=0)
    axes.axhline(line, color=LINE_COLOR, ls=":", lw=1.2, label="promised")
    label(axes, names[0], names[1], title, legend=True)
    save(drawn, path)
