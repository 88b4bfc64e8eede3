"""`gpumux top` without a daemon: rates from two answers, the screen, and the ways it ends."""

from __future__ import annotations

import copy
import json
import os
import pty

import pytest

from gpumux.cli import top
from gpumux.cli.main import EX_FAILED, EX_USAGE, main
from gpumux.cli.top import compare
from gpumux.errors import DaemonGone

KEPT = "mean 1.04 of 1.10, tail 1.10 of 1.20 in 80 steps: kept"


def job(short, priority, **changes):
    promise = (
        {
            "verdict": KEPT,
            "slowdown": 1.04,
            "slowdown_p99": 1.1,
            "kept": True,
            "steps_over": 0,
            "solo_step_s": 0.01,
            "bans": 1,
        }
        if priority == "high"
        else {"held": "budget", "held_by": "j1", "held_for_s": 0.25, "too_long": None, "bans": 1}
    )
    base = {
        "job": short * 16, "short": short, "name": f"job {short}", "uid": 7, "priority": priority, "state": "open",
        "paused": False, "queued": 1, "running": 1, "steps_done": 100, "steps_failed": 0, "memory_bytes": 1 << 20,
        "device_busy_s": 10.0, "max_slowdown": 1.1, "promise": promise,
    }  # fmt: skip
    return base | changes


def body(**changes):
    base = {
        "daemon": {"version": "1", "pid": 7, "uptime_s": 60.0, "policy": "guarded"},
        "device": {"kind": "cpu", "name": "A CPU"},
        "memory": {"total_bytes": 1 << 30, "free_bytes": 1 << 29, "shared_bytes": 0},
        "sessions": 3,
        "jobs": [job("j2", "low"), job("j1", "high"), job("j3", "low")],
        "guard": {"bans": 1, "bans_total": 4, "probes_total": 1, "harvested_s": 5.0,
                  "held_s": {"budget": 1.0, "gap": 0.0}},
    }  # fmt: skip
    return base | changes


def later(before, seconds=2.0, **per_job):
    """The same daemon, `seconds` later; `per_job`: the growth of each short id's counters."""
    after = copy.deepcopy(before)
    after["daemon"]["uptime_s"] += seconds
    for entry in after["jobs"]:
        steps, busy = per_job.get(entry["short"], (0, 0.0))
        entry["steps_done"] += steps
        entry["device_busy_s"] += busy
    return after


def test_rates_are_of_the_time_between():
    after = later(body(), j1=(50, 1.0), j2=(3, 0.1), j3=(8, 0.5))
    after["guard"]["harvested_s"] += 0.4
    after["guard"]["held_s"]["budget"] += 1.2
    view = compare(body(), after)
    assert view["seconds"] == pytest.approx(2.0)
    assert [(j["short"], j["steps_s"]) for j in view["jobs"]] == [("j1", 25.0), ("j3", 4.0), ("j2", 1.5)]
    assert (view["device"]["high"], view["device"]["low"]) == (pytest.approx(0.5), pytest.approx(0.3))
    assert view["device"]["busy"] == pytest.approx(0.8)
    assert view["guard"]["harvested"] == pytest.approx(0.2)
    assert view["guard"]["held_by_reason"] == {"budget": pytest.approx(0.6), "gap": 0.0}
    json.dumps(view)


def test_a_job_that_is_new_has_no_rate_yet_and_one_that_is_gone_is_not_shown():
    before = body(jobs=[job("j1", "high"), job("j4", "low")])
    view = compare(before, later(body(), j1=(2, 0.2)))
    assert {j["short"]: j["steps_s"] for j in view["jobs"]} == {"j1": 1.0, "j2": None, "j3": None}
    assert "j4" not in top.describe(view)


def test_no_time_between_and_no_guard_are_no_error():
    view = compare(body(guard=None), body(guard=None))
    assert view["guard"] is None
    assert view["jobs"][0]["steps_s"] is None
    assert "guard  " not in top.describe(view)
    assert "no jobs" in top.describe(compare(body(jobs=[]), later(body(jobs=[]))))


def test_the_picture():
    before = body()
    broken = "mean 1.04 of 1.10, tail 2.36 of 1.20 in 80 steps: BROKEN since 12 s"
    before["jobs"][1]["promise"] |= {"kept": False, "verdict": broken}
    view = compare(before, later(before, j1=(50, 1.0), j2=(3, 0.1)))
    lines = top.describe(view).splitlines()
    assert lines[0] == f"promise  j1 job j1: {broken}"
    assert lines[3].startswith("busy     55%: high 50%, low 5%; memory 512.0 MiB of 1.0 GiB")
    header, high, low = lines[-4], lines[-3], lines[-2]
    assert header.split() == list(top.HEADER)
    assert high.split()[:2] == ["j1", "job"]
    assert "25.0" in high
    assert "1.04 BROKEN" in high
    assert "budget 250ms for j1" in low


def test_it_fits_the_window():
    view = compare(body(), later(body()))
    text = top.describe(view)
    rows = text.splitlines()
    assert top.fit(text, 500, len(rows)) == rows
    small = top.fit(text, 40, 6)
    assert len(small) == 6
    assert max(map(len, small)) <= 40
    assert small[-1] == f"... {len(rows) - 5} more"
    assert len(top.fit(text, 40, 1)) == 1
    assert any("\x1b" in row for row in top.fit(text, 200, 50, colours=True))


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
    monkeypatch.setattr(top, "Control", FakeControl(bodies(2)))
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert out.count("JOB ") == 1
    assert "\x1b" not in out
    monkeypatch.setattr(top, "Control", FakeControl(bodies(2)))
    assert main(["top", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["steps_s"] == 25.0


def test_without_a_terminal_tables_follow_one_another_until_ctrl_c(monkeypatch, capsys):
    monkeypatch.setattr(top, "Control", FakeControl(bodies(4)))
    assert main(["top"]) == 0
    out = capsys.readouterr().out
    assert out.count("JOB ") == 3
    assert "\x1b" not in out
    monkeypatch.setattr(top, "Control", FakeControl(bodies(4)))
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
def test_a_terminal_gets_its_screen_and_its_keys_back(end, code, monkeypatch, capsys):
    """The screen is restored on every way out."""
    master, slave = pty.openpty()
    before = top.termios.tcgetattr(slave)
    with os.fdopen(slave, "w", buffering=1) as terminal, os.fdopen(os.dup(slave)) as keyboard:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stdin", keyboard)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(top.shutil, "get_terminal_size", lambda **_: os.terminal_size((50, 8)))
        monkeypatch.setattr(top, "Control", FakeControl(bodies(3), end))
        assert main(["top"]) == code
        assert top.termios.tcgetattr(slave) == before
    drawn = all_of(master)
    os.close(master)
    assert drawn.startswith(top._ENTER)
    assert drawn.endswith(top._LEAVE)
    last = drawn.split(top._HOME)[-1]
    rows = last.split("\r\n")
    assert len(rows) == 8
    assert "... 3 more" in rows[-1]


@pytest.mark.parametrize("typed", [b"q", b"Q", b"\x1b"])
def test_some_keys_end_it(typed):
    read, write = os.pipe()
    os.write(write, typed)
    assert top._quits(read)
    os.write(write, b" ")
    assert not top._quits(read)
    assert not top._quits(None)
    os.close(write)
    assert top._quits(read)  # there is no keyboard any more
    os.close(read)


@pytest.mark.parametrize("flags", [["--interval", "0"], ["--interval", "soon"], ["now"]])
def test_wrong_usage(flags, capsys):
    assert main(["top", *flags]) == EX_USAGE
    assert "error:" in capsys.readouterr().err
