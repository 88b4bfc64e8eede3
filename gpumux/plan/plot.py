"""Figures of plans, and DeepPool's figures 1 to 3, 5 and 10 for any model. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from gpumux.pictures import (
    BLUE,
    DENSE,
    LINE_COLOR,
    LOOKS,
    NARROW,
    SKY,
    TEXT,
    VERMILION,
    WIDE,
    figure,
    label,
    save,
)
from gpumux.plan.baselines import STRATEGIES, SampleEfficiency, Scaled, scaled
from gpumux.plan.graph import LayerGraph
from gpumux.plan.plan import BurstPlan
from gpumux.plan.query import PlanQuery
from gpumux.program.saved_plan import PlanRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ---- DeepPool's figures for any model: the effects of GPU counts, networks and amplification limits.


LIMITS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, inf)
BANDWIDTHS = tuple(gbps * 1e9 / 8 for gbps in (10, 25, 50, 100, 200, 400, 1000, 2400, 4800))


def over_limits(
    query: PlanQuery, progress: Callable[[int, int, float], None] | None = None
) -> list[tuple[float, BurstPlan | None]]:
    """Each amplification limit with its plan (None if there is none), for iteration time against GPU time.
    `progress(done, whole, limit)` is called before each."""
    found = []
    for done, limit in enumerate(LIMITS):
        if progress is not None:
            progress(done, len(LIMITS), limit)
        found.append((limit, replace(query, limit=limit).answer()))
    return found


@dataclass(frozen=True)
class OperatingPoint:
    """A foreground job and background jobs on one cluster (figure 10). `speedup`: the foreground's over one GPU with
    the same batch. `throughput`: samples a second of all jobs. Each background job is taken to be as fast on its GPU as
    alone, so this is an upper bound for sharing."""

    name: str
    speedup: float
    throughput: float


def background_batch(query: PlanQuery) -> int:
    """Samples of one iteration of a background job: a GPU's part of the foreground's, at least as many as were
    timed."""
    timed = max(layer.times[0].samples for layer in query.graph.layers)
    return max(timed, query.batch // query.gpus)


def operating_points(query: PlanQuery, plans: Sequence[BurstPlan]) -> list[OperatingPoint]:
    """The plans with all idle GPU time given to background jobs; then, for each count, the cluster divided into
    data-parallel foreground GPUs and background ones."""
    batch, gpus, share = query.batch, query.gpus, background_batch(query)
    alone = replace(query, batch=share, gpus=1, counts=(1,)).data_parallel(1)
    background = share / alone.seconds  # samples a second of one GPU
    found = []
    for each in plans:
        idle = each.idle / each.seconds  # idle time as a number of GPUs
        found.append(OperatingPoint(f"limit {each.limit:g}", each.speedup, batch / each.seconds + idle * background))
    for count in query.counts:
        foreground = query.data_parallel(count)
        total = batch / foreground.seconds + (gpus - count) * background
        found.append(OperatingPoint(f"partition {count}", foreground.speedup, total))
    return found


def over_sizes(query: PlanQuery, efficiency: SampleEfficiency) -> list[Scaled]:
    """Every strategy on a cluster of each of the query's counts (figures 1 and 2)."""
    return [each for gpus in query.counts for each in scaled(query, gpus, efficiency)]


def over_networks(
    query: PlanQuery, efficiency: SampleEfficiency, bandwidths: Sequence[float] = BANDWIDTHS
) -> list[tuple[float, Scaled]]:
    """Every strategy on the largest count at every bandwidth in bytes a second, with the network's own latency (figure
    3). All-reduces follow from these: measured ones are of another bandwidth."""
    return [
        (bandwidth, each)
        for bandwidth in bandwidths
        for each in scaled(
            replace(query, network=replace(query.network, bandwidth=bandwidth, sums=())), query.counts[-1], efficiency
        )
    ]


def layer_speedups(query: PlanQuery) -> list[list[float]]:
    """comp(i, 1) / comp(i, g) of each layer and count: computation only (figure 5). A layer without any has
    1."""
    found = []
    for layer in query.graph.layers:
        one = layer.at(query.batch).seconds
        each = [layer.at(query.batch // count).seconds for count in query.counts]
        found.append([one / seconds if seconds else 1.0 for seconds in each])
    return found


# ---- Drawing.


# A part's colour, hatch and name; idle time is white.
PARTS = {
    "comp": (BLUE, "", "computation"),
    "comm": (VERMILION, "xxxx", "samples moved"),
    "sync": (SKY, "....", "gradients summed"),
}
LINES = dict(zip(STRATEGIES, LOOKS, strict=False))
LABELLED = 40  # layers; more labels would overlap


def available() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    figure(1.0, 1.0)


def timeline(plan: BurstPlan, path: Path) -> None:
    """The layers on each GPU over time; white is idle. A GPU's row is as high as there is room."""
    drawn = figure(WIDE, 4.0)
    axes = drawn.subplots()
    for part, (color, hatch, name) in PARTS.items():
        bars = [(row, _begin(row, part), getattr(row, part)) for row in plan.rows if getattr(row, part) > 0]
        for row, begin, seconds in bars:
            axes.broken_barh(
                [(begin * 1e3, seconds * 1e3)],
                (row.first, row.gpus),
                facecolor=color,
                edgecolor="white",
                lw=0.2,
                hatch=hatch,
            )
        axes.broken_barh([], (0, 0), facecolor=color, edgecolor="white", hatch=hatch, label=name)
    axes.set_ylim(0, plan.gpus)
    axes.set_xlim(0, plan.seconds * 1e3)
    idle = plan.idle / (plan.gpus * plan.seconds) if plan.seconds else 0.0
    title = f"{plan.graph.name}, {plan.algorithm}: {plan.gpus} GPUs, batch {plan.batch}, {idle:.0%} idle"
    label(axes, "time (ms)", "GPU", title)
    drawn.legend(
        loc="outside lower center", ncols=len(PARTS), fontsize=TEXT, frameon=False
    )  # bars may be anywhere inside
    save(drawn, path)


def _begin(row: PlanRow, part: str) -> float:
    """The start of a part of a row: samples come first, gradients go last."""
    return row.start + (0.0 if part == "comm" else row.comm if part == "comp" else row.comm + row.comp)


def scaling(found: Sequence[Scaled], name: str, path: Path) -> None:
    """Figures 1 and 2: speed-up to accuracy over cluster sizes, and the samples a GPU chosen by batch-optimal
    scaling."""
    drawn = figure(WIDE, 4.0)
    speedups, samples = drawn.subplots(1, 2)
    sizes = sorted({each.gpus for each in found})
    speedups.plot(sizes, sizes, color=LINE_COLOR, ls=":", lw=1, label="linear")
    for strategy in STRATEGIES:
        some = [each for each in found if each.strategy == strategy]
        _line(speedups, strategy, [(float(s.gpus), s.speedup) for s in some])
    chosen = [each for each in found if each.strategy == "batch-optimal"]
    _line(samples, "batch-optimal", [(float(s.gpus), s.samples_a_gpu) for s in chosen])
    for axes in (speedups, samples):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.yaxis.set_major_formatter("{x:g}")
    label(speedups, "GPUs", "speed-up to accuracy (times)", f"{name}: ways to scale", legend=True)
    label(samples, "GPUs", "samples a GPU", "what batch-optimal scaling chooses")
    save(drawn, path)


def networks(found: Sequence[tuple[float, Scaled]], name: str, path: Path) -> None:
    """Figure 3: speed-up to accuracy over network speeds."""
    drawn = figure(NARROW, 4.2)
    axes = drawn.subplots()
    for strategy in STRATEGIES:
        _line(axes, strategy, [(rate * 8e-9, each.speedup) for rate, each in found if each.strategy == strategy])
    rates = sorted({bandwidth * 8e-9 for bandwidth, _ in found})
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.axhline(1, color=LINE_COLOR, ls=":", lw=1)
    gpus = found[0][1].gpus if found else 0
    label(
        axes, "network (Gb/s a GPU)", "speed-up to accuracy (times)", f"{name}: {gpus} GPUs over one", legend=True
    )  # fmt: skip
    save(drawn, path)


def layers(graph: LayerGraph, speedups: Sequence[Sequence[float]], counts: Sequence[int], path: Path) -> None:
    """Figure 5: the speed-up of each layer's computation over numbers of GPUs."""
    drawn = figure(WIDE, 4.0)
    axes = drawn.subplots()
    last = [each[-1] for each in speedups]
    axes.bar(range(len(last)), last, color=BLUE)
    axes.axhline(counts[-1], color=LINE_COLOR, ls=":", lw=1)
    names = [layer.name for layer in graph.layers]
    few = len(names) <= LABELLED
    title = f"{graph.name}: computation alone (dotted: as many times as GPUs)"
    label(axes, "layer" if few else "layer, by its place in the model", f"speed-up on {counts[-1]} GPUs (times)", title)
    if few:
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=DENSE)
    save(drawn, path)


def trade_off(points: Sequence[OperatingPoint], name: str, path: Path) -> None:
    """Figure 10: the cluster's throughput over the speed-up of the foreground job."""
    drawn = figure(NARROW, 4.2)
    axes = drawn.subplots()
    kinds = (("limit", "burst, idle time shared", LOOKS[0]), ("partition", "partition", LOOKS[1]))
    for prefix, meaning, look in kinds:
        line = sorted((p.speedup, p.throughput) for p in points if p.name.startswith(prefix))
        axes.plot(
            [x for x, _ in line],
            [y for _, y in line],
            marker=look.marker,
            ls=look.dashes,
            color=look.color,
            label=meaning,
        )
    axes.margins(x=0.2, y=0.1)
    near = [0.04 * (high - low) for low, high in (axes.get_xlim(), axes.get_ylim())]
    for (prefix, _, _), offset in zip(kinds, (5, -13), strict=True):  # each line's labels on a side of their own
        some = [(p.speedup, p.throughput, p.name.split()[1]) for p in points if p.name.startswith(prefix)]
        for (x, y), text in _together(some, *near).items():
            axes.annotate(text, (x, y), fontsize=DENSE, xytext=(5, offset), textcoords="offset points")
    title = f"{name}: amplification limits, and GPUs given to the foreground"
    label(axes, "foreground speed-up (times)", "all jobs (samples/s)", title, legend=True)
    save(drawn, path)


def _line(axes: Axes, strategy: str, points: Sequence[tuple[float, float]]) -> None:
    look = LINES[strategy]
    axes.plot(
        [x for x, _ in points], [y for _, y in points], marker=look.marker, ms=5, color=look.color, ls=look.dashes,
        lw=1.5, label=strategy,
    )  # fmt: skip


def _together(points: Sequence[tuple[float, float, str]], wide: float, high: float) -> dict[tuple[float, float], str]:
    """One text for each place: "1.75 to none" if several limits make the same plan, or nearly."""
    found: dict[tuple[float, float], list[str]] = {}
    for x, y, text in points:
        near = next((at for at in found if abs(at[0] - x) <= wide and abs(at[1] - y) <= high), (x, y))
        found.setdefault(near, []).append("none" if text == "inf" else text)
    return {at: texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}" for at, texts in found.items()}
