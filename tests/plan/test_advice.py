"""The guidelines' own numbers, both lemmas, the integer program, and the overhead in a trace of a loop."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpumux.device.sim.spec import A100
from gpumux.errors import ConfigError
from gpumux.plan import guidelines, models
from gpumux.plan.trace import trace

ALEXNET = guidelines.read(trace(models.find("alexnet")))


def modelled(cnn: guidelines.Cnn, *algorithms: str) -> Callable[[int], dict[str, list[guidelines.Option]]]:
    """Every layer's algorithms (all of them unless named) at a batch, on an A100."""
    return lambda batch: guidelines.options(cnn, batch, A100, algorithms or guidelines.ALGORITHMS)


def test_table_2_of_the_guidelines():
    """The printed 11.6, 1.6, 2.3, 2.7 and 2.3."""
    found = [layer.fft_bytes(128) / layer.gemm_bytes(128) for layer in ALEXNET.convolutions]
    assert found == pytest.approx([11.62, 1.60, 2.37, 2.69, 2.37], abs=0.005)
    assert found == pytest.approx([11.6, 1.6, 2.3, 2.7, 2.3], abs=0.1)


def test_equations_2_to_5_for_alexnet():
    assert ALEXNET.maps[0] == 3 * 224 * 224
    assert ALEXNET.dense == (9216, 4096, 4096, 1000)
    weights = 11 * 11 * 3 * 96 + 5 * 5 * 96 * 256 + 9 * (256 * 384 + 384 * 384 + 384 * 256)
    assert ALEXNET.parameter_bytes() == 12 * (weights + 96 + 256 + 384 + 384 + 256)
    assert ALEXNET.classifier_bytes() == 4 * (18408 + 3 * (9216 * 4096 + 4096 * 4096 + 4096 * 1000) + 9)
    maps = sum(
        (
            3 * 224**2,
            96 * 55**2,
            96 * 27**2,
            256 * 27**2,
            256 * 13**2,
            384 * 13**2,
            384 * 13**2,
            256 * 13**2,
            256 * 6**2,
        )
    )
    assert ALEXNET.feature_bytes(128) == 4 * 128 * maps
    left = ALEXNET.bound(128, 12e9)
    assert left == 12e9 - ALEXNET.feature_bytes(128) - ALEXNET.parameter_bytes() - ALEXNET.classifier_bytes()


class Uneven(nn.Module):
    """Filters that are not square, have gaps or uneven strides, one that runs three times, and pools that are
    functions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, (1, 7), padding=(0, 3))
        self.row = nn.Conv2d(8, 8, (1, 3), padding=(0, 1))
        self.gaps = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.uneven = nn.Conv2d(8, 8, 3, stride=(1, 2), padding=1)
        self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.gaps(self.row(self.wide(x))), 2)
        for _ in range(3):
            x = self.again(x)
        return F.adaptive_avg_pool2d(self.groups(self.uneven(x)), 1)


def test_convolutions_are_taken_as_they_are():
    net = guidelines.read(trace(models.LoadedModel("uneven", Uneven(), (torch.zeros(1, 3, 16, 16),))))
    assert [c.name for c in net.convolutions] == [
        "wide", "row", "gaps", "again", "again:2", "again:3", "uneven", "groups"
    ]  # fmt: skip
    assert [c.name for c in net.convolutions if c.can("winograd")] == ["again", "again:2", "again:3"]
    assert [c.name for c in net.convolutions if not c.can("fft")] == ["groups"]
    weights = sum(p.numel() for p in Uneven().parameters())
    assert net.parameter_bytes() == 12 * weights
    assert net.maps == (768, 2048, 2048, 2048, 512, *(512,) * 3, 256, 256, 8)
    wide = net.convolutions[0]
    square = replace(wide, kernel=(7, 7))
    big = 4096  # where computation counts, seven times the products are seven times as long
    assert square.seconds("gemm", big, A100) > 3 * wide.seconds("gemm", big, A100)
    (choice,) = guidelines.suggest(net, [4], 12e9, modelled(net))
    assert choice.algorithms.keys() == {c.name for c in net.convolutions}
    every = guidelines.options(net, 4, A100)
    assert choice.seconds == pytest.approx(
        sum(o.seconds for name in every for o in every[name] if o.algorithm == choice.algorithms[name])
    )


def test_convolutions_that_can_not_be_known_are_refused():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Conv2d(3, 4, 3), nn.Parameter(torch.zeros(4, 4, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(self.first(x), self.weight)

    with pytest.raises(ConfigError, match="calls conv2d as a function"):
        guidelines.read(trace(models.LoadedModel("functional", Functional(), (torch.zeros(1, 3, 16, 16),))))
    inside = nn.Sequential(nn.Conv2d(3, 4, 3), WholePool(), nn.Flatten())
    with pytest.raises(ConfigError, match="is taken as one layer, and has convolutions inside"):
        guidelines.read(trace(models.LoadedModel("hidden", inside, (torch.zeros(1, 3, 16, 16),)), whole=["WholePool"]))


@pytest.mark.parametrize("other", [(nn.ConvTranspose2d(3, 3, 3),), (nn.Flatten(2), nn.Conv1d(3, 3, 3))])
def test_other_convolutions_are_refused(other: tuple[nn.Module, ...]):
    net = nn.Sequential(nn.Conv2d(3, 3, 3), *other)
    with pytest.raises(ConfigError, match=r"for torch\.nn\.Conv2d alone"):
        guidelines.read(trace(models.LoadedModel("other", net, (torch.zeros(1, 3, 16, 16),))))


class WholePool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_lemma_3_1_and_its_examples():
    assert guidelines.tolerable_overhead(4, 0.8) == pytest.approx(0.0909, abs=1e-4)  # "must not exceed 9 %"
    assert guidelines.gpus_for(3, 0.1) == 4
    assert guidelines.gpus_for(11, 0.1) is None
    assert guidelines.most_speedup(0.1) == pytest.approx(11)
    assert guidelines.tolerable_overhead(1, 0.5) == inf
    assert guidelines.efficiency(1, 0.3) == 1
    for wrong in ((0, 0.1), (1, -0.1), (1, inf)):
        with pytest.raises(ConfigError):
            guidelines.efficiency(*wrong)


@given(st.integers(2, 2000), st.floats(0, 10))
def test_lemma_3_1_is_one_lemma_both_ways(gpus: int, ratio: float):
    alpha = guidelines.efficiency(gpus, ratio)
    assert 1 / gpus <= alpha <= 1 + 1e-12
    if alpha * gpus > 1.001:
        assert guidelines.tolerable_overhead(gpus, min(1.0, alpha)) == pytest.approx(ratio, rel=1e-5, abs=1e-9)
    needed = guidelines.gpus_for(max(1.0, guidelines.speedup(gpus, ratio) * (1 - 1e-7)), ratio)
    assert needed is not None
    assert needed <= gpus
    assert guidelines.speedup(needed, ratio) >= guidelines.speedup(gpus, ratio) * (1 - 1e-6)


def test_lemma_3_2_and_alexnets_updates():
    """180 MB a push do not go through 1 Gb/s: 1.44 s, where 10 Gb/s takes 0.144 s."""
    one, ten = guidelines.exchanges(180e6, 8, 1e9 / 8, 0.5), guidelines.exchanges(180e6, 8, 10e9 / 8, 0.5)
    assert guidelines.servers(180e6, 8, 1e9 / 8, 0.5) == 47
    assert guidelines.servers(180e6, 8, 10e9 / 8, 0.5) == 5
    assert guidelines.servers(1.0, 1, 2.0, 1.0) == 1
    assert [each.hidden for each in one] == [False] * 3
    assert [each.hidden for each in ten] == [True] * 3
    assert one[0].nbytes == 2 * 7 / 8 * 180e6
    assert one[0].seconds == pytest.approx(2.52)
    assert one[2].nbytes == 1.5 * one[1].nbytes
    assert one[0].bandwidth * 0.5 == one[0].nbytes
    with pytest.raises(ConfigError, match="bandwidth"):
        guidelines.servers(1.0, 1, 0.0, 1.0)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    st.integers(-5, 120),
)
@settings(max_examples=60)
def test_the_integer_program_is_solved_exactly(layers: list[list[tuple[int, int]]], bound: int):
    options = {
        f"l{i}": [guidelines.Option(str(j), float(t), float(m)) for j, (t, m) in enumerate(each)]
        for i, each in enumerate(layers)
    }
    found = guidelines.choose(options, float(bound))
    fitting = [chosen for chosen in product(*options.values()) if sum(o.nbytes for o in chosen) <= bound]
    if not fitting:
        assert found is None
    else:
        assert found is not None
        assert sum(o.nbytes for o in found.values()) <= bound
        assert sum(o.seconds for o in found.values()) == min(sum(o.seconds for o in chosen) for chosen in fitting)


def test_less_memory_means_slower_algorithms_or_smaller_batches():
    plenty, tight = (
        guidelines.suggest(ALEXNET, (16, 32, 64, 128), memory, modelled(ALEXNET)) for memory in (12e9, 1e9)
    )
    assert plenty[0].batch == 128
    assert tight[0].batch == 16
    for choices, memory in ((plenty, 12e9), (tight, 1e9)):
        for choice in choices:
            assert 0 <= choice.workspace <= choice.bound
            assert choice.bound == ALEXNET.bound(choice.batch, memory)
    same = {choice.batch: choice for choice in plenty}
    assert all(choice.seconds >= same[choice.batch].seconds for choice in tight)
    assert "fft" not in {
        a
        for choice in guidelines.suggest(ALEXNET, (64,), 12e9, modelled(ALEXNET, "gemm"))
        for a in choice.algorithms.values()
    }
    with pytest.raises(ConfigError, match="fits into"):
        guidelines.suggest(ALEXNET, (64,), 1e8, modelled(ALEXNET))


def test_groups_strides_and_shapes_limit_the_algorithms():
    layer = ALEXNET.convolutions[0]
    assert [layer.can(each) for each in guidelines.ALGORITHMS] == [True, True, False]
    assert [ALEXNET.convolutions[2].can(each) for each in guidelines.ALGORITHMS] == [True, True, True]
    with pytest.raises(ConfigError, match="no 2d convolutions"):
        guidelines.read(trace(models.find("transformer")))


def event(name: str, category: str, start: float, seconds: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": seconds * 1e6}


def test_overhead_on_a_gpu_is_when_no_kernel_computes():
    found = guidelines.measure({"traceEvents": [
        event("aten::mm", "cpu_op", 0, 1), event("gemm", "kernel", 1, 2), event("relu", "kernel", 2, 2),
        event("ncclDevKernel_AllReduce", "kernel", 4, 2), event("memcpy", "gpu_memcpy", 6, 1),
        event("enumerate(DataLoader)#x", "cpu_op", 7, 1), event("gemm", "kernel", 8, 2),
    ]})  # fmt: skip
    assert (found.total, found.compute, found.loading, found.device) == (10, 5, 1, "cuda")
    assert found.ratio == pytest.approx(1.0)


def test_overhead_on_the_cpu_leaves_out_loading_and_collectives():
    found = guidelines.measure([
        event("enumerate(DataLoader)#x", "cpu_op", 0, 2), event("aten::stack", "cpu_op", 1, 0.5),
        event("aten::mm", "cpu_op", 2, 4),
        event("aten::add", "cpu_op", 3, 1), event("c10d::allreduce_", "cpu_op", 6, 1),
        event("aten::add", "cpu_op", 7, 1),
    ])  # fmt: skip
    assert (found.total, found.compute, found.loading, found.device) == (8, 5, 2, "cpu")


def test_a_real_loops_trace(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16)
    model = torch.nn.Linear(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        for (x,) in data:
            model(x).sum().backward()
    path = tmp_path / "loop.json"
    profiler.export_chrome_trace(str(path))
    found = guidelines.load(path)
    assert 0 < found.compute < found.total
    assert found.loading > 0
    assert found.ratio > 0
    packed = tmp_path / "loop.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert guidelines.load(packed) == found


def test_what_is_no_trace_is_refused(tmp_path):
    for body, says in (("{", "no JSON"), ("{}", "no trace"), (json.dumps({"traceEvents": []}), "no computation")):
        path = tmp_path / "x.json"
        path.write_text(body)
        with pytest.raises(ConfigError, match=says):
            guidelines.load(path)
    with pytest.raises(ConfigError, match="can't read"):
        guidelines.load(tmp_path / "absent.json")
