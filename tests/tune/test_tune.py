"""`gpumux tune` from the outside, with the serial scheduler: tables, JSON, pictures, kills, Ctrl-C, and bad input."""

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

from gpumux.cli.main import EX_CONFIG, EX_FAILED, EX_USAGE, main
from gpumux.errors import ConfigError
from gpumux.tune import tune
from gpumux.tune.checkpoints import read_state
from gpumux.tune.task import Task, find
from tests.tune import toy

ROOT = Path(toy.__file__).parents[2]
TASK = "tests.tune.toy:factory"


@pytest.fixture
def space(tmp_path: Path) -> str:
    path = tmp_path / "space.toml"
    path.write_text(toy.SPACE)
    return str(path)


def run_command(space: str, *flags: str) -> int:
    return main(["tune", TASK, "--space", space, "--scheduler", "serial", *flags])


def as_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_a_search(space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plot, best = tmp_path / "a.png", tmp_path / "best.pt"
    before = torch.random.get_rng_state()
    assert run_command(space, "--trials", "4", "--steps", "12", "--plot", str(plot), "--save", str(best)) == 0
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's generator is left alone"
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["TRIAL", "SCORE", "STEPS", "STATE", "DEVICE", "CONFIGURATION"]
    scores = [float(line.split()[1]) for line in lines[1:5]]
    assert scores == sorted(scores)
    assert lines[6].startswith(f"best: trial {lines[1].split()[0]}, score")
    assert "random, serial: 4 trials in" in out
    assert "GPU hours" in out
    assert "gpumux: 4 trials to 12 steps" in err
    assert "best so far" in err
    assert plot.read_bytes().startswith(b"\x89PNG")
    saved = torch.load(best, weights_only=True)
    _, model, _ = toy.factory(saved["config"])
    model.load_state_dict(saved["model"])
    with torch.no_grad():
        assert float(toy.score(model.eval(), {})) == saved["score"] == pytest.approx(scores[0], rel=1e-5)


def test_hyperband(space: str, capsys: pytest.CaptureFixture[str]):
    flags = ["--algorithm", "hyperband", "--steps", "9", "--min-steps", "3", "--eta", "3", "--json"]
    assert run_command(space, *flags) == 0
    body = as_json(capsys)
    assert [t["steps"] for t in body["trials"]].count(9) == 3
    assert {t["state"] for t in body["trials"]} == {"complete", "pruned"}
    assert body["device_s"] == pytest.approx(sum(t["device_s"] for t in body["trials"]))
    assert body["gpu_hours"] == body["device_s"] / 3600
    best = min((t for t in body["trials"] if t["state"] == "complete"), key=lambda t: t["score"])
    assert body["best"] == best


def test_to_go_on_is_to_train_on(space: str):
    """A trial that continues from a checkpoint equals the plain loop: dropout's masks are those of each stretch."""
    found = tune(
        TASK, space, algorithm="hyperband", steps=6, min_steps=2, eta=3, scheduler="serial", seed=3
    )  # fmt: skip
    entry = next(e for e in found.entries if sorted(e.scores) == [2, 6])
    task = find(TASK)
    with torch.random.fork_rng():
        config = entry.config
        step, model, optimizer = task.build(entry.number, config, trial_seed(3, entry.number))
        for k in range(6):
            if k in (0, 2):
                torch.manual_seed(trial_seed(3, entry.number, k))
            optimizer.param_groups[0].update(toy.hyperparameters(config, k))
            step(*toy.data(k, config["batch_size"]))
        assert task.rate(0, model, config) == entry.score
    if found.best == entry:
        assert str(found.state()) == str(read_state(model, optimizer))


def trial_seed(seed: int, trial: int, start: int | None = None) -> int:
    from gpumux.tune.trainer import seed_of

    return seed_of(seed, trial, {}, start)


BUDGET = ["--algorithm", "hyperband", "--steps", "9", "--min-steps", "3", "--json"]


def killed(space: str, *flags: str) -> None:
    """A sweep in a process of its own that is killed when it scores for the fifth time."""
    command = [sys.executable, "-m", "gpumux.cli.main", "tune", TASK, "--space", space, "--scheduler", "serial", *flags]
    environ = {**os.environ, "TOY_SIGNAL": f"{int(signal.SIGKILL)}@5", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def interrupted(space: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """The same ended by Ctrl-C, in this process."""
    toy.scored[0] = 0
    with monkeypatch.context() as patched:
        patched.setenv("TOY_SIGNAL", f"{int(signal.SIGINT)}@5")
        assert run_command(space, *flags) == 130


@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.every(2)
def test_a_sweep_that_was_ended_goes_on(
    how: str, space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    stored = [*BUDGET, "--storage", f"sqlite:///{tmp_path}/t.db"]
    if how == "killed":
        killed(space, *stored)
    else:
        interrupted(space, monkeypatch, *stored)
        err = capsys.readouterr().err
        assert "4 scores of this run are kept in sqlite:///" in err
        assert "run the same command again" in err
    toy.scored[0] = 0
    assert run_command(space, *stored) == 0
    resumed = as_json(capsys)
    trained, toy.scored[0] = toy.scored[0], 0
    assert run_command(space, *BUDGET) == 0
    fresh = as_json(capsys)
    assert trained == toy.scored[0] - 4, "what was scored was not trained again"
    for key in ("number", "config", "state", "score", "scores"):
        assert [t[key] for t in resumed["trials"]] == [t[key] for t in fresh["trials"]], key
    assert resumed["wall_s"] > 0
    left = sorted(p.name for p in (tmp_path / "t.db.checkpoints").rglob("*.pt"))
    assert left == [f"trial-{resumed['best']['number']}-at-9.pt"], "only the best trial's state stays"


def test_ctrl_c_without_storage_says_so(
    space: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    interrupted(space, monkeypatch, *BUDGET)
    assert "nothing is kept without --storage" in capsys.readouterr().err


@pytest.mark.extended
def test_a_diverged_trial_fails_alone(space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["tune", "tests.tune.toy:diverges", "--space", space, "--scheduler", "serial", "--json"]
    stored = ["--storage", f"sqlite:///{tmp_path}/t.db", "--plot", str(tmp_path / "a.png")]
    assert main([*asked, "--trials", "6", "--steps", "3", *stored]) == 0
    body = as_json(capsys)
    drawn = {path.name: path.read_bytes()[:4] for path in tmp_path.glob("*.png")}
    assert drawn == dict.fromkeys(("a.png", "a-history.png", "a-parameters.png"), b"\x89PNG")
    for trial in body["trials"]:
        assert (trial["state"] == "failed") == (trial["config"]["optimizer"] == "sgd") == (trial["score"] is None)
    assert body["best"]["config"]["optimizer"] == "adam"


@pytest.mark.parametrize(
    ("task", "code", "says"),
    [
        ("tests.tune.toy:raises", EX_FAILED, "trial 0 (.*): factory raises RuntimeError: no such file"),
        ("tests.tune.toy:returns_two", EX_CONFIG, r"let it return \(step, model, optimizer\)"),
        ("tests.tune.toy:absent", EX_CONFIG, "has no function absent"),
        ("tests.tune.absent:factory", EX_CONFIG, "can't import"),
        ("tests.tune.fakes:quality", EX_CONFIG, "has no batches, score, direction"),
        ("nothing", EX_CONFIG, "names no factory"),
    ],
)
def test_what_users_get_wrong(task: str, code: int, says: str, space: str, capsys: pytest.CaptureFixture[str]):
    assert main(["tune", task, "--space", space, "--scheduler", "serial", "--trials", "2", "--steps", "2"]) == code
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--steps", "0", "--trials", "1"], EX_USAGE, "whole number from 1 up"),
        (["--steps", "5"], EX_CONFIG, "needs a number of trials"),
        (["--steps", "5", "--trials", "2", "--min-steps", "2"], EX_CONFIG, "min_steps with random search"),
        (["--steps", "5", "--algorithm", "hyperband", "--min-steps", "6"], EX_CONFIG, "above steps 5"),
        (["--steps", "5", "--algorithm", "hyperband", "--eta", "1"], EX_USAGE, "give 2 or more"),
        (["--steps", "5", "--trials", "2", "--sampler", "tpe"], EX_CONFIG, "give a storage"),
        (["--steps", "5", "--trials", "2", "--plot", "/absent/x.png"], EX_CONFIG, "no directory /absent"),
        (["--steps", "5", "--trials", "2", "--save", "/absent/x.pt"], EX_CONFIG, "no directory /absent"),
        (["--steps", "5", "--trials", "2", "--storage", "sqlite:////absent/x.db"], EX_CONFIG, "can't open storage"),
        (["--steps", "5", "--trials", "2", "--space", "absent.toml"], EX_CONFIG, "can't read absent.toml"),
        (["--trials", "2"], EX_USAGE, "--steps"),
    ],
)
def test_bad_input_is_answered(flags: list[str], code: int, says: str, space: str, capsys: pytest.CaptureFixture[str]):
    assert run_command(space, *flags) == code
    assert says in capsys.readouterr().err


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]):
    assert main(["tune", "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "fusible = true" in out
    assert "hyperparameters(config, k)" in out


def test_data_that_ends_early_is_said(space: str):
    task = Task(
        "t", toy.factory, lambda config, start: [toy.data(k, 8) for k in range(start, 3)], toy.score, "minimize"
    )
    with pytest.raises(ConfigError, match="ended after 3 of 5 steps"):
        tune(task, space, trials=1, steps=5, scheduler="serial")


def test_a_schedule_names_what_the_optimizer_has(space: str):
    task = Task("t", toy.factory, toy.batches, toy.score, "minimize", lambda config, k: {"momentums": 0.5})
    with pytest.raises(ConfigError, match="'momentums', which the optimizer has not"):
        tune(task, space, trials=1, steps=5, scheduler="serial")
