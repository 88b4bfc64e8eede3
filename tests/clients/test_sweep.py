"""The shipped example of `gpumux tune`: what its module says of itself is so."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from clients import digits_sweep
from gpumux.cli.main import main
from gpumux.tune.run import read_space, tune

SPACE = Path(digits_sweep.__file__).with_suffix(".toml")


def test_every_configuration_of_its_space_trains_a_step():
    seen = set()
    for number in range(24):
        config = read_space(SPACE).sample(0, number)
        seen.add((config["model"], config["optimizer"]))
        step, model, _ = digits_sweep.factory(config)
        x, y = next(digits_sweep.batches(config, 0))
        assert x.shape == (config["batch_size"], 1, 8, 8)
        assert torch.isfinite(step(x, y))
        assert 0 <= digits_sweep.score(model, config) <= 1
    assert len(seen) == 4


def test_batches_go_on_where_they_are_asked_to():
    config = {"batch_size": 64}
    whole = list(islice(digits_sweep.batches(config, 0), 50))
    later = list(islice(digits_sweep.batches(config, 30), 20))
    assert all(torch.equal(a, b) for x, y in zip(whole[30:], later, strict=True) for a, b in zip(x, y, strict=True))
    assert len({tuple(y.tolist()) for _, y in whole}) == 50


EIGHT = {
    "model": {"choices": ["mlp"]},
    "batch_size": {"choices": [16]},
    "optimizer": {"choices": ["adamw"]},
    "lr": {"low": 1e-3, "high": 3e-2, "log": True, "fusible": True},
    "weight_decay": {"low": 1e-6, "high": 1e-2, "log": True, "fusible": True},
    "beta1": {"low": 0.8, "high": 0.98, "fusible": True},
    "decay": {"low": 0.3, "high": 1.0, "fusible": True},
}


@pytest.mark.slow
@pytest.mark.extended
def test_eight_configurations_score_the_same_as_an_array(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """In float64: the scores, shares of images, are equal, and so is all state to 1e-9. (In float32 two correct
    versions of a step differ by roundings, which training makes larger: scores may then differ by an image.)"""
    monkeypatch.setattr(digits_sweep, "DTYPE", torch.float64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {
        scheduler: tune("clients.digits_sweep:factory", EIGHT, trials=8, steps=60, scheduler=scheduler)
        for scheduler in ("fused", "serial")
    }
    fused, serial = found["fused"], found["serial"]
    assert fused.notes["array_sizes"] == [8]
    assert [e.scores for e in fused.entries] == [e.scores for e in serial.entries]
    assert len({e.score for e in serial.entries}) > 2
    assert fused.best == replace(serial.best, device_s=fused.best.device_s)
    for name, value in fused.state()["model"].items():
        torch.testing.assert_close(value, serial.state()["model"][name], rtol=1e-9, atol=1e-12)


def test_it_is_tuned(capsys: pytest.CaptureFixture[str]):
    asked = ["tune", "clients.digits_sweep:factory", "--space", str(SPACE), "--scheduler", "serial", "--json"]
    assert main([*asked, "--trials", "3", "--steps", "30", "--threads", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["best"]["score"] == max(t["score"] for t in body["trials"]) > 0.2
