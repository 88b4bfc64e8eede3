"""The planner's benchmark, and the plans for DeepPool's models on DeepPool's own layer times."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpumux.errors import ConfigError
from gpumux.plan import deeppool, optimal
from gpumux.plan.costs import ProfiledCosts, powers_of_two, preset
from gpumux.plan.graph import reduce
from gpumux.plan.plan import evaluate
from gpumux.plan.query import PlanQuery
from microbench import a100, planner

WHERE = "DEEPPOOL_PROFILES"
QUICK = ["--models", "vgg16", "inception_v3", "--sizes", "8", "--repeats", "1", "--layers", "50"]


@pytest.fixture
def directory() -> Path:
    path = os.environ.get(WHERE)
    if path is None:
        pytest.skip(f"{WHERE} names no directory with DeepPool's A100_*.prof")
    return Path(path)


@pytest.mark.extended
def test_it_runs_on_modelled_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "planner.json"
    assert planner.main([*QUICK, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["models"]["vgg16"]["sources"] == {"model": 21}
    for name in ("vgg16", "inception_v3"):
        timed = report["models"][name]["8"]
        assert timed["optimal_over_limit"] == 0
        assert timed["deeppool_over_limit"] or timed["iteration_s"]["optimal"] <= timed["iteration_s"]["deeppool"]
        target = report["targets"][f"{name} on 8: optimal over deeppool"]
        assert (
            target["value"]
            == timed["ratio"]["median"]
            == timed["samples"]["deeppool"][0] / timed["samples"]["optimal"][0]
        )
        first = report["targets"][f"{name} on 8: the first search over deeppool"]["value"]
        assert first == timed["samples"]["deeppool"][0] / timed["samples"]["first"][0]
        assert timed["looked_up_ratio"]["median"] == timed["samples"]["looked_up"][0] / timed["samples"]["optimal"][0]
        gains = [each["gain"] for each in report["models"][name]["gains"]]
        assert gains == sorted(gains)
    assert report["chain"]["layers"] == 50
    assert "table 3" in capsys.readouterr().out


LINES = """\
 conv2d{"in_channels":3,"kernel_size":3,"out_channels":64,"padding":1,"stride":1}[1][3,224,224]   2.157     2157      6
 ReLU2d{"inplace":true,"kernel_size":1,"padding":0,"stride":1}[1][64,224,224]   4.936      1205      3730
"""


def test_files_of_another_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, says in (("vgg16", LINES + LINES.replace("conv2d", "adAvgPool2d"), "line 1 fits no layer"),):
        (tmp_path / a100.MODELS[name].file).write_text(text)
        with pytest.raises(ConfigError, match=says):
            a100.profile(tmp_path, name)
    with pytest.raises(ConfigError, match="can't read"):
        a100.profile(tmp_path / "absent", "vgg16")


def test_a_rectifiers_time_is_its_convolutions(tmp_path: Path) -> None:
    (tmp_path / "A100_vgg.prof").write_text(LINES)
    found = a100.profile(tmp_path, "vgg16")
    assert found.layers[0].times[0] == (1, pytest.approx(3362e-6), pytest.approx(3736e-6))
    assert found.sources() == {"measured": 1, "model": 20}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(a100.MODELS))
def test_plans_on_the_measured_times(name: str, directory: Path) -> None:
    graph = reduce(a100.profile(directory, name))
    measured = sum(layer.source == "measured" for layer in graph.layers)
    assert measured == {"vgg16": 21, "wide_resnet101_2": 37, "inception_v3": 107}[name]
    for gpus in (8, 1024):
        batch = a100.MODELS[name].batch * gpus // 8
        costs = ProfiledCosts(graph, batch, powers_of_two(gpus), preset("nvswitch"))
        for limit in (1.5, 2.0, 4.0, float("inf")):
            ours, theirs = (
                evaluate(graph, costs, search.search(graph, costs, limit, gpus), gpus=gpus, batch=batch, limit=limit)
                for search in (optimal, deeppool)
            )
            assert not ours.over_limit()
            assert theirs.over_limit() or ours.seconds <= theirs.seconds * (1 + 1e-12)
        query = PlanQuery(graph, batch, gpus, powers_of_two(gpus), preset("nvswitch"))
        assert ours.seconds <= query.data_parallel(gpus).seconds * (1 + 1e-12)
