"""Arrays of trials: the same scores as serial training, partitions and capacity observed, and wrong marks named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumux.errors import ConfigError, TrialFailed
from gpumux.fuse.fuse import fuse
from gpumux.tune import probe, tune
from gpumux.tune.fused import BatchFeed, TrackedConfig
from gpumux.tune.probe import SLACK, MemoryMeasurement, MemoryMeter, MemoryModel
from gpumux.tune.run import SweepResult
from gpumux.tune.space import Space
from gpumux.tune.task import Task, find
from gpumux.tune.trainer import TrialWork
from tests.tune import toy

TASK = find("tests.tune.toy:factory")
SPACE: dict[str, Any] = {
    "lr": {"low": 1e-3, "high": 0.3, "log": True, "fusible": True},
    "batch_size": {"choices": [8, 16]},
    "optimizer": {"choices": ["sgd", "adam"]},
    "momentum": {"low": 0.1, "high": 0.9, "fusible": True, "when": {"optimizer": "sgd"}},
}
ONE = {"lr": SPACE["lr"], "batch_size": {"choices": [8]}, "optimizer": {"choices": ["adam"]}}
TOLERANCE = 1e-9  # relative, in float64: sums of a batched product may be rounded in another order


@pytest.fixture(autouse=True)
def _one_thread(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And measured times of operators in a cache of the tests' own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(task: Task, space: Any, **options: Any) -> SweepResult:
    """A sweep trained as arrays, compared with the same sweep trained serially."""
    arrays = {key: options.pop(key) for key in ("max_array", "memory") if key in options}
    fused = tune(task, space, scheduler="fused", **arrays, **options)
    serial = tune(task, space, scheduler="serial", **options)
    assert [(e.config, e.state, e.steps) for e in fused.entries] == [
        (e.config, e.state, e.steps) for e in serial.entries
    ]
    for ours, alone in zip(fused.entries, serial.entries, strict=True):
        assert ours.scores == pytest.approx(alone.scores, rel=TOLERANCE), ours.config
    assert fused.best is not None
    assert serial.best is not None
    assert fused.best.number == serial.best.number
    for name, value in fused.state()["model"].items():
        torch.testing.assert_close(value, serial.state()["model"][name], rtol=TOLERANCE, atol=1e-12)
    return fused


def test_a_sweep_equals_serial():
    """Dropout, schedules, two optimizers, two batch sizes, and rungs that continue from checkpoints."""
    found = both(TASK, SPACE, algorithm="hyperband", steps=9, min_steps=3, trials=9)
    assert found.notes["arrays"] >= 2
    assert max(found.notes["array_sizes"]) > 1
    assert found.notes["predicted_bytes"] > 0


def test_arrays_are_no_larger_than_allowed():
    found = both(TASK, ONE, trials=5, steps=3, max_array=2)
    assert found.notes["array_sizes"] == [2, 2, 1]
    assert found.notes["trained_alone"] == 1


def test_memory_bounds_arrays():
    """So much that three models fit; the prediction is what larger arrays come to."""
    work = TrialWork(0, {"lr": 0.1, "batch_size": 8, "optimizer": "adam"}, 0, 3, 1, 1)
    captured = probe.capture(TASK, work, work.config, toy.data(0, 8))
    memory = probe.predict(captured)
    five = fuse([captured.program] * 5, [captured.values] * 5).program
    assert memory.of(5) - SLACK == pytest.approx(probe.array_bytes([five], 5) - SLACK, rel=0.1)
    assert memory.most(memory.of(3)) == 3
    assert probe.guess(captured).of(8) > memory.of(8)
    found = both(TASK, ONE, trials=4, steps=2, memory=memory.of(3))
    assert found.notes["array_sizes"] == [3, 1]
    with pytest.raises(ConfigError, match="not one model of the partition batch_size=8 optimizer=adam"):
        tune(TASK, ONE, trials=3, steps=2, scheduler="fused", memory=SLACK)


@given(
    memory=st.builds(MemoryModel, st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 1000)),
    limit=st.integers(0, 20_000),
)
def test_the_most_models_are_those_that_fit(memory: MemoryModel, limit: int):
    most = memory.most(SLACK + limit)
    assert most == 0 or memory.of(most) <= SLACK + limit
    assert memory.of(most + 1) > SLACK + limit


def test_what_is_measured_raises_predictions_where_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With counts of the kernel's as the test says: those of this process also fall when file pages are reclaimed."""
    assert MemoryMeasurement(predicted=SLACK, measured=10 << 20).scale == 1.0
    assert MemoryMeasurement(predicted=100 << 20, measured=250 << 20).scale == 2.5
    assert MemoryMeter().read(1).measured >= 0
    assert probe._resident("VmHWM:") >= probe._resident("VmRSS:") > 1 << 20, "the fields are the kernel's"
    status, refs = tmp_path / "status", tmp_path / "clear_refs"
    monkeypatch.setattr(probe, "_STATUS", status)
    monkeypatch.setattr(probe, "_REFS", refs)
    status.write_text("Name:\tpython\nVmHWM:\t  900000 kB\nVmRSS:\t  300000 kB\n")
    meter = MemoryMeter()
    assert refs.read_text() == "5", "the peak is reset"
    status.write_text("Name:\tpython\nVmHWM:\t  381920 kB\nVmRSS:\t  350000 kB\n")
    assert meter.read(80 << 20) == MemoryMeasurement(80 << 20, 81920 << 10)
    status.write_text("VmHWM:\t  200000 kB\nVmRSS:\t  200000 kB\n")
    assert meter.read(80 << 20).measured == 0


@pytest.mark.every(2)
@pytest.mark.parametrize("choices", [[4, 8], [8, 12]])
def test_a_parameter_that_changes_the_step_is_named(choices: list[int]):
    """`width` is wrongly marked fusible, together with lr, which is."""
    space = {**ONE, "width": {"choices": choices, "fusible": True}}
    with pytest.raises(ConfigError, match="'width' is marked fusible, but changes the step"):
        tune(TASK, space, trials=6, steps=2, scheduler="fused")
    both(TASK, {**ONE, "width": {"choices": choices}}, trials=4, steps=2)


def test_mixtures_show_every_choice():
    space = Space.read({**ONE, "kind": {"choices": ["a", "b", "c"], "fusible": True}})
    first = {"lr": 0.1, "batch_size": 8, "optimizer": "adam", "kind": "a"}
    configs = [first, {**first, "lr": 0.2}, {**first, "lr": 0.3, "kind": "b"}, {**first, "kind": "c"}]
    assert probe.mixtures(space, configs) == [{**first, "lr": 0.2, "kind": "b"}, {**first, "lr": 0.2, "kind": "c"}]
    assert probe.mixtures(space, [first, first]) == []


def test_the_ends_of_a_range_are_tried_where_they_may_be_drawn():
    space = Space.read({**ONE, "warmup": {"low": 0, "high": 3, "fusible": True}})
    first = {"lr": 0.1, "batch_size": 8, "optimizer": "adam", "warmup": 1}
    values = [mixed["warmup"] for mixed in probe.mixtures(space, [first, {**first, "warmup": 2}])]
    assert values == [2, 0, 3]
    assert probe.mixtures(space, [first]) == [], "one trial is an array of its own"


@pytest.mark.extended
def test_a_weight_decay_and_a_momentum_of_0_are_fused_with_others():
    def factory(config):
        step, model, optimizer = toy.factory(config)
        optimizer.param_groups[0]["weight_decay"] = config["decay"]
        return step, model, optimizer

    zeros = {"choices": [0.0, 0.5], "fusible": True}
    space = {**ONE, "optimizer": {"choices": ["sgd"]}, "momentum": zeros, "decay": zeros}
    found = both(replace(TASK, factory=factory), space, algorithm="hyperband", steps=9, min_steps=3, trials=9)
    assert {e.config["momentum"] for e in found.entries} == {e.config["decay"] for e in found.entries} == {0.0, 0.5}
    assert max(found.notes["array_sizes"]) > 2


def test_a_factory_that_is_another_each_time_is_said_to_be():
    widths = count(4)
    task = replace(TASK, factory=lambda config: toy.factory({**config, "width": next(widths)}))
    with pytest.raises(ConfigError, match="does not make the same step of the same configuration twice"):
        tune(task, ONE, trials=2, steps=2, scheduler="fused")


def test_batches_that_depend_on_a_fusible_parameter_are_one_a_model():
    def batches(config, start):
        for k in count(start):
            yield toy.data(1000 * config["data"] + k, config["batch_size"])

    space = {**ONE, "data": {"low": 0, "high": 99, "fusible": True}}
    both(replace(TASK, batches=batches), space, trials=3, steps=4)


def test_batches_that_look_too_late_are_refused():
    def batches(config, start):
        yield toy.data(0, config["batch_size"])
        for k in count(1):
            yield toy.data(k if config["lr"] > 0 else -k, config["batch_size"])

    with pytest.raises(ConfigError, match="looks at 'lr', which is fusible, only after its first batch"):
        tune(replace(TASK, batches=batches), ONE, trials=2, steps=3, scheduler="fused")


@pytest.mark.parametrize("look", [dict, list, lambda c: {**c}, lambda c: c.copy(), lambda c: list(c.values())])
def test_going_through_a_configuration_looks_at_all_of_it(look):
    reads = TrackedConfig({"lr": 0.1, "batch_size": 8}, {"lr"})
    assert reads["batch_size"] == 8
    assert reads.get("absent") is None
    assert not reads.touched
    look(reads)
    assert reads.touched == {"lr"}


def test_one_batch_serves_all():
    works = [TrialWork(t, {"lr": t / 10, "batch_size": 8}, 2, 5, 0, 0) for t in (1, 2)]
    feed = BatchFeed(TASK, works, {"lr"})
    assert not feed.per_model
    assert all(torch.equal(feed.next()[0], toy.data(k, 8)[0]) for k in (2, 3, 4))


def test_a_diverged_model_leaves_the_others_alone():
    def factory(config):
        step, model, optimizer = toy.factory(config)
        if config["lr"] > 0.05:
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))
        return step, model, optimizer

    space = {**ONE, "lr": {"choices": [0.01, 0.02, 0.1], "fusible": True}}
    task = replace(TASK, factory=factory)
    fused = tune(task, space, trials=6, steps=3, scheduler="fused")
    assert {e.state for e in fused.entries} == {"complete", "failed"}
    assert all((e.state == "failed") == (e.config["lr"] == 0.1) for e in fused.entries)
    assert fused.best == min((e for e in fused.entries if e.state == "complete"), key=lambda e: e.score)


def test_a_step_that_can_not_run_names_the_trial():
    def batches(config, start):
        yield from (toy.data(0, 8), toy.data(1, 8))
        raise OSError("the disk is gone")

    with pytest.raises(TrialFailed, match=r"trial 0 .*batches raises OSError: the disk is gone"):
        tune(replace(TASK, batches=batches), ONE, trials=2, steps=3, scheduler="fused")
