"""`gpumux top` as a table: what it prints, the screen without Textual, and the ways it ends."""

from __future__ import annotations

import io
import json
import os
import pty

import pytest

from gpumux.cli.main import EX_FAILED, EX_USAGE, main
from gpumux.cli.top import command
from gpumux.cli.top.rates import compare
from gpumux.errors import DaemonGone

from .bodies import BROKEN, body, later


def test_the_picture():
    before = body()
    before["jobs"][1]["promise"] |= {"kept": False, "verdict": BROKEN}
    view = compare(before, later(before, j1=(50, 1.0), j2=(3, 0.1)))
    lines = command.describe(view).splitlines()
    assert lines[0] == f"promise  j1 job j1: {BROKEN}"
    assert lines[3].startswith("busy     55%: high 50%, low 5%; memory 512.0 MiB of 1.0 GiB")
    header, high, low = lines[-4], lines[-3], lines[-2]
    assert header.split() == list(command.HEADER)
    assert high.split()[:2] == ["j1", "job"]
    assert "25.0" in high
    assert "1.04 BROKEN" in high
    assert "budget 250ms for j1" in low


def test_it_fits_the_window():
    view = compare(body(), later(body()))
    text = command.describe(view)
    rows = text.splitlines()
    assert command.fit(text, 500, len(rows)) == rows
    small = command.fit(text, 40, 6)
    assert len(small) == 6
    assert max(map(len, small)) <= 40
    assert small[-1] == f"... {len(rows) - 5} more"
    assert len(command.fit(text, 40, 1)) == 1
    assert any("\x1b" in row for row in command.fit(text, 200, 50, colours=True))


class FakeControl:
    """Gives answers in turn; when they are used up, it raises KeyboardInterrupt."""

    def __init__(self, answers, end=KeyboardInterrupt):
        self.answers, self.end = list(answers), end

    def __call__(self, endpoint, timeout):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def status(self):
        return self.answers.pop(0)

    def wait(self, seconds, watch=None):
        if not self.answers:
            raise self.end
        return False


def bodies(count):
    out = [body()]
    for _ in range(count - 1):
        out.append(later(out[-1], j1=(50, 1.0)))
    return out


def test_once_prints_one_interval(monkeypatch, capsys):
    monkeypatch.setattr(command, "Control", FakeControl(bodies(2)))
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert out.count("JOB ") == 1
    assert "\x1b" not in out
    monkeypatch.setattr(command, "Control", FakeControl(bodies(2)))
    assert main(["top", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["steps_s"] == 25.0


def test_without_a_terminal_tables_follow_one_another_until_ctrl_c(monkeypatch, capsys):
    monkeypatch.setattr(command, "Control", FakeControl(bodies(4)))
    assert main(["top"]) == 0
    out = capsys.readouterr().out
    assert out.count("JOB ") == 3
    assert "\x1b" not in out
    monkeypatch.setattr(command, "Control", FakeControl(bodies(4)))
    assert main(["top", "--json"]) == 0
    assert [json.loads(line)["seconds"] for line in capsys.readouterr().out.splitlines()] == [2.0, 2.0, 2.0]


def all_of(master):
    """All that was written to a terminal whose other end is closed: it comes in chunks of the kernel's choice."""
    chunks = []
    while True:
        try:
            chunks.append(os.read(master, 1 << 16))
        except OSError:  # EIO: nothing is left
            return b"".join(chunks).decode()


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt, 0), (DaemonGone("it left"), EX_FAILED)])
@pytest.mark.parametrize(
    ("flags", "installed", "hint"),
    [([], False, command.INSTALL), ([], True, command.STREAMS), (["--plain"], True, "")],
)
def test_without_textual_a_terminal_gets_a_table_and_its_keys_back(
    flags, installed, hint, end, code, monkeypatch, capsys
):
    """The screen is restored on every way out; the last line says how to get more, but where less was asked for."""
    monkeypatch.setattr(command, "find_spec", lambda name: object() if installed else None)
    master, slave = pty.openpty()
    before = command.termios.tcgetattr(slave)
    with os.fdopen(slave, "w", buffering=1) as terminal, os.fdopen(os.dup(slave)) as keyboard:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stdin", keyboard)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(command.shutil, "get_terminal_size", lambda **_: os.terminal_size((50, 8)))
        monkeypatch.setattr(command, "Control", FakeControl(bodies(3), end))
        assert main(["top", *flags]) == code
        assert command.termios.tcgetattr(slave) == before
    drawn = all_of(master)
    os.close(master)
    assert drawn.startswith(command._ENTER)
    assert drawn.endswith(command._LEAVE)
    last = drawn.split(command._HOME)[-1]
    rows = last.split("\r\n")
    assert len(rows) == 8
    if hint:
        assert "... 4 more" in rows[-2]
        assert hint[:50] in rows[-1]
    else:
        assert "... 3 more" in rows[-1]


class ErrorTerminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_tables_and_the_terminal_behind_it_the_reason(monkeypatch, capsys):
    said = ErrorTerminal()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr(command, "Control", FakeControl(bodies(2)))
    assert main(["top"]) == 0
    assert said.getvalue().count("the output is no terminal") == 1
    assert capsys.readouterr().out.count("JOB ") == 1


@pytest.mark.parametrize("typed", [b"q", b"Q", b"\x1b"])
def test_some_keys_end_it(typed):
    read, write = os.pipe()
    os.write(write, typed)
    assert command._quits(read)
    os.write(write, b" ")
    assert not command._quits(read)
    assert not command._quits(None)
    os.close(write)
    assert command._quits(read)  # there is no keyboard any more
    os.close(read)


@pytest.mark.parametrize("flags", [["--interval", "0"], ["--interval", "soon"], ["now"]])
def test_wrong_usage(flags, capsys):
    assert main(["top", *flags]) == EX_USAGE
    assert "error:" in capsys.readouterr().err
