"""The benchmark of a cluster, on a model small enough for a test, and what it counts as equal throughput."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumux.plan.graph import LayerGraph
from gpumux.plan.layers import LayerProfile, Timing
from gpumux.simulate.comparison import ClusterCase
from microbench import ablation, cluster


def graph(*_: object) -> LayerGraph:
    """A layer that scales, and one with many weights that hardly does."""
    times = [tuple(Timing(n, base + rate * n, 2 * (base + rate * n)) for n in (1, 2, 4, 8, 16, 32))
             for base, rate in ((1e-5, 4e-5), (1.5e-4, 1e-6))]  # fmt: skip
    layers = (
        LayerProfile("scales", "Conv2d", (), 1 << 20, 1 << 16, times[0]),
        LayerProfile("does not", "Linear", ("scales",), 1 << 10, 100 << 20, times[1]),
    )
    return LayerGraph("small", "a100", layers, (0, 1))


def test_the_benchmark_prints_each_way_as_it_comes_and_writes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "graph_of", graph)
    out = tmp_path / "cluster.json"
    assert cluster.main(["--models", "vgg16", "--iterations", "4", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    points = {point["label"]: point for point in told["models"]["vgg16"]["points"]}
    assert {"data parallel", "limit 1.5, alone", "limit 1.5, paced", "limit 1.5, guarded", "2 of 8 GPUs"} <= set(points)
    assert points["limit 1.5, paced"]["samples_per_s"] > points["limit 1.5, alone"]["samples_per_s"]
    assert points["limit 1.5, alone"]["iteration_s"] < points["data parallel"]["iteration_s"]
    assert [row["label"] for row in told["techniques"]] == list(ablation.ROWS)
    assert told["techniques"][1]["high"] == 1.0
    assert told["techniques"][2]["high"] < told["techniques"][4]["high"] <= 1.0
    assert len(told["targets"]) == 4
    printed = capsys.readouterr().out
    assert "limit 1.5, guarded" in printed
    assert "published 1.2 to 2.3" in printed


def point(samples_per_s: float, speedup: float, policy: str | None = None) -> cluster.Point:
    low = (1.0,) if samples_per_s != 100.0 else (0.0,)
    case = ClusterCase("case", 8, 1.0, 1.0, speedup, low, samples_per_s, policy)
    return cluster.Point(2.0 if policy else 0.0, case)


def test_a_plan_is_compared_with_the_mixture_of_partitions_that_does_as_much() -> None:
    parted = [point(300.0, 1.0), point(100.0, 5.0)]
    found, which = cluster.faster_at_equal_throughput([point(200.0, 4.5, "paced")], parted)
    assert found == pytest.approx(4.5 / 3.0 - 1)
    assert which == "limit 2, paced"
    beyond = [point(400.0, 4.0, "paced")]
    assert cluster.faster_at_equal_throughput(beyond, parted) == (None, "all give more than any partition")


def test_without_layer_times_it_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cluster.main(["--models", "vgg16", "--profiles", str(tmp_path)]) == 78
    assert "can't read" in capsys.readouterr().err
