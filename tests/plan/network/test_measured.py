"""A measured network: lines through its points, its file, and what the planner makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import exp, isclose, log, sqrt
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpumux.errors import ConfigError
from gpumux.plan.costs import Network, ProfiledCosts, SumCost
from gpumux.plan.graph import reduce
from gpumux.plan.layers import ModelProfile, Timing
from gpumux.plan.network.measured import MeasuredNetwork, Point, Series, dumps, load, loads, save
from gpumux.plan.query import PlanQuery
from tests.plan.graphs import layer
from tests.plan.network.networks import SIZES, measured, on_a_line


@pytest.mark.parametrize(("delay", "a_byte"), [(1e-4, 1e-9), (1e-9, 1e-9), (2e-3, 1e-12), (5e-6, 1e-5)])
def test_points_on_a_line_give_the_line(delay: float, a_byte: float) -> None:
    line = Series("transfer", 2, on_a_line(delay, a_byte)).line()
    assert isclose(line.delay, delay, rel_tol=1e-4, abs_tol=1e-12)
    assert isclose(line.a_byte, a_byte, rel_tol=1e-4)
    assert isclose(line.residual, 1.0, rel_tol=1e-6)
    assert isclose(line.worst, 1.0, rel_tol=1e-6)
    assert line.bandwidth == 1 / line.a_byte


def test_no_other_line_is_nearer_to_points_that_scatter() -> None:
    random = Random(1)
    for _ in range(30):
        true = on_a_line(10 ** random.uniform(-6, -3), 10 ** random.uniform(-11, -8))
        points = tuple(Point(n, *[median * random.uniform(0.5, 2.0)] * 3) for n, median, _, _ in true)
        line = Series("all-reduce", 3, points).line()
        assert 1 < line.residual <= line.worst
        for _ in range(20):
            other = (line.delay * random.uniform(0.9, 1.1), line.a_byte * random.uniform(0.9, 1.1))
            assert residual(points, *other) >= line.residual * (1 - 1e-9)


def residual(points: tuple[Point, ...], delay: float, a_byte: float) -> float:
    apart = [log(point.median / (delay + a_byte * point.nbytes)) for point in points]
    return exp(sqrt(sum(each**2 for each in apart) / len(apart)))


def test_times_that_do_not_rise_have_no_bandwidth() -> None:
    falling = tuple(Point(n, *[1e-3 / n] * 3) for n in SIZES)
    with pytest.raises(ConfigError, match="transfer among 2 ranks takes no longer for more bytes"):
        Series("transfer", 2, falling).line()


def test_a_network_is_read_as_it_was_written(tmp_path: Path) -> None:
    network, path = measured(ranks=3), tmp_path / "n.json"
    save(network, path)
    assert load(path) == network


def set_at(*place: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_at("format", to="gpumux-profile"), "this is no measured network"),
        (set_at("version", to=2), "version 2"),
        (set_at("units", "median", to="ms"), "ms"),
        (set_at("more", to=1), "more"),
        (lambda body: body.pop("rounds"), "rounds"),
        (set_at("ranks", to="4"), "ranks"),
        (set_at("rounds", to=0), "0 rounds"),
        (set_at("machines", to=["one"]), "1 machines for 4 ranks"),
        (set_at("versions", to={"torch": 2}), "versions"),
        (set_at("series", 1, "kind", to="gather"), r"series\[1\].*'gather'"),
        (set_at("series", 2, "ranks", to=1), r"series\[2\].*among 1 ranks"),
        (set_at("series", 2, "ranks", to=8), "among 8 of 4 ranks"),
        (set_at("series", 0, "points", 3, to=[8, 1.0]), r"series\[0\].points\[3\]"),
        (set_at("series", 0, "points", 3, 0, to=8), r"series\[0\].*each once, rising"),
        (set_at("series", 0, "points", 3, 1, to=-1.0), r"series\[0\].*took \[-1.0"),
        (set_at("series", 0, "points", 3, 3, to=1e-12), r"series\[0\].*median between"),
        (set_at("series", 0, "points", 3, 1, to=float("inf")), r"series\[0\].*took \[inf"),
        (set_at("series", 0, "points", to=[]), r"series\[0\].*two sizes or more"),
        (lambda body: body["series"].pop(), "0 series of all-reduce among 4 ranks"),
        (lambda body: body["series"].append(body["series"][0]), "2 series of transfer among 2 ranks"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(change: Callable[[dict[str, Any]], None], said: str) -> None:
    body = json.loads(dumps(measured()))
    change(body)
    with pytest.raises(ConfigError, match=said):
        loads(json.dumps(body))


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    path.write_text(dumps(measured()).replace('"rounds": 5', '"rounds": 0'))
    with pytest.raises(ConfigError, match=r"n\.json: 4 ranks, 0 rounds"):
        load(path)


# ---- For the planner.


def test_transfers_take_the_line_of_all_ranks_and_sums_that_of_their_own() -> None:
    network = measured(ranks=4).network("here")
    assert isclose(network.latency, 1e-4 * 4, rel_tol=1e-4)
    assert isclose(network.bandwidth, 1e9 / 4, rel_tol=1e-4)
    for gpus in (2, 4):
        assert isclose(network.all_reduce(1e6, gpus), gpus * (2e-4 + 1e6 * 3e-9), rel_tol=1e-4)
    assert network.all_reduce(1e6, 1) == network.all_reduce(0, 2) == 0.0


def test_between_measured_numbers_of_ranks_a_sum_lies_on_a_straight_line() -> None:
    network = Network("n", 1.0, 0.0, sums=(SumCost(2, 1.0, 10.0), SumCost(6, 3.0, 30.0)))
    assert network.sum_cost(3) == SumCost(3, 1.5, 15.0)
    assert network.all_reduce(2, 3) == 31.5


def test_more_ranks_than_measured_are_refused() -> None:
    network = measured(ranks=4).network("here")
    graph = reduce(ModelProfile("m", "d", (layer("a", times=(Timing(1, 1.0, 2.0),)),)))
    with pytest.raises(ConfigError, match="measured among 2, 4 ranks, and this is about 8 GPUs"):
        PlanQuery(graph, 8, 8, (1, 2, 4, 8), network)
    assert PlanQuery(graph, 8, 8, (1, 2, 4), network).plan()


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_the_search_and_the_costs_take_the_same_sums(overlap: float) -> None:
    layers = tuple(
        layer(f"l{i}", *([f"l{i - 1}"] if i else []), parameter_bytes=size, times=(Timing(1, 1e-4, 2e-4),))
        for i, size in enumerate((0, 400, 1 << 20))
    )
    costs = ProfiledCosts(
        reduce(ModelProfile("m", "d", layers)), 8, (1, 2, 4), measured(ranks=4).network("here"), overlap
    )
    found, _ = costs.columns()
    for row, g in zip(found, costs.counts, strict=True):
        for i, seconds in enumerate(row):
            assert isclose(seconds, costs.comp(i, g) + costs.sync(i, g), rel_tol=1e-12)


@pytest.mark.parametrize(
    "sums",
    [
        (SumCost(4, 1.0, 1.0), SumCost(2, 1.0, 1.0)),
        (SumCost(2, 1.0, 1.0), SumCost(2, 1.0, 1.0)),
        (SumCost(1, 1.0, 1.0),),
        (SumCost(2, -1.0, 1.0),),
        (SumCost(2, 1.0, float("nan")),),
    ],
)
def test_impossible_sums_are_refused(sums: tuple[SumCost, ...]) -> None:
    with pytest.raises(ConfigError):
        Network("n", 1.0, 0.0, sums=sums)


def test_a_network_needs_two_ranks() -> None:
    with pytest.raises(ConfigError, match="1 ranks"):
        MeasuredNetwork("gloo", "cpu", 1, 1, ("m",), {}, "now", ())
