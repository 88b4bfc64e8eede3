"""Whose layer an operator is, from the capture to a plan that is made of what a job's steps took."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpumux import client
from gpumux.cli.main import main
from gpumux.client.layers import Layers
from gpumux.plan import layers, steps
from gpumux.plan.grouping import module_path
from gpumux.plan.models import find
from gpumux.plan.trace import TracedModel, trace
from gpumux.program.layers import ROOT, Label, labels
from gpumux.program.profile import StepProfile, load
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 3, 8, 8), torch.randint(0, CLASSES, (4,))
    with client.submit(
        training_step(model, optimizer), example=batch, model=[model, *models], optimizer=optimizer, endpoint=endpoint, **options
    ) as job:  # fmt: skip
        program = job._functions[0][0].choose(batch, {}, job._state).made.lowered.program
    return [(op.target.split(".")[1], label) for op, label in zip(program.ops, labels(program), strict=True)]


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
        program = job._functions[0][0].choose(batch, {}, job._state).made.lowered.program
    assert (program.layers, program.spans) == ((), ())


def test_nothing_but_the_labels_differs(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_labels = captured(endpoint, branching())
    monkeypatch.setattr(Layers, "here", lambda self: None)
    assert [name for name, _ in captured(endpoint, branching())] == [name for name, _ in with_labels]


# ---- plans


@pytest.fixture(scope="module")
def recorded(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of a job's steps with 4 and with 8 samples, as `gpumux jobs profile` writes them."""
    directory, files = tmp_path_factory.mktemp("steps"), []
    for samples in (4, 8):
        model = branching()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(samples, 3, 8, 8), torch.randint(0, CLASSES, (samples,))
        name, out = f"branching-{samples}", str(directory / f"{samples}.json")
        with client.submit(
            training_step(model, optimizer), example=batch, model=model, optimizer=optimizer, endpoint=endpoint, name=name
        ) as job:  # fmt: skip
            for _ in range(3):
                job.step(*batch).result()
            assert main(["jobs", "profile", name, "-o", out, "--endpoint", endpoint]) == 0
            job.sync()
        files.append(out)
    return files


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
    assert main(["plan", "burst", str(merged), *SIZE]) == 0


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
        ([*MODEL, *SIZE, "--profile", "1"], "no time for 4 samples"),
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
    from gpumux.errors import ConfigError

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
            steps.profile(traced, steps_given)
        assert caught.value.remedy
    inside = tuple(replace(op, layer=f"{op.layer}.deeper") if op.layer == "stem" else op for op in step.ops)
    assert steps.profile(traced, [replace(step, ops=inside)]) == steps.profile(traced, [step])


def test_a_whole_module_takes_all_that_runs_inside(recorded: list[str]) -> None:
    traced = trace(find(*_found()), whole=["Residual"])
    found = {layer.name: layer.times[0] for layer in steps.profile(traced, [load(Path(recorded[0]))]).layers}
    inside = [op for op in load(Path(recorded[0])).ops if (op.layer or "").startswith("blocks.0")]
    assert found["blocks.0"].seconds == pytest.approx(sum(op.seconds for op in inside))
