"""Estimated against actual speed-up: the estimates from known times, and a small run over two ranks."""

from __future__ import annotations

import json
from math import isclose
from pathlib import Path

import pytest

from gpumux.plan import guidelines
from gpumux.plan.costs import Network, SumCost
from gpumux.plan.layers import LayerProfile, ModelProfile, Timing, dumps
from gpumux.plan.network import ranks
from microbench import speedup
from tests.plan.network.networks import measured

SAMPLES = 128  # as "MLP" has
LAYERS = (
    LayerProfile("a", "Linear", (), 8, 1000, (Timing(SAMPLES, 1.0, 2.0),)),
    LayerProfile("b", "Linear", ("a",), 8, 0, (Timing(SAMPLES, 0.5, 0.5),)),
    LayerProfile("c", "Linear", ("b",), 8, 3000, (Timing(SAMPLES, 1.0, 1.0),)),
)
PROFILE = ModelProfile("MLP", "d", LAYERS)  # 6 s a step
NETWORK = Network("n", 1e9, 0.0, sums=(SumCost(2, 1.0, 1e-3), SumCost(4, 2.0, 1e-3)))


def test_estimates_count_a_sum_for_each_layer_with_parameters_or_one() -> None:
    said = speedup.estimates(PROFILE, SAMPLES, 2, NETWORK, crowding=3.0)
    assert isclose(said["planner"], 2 * 6 / (6 + 2 * 1.0 + 4))
    assert isclose(said["crowded"], 2 * 6 / (18 + 2 * 1.0 + 4))
    assert isclose(said["one sum"], 2 * 6 / (18 + 1.0 + 4))
    assert speedup.estimates(PROFILE, SAMPLES, 1, NETWORK, 1.0) == {"planner": 1.0, "crowded": 1.0, "one sum": 1.0}


@pytest.mark.parametrize("speed", [1.2, 1.7, 2.0])
def test_the_lemma_gives_the_speed_up_that_its_overhead_was_taken_from(speed: float) -> None:
    found = speedup.overhead(speed)
    assert found is not None
    assert isclose(guidelines.speedup(2, found), speed)


def test_no_overhead_explains_a_step_that_is_no_faster_on_two_ranks() -> None:
    assert speedup.overhead(1.0) is None
    assert speedup.overhead(2.5) == 0.0


def test_figures_are_of_ratios_within_a_round() -> None:
    rounds = [
        {"network": "MLP", "profile": dumps(PROFILE), "ranks": {"1": [1.0, 1.0], "2": [1.0, 1.25], "4": [2.0, 4.0]}},
        {"network": "MLP", "profile": dumps(PROFILE), "ranks": {"1": [2.0, 2.0], "2": [2.0, 2.5], "4": [4.0, 8.0]}},
    ]
    found = speedup.compared(rounds, NETWORK)["MLP"]
    assert found["4"]["actual"] == speedup.common.Figure(1.0, 1.0, 1.0, 0.0, 2)
    assert found["4"]["crowding"].median == 2.0
    assert isclose(found["4"]["estimates"]["crowded"].median, 4 * 6 / (12 + 2 * 2.0 + 4))
    assert found["4"]["errors"]["crowded"] == found["4"]["estimates"]["crowded"]
    lemma = guidelines.speedup(4, (2 - 1.6) / (2 * 0.6))
    assert isclose(found["4"]["estimates"]["lemma"].median, lemma)
    assert "lemma" not in found["2"]["estimates"]


@pytest.mark.extended
def test_a_small_run_over_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "measure_here", lambda asked: measured(ranks=asked.ranks))
    out = tmp_path / "speedup.json"
    options = [
        "--ranks",
        "2",
        "--rounds",
        "1",
        "--repeats",
        "1",
        "--seconds",
        "0.01",
    ]
    assert speedup.main([*options, "--networks", "LeNet", "--out", str(out)]) == 0
    body = json.loads(out.read_text())
    assert set(body["networks"]) == {"LeNet"}
    for by_ranks in body["networks"].values():
        assert by_ranks["1"]["crowding"]["median"] == 1.0
        assert by_ranks["2"]["actual"]["median"] > 0
        assert set(by_ranks["2"]["errors"]) == {"planner", "crowded", "one sum"}
    assert "LeNet, 2 ranks" in capsys.readouterr().out
