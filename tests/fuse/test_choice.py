"""The choice between running once for all models and once a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux import fuse
from gpumux.errors import ConfigError, NotFusible
from gpumux.fuse import fuse as fuse_module
from gpumux.fuse import proof, rules
from gpumux.fuse.emit import Declined
from gpumux.fuse.template import Fused
from gpumux.fuse.variants import END, Timed, cheapest
from gpumux.program.ir import Program, ProgramBuilder
from tests.fuse.serial import array_of, batches, check, configs, steady, ways

nn = torch.nn


def cost(times: dict[int, Timed], reads: list[tuple[int, int]], each: frozenset[int]) -> float:
    total = 0.0
    for op, timed in times.items():
        joined = op in each and any(r not in each for r, m in reads if m == op)
        total += timed.each if op in each else float("inf") if timed.fused is None else timed.fused
        total += timed.join if joined else 0
    return total


@st.composite
def lines(draw: st.DrawFn) -> tuple[dict[int, Timed], list[tuple[int, int]]]:
    count = draw(st.integers(1, 6))
    number = st.integers(0, 9).map(float)
    times = {i: Timed(draw(st.none() | number), draw(number), draw(number)) for i in range(count)}
    pairs = [(r, m) for r in range(count) for m in range(r)] + [(END, m) for m in range(count)]
    return times, draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12))


@given(lines())
@settings(deadline=None)
def test_no_labelling_is_cheaper(case: tuple[dict[int, Timed], list[tuple[int, int]]]):
    times, reads = case
    found = cheapest(times, reads)
    best = min(
        cost(times, reads, frozenset(each))
        for count in range(len(times) + 1)
        for each in itertools.combinations(times, count)
    )
    assert cost(times, reads, found) == pytest.approx(best)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def with_times(monkeypatch: pytest.MonkeyPatch, measure: Any) -> None:
    monkeypatch.setattr("gpumux.fuse.variants.Times", lambda path: proof.Times(None, measure))


def by_operator(**dear: float) -> Any:
    """A timer that takes a second for every operator, except for some."""

    def measure(program: Program) -> float:
        return sum(dear.get(op.target.split(".")[1], 1.0) for op in program.ops)

    return measure


def test_what_is_quicker_once_a_model_runs_so(monkeypatch: pytest.MonkeyPatch):
    with_times(monkeypatch, by_operator(baddbmm=100.0, cat=0.1))
    array = check(steady(mlp), batches(6, 5), choose="measured")
    found = ways(array)
    assert found["aten.addmm.default"] == {"rule", "per-model"}  # the first has one batch for all and is one product
    assert found["aten.tanh.default"] == {"pointwise"}
    rows = [r for r in array.plan().rows if r.target == "aten.addmm.default"]
    assert [r.fused_s for r in rows] == [1.0, 100.0]
    assert rows[1].each_s == 3.0
    text = str(array.plan())
    assert "once a model" in text
    assert "per-model (chosen)" in text


def test_a_join_that_costs_more_than_it_saves_is_not_made(monkeypatch: pytest.MonkeyPatch):
    with_times(monkeypatch, by_operator(baddbmm=5.0, cat=100.0))
    array = check(steady(mlp), batches(6, 5), choose="measured")
    assert ways(array)["aten.addmm.default"] == {"rule"}


def test_models_one_after_another_where_fusion_does_not_pay(monkeypatch: pytest.MonkeyPatch):
    """The parts may look cheap although the whole is not."""

    def measure(program: Program) -> float:
        if program.results:
            return 1.0 if any(op.target == "aten.bmm.default" for op in program.ops) else 0.5
        return by_operator()(program)

    with_times(monkeypatch, measure)
    array = check(steady(mlp), batches(6, 5), choose="measured")
    assert {w for r in ways(array).values() for w in r} == {"per-model", "alike"}
    assert array.plan().whole_s == (0.5, 0.5)


def test_the_clock_is_real(tmp_path: Path):
    """Only checks that it measures and remembers times in its file."""
    file = tmp_path / "deep" / "times.json"
    array = check(steady(mlp), batches(6, 5, count=2), choose="measured", times_file=file)
    assert all(r.fused_s is None or 0 < r.fused_s < 60 for r in array.plan().rows)
    assert file.exists()

    def none(program: Program) -> float:
        raise AssertionError("measured again")

    build = ProgramBuilder()
    x = build.state("float64", (4,))
    build.call("aten.neg.default", x, dtype="float64", size=(4,))
    program = build.build()
    first = proof.Times(file, lambda p: 3.0)
    assert first(program) == 3.0
    first.save()
    assert proof.Times(file, none)(program) == 3.0


def test_a_broken_file_is_said_and_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "times.json"
    file.write_text("[1, 2")
    assert proof.Times(file, lambda p: 2.0)(ProgramBuilder().build()) == 2.0
    assert "can't be read" in caplog.text


def test_repeating_a_program_does_it_again():
    build = ProgramBuilder()
    x = build.state("float64", (4,))
    y = build.call("aten.neg.default", x, dtype="float64", size=(4,))
    build.add_op("aten.add_.Tensor", x, y, outs=(x.view,))
    again = proof.repeated(build.build(), 3)
    assert [op.target for op in again.ops] == ["aten.neg.default", "aten.add_.Tensor"] * 3
    assert sum(s.kind == "temp" for s in again.storages) == 3
    assert 0 < proof.seconds(again) < 60


def test_a_wrong_rule_is_found_before_a_step_runs(monkeypatch: pytest.MonkeyPatch):
    with_times(monkeypatch, by_operator())
    monkeypatch.setitem(rules.RULES, "aten.tanh.default", lambda call: torch.tanh(call["self"].all()) * 1.01)
    with pytest.raises(NotFusible, match=r"result 0 .* fused wrongly: .*aten\.tanh\.default"):
        fuse.Array(steady(mlp), configs(), batches(6, 5)[0])


@pytest.mark.parametrize("small", [False, True])
def test_of_many_models_three_are_compared(small: bool, monkeypatch: pytest.MonkeyPatch):
    """Or all, where that takes little memory. The third shows what is wrong by its position alone."""
    with_times(monkeypatch, by_operator())
    monkeypatch.setattr(proof, "SMALL_BYTES", proof.SMALL_BYTES if small else 0)
    compared = []
    right = proof.check
    monkeypatch.setattr(proof, "check", lambda fused, *rest: (compared.append(fused.models), right(fused, *rest)))
    check(steady(mlp), batches(6, 5, count=2), given=configs(5), choose="measured")
    assert compared == [5 if small else 3]

    def wrong(call: Any) -> Any:
        made = torch.tanh(call["self"].all())
        return torch.cat([made[:2], made[2:] * 1.01])

    monkeypatch.setitem(rules.RULES, "aten.tanh.default", wrong)
    with pytest.raises(NotFusible, match="fused wrongly"):
        fuse.Array(steady(mlp), configs(5), batches(6, 5)[0])


def test_an_operator_that_runs_otherwise_for_fewer_models_is_compared_for_all(monkeypatch: pytest.MonkeyPatch):
    with_times(monkeypatch, by_operator())
    monkeypatch.setattr(proof, "SMALL_BYTES", 0)
    compared = []
    right = proof.check
    monkeypatch.setattr(proof, "check", lambda fused, *rest: (compared.append(fused.models), right(fused, *rest)))

    name = "aten.tanh.default"

    def rule(call: Any) -> Any:
        if len(call["self"].all()) < 5:
            raise Declined("few models")
        return torch.tanh(call["self"].all())

    ways_of = fuse_module._ways
    monkeypatch.setattr(fuse_module, "_ways", lambda call: [("rule", rule)] if call.target == name else ways_of(call))
    monkeypatch.setitem(rules.PER_MODEL, name, "few models")
    array = check(steady(mlp), batches(6, 5, count=2), given=configs(5), choose="measured")
    assert ways(array)[name] == {"rule"}
    assert compared == [5]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_what_is_only_rounding_is_no_wrong_rule(monkeypatch: pytest.MonkeyPatch):
    """The gradient of a bias before a batch norm is truly zero: each order of summation leaves another rounding
    error."""
    with_times(monkeypatch, by_operator())
    array = check(
        steady(normed), batches(6, 5), choose="measured", noise=dict.fromkeys(["0.bias", "1.bias"], slice(None))
    )
    assert ways(array)["aten.native_batch_norm.default"] == {"rule"}


def squared(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("target", ["native_batch_norm_backward", "addmm", "mm"])
@pytest.mark.every(2)
def test_a_rule_that_is_wrong_by_little_is_found(target: str, monkeypatch: pytest.MonkeyPatch):
    """An error below float32's rounding is found: Programs are compared in float64."""
    with_times(monkeypatch, by_operator())
    rules.load()
    right = rules.RULES[f"aten.{target}.default"]

    def wrong(call: Any) -> Any:
        made = right(call)
        return (made[0] * 1.00001, *made[1:]) if isinstance(made, tuple) else made * 1.00001

    def single(config: Any) -> Any:
        _, model, _ = steady(normed)(config)
        optimizer = torch.optim.Adam(model.float().parameters(), lr=config.lr)
        return squared(model, optimizer), model, optimizer

    monkeypatch.setitem(rules.RULES, f"aten.{target}.default", wrong)
    with pytest.raises(NotFusible, match="fused wrongly"):
        fuse.Array(single, configs(), torch.ones(6, 5))


class Halved(nn.Module):
    """Batch norm between layers in bfloat16: its statistics are in float32, and must be in float64 if its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(self.norm(self.first(x.reshape(6, 1, 5, 1).expand(6, 1, 5, 5))).mean((2, 3))).float()


class HalvedLayers(nn.Module):
    """Layer norms with and without a bias, between layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8, bias=False), nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float()


class Drawn(nn.Module):
    """Floats made of no floats are of torch's default type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * (torch.rand(6, 1) > 0.2)
        return y * ((y > 0).sum() / 6)


@pytest.mark.parametrize("module", [Halved, HalvedLayers, Drawn])
def test_all_floats_are_verified_in_float64(module: Any, monkeypatch: pytest.MonkeyPatch):
    with_times(monkeypatch, by_operator())

    def factory(config: Any) -> Any:
        torch.manual_seed(config.seed)
        model = module()
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        return squared(model, optimizer), model, optimizer

    fuse.Array(factory, configs(), torch.ones(6, 5)).close()
    right = rules.RULES["aten.addmm.default"]
    monkeypatch.setitem(rules.RULES, "aten.addmm.default", lambda call: right(call) * 1.00001)
    with pytest.raises(NotFusible, match="fused wrongly"):
        fuse.Array(factory, configs(), torch.ones(6, 5))


def test_what_does_not_run_in_float64_is_verified_in_its_own_types(monkeypatch: pytest.MonkeyPatch):
    build = ProgramBuilder()
    x = build.state("float32", (4,))
    waves = build.call("aten._fft_r2c.default", x, (0,), 0, True, dtype="complex64", size=(3,))
    build.result(build.call("aten.abs.default", waves, dtype="float32", size=(3,)))
    fused = Fused(build.build(), 1, (), (), (), False, ((0,),), False)
    types, ran = [], proof._ran
    monkeypatch.setattr(
        proof, "_ran", lambda made, *rest: types.append(made.program.views[0].dtype) or ran(made, *rest)
    )
    proof.check(fused, fused, [[]])
    assert types == ["float64", "float32", "float32"]
    build.call("aten.index_select.default", x, 0, x, dtype="float32", size=(4,))
    fused = replace(fused, program=build.build())
    with pytest.raises(NotFusible, match=r'does not run on synthetic numbers.*index_select.*choose="per-model"'):
        proof.check(fused, fused, [[]])


def test_draws_are_alike_in_what_is_compared(monkeypatch: pytest.MonkeyPatch):
    with_times(monkeypatch, by_operator())
    module = lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 4))  # noqa: E731
    operators = ["aten.native_batch_norm.default", "aten.native_batch_norm_backward.default"]
    check(steady(module), batches(6, 5), choose="measured", per_model_operators=operators)


def test_draws_of_another_model_are_found(monkeypatch: pytest.MonkeyPatch):
    """Each model draws other numbers in what is compared."""
    with_times(monkeypatch, by_operator())

    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (torch.rand_like(x) > 0.3)

    monkeypatch.setitem(rules.RULES, "aten.gt.Scalar", lambda call: (call["self"].all() > 0.3).flip(0))
    with pytest.raises(NotFusible, match=r"fused wrongly: .*aten\.gt\.Scalar"):
        fuse.Array(steady(lambda: Noisy(5, 5)), configs(), batches(6, 5)[0])


def test_a_plan_needs_a_step():
    with array_of(steady(mlp), configs(), batches(6, 5)[0]) as array, pytest.raises(ConfigError, match="no step"):
        array.plan()
    with pytest.raises(ConfigError, match="choose is 'best'"):
        fuse.Array(steady(mlp), configs(), batches(6, 5)[0], choose="best")  # type: ignore[arg-type]


class Mixed(nn.Module):
    """Layers whose backward kernels read tensors as they lie in memory, behind one whose fused result has the models
    among the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.group, self.layer = nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.LayerNorm([4, 4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.group(self.first(x))
        pooled = nn.functional.adaptive_max_pool2d(nn.functional.max_pool2d(out, 2), 2)
        return self.layer(pooled.flatten(2))


@pytest.mark.parametrize(
    "apart",
    ["max_pool2d_with_indices_backward", "adaptive_max_pool2d_backward", "native_group_norm_backward",
     "native_layer_norm_backward", "max_pool2d_with_indices"],
)  # fmt: skip
def test_one_operator_runs_once_a_model_between_fused_ones(apart: str):
    name = f"aten.{apart}.default"
    array = check(steady(Mixed), batches(3, 2, 8, 8, count=2), per_model_operators=[name])
    assert ways(array)[name] == {"per-model"}
    assert ways(array)["aten.convolution.default"] == {"rule"}
