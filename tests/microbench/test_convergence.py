"""Training alone beside one array: its figures, and that it fails on an array that learns otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from microbench import convergence


def test_differences_are_of_the_whole_state_and_relative_to_large_values():
    state = {"model": {"w": torch.tensor([2.0]), "n": torch.tensor(3)}, "optimizer": [{"v": torch.zeros(0)}, 0.5]}
    tensors = convergence._tensors(state)
    assert [tensor.tolist() for tensor in tensors] == [[2.0], 3.0, []]
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
    assert convergence._apart(torch.tensor([0.5, 4.0]), torch.tensor([0.75, 5.0])) == 0.25
    assert convergence._apart(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.extended
def test_an_array_learns_what_each_model_learns_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    flags = ["--size", "tiny", "--batch", "4", "--rates", "0.001", "0.5", "--out"]
    assert convergence.main([*flags, str(out), "--steps", "4", "--picture", str(picture)]) == 0
    found = json.loads(out.read_text())
    assert [model["lr"] for model in found["models"]] == [0.001, 0.5]
    assert all(len(model["alone"]) == len(model["array"]) == 4 for model in found["models"])
    assert picture.stat().st_size > 1000
    original = convergence.Workload.factory

    def otherwise(self, config):
        alone = otherwise.calls < 2
        otherwise.calls += 1
        return original(self, config if alone else {**config, "weight_decay": 0.1})

    otherwise.calls = 0
    monkeypatch.setattr(convergence.Workload, "factory", otherwise)
    assert convergence.main([*flags, str(tmp_path / "other.json"), "--steps", "4"]) == 1
