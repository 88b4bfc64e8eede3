"""The client programs without gpumux: they learn, repeat themselves bit for bit, and report it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clients import compare, digits_cnn, digits_gan, digits_inference, digits_transformer
from clients.common import INTERRUPTED, digest
from clients.data import digits

TRAINERS = [digits_cnn, digits_transformer, digits_gan]


def run(program, tmp_path: Path, *flags: str, name: str = "run") -> dict:
    out = tmp_path / f"{name}.json"
    files = ["--json", str(out), "--save", str(tmp_path / f"{name}.pt")]
    assert program.main(["--plain", "--size", "tiny", *files, *flags]) == 0
    return json.loads(out.read_text())


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("program", TRAINERS, ids=lambda program: program.__name__)
def test_a_run_repeats_bit_for_bit(program, tmp_path: Path):
    first = run(program, tmp_path, "--steps", "25", name="a")
    second = run(program, tmp_path, "--steps", "25", name="b")
    assert first["losses"] == second["losses"]
    assert len(set(first["losses"])) > 20
    assert compare.main([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 0
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0


@pytest.mark.parametrize("program", TRAINERS, ids=lambda program: program.__name__)
def test_another_seed_is_another_run(program, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(program, tmp_path, "--steps", "3", name="a")
    run(program, tmp_path, "--steps", "3", "--seed", "1", name="b")
    assert compare.main([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 1
    assert "largest difference" in capsys.readouterr().out
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1


@pytest.mark.parametrize(("program", "least"), [(digits_cnn, 0.8), (digits_transformer, 0.5)])
def test_accuracy_rises(program, least: float, tmp_path: Path):
    accuracy = run(program, tmp_path, "--epochs", "6")["accuracy"]
    assert len(accuracy) == 7
    assert accuracy[-1] > least > accuracy[0]


def test_the_gan_comes_nearer_to_the_digits(tmp_path: Path):
    distance = run(digits_gan, tmp_path, "--epochs", "8")["extra"]["distance"]
    assert distance[-1] < distance[0] / 2


def test_inference_reports_latency_and_uses_saved_weights(tmp_path: Path):
    trained = run(digits_cnn, tmp_path, "--epochs", "6", name="cnn")
    flags = ["--load", str(tmp_path / "cnn.pt"), "--steps", "50"]
    served = run(digits_inference, tmp_path, *flags, name="serve")
    latency = served["extra"]["latency_s"]
    assert list(latency) == ["p50", "p90", "p99", "p99.9"]
    assert 0 < latency["p50"] <= latency["p99.9"]
    assert served["extra"]["rate_per_s"] > 0
    assert served["accuracy"][0] > trained["accuracy"][0] + 0.5


def test_scheduled_requests_are_all_answered(tmp_path: Path):
    served = run(digits_inference, tmp_path, "--steps", "20", "--rate", "2000")
    assert served["steps"] == 20
    assert served["extra"]["rate_per_s"] <= 2200  # not faster than they were scheduled


def test_the_batches_are_of_one_shape_and_cover_the_training_set():
    data = digits()
    batches = data.batches(64, seed=0)
    epoch = [next(batches) for _ in range(data.steps_per_epoch(64))]
    assert {tuple(x.shape) for x, _ in epoch} == {(64, 1, 8, 8)}
    assert len(torch.cat([x for x, _ in epoch]).flatten(1).unique(dim=0)) > 0.98 * 64 * len(epoch)
    assert not torch.equal(next(batches)[0], epoch[0][0])


def test_batches_leave_the_default_generator_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    next(digits().batches(64, seed=0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([0.0, -0.0])},
        {"w": torch.tensor([0.0, 0.0], dtype=torch.float64)},
        {"w": torch.tensor([[0.0, 0.0]])},
        {"v": torch.tensor([0.0, 0.0])},
        {"w": torch.tensor([0.0, 0.0]), "v": torch.tensor(1)},
    ],
    ids=["sign of zero", "dtype", "shape", "name", "one more"],
)
def test_every_difference_is_seen(other: dict[str, torch.Tensor]):
    one = {"w": torch.tensor([0.0, 0.0])}
    assert compare.differences(one, one) == []
    assert compare.differences(one, other) != []
    assert digest(one) != digest(other)


def test_equal_nans_are_equal():
    one = {"w": torch.tensor([float("nan")])}
    assert compare.differences(one, {"w": torch.tensor([float("nan")])}) == []


def test_unlike_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.pt")]) == 2
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--epochs", "1", "--steps", "1"], ["--priority", "urgent"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        digits_cnn.main(flags)
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.extended
def test_ctrl_c_ends_it_with_a_word():
    command = [sys.executable, "-u", "-m", "clients.digits_cnn", "--plain", "--size", "tiny", "--epochs", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert re.search("accuracy", child.stdout.readline())
        os.kill(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=120)
    assert child.returncode == INTERRUPTED
    assert err.strip() == "interrupted"
