"""The shipped example of `gpumux tune`: what its module says of itself is so."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from clients import digits_sweep
from gpumux.cli.main import main
from gpumux.fuse.tune import read_space

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


def test_it_is_tuned(capsys: pytest.CaptureFixture[str]):
    asked = ["tune", "clients.digits_sweep:factory", "--space", str(SPACE), "--scheduler", "serial", "--json"]
    assert main([*asked, "--trials", "3", "--steps", "30", "--threads", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["best"]["score"] == max(t["score"] for t in body["trials"]) > 0.2
