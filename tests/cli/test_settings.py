"""`gpumux config` and `gpumux keys`: what they print is what a daemon takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from gpumux import config
from gpumux.cli.main import EX_CONFIG, EX_FAILED, EX_USAGE, SETTINGS, main
from gpumux.cli.setup import settings
from gpumux.config import FILE_ONLY, Config
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
        (["jobs", "pase", "j1"], "did you mean pause?"),
        (["jobs", "priority", "j1", "hihg"], "did you mean high?"),
        (["deploy", "kubernets", "-o", "x"], "did you mean kubernetes?"),
        (["frobnicate"], "choose from serve, status"),
    ],
)
def test_an_unknown_word_gets_the_nearest(words, advice, capsys):
    assert main(words) == EX_USAGE
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
