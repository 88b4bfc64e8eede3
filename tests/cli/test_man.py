"""The manual pages say what the command line and the settings declare, and a formatter reads them without a warning."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess

import pytest

from gpumux.cli.main import SETTINGS, build_parser, main
from gpumux.cli.setup import man
from gpumux.config import FILE_ONLY, RULE_SETTINGS, Config

FLAGS = {name: f"--{name.replace('_', '-')}" for name in SETTINGS}


@pytest.fixture(scope="module")
def pages():
    return {name: body.decode() for name, body in man.pages(build_parser(), FLAGS).items()}


def plain(page):
    """A page's text without what is only for the formatter."""
    text = re.sub(r"^\\&", "", page, flags=re.M)
    for escape, meant in ((r"\-", "-"), (r"\`", "`"), (r"\(aq", "'"), (r"\(ha", "^"), (r"\(ti", "~"), (r"\(dq", '"')):
        text = text.replace(escape, meant)
    return text


def commands(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield sub
                yield from commands(sub)


def test_every_command_and_every_flag_has_its_place(pages):
    sections = plain(pages[man.COMMANDS]).split("\n.SS ")
    found = {section.split("\n")[0].strip('"'): section for section in sections[1:]}
    expected = list(commands(build_parser()))
    assert list(found) == [command.prog for command in expected]
    for command in expected:
        for action in command._actions:
            if action.help != argparse.SUPPRESS and action.option_strings not in ([], ["-h", "--help"]):
                heads = [line for line in found[command.prog].split("\n") if line.startswith(".B ")]
                assert any(line.startswith(f".B {', '.join(action.option_strings)}") for line in heads), action


def test_every_setting_is_there_with_its_default_variable_and_flag(pages):
    text = plain(pages[man.SETTINGS])
    for name in Config.__dataclass_fields__:
        if name not in FILE_ONLY:
            entry = text.split(f"\n.BR {name} ")[1].split("\n.TP")[0]
            assert f"GPUMUX_{name.upper()}" in entry
            assert name not in FLAGS or FLAGS[name] in entry
    assert '.BR metrics_host " = "127.0.0.1""' in text
    for name in RULE_SETTINGS:
        assert f"\n.B {name}\n" in text


def test_pages_are_the_same_on_every_terminal(pages, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert {name: body.decode() for name, body in man.pages(build_parser(), FLAGS).items()} == pages


def test_nothing_of_a_line_is_a_request_or_an_escape():
    parser = argparse.ArgumentParser(prog="p")
    verbs = parser.add_subparsers()
    verbs.add_parser("v", epilog=".so /etc/x-y ~\n'br\n\\n(yr ^ `x`", description=".de x")
    lines = man.pages(parser, {})[man.COMMANDS].decode().splitlines()
    expected = [r"\&.so /etc/x\-y \(ti", r"\(aqbr", r"\en(yr \(ha \`x\`"]
    at = lines.index(expected[0])
    assert lines[at : at + 3] == expected
    assert r"\&.de x" in lines


@pytest.mark.parametrize("name", [man.COMMANDS, man.SETTINGS])
@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_has_nothing_against_them(name, pages):
    command = ["groff", "-ww", "-man", "-Tutf8", "-P-cbou"]
    done = subprocess.run(command, input=pages[name], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    whole = " ".join(done.stdout.split())
    kept = {man.COMMANDS: ["gpumux jobs pause resnet-sweep", "`jobs resume`"], man.SETTINGS: ['metrics_host = "127']}
    for text in kept[name]:
        assert text in whole, "nothing of a line is taken for a request or an escape"


def test_deploy_writes_them(tmp_path, capsys):
    assert main(["deploy", "man", "-o", str(tmp_path)]) == 0
    assert f"man -l {tmp_path}/man1/gpumux.1" in capsys.readouterr().out
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.[15]")) == [man.COMMANDS, man.SETTINGS]
