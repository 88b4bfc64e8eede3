"""The benchmark of waves beside synchronous training, on one seed and little data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from microbench import wave_curves
from tests.waves.reference import WaveReference


@pytest.mark.extended
def test_it_writes_curves_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, picture = tmp_path / "curves.json", tmp_path / "curves.svg"
    arguments = ["--seeds", "2", "--epochs", "1", "--out", str(out), "--picture", str(picture)]
    assert wave_curves.main(arguments) == 0
    report = json.loads(out.read_text())
    assert len(report["cells"]) == len(wave_curves.RATES) * len(wave_curves.MOMENTA) * len(wave_curves.WAYS)
    for cell in report["cells"]:
        for mean, low, high in (*cell["accuracy"], *cell["loss"]):
            assert low <= mean <= high
        assert len(cell["accuracy"]) == 1
    assert picture.read_text().startswith("<?xml")
    assert "0.38 with waves, 3.80 synchronously" in capsys.readouterr().out


def test_the_same_seed_gives_all_ways_the_same_start_and_samples():
    (first,) = wave_curves.train("single", 1e-9, 0.0, 4, 1)
    for way in ("waves", "doubled"):
        (other,) = wave_curves.train(way, 1e-9, 0.0, 4, 1)
        assert other == pytest.approx(first, abs=1e-5)
    (other,) = wave_curves.train("single", 1e-9, 0.0, 5, 1)
    assert other != pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize(("rate", "momentum"), [(0.6, 0.9), (2.2, 0.0)])
def test_the_growth_of_a_quadratic_is_what_the_reference_does(rate: float, momentum: float):
    def half_square(model: nn.Module, batch: None) -> Tensor:
        (weight,) = model.parameters()
        return weight.square().sum() / 2

    run = WaveReference(
        lambda: nn.Linear(1, 1, bias=False).double(),
        lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum),
        half_square,
    )
    sizes = []
    for _ in range(900):
        run.step(None)
        sizes.append(next(run.model.parameters()).abs().item())
    grown = (max(sizes[-100:]) / max(sizes[400:500])) ** (1 / 400)
    assert grown == pytest.approx(wave_curves.growth(rate, momentum, "waves"), rel=3e-3)
    assert grown > 1.001
