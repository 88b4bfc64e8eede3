"""The layers of operators, from the capture to a plan made from the times of a job's steps."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpumux import client
from gpumux.capture.source import Layers
from gpumux.capture.step import Choice
from gpumux.capture.watch.reuse import kept_traces
from gpumux.cli.main import main
from gpumux.client.job import Job
from gpumux.device.sim.spec import A100
from gpumux.errors import ConfigError
from gpumux.plan import layers
from gpumux.plan import measure as roofline
from gpumux.plan import measure as steps
from gpumux.plan.models import LoadedModel, find
from gpumux.plan.trace import TracedModel, module_path, trace
from gpumux.program.ir import ROOT, Label, Program, labels
from gpumux.program.profile import OpProfile, StepProfile, load
from tests.client.branching import branching

CLASSES = 5


def training_step(model: nn.Module, optimizer: Any) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def captured(endpoint: str, model: nn.Module, *models: nn.Module, **options: Any) -> list[tuple[str, Label | None]]:
    """(operator, label) of a training step's Program."""
    program = captured_program(endpoint, model, *models, **options)
    return [(op.target.split(".")[1], label) for op, label in zip(program.ops, labels(program), strict=True)]


def chosen(job: Job, batch: Any) -> Program:
    """The choice for the next step on this batch."""
    choice = job._functions[0][0].choose(batch, {}, job._state)
    assert isinstance(choice, Choice)
    return choice.program.lowered.program


def captured_program(endpoint: str, model: nn.Module, *models: nn.Module, **options: Any) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 3, 8, 8), torch.randint(0, CLASSES, (4,))
    with client.submit(
        training_step(model, optimizer), example=batch, model=[model, *models], optimizer=optimizer, endpoint=endpoint,
        **options,
    ) as job:  # fmt: skip
        return chosen(job, batch)


def test_operators_are_of_the_innermost_module_in_both_passes(endpoint: str) -> None:
    found = captured(endpoint, branching())
    convolutions = [label for name, label in found if name == "convolution"]
    names = ["stem", "left", "right", "blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second"]
    assert convolutions == [Label(name) for name in names]
    back = [label.layer for name, label in found if name == "convolution_backward" and label and label.backward]
    assert sorted(back) == sorted(names)
    assert [label for name, label in found if name == "cat"] == [Label(ROOT)]
    assert {label for name, label in found if name == "relu_"} == {Label("blocks.0.relu"), Label("blocks.1.relu")}
    assert {label for name, label in found if name.startswith(("nll_loss", "_log_softmax", "_foreach", "_fused"))} == {
        None
    }
    modules = {name or ROOT for name, _ in branching().named_modules()}
    assert {label.layer for _, label in found if label} <= modules


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(192, 16), nn.Tanh()), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(checkpoint(self.body, x.flatten(1), use_reentrant=False).relu())
        return found


def test_what_the_backward_pass_computes_again_is_of_the_backward_pass(endpoint: str) -> None:
    found = captured(endpoint, Recomputing())
    assert [label for name, label in found if name == "addmm"] == [
        Label("body.0"),
        Label("head"),
        Label("body.0", True),
    ]
    assert [label for name, label in found if name == "threshold_backward"] == [Label(ROOT, True)]


def test_several_models_and_microbatches(endpoint: str) -> None:
    found = captured(endpoint, Recomputing(), nn.Linear(2, 2), microbatches=2)
    products = [label for name, label in found if name == "addmm"]
    assert products.count(Label("model0.body.0")) == products.count(Label("model0.body.0", True)) == 2


def test_a_step_without_modules_has_no_layers(endpoint: str) -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = (x * weight).sum()
        loss.backward()
        optimizer.step()
        return loss

    batch = (torch.ones(2, 3),)
    with client.submit(step, example=batch, optimizer=optimizer, endpoint=endpoint) as job:
        program = chosen(job, batch)
    assert (program.layers, program.spans) == ((), ())


def test_nothing_but_the_labels_differs(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_labels = captured_program(endpoint, branching())
    monkeypatch.setattr(Layers, "here", lambda self: None)
    monkeypatch.setattr(kept_traces, "_cases", OrderedDict())
    without_labels = captured_program(endpoint, branching())
    assert with_labels.spans
    assert not without_labels.spans
    assert replace(with_labels, layers=(), spans=()) == without_labels


# ---- plans


@pytest.fixture(scope="module")
def recorded(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of a job's steps with 4 and with 8 samples, as `gpumux jobs profile` writes them."""
    directory = tmp_path_factory.mktemp("steps")
    return [record(endpoint, directory, samples) for samples in (4, 8)]


def record(endpoint: str, directory: Path, samples: int, microbatches: int = 1) -> str:
    """The file that `gpumux jobs profile` writes of a job that trains `branching`."""
    model = branching()
    model.norm.train(microbatches == 1)  # a microbatch has other statistics than the batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(samples, 3, 8, 8), torch.randint(0, CLASSES, (samples,))
    name, out = f"branching-{samples}", str(directory / f"{samples}-{microbatches}.json")
    with client.submit(
        training_step(model, optimizer), example=batch, model=model, optimizer=optimizer, endpoint=endpoint, name=name,
        microbatches=microbatches,
    ) as job:  # fmt: skip
        for _ in range(3):
            job.step(*batch).result()
        asked = ["jobs", "profile", name, "-o", out, "--endpoint", endpoint]
        assert main([*asked, "--timeout", "60"]) == 0  # a busy daemon measures for longer than people wait
        job.sync()
    return out


MODEL = ["tests.client.branching:branching", "--input", "3,8,8"]
SIZE = ["--gpus", "4", "--global-batch", "16"]


def given(files: list[str]) -> list[str]:
    return [word for file in files for word in ("--profile", file)]


def test_plan_with_what_a_jobs_steps_took(
    recorded: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "burst", *MODEL, *SIZE, *given(recorded)]) == 0
    out = capsys.readouterr().out
    for text in (
        "blocks.1.second",
        "adaptive_avg_pool2d",
        "data-parallel",
        "(measured)",
        "from steps of branching-4, branching-8",
    ):
        assert text in out
    merged = tmp_path / "layers.json"
    assert main(["plan", "profile", *MODEL, *given(recorded[::-1]), "-o", str(merged)]) == 0
    profile = layers.load(merged)
    assert profile.sources() == {"measured": 12}
    taken = [load(Path(file)) for file in recorded]
    for samples, step in zip((4, 8), taken, strict=True):
        of_layers = sum(op.seconds for op in step.ops if op.layer is not None)
        assert profile.seconds(samples) == pytest.approx(of_layers)
        assert 0 < of_layers < step.seconds
    timings = {layer.name: layer.times[0] for layer in profile.layers}
    assert timings["stem"].samples == 4
    assert all(timing.forward > 0 and timing.backward > 0 for timing in timings.values())
    for name in ("left", "right", "head"):  # modules with operators of their own
        for passes, backward in ((timings[name].forward, False), (timings[name].backward, True)):
            own = [op.seconds for op in taken[0].ops if op.layer == name and op.backward == backward]
            assert passes == pytest.approx(sum(own)), (name, backward)
    assert main(["plan", "burst", str(merged), *SIZE]) == 0


def test_a_step_in_microbatches_says_what_one_of_them_takes(
    endpoint: str, recorded: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(endpoint, tmp_path, 16, microbatches=2)
    step, traced = load(Path(path)), traced_model()
    assert step.batch == 16
    found = steps.steps_profile(traced, [step])
    assert {timing.samples for layer in found.layers for timing in layer.times} == {8}
    assert found.seconds(8) == pytest.approx(sum(op.seconds for op in step.ops if op.layer is not None) / 2)
    assert "microbatches of 8 of 16 samples" in found.note
    assert main(["plan", "burst", *MODEL, *SIZE, "--profile", recorded[0], "--profile", path]) == 0
    assert "microbatches of 8 of 16 samples" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="two profiles are of batches of 8"):
        steps.steps_profile(traced, [step, load(Path(recorded[1]))])
    first = next(op for op in step.ops if op.layer == "stem" and not op.backward and "convolution" in op.target)
    once = tuple(op for op in step.ops if op is not first)
    with pytest.raises(ConfigError, match=r"numbers a sample|parts that are not equal"):
        steps.steps_profile(traced, [replace(step, ops=once)])


@pytest.mark.parametrize("activation", [nn.GELU(), nn.Identity(), nn.Tanh()])
def test_a_model_with_other_activations_is_another_model(recorded: list[str], activation: nn.Module) -> None:
    model = branching()
    for block in model.blocks:  # type: ignore[union-attr]
        block.relu = deepcopy(activation)
    other = trace(LoadedModel("other", model, (torch.randn(1, 3, 8, 8),)))
    with pytest.raises(ConfigError, match=r"has relu in 'blocks.0.relu', and other has (gelu|none|tanh)") as caught:
        steps.steps_profile(other, [load(Path(recorded[0]))])
    assert "model that the job trains" in caught.value.remedy


def test_what_several_layers_share_is_shared_as_modelled(recorded: list[str]) -> None:
    """blocks.0 is two layers: each has its own convolution, and of the rectifier, which both use, as much as is
    modelled."""
    step, traced = load(Path(recorded[0])), traced_model()
    ops = tuple(
        replace(op, seconds=0.0 if op.layer != "blocks.0.relu" else 1.0 if op.backward else 3.0) for op in step.ops
    )
    relus = [sum(op.layer == "blocks.0.relu" and op.backward == back for op in step.ops) for back in (False, True)]
    found = {layer.name: layer.times[0] for layer in steps.steps_profile(traced, [replace(step, ops=ops)]).layers}
    parts: dict[str, tuple[float, float]] = {}
    for layer in traced.layers:
        for node in layer.nodes:
            if module_path(node) == "blocks.0.relu":
                parts[layer.name] = roofline.node_seconds(traced, node, A100, traced.batch)
    assert len(parts) == 2
    whole = [sum(each[at] for each in parts.values()) for at in (0, 1)]
    for name, (forward, backward) in parts.items():
        assert found[name].forward == pytest.approx(3.0 * relus[0] * forward / whole[0])
        assert found[name].backward == pytest.approx(1.0 * relus[1] * backward / whole[1])
    assert sum(timing.forward for timing in found.values()) == pytest.approx(3.0 * relus[0])


def test_shares_follow_the_model_where_layers_differ() -> None:
    """Two layers that add in the model itself, one of them to ten times as much."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(4, 4000000), nn.Linear(4000000, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.narrow(self.wide(x) + 1.0) + 1.0
            return found

    with torch.device("meta"):
        traced = trace(LoadedModel("uneven", Uneven(), (torch.randn(1, 4),)))
    ops = [
        OpProfile("aten.addmm.default", ((4, wide),), 1.0, 1, layer=name, backward=back)
        for name, wide in (("wide", 4000000), ("narrow", 4)) for back in (False, True)
    ]  # fmt: skip
    shared = OpProfile("aten.add.Tensor", ((4, 4),), 8.0, 1, layer=ROOT)
    wide, narrow = steps.steps_profile(traced, [StepProfile("x", "d", (*ops, shared), batch=4)]).layers
    adding = {layer.name: roofline.node_seconds(traced, layer.nodes[-1], A100, 2)[0] for layer in traced.layers}
    assert adding["wide"] > 1.05 * adding["narrow"]
    share = adding["wide"] / sum(adding.values())
    assert wide.times[0] == (4, pytest.approx(1 + 8 * share), 1.0)
    assert narrow.times[0] == (4, pytest.approx(1 + 8 * (1 - share)), 1.0)


def test_layers_are_called_as_the_trace_calls_them(recorded: list[str]) -> None:
    traced = traced_model()
    modules = {module_path(node) or ROOT for layer in traced.layers for node in layer.nodes}
    assert {op.layer for op in load(Path(recorded[0])).ops if op.layer is not None} == modules


def traced_model() -> TracedModel:
    return trace(find(*_found()))


def _found() -> tuple[str, tuple[int, ...]]:
    return MODEL[0], (3, 8, 8)


def without(step: StepProfile, what: str) -> StepProfile:
    return replace(step, ops=tuple(op for op in step.ops if not (op.layer or "").startswith(what)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vgg11", *SIZE, "--profile", "0"], "has layers that vgg11 has not: stem, norm"),
        ([*MODEL[:2], "3,16,16", *SIZE, "--profile", "0"], "512 numbers a sample, and branching makes 2048"),
        ([*MODEL, *SIZE, "--profile", "0", "--profile", "0"], "two profiles are of batches of 4"),
        ([*MODEL, *SIZE, "--profile", "1"], "16 on 4 GPUs is 4 samples each, and layer"),
        ([*MODEL, *SIZE, "--profile", "0", "--gpu-model", "a100"], "not of 'a100'"),
        (["0", *SIZE], "is the profile of a step"),
    ],
)
def test_steps_that_do_not_fit_are_named(
    recorded: list[str], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [recorded[int(word)] if word in ("0", "1") else word for word in arguments]
    assert main(["plan", "burst", *words]) == 78
    assert says in capsys.readouterr().err


def test_profiles_that_lack_something_are_refused(recorded: list[str]) -> None:
    step, traced = load(Path(recorded[0])), traced_model()
    plain = replace(step, ops=tuple(replace(op, layer=None, backward=False) for op in step.ops))
    forward = replace(step, ops=tuple(op for op in step.ops if not op.backward))
    for steps_given, says in (
        ([], "no profiles"),
        ([plain], "whose layer"),
        ([forward], "no backward pass"),
        ([replace(step, batch=None)], "how large its batch is"),
        ([step, replace(step, batch=8, device="other")], "several devices"),
        ([without(step, "head")], "no operator of layer 'head'"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            steps.steps_profile(traced, steps_given)
        assert caught.value.remedy
    inside = tuple(replace(op, layer=f"{op.layer}.deeper") if op.layer == "stem" else op for op in step.ops)
    assert steps.steps_profile(traced, [replace(step, ops=inside)]) == steps.steps_profile(traced, [step])


def test_a_whole_module_takes_all_that_runs_inside(recorded: list[str]) -> None:
    traced = trace(find(*_found()), whole=["Residual"])
    found = {layer.name: layer.times[0] for layer in steps.steps_profile(traced, [load(Path(recorded[0]))]).layers}
    inside = [op for op in load(Path(recorded[0])).ops if (op.layer or "").startswith("blocks.0")]
    assert found["blocks.0"].seconds == pytest.approx(sum(op.seconds for op in inside))
