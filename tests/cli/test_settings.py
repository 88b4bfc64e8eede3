"""`gpumux config` and `gpumux keys`: what they print is what a daemon takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest

from gpumux import config
from gpumux.cli.main import EX_CONFIG, EX_FAILED, EX_USAGE, SETTINGS, main
from gpumux.cli.setup import settings
from gpumux.client.arguments import job_spec
from gpumux.config import FILE_ONLY, Config
from gpumux.errors import ConfigError
from gpumux.scheduler.admission import refuse_weight
from gpumux.wire.peers import allowed_keys

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {name: f"--{name.replace('_', '-')}" for name in SETTINGS}


def test_the_page_in_docs_is_made_from_the_declarations():
    """After a change: gpumux config --reference > docs/configuration.md"""
    assert (ROOT / "docs" / "configuration.md").read_text() == settings.reference(FLAGS)


def test_the_page_names_every_setting_its_variable_and_its_flag(capsys):
    assert main(["config", "--reference"]) == 0
    page = capsys.readouterr().out
    for each in fields(Config):
        if each.name not in FILE_ONLY:
            assert f"| `{each.name}`<br>`GPUMUX_{each.name.upper()}`" in page
    assert all(f"`{flag}`" in page for flag in FLAGS.values())
    assert set(config.RULE_SETTINGS) == set(config._READERS)


def test_the_file_of_defaults_changes_nothing_and_uncommented_neither(tmp_path, capsys):
    assert main(["config", "--defaults"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "gpumux.toml"
    path.write_text(text)
    assert config.load({}, {}, path) == Config()
    own = text[: text.index("# Access rules, one")]
    path.write_text(re.sub(r"^# (\w+ = )", r"\1", own, flags=re.MULTILINE))
    assert config.load({}, {}, path) == Config(device="cuda")  # naming a GPU means one
    named = {key for table in tomllib.loads(path.read_text()).values() for key in table}
    assert named == {each.name for each in fields(Config)} - FILE_ONLY


def test_settings_in_force_say_where_they_are_from(tmp_path, capsys, monkeypatch):
    path = tmp_path / "gpumux.toml"
    path.write_text(
        "[daemon]\nthreads = 2\npolicy = 'fifo'\nmetrics_port = 'off'\n[access.rules.default]\nsubmit = false\n"
    )
    monkeypatch.setenv("GPUMUX_POLICY", "paced")
    assert main(["config", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"threads = 2  # {path}\n" in out
    assert 'policy = "paced"  # GPUMUX_POLICY\n' in out
    assert f'metrics_port = "off"  # {path}\n' in out
    assert "\nkeep_s = 86400.0\n" in out
    assert f"# rules: default  # {path}" in out
    again = tmp_path / "again.toml"
    again.write_text(out)
    monkeypatch.delenv("GPUMUX_POLICY")
    assert config.load({}, {}, again).policy == "paced"
    assert main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == {"value": "guarded", "from": "default"}


def test_a_wrong_file_is_78_with_the_nearest_name(tmp_path, capsys):
    path = tmp_path / "gpumux.toml"
    path.write_text("[daemon]\nthraeds = 2\n")
    assert main(["config", "--config", str(path)]) == EX_CONFIG
    assert "did you mean threads?" in capsys.readouterr().err


def test_what_is_shown_is_toml_whatever_the_characters(tmp_path, capsys):
    path = tmp_path / "new\nline.toml"
    path.write_text('[daemon]\nendpoint = ["ipc:///tmp/\U0001f600\\u007f\\n.sock"]\n', encoding="utf-8")
    assert main(["config", "--config", str(path)]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out, encoding="utf-8")
    assert config.load({}, {}, again).endpoint == ("ipc:///tmp/\U0001f600\x7f\n.sock",)


def test_a_device_that_was_named_auto_and_became_cuda_says_why(tmp_path, capsys, monkeypatch):
    path = tmp_path / "gpumux.toml"
    path.write_text("[daemon]\ndevice = 'auto'\n")
    monkeypatch.setenv("GPUMUX_GPU", "1")
    assert main(["config", "--config", str(path)]) == 0
    assert 'device = "cuda"  # since gpu is set\n' in capsys.readouterr().out


def test_an_unknown_value_of_a_setting_gets_the_nearest_of_all_that_may_be_written(capsys, monkeypatch):
    monkeypatch.setenv("GPUMUX_DEVICE", "gpuu")
    assert main(["config"]) == EX_CONFIG
    assert "did you mean gpu?" in capsys.readouterr().err
    monkeypatch.delenv("GPUMUX_DEVICE")
    monkeypatch.setenv("GPUMUX_METRICS_PORT", "70000")
    assert main(["config"]) == EX_CONFIG
    assert "between 0 and 65535, or off" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["flag", "file", "variable"])
def test_gpu_means_cuda(source, tmp_path):
    path = tmp_path / "gpumux.toml"
    path.write_text("[daemon]\ndevice = 'gpu'\n" if source == "file" else "")
    flags = {"device": "gpu"} if source == "flag" else {}
    assert config.load(flags, {"GPUMUX_DEVICE": "gpu"} if source == "variable" else {}, path).device == "cuda"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["stauts"], "did you mean status?"),
        (["serve", "--polcy=fifo"], "did you mean --policy?"),
        (["jobs", "pase", "j1"], "did you mean pause?"),
        (["jobs", "priority", "j1", "hihg"], "did you mean high?"),
        (["deploy", "kubernets", "-o", "x"], "did you mean kubernetes?"),
        (["frobnicate"], "choose from serve, status"),
    ],
)
def test_an_unknown_word_gets_the_nearest(words, advice, capsys):
    assert main(words) == EX_USAGE
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["plan", "burst", "vgg61", "--gpus", "2", "--global-batch", "8"], "did you mean vgg16?"),
        (["simulate", "--high", "vgg16-b5"], "did you mean vgg16-b4?"),
    ],
)
def test_an_unknown_model_or_profile_gets_the_nearest(words, advice, capsys):
    assert main(words) == EX_CONFIG
    assert advice in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_what_can_not_be_written_is_said_in_a_sentence():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gpumux", "config", "--defaults"], stdout=full, stderr=subprocess.PIPE, text=True,
            check=False, cwd=ROOT,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        EX_FAILED, "gpumux: can't write the output: No space left on device\n  make room, or send it elsewhere\n",
    )  # fmt: skip


@pytest.mark.parametrize("weight", [0.0, 0.0009, 1e-3, 1.0, 1e3, 1000.1, float("nan"), float("inf")])
def test_command_client_and_daemon_allow_the_same_weights(weight, capsys):
    good = refuse_weight(weight) is None
    code = main(["jobs", "weight", "j1", str(weight), "--endpoint", "ipc:///nowhere"])
    assert code == (EX_FAILED if good else EX_USAGE)
    assert good or "from 0.001 to 1000" in capsys.readouterr().err
    with nullcontext() if good else pytest.raises(ConfigError, match=r"use a number from 0\.001 to 1000"):
        job_spec(print, "low", "a", weight, 1.1, None, 2, 0)


def test_a_closed_output_is_no_error():
    closed = '"$0" -m gpumux version >&-'
    done = subprocess.run(["sh", "-c", closed, sys.executable], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "gpumux", "config", "--defaults"], stdout=write, stderr=subprocess.PIPE, text=True,
        check=False, cwd=ROOT,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ["trace", "-o", "{}"],
        ["deploy", "slurm", "-o", "{}"],
        ["keys", "laptop", "-o", "{}"],
        ["simulate", "--high", "vgg16-b4", "--plot", "{}"],
        ["interference", "--plot", "{}"],
        ["plan", "memory", "resnet50", "--batch", "2", "--plot", "{}"],
        ["plan", "burst", "vgg16", "--gpus", "2", "--global-batch", "2", "--plot", "{}"],
        ["tune", "tests.tune.toy:factory", "--space", "none.toml", "--steps", "1", "--save", "{}"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_can_not_be_written_has_one_exit_code(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    target = str(tmp_path / "file" / "below.png")
    assert main([word.format(target) for word in words]) == EX_CONFIG
    said = capsys.readouterr().err
    assert f"can't write {target}" in said or "ot a directory" in said or "is no directory" in said
    assert said.count("\n") == 2, "what is wrong, and what to do"


def test_what_a_terminal_has_no_characters_for_is_escaped(tmp_path):
    path = tmp_path / "gpumux.toml"
    path.write_text('[daemon]\nstate_dir = "/\u00e4"\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "gpumux", "config", "--config", str(path)], capture_output=True, text=True, check=False,
        cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert 'state_dir = "/\\xe4"' in done.stdout, done.stderr


def test_keys_are_made_once_and_are_ones_that_a_daemon_takes(tmp_path, capsys):
    assert main(["keys", "laptop", "-o", str(tmp_path / "keys")]) == 0
    said = capsys.readouterr().out
    secret, public = tmp_path / "keys" / "laptop.key_secret", tmp_path / "keys" / "laptop.key"
    assert f"{secret}  for its holder alone" in said
    assert secret.stat().st_mode & 0o077 == 0
    unusable: list = []
    assert list(allowed_keys(tmp_path / "keys", unusable).values()) == ["laptop"]
    assert unusable == []
    before = public.read_bytes()
    assert main(["keys", "laptop", "-o", str(tmp_path / "keys")]) == EX_CONFIG
    assert "choose another name" in capsys.readouterr().err
    assert public.read_bytes() == before
    assert main(["keys", "../laptop"]) == EX_CONFIG
    (tmp_path / "file").write_text("")
    assert main(["keys", "other", "-o", str(tmp_path / "file")]) == EX_CONFIG
