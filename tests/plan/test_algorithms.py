"""Convolutions timed by algorithm: what torch is set to, the file, and the advice that takes the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from gpumux.errors import ConfigError
from gpumux.plan import guidelines, layers, measure
from gpumux.plan.layers import AlgorithmTimes, AlgorithmTiming, LayerProfile, ModelProfile, Timing
from gpumux.plan.models import LoadedModel
from gpumux.plan.trace import trace

LAYER = LayerProfile("0", "Conv2d", (), 8, 4, (Timing(2, 1.0, 1.0),))
QUICK = AlgorithmTimes("0", "quick", (AlgorithmTiming(2, 1.0, 1.5, 1000), AlgorithmTiming(4, 1.0, 2.0, 2000)))
SMALL = AlgorithmTimes("0", "small", (AlgorithmTiming(2, 2.0, 2.0, 10), AlgorithmTiming(4, 4.0, 4.0, 20)))
PROFILE = ModelProfile("net", "some CPU", (LAYER,), algorithms=(QUICK, SMALL))


class Seen(nn.Conv2d):
    """A convolution that notes how it runs."""

    seen: ClassVar[list[tuple[bool, bool, bool]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layouts = [each.is_contiguous(memory_format=torch.channels_last) for each in (x, self.weight)]
        self.seen.append((torch.backends.mkldnn.enabled, layouts[0], layouts[1]))
        return super().forward(x)


def net() -> LoadedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    return LoadedModel("net", model, [torch.randn(1, 3, 8, 8)])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_each_convolution_runs_by_each_algorithm_of_the_cpu() -> None:
    loaded = net()
    found = measure.convolutions(loaded, device="cpu", batches=(1, 3), repeats=2)
    names = ["onednn", "onednn channels-last", "native", "native channels-last"]
    assert [(each.convolution, each.algorithm) for each in found] == [(at, name) for at in ("0", "2") for name in names]
    assert all([timing.samples for timing in each.times] == [1, 3] for each in found)
    assert all(timing.workspace == 0 for each in found for timing in each.times)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_torch_is_set_to_the_algorithm_and_back() -> None:
    Seen.seen.clear()
    loaded = LoadedModel("net", nn.Sequential(Seen(3, 4, 3)), [torch.randn(1, 3, 8, 8)])
    weights = loaded.module.state_dict()
    before = {name: value.clone() for name, value in weights.items()}
    enabled = torch.backends.mkldnn.enabled
    measure.convolutions(loaded, device="cpu", batches=(2,), repeats=1)
    runs = [(fast, last, last) for fast in (True, False) for last in (False, True)]
    assert Seen.seen[1:] == [run for run in runs for _ in range(2)]
    assert torch.backends.mkldnn.enabled == enabled
    assert all(torch.equal(value, before[name]) and value.is_contiguous() for name, value in weights.items())
    assert not loaded.module[0]._forward_pre_hooks  # type: ignore[index,union-attr]


def test_cuda_has_choices_of_the_same_form() -> None:
    found = measure.algorithms("cuda")
    assert [each.name for each in found] == [
        "cudnn.benchmark", "cudnn.benchmark channels-last", "cudnn", "cudnn channels-last"
    ]  # fmt: skip
    assert [(each.fast, each.channels_last) for each in found] == [
        (True, False), (True, True), (False, False), (False, True)
    ]  # fmt: skip


# ---- The file.


def test_a_profile_with_algorithms_is_read_as_it_was_written(tmp_path: Path) -> None:
    layers.save(PROFILE, tmp_path / "net.json")
    assert layers.load(tmp_path / "net.json") == PROFILE


def test_a_profile_without_algorithms_is_written_as_before() -> None:
    """So that an older gpumux reads it, and this one reads an older one's."""
    old = ModelProfile("net", "some CPU", (LAYER,))
    assert "algorithms" not in json.loads(layers.dumps(old))
    assert layers.loads(layers.dumps(old)) == old


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((0,), 3, r"algorithms\[0\] is 3"),
        ((1, "more"), 3, r"algorithms\[1\].*more"),
        ((1, "algorithm"), 3, r"algorithms\[1\].algorithm"),
        ((1, "algorithm"), "quick", "'quick' of convolution '0' occurs twice"),
        ((1, "times"), [], r"algorithms\[1\].*has times for \[\]"),
        ((1, "times", 1), [4, 1.0, 1.0], r"algorithms\[1\].times\[1\].*samples, forward"),
        ((1, "times", 1, 0), 2, r"algorithms\[1\].*each batch once"),
        ((1, "times", 1, 1), -1.0, r"algorithms\[1\].*negative"),
        ((1, "times", 1, 3), 0.5, r"algorithms\[1\].times\[1\]"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(place: tuple[str | int, ...], value: object, said: str) -> None:
    body = json.loads(layers.dumps(PROFILE))
    at = body["algorithms"]
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(ConfigError, match=said):
        layers.loads(json.dumps(body))


# ---- Advice.


def test_the_quickest_measured_algorithms_that_fit_are_chosen() -> None:
    pytest.importorskip("scipy")
    cnn = guidelines.read(trace(LoadedModel("net", nn.Sequential(nn.Conv2d(3, 4, 3)), [torch.zeros(1, 3, 8, 8)])))
    room = {batch: 1e9 - cnn.bound(batch, 1e9) for batch in (2, 4)}  # bytes before any workspace

    def suggested(memory: float) -> list[tuple[int, str, float]]:
        choices = guidelines.suggest(
            cnn, (2, 4), memory, lambda batch: guidelines.measured_options(cnn, batch, PROFILE)
        )
        return [(each.batch, each.algorithms["0"], each.seconds) for each in choices]

    assert suggested(room[4] + 2000) == [(4, "quick", 3.0), (2, "quick", 2.5)]
    assert suggested(room[4] + 20) == [(2, "quick", 2.5), (4, "small", 8.0)]
    assert suggested(room[2] + 10) == [(2, "small", 4.0)]


def test_a_batch_or_a_layer_without_measured_times_is_refused() -> None:
    cnn = guidelines.read(trace(net()))
    with pytest.raises(ConfigError, match="without algorithms of 2 for a mini-batch of 2"):
        guidelines.measured_options(cnn, 2, PROFILE)
    with pytest.raises(ConfigError, match="without algorithms of 0 for a mini-batch of 8"):
        guidelines.measured_options(cnn, 8, PROFILE)


def test_a_convolution_that_runs_again_has_the_times_of_its_first_call() -> None:
    once = nn.Conv2d(3, 3, 3, padding=1)
    cnn = guidelines.read(trace(LoadedModel("net", nn.Sequential(once, once), [torch.zeros(1, 3, 8, 8)])))
    found = guidelines.measured_options(cnn, 2, PROFILE)
    assert list(found) == ["0", "0:2"]
    assert found["0"] == found["0:2"]
