"""The experiments' own logic, against a driver without a device: what they call it calls by the right names, in an order it
accepts; each gives rows of equal keys, an answer and a file. What they find means nothing here."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

import microbench.cuda as experiments
from microbench.cuda import depth, driver, experiment, idle_contexts, same_address
from tests.microbench.fake_driver import CYCLES_PER_S, SMS, FakeCompiler, FakeDriver

HERE = ("launch_cost", "boundary_gaps", "priorities", "piece_delay", "completion", "copies", "idle_contexts", "green")
CHANGED = {"boundary_gaps": {"DEPTHS": (1, 2, 4)}, "completion": {"POLLS": 5}}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> driver.Gpu:
    monkeypatch.setattr(driver, "PRIMING_S", 0.0)
    return driver.Gpu(api=FakeDriver(), nvrtc=FakeCompiler())


def test_every_experiment_is_listed_with_its_question_and_needs_no_driver_to_be():
    found = {path.stem for path in Path(experiments.__path__[0]).glob("*.py")} - {"__init__", "driver", "experiment"}
    assert found == set(experiments.NAMES)
    for name in experiments.NAMES:
        made = importlib.import_module(f"microbench.cuda.{name}").EXPERIMENT
        assert made.name == name
        assert made.question.endswith("?")
        assert made.method.endswith(".")


def test_a_gpu_is_calibrated(gpu: driver.Gpu):
    assert gpu.cycles_per_s == pytest.approx(CYCLES_PER_S)
    assert (gpu.name, gpu.sms, gpu.wave) == ("Fake GPU", SMS, 2 * SMS)
    stream = gpu.stream()
    assert gpu.timed(stream, lambda: gpu.full(stream, 1e-3, 4)) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", HERE)
def test_it_runs(
    name: str, gpu: driver.Gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    module = importlib.import_module(f"microbench.cuda.{name}")
    for key, value in CHANGED.get(name, {}).items():
        monkeypatch.setattr(module, key, value)
    monkeypatch.setattr(idle_contexts, "_client", lambda doing: nullcontext())
    out = tmp_path / "result.json"
    assert experiment.main(module.EXPERIMENT, ["--repeats", "2", "--out", str(out)], gpu=gpu) == 0
    report = json.loads(out.read_text())
    assert report["rows"]
    assert {tuple(row) for row in report["rows"]} == {tuple(report["rows"][0])}
    assert report["device"]["name"] == "Fake GPU"
    assert report["answer"]
    printed = capsys.readouterr().out
    assert report["question"] in printed
    assert printed.endswith(experiment.show(report["rows"]) + "\n")  # the table comes last


def test_queue_depth_is_measured_in_this_process(gpu: driver.Gpu):
    rows = depth.measure_here(gpu, 2)
    assert {row["low_streams"] for row in rows} == set(depth.STREAMS)
    assert depth.answer([{"connections": each, **row} for each in depth.CONNECTIONS for row in rows])


def test_without_green_contexts_it_says_so(monkeypatch: pytest.MonkeyPatch):
    from microbench.cuda import green

    monkeypatch.setattr(driver, "PRIMING_S", 0.0)
    gpu = driver.Gpu(api=FakeDriver(green=False), nvrtc=FakeCompiler())
    rows = green.measure(gpu, 1)
    confined = [row for row in rows if row["low_share"] < 1.0]
    assert all("CUDA_ERROR_NOT_SUPPORTED" in row["note"] for row in confined)
    assert "not measured" in green.answer(rows)


def test_same_address_tells_what_failed(gpu: driver.Gpu, monkeypatch: pytest.MonkeyPatch):
    class Mapped:
        """Memory that is never where it was asked for."""

        def __init__(self, gpu: driver.Gpu, hint: int, descriptor: int | None = None) -> None:
            self.address = hint + 4096

        def fill(self, word: int) -> None: ...

        def export(self) -> int:
            import os

            return os.open(os.devnull, os.O_RDONLY)

        def holds(self, word: int) -> bool:
            return True

        def release(self) -> None: ...

    monkeypatch.setattr(same_address, "Mapped", Mapped)
    monkeypatch.setattr(same_address, "_child", lambda role, hint, send: ("the client ended early", []))
    rows = same_address.measure(gpu, 1)
    assert len(rows) == 4 * len(same_address.HINTS)
    assert same_address.answer(rows) == "no: at none of the hints did all of it work"
    good = [row | {"ok": "yes"} for row in rows]
    assert same_address.answer(good).startswith(f"yes, at {len(same_address.HINTS)} of")


def test_no_device_is_said_so_and_has_its_own_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from microbench.cuda import launch_cost

    monkeypatch.setattr(driver, "bindings", lambda module="driver": FakeDriver(devices=0))
    assert experiment.main(launch_cost.EXPERIMENT, []) == experiment.NO_DEVICE
    assert "has no device" in capsys.readouterr().err


def test_a_failed_call_names_itself(gpu: driver.Gpu):
    with pytest.raises(driver.DriverError, match="cuStreamCreateWithPriority failed: CUDA_ERROR_INVALID_VALUE"):
        gpu.stream(-9)


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]):
    from microbench.cuda import launch_cost

    with pytest.raises(SystemExit):
        experiment.main(launch_cost.EXPERIMENT, ["--repeats", "0"])
    assert "not a positive whole number" in capsys.readouterr().err
