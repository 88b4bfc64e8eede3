"""Figures and curves use all options of the query, and their pictures show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gpumux.errors import ConfigError
from gpumux.plan import plot
from gpumux.plan.baselines import SampleEfficiency, scaled
from gpumux.plan.costs import Network
from gpumux.plan.graph import reduce
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing
from gpumux.plan.plan import BurstPlan
from gpumux.plan.query import PlanQuery
from tests.plan.graphs import layer

EFFICIENCY = SampleEfficiency(64.0)


def timed(name: str, *inputs: str, smallest: int = 1, rate: float = 2.0, parameters: int = 60) -> LayerProfile:
    times = tuple(Timing(n, 1.0 + rate * n, 2.0 + 2 * rate * n) for n in (1, 2, 4, 8, 16) if n >= smallest)
    return layer(name, *inputs, times=times, output_bytes=3, parameter_bytes=parameters)


def query(smallest: int = 1, counts: tuple[int, ...] = (1, 2, 4)) -> PlanQuery:
    """Two branches, small enough for both searches, with syncs and transfers that matter."""
    layers = (timed("a", smallest=smallest), timed("b", "a", smallest=smallest),
              timed("c", "a", smallest=smallest, rate=0.5),
              timed("d", "b", "c", smallest=smallest, parameters=400),
              timed("e", "d", smallest=smallest, rate=0.01))  # fmt: skip
    return PlanQuery(reduce(ModelProfile("m", "d", layers)), 16, 4, counts, Network("n", 40.0, 0.01), 2.0)


OPTIONS = (
    {"overlap": 1.0},
    {"counts": (1, 4)},
    {"algorithm": "deeppool", "limit": 1.2},
    {"network": Network("n", 4.0, 0.5)},
    {"limit": 1.0},
)


@pytest.mark.parametrize("changed", OPTIONS, ids=lambda each: next(iter(each)))
def test_every_option_reaches_every_curve(changed: dict[str, object]) -> None:
    asked = replace(query(), **changed)  # type: ignore[arg-type]
    assert {each.gpus for each in plot.over_sizes(asked, EFFICIENCY)} == set(asked.counts)
    ways = {each.strategy: each for each in scaled(asked, 4, EFFICIENCY)}
    assert ways["burst"].iteration_s == asked.plan().seconds
    assert ways["strong"].iteration_s == asked.data_parallel(4).seconds
    assert ways["weak"].iteration_s == replace(asked, batch=64).data_parallel(4).seconds
    for limit, plan in plot.over_limits(asked):
        assert plan == replace(asked, limit=limit).plan()
        assert plan.algorithm == asked.algorithm
    last = [each for bandwidth, each in plot.over_networks(asked, EFFICIENCY, (asked.network.bandwidth,))]
    assert last == scaled(asked, asked.counts[-1], EFFICIENCY)
    points = {each.name: each for each in plot.operating_points(asked, [asked.plan()])}
    assert {f"partition {count}" for count in asked.counts} < set(points)
    assert points["partition 4"].speedup == asked.data_parallel(4).speedup
    assert len(plot.layer_speedups(asked)[0]) == len(asked.counts)


def test_the_options_make_a_difference_there() -> None:
    """Checks that the test above can fail."""
    plain = query()
    for changed in OPTIONS:
        asked = replace(plain, **changed)
        beside = replace(plain, limit=changed.get("limit", 2.0))  # type: ignore[arg-type]
        if set(changed) != {"limit"}:
            assert asked.plan().seconds != beside.plan().seconds or asked.counts != beside.counts
    assert plain.plan().seconds != replace(plain, limit=1.0).plan().seconds


def test_limits_that_no_plan_keeps_are_said_and_skipped() -> None:
    asked = replace(query(), counts=(2, 4), limit=1.0)
    assert asked.answer() is None
    with pytest.raises(ConfigError, match="no plan over 2, 4 GPUs"):
        asked.plan()
    found = dict(plot.over_limits(asked))
    assert found[1.0] is None
    assert found[inf] is not None
    assert {each.strategy for each in scaled(asked, 4, EFFICIENCY)} == {"weak", "strong", "batch-optimal"}


def test_background_jobs_run_what_was_timed() -> None:
    """A profile of batches from 16 on says nothing of a GPU's part of 16."""
    with pytest.raises(ConfigError, match="16 on 4 GPUs is 4 samples each"):
        query(smallest=16)
    asked = query(smallest=16, counts=(1,))
    assert plot.background_batch(asked) == 16
    assert plot.background_batch(query()) == 4
    points = plot.operating_points(asked, [asked.plan()])
    plan = asked.plan()
    shared = plan.idle / plan.seconds * 16 / asked.data_parallel(1).seconds
    assert points[0].throughput == pytest.approx(16 / plan.seconds + shared)
    assert [each.strategy for each in plot.over_sizes(asked, EFFICIENCY)] == [
        "weak", "strong", "batch-optimal", "burst"
    ]  # fmt: skip


# ---- pictures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Figure]:
    """The figure that was saved last."""
    kept: list[Figure] = []
    monkeypatch.setattr(plot, "save", lambda figure, path: kept.append(figure))
    return lambda: kept[-1]


def test_a_timeline_has_a_bar_for_all_that_takes_time(drawn: Callable[[], Figure]) -> None:
    plan: BurstPlan = replace(query(), limit=inf).plan()
    plot.timeline(plan, Path("x.png"))
    (axes,) = drawn().axes
    bars = {
        (to_hex(bar.get_facecolor()[0]), *(round(float(each), 6) for each in bar.get_paths()[0].get_extents().bounds))
        for bar in axes.collections
        if bar.get_paths()
    }
    wanted = set()
    for row in plan.rows:
        begin = row.start
        for part in ("comm", "comp", "sync"):
            seconds = getattr(row, part)
            if seconds:
                box = (begin * 1e3, row.first, seconds * 1e3, row.gpus)
                wanted.add((to_hex(plot.PARTS[part][0]), *(round(float(each), 6) for each in box)))
            begin += seconds
    assert {each[0] for each in wanted} == {to_hex(color) for color, _, _ in plot.PARTS.values()}  # all kinds are there
    assert bars == wanted
    assert axes.get_xlim() == (0, plan.seconds * 1e3)
    assert axes.get_ylim() == (0, 4)
    assert f"{plan.idle / (4 * plan.seconds):.0%} idle" in axes.get_title()


def lines(figure: Figure, at: int = 0) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in figure.axes[at].lines
    }


def test_scaling_and_networks_show_each_strategy(drawn: Callable[[], Figure]) -> None:
    asked = query()
    found = plot.over_sizes(asked, EFFICIENCY)
    plot.scaling(found, "it", Path("x.png"))
    shown = lines(drawn())
    for strategy in plot.STRATEGIES:
        assert shown[strategy] == [(each.gpus, each.speedup) for each in found if each.strategy == strategy]
        assert len(shown[strategy]) == 3
    (samples,) = lines(drawn(), 1).values()
    assert samples == [(each.gpus, each.samples_a_gpu) for each in found if each.strategy == "batch-optimal"]
    speeds = plot.over_networks(asked, EFFICIENCY)
    plot.networks(speeds, "it", Path("x.png"))
    shown = lines(drawn())
    for strategy in plot.STRATEGIES:
        assert shown[strategy] == [(rate * 8e-9, each.speedup) for rate, each in speeds if each.strategy == strategy]
        assert len(shown[strategy]) == len(plot.BANDWIDTHS)


def test_layers_and_the_trade_off_show_what_was_found(drawn: Callable[[], Figure]) -> None:
    asked = query()
    speedups = plot.layer_speedups(asked)
    plot.layers(asked.graph, speedups, asked.counts, Path("x.png"))
    (axes,) = drawn().axes
    assert [bar.get_height() for bar in axes.patches] == [each[-1] for each in speedups]  # type: ignore[attr-defined]
    assert [each.get_text() for each in axes.get_xticklabels()] == ["a", "b", "c", "d", "e"]
    points = plot.operating_points(asked, [each for _, each in plot.over_limits(asked) if each is not None])
    plot.trade_off(points, "it", Path("x.png"))
    shown = lines(drawn())
    for kind, label in (("limit", "burst, idle time shared"), ("partition", "partition")):
        assert shown[label] == sorted((each.speedup, each.throughput) for each in points if each.name.startswith(kind))
        assert shown[label]
    assert "none" in " ".join(text.get_text() for text in drawn().axes[0].texts)
