"""Pictures of results. matplotlib is an extra (`pip install matplotlib`), imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumux.simulate.result import HIGH_COLOR, LOW_COLOR, figure, save

COLUMNS = 4  # of a picture of several panels


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves by name: (x, y, lowest, highest) each."""

    title: str
    curves: Mapping[str, Sequence[tuple[float, float, float, float]]]


def curves(
    path: Path,
    title: str,
    panels: Sequence[Panel],
    kinds: Mapping[str, tuple[str, str]],
    names: tuple[str, str],
    *,
    columns: int = COLUMNS,
    doubling: bool = True,
    bottom: float | None = 0.0,
) -> None:
    """Panels side by side, each with its own scale. `kinds`: label and colour by a curve's name, in the order of the
    legend. Where y was measured several times, a band goes from the lowest to the highest. `doubling`: x is in steps of
    a factor of two, each with a tick. `bottom`: where y begins, None for what suits the curves."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    drawn = figure(max(5.0, 3.0 * columns), 0.9 + 2.5 * rows)
    grid = drawn.subplots(rows, columns, squeeze=False)
    shown = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for name, points in panel.curves.items():
            xs, ys, low, high = zip(*points, strict=True)
            label, color = kinds[name]
            (shown[label],) = axes.plot(xs, ys, marker="o", ms=3, lw=1.2, color=color)
            axes.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)
        axes.tick_params(labelsize=7)
        if doubling:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in panel.curves.values() for x, *_ in points})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks], fontsize=7)
            axes.minorticks_off()
        axes.set_ylim(bottom=bottom)
        axes.set_title(panel.title, fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel(names[1], fontsize=8)
    for axes in grid.flat[len(panels) - columns : len(panels)]:
        axes.set_xlabel(names[0], fontsize=8)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    labels = [label for label, _ in kinds.values() if label in shown]
    drawn.legend(
        [shown[label] for label in labels], labels, fontsize=8, ncols=min(4, len(labels)), loc="outside lower center"
    )
    drawn.suptitle(title, fontsize=9)
    save(drawn, path)


def stacked_bars(path: Path, title: str, labels: Sequence[str], high: Sequence[float], low: Sequence[float]) -> None:
    """One bar a row, the first at the bottom: the high job's throughput over alone, then the low one's."""
    drawn = figure(8.0, 0.9 + 0.45 * len(labels))
    axes = drawn.subplots()
    places = range(len(labels))
    axes.barh(places, high, color=HIGH_COLOR, label="high", height=0.7)
    axes.barh(places, low, left=list(high), color=LOW_COLOR, label="low", height=0.7)
    for place, first, second in zip(places, high, low, strict=True):
        axes.text(first / 2, place, f"{first:.2f}", ha="center", va="center", color="white", fontsize=8)
        if second > 0.05:
            axes.text(first + second / 2, place, f"{second:.2f}", ha="center", va="center", color="white", fontsize=8)
    axes.axvline(1.0, color="#555555", ls=":", lw=1)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_xlabel("throughput over the job's own alone", fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    save(drawn, path)


def heat_map(
    path: Path,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    names: tuple[str, str],
) -> None:
    """`values[row][column]` from 0 to 1; `names` are what rows and columns are."""
    drawn = figure(1.6 + 0.62 * len(columns), 1.4 + 0.36 * len(rows))
    axes = drawn.subplots()
    image = axes.imshow(values, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=45, ha="right")
    axes.set_ylabel(names[0], fontsize=8)
    axes.set_xlabel(names[1], fontsize=8)
    axes.set_title(title, fontsize=9)
    drawn.colorbar(image, ax=axes, shrink=0.8)
    save(drawn, path)


def scatter(
    path: Path,
    title: str,
    points: Sequence[Sequence[tuple[float, float]]],
    labels: Sequence[str],
    names: tuple[str, str],
    line: float,
) -> None:
    """Clouds of (x, y), a colour each; `line` is a bound on y."""
    drawn = figure(7.0, 4.0)
    axes = drawn.subplots()
    for cloud, label, color in zip(points, labels, (LOW_COLOR, HIGH_COLOR, "#55a868"), strict=False):
        axes.scatter([x for x, _ in cloud], [y for _, y in cloud], s=10, label=label, color=color, alpha=0.7)
    axes.axhline(line, color="#555555", ls=":", lw=1)
    axes.set_xlabel(names[0], fontsize=8)
    axes.set_ylabel(names[1], fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    save(drawn, path)
