"""`gpumux trace` without a daemon: records as trace events, and how the file is written."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.cli.control import Recorded
from gpumux.cli.main import EX_CONFIG, EX_USAGE, main
from gpumux.cli.trace import trace
from gpumux.wire.messages import Happened, JobSeen, LoadSeen, PieceRan, ProgramSeen, StepRan, WasBanned, WasHeld

from .tracks import check

HIGH, LOW = JobSeen("j10", "bert", "high", True), JobSeen("j2", "sweep", "low", False)
OPERATORS = ProgramSeen("j10", 0, ["aten.mm.default", "aten.relu.default", "aten.add.Tensor", "aten.sum.default"])


def piece(job="j10", first=0, end=3, started=0.1, ended=0.2, how="done", number=0):
    return PieceRan(job, 1, 5, 0, number, first, end, 1.0, started, started, ended, how)


def made(*records, seconds=1.0):
    return trace([LOW, HIGH, OPERATORS, *records], seconds, "cpu", {"cut": ""})


def test_pieces_are_on_their_jobs_stream_by_their_operators():
    found = check(made(piece(), piece(first=3, end=4, started=0.2, ended=0.3, number=1)))
    first, second = found["j10 bert (high)"]
    assert (first["name"], first["ts"], first["dur"]) == ("mm ... add (3 operators)", 100_000.0, 100_000.0)
    assert first["args"]["operators"] == ["mm", "relu", "add"]
    assert first["args"]["range"] == "[0, 3)"
    assert second["name"] == "sum"


def test_of_others_jobs_there_are_times_alone():
    (event,) = check(made(piece("j2", 0, 0, number=3)))["j2 sweep (low)"]
    assert event["name"] == "piece 3"
    assert "operators" not in event["args"]
    assert "range" not in event["args"]


def test_high_jobs_come_first_and_each_track_says_whose_it_is():
    content = made(
        piece("j2", 0, 0), piece(), StepRan("j10", 5, 0.05, 0.25, 0.05, 0.1), WasHeld("j2", "j10", "tail", 0.1, 0.2),
        WasBanned("j10", "j2", 1, 3, 1.0, 1.7, "tail", 0.0, 0.5), Happened("j2", 0.3, "paused", ""),
    )  # fmt: skip
    found = check(content)
    assert list(found) == [
        "j10 bert (high)", "j2 sweep (low)", "j10 bert (high): steps", "j2 sweep (low): steps", "j2 sweep (low): held",
        "j2 sweep (low): banned",
    ]  # fmt: skip
    (held,) = found["j2 sweep (low): held"]
    assert (held["name"], held["args"]) == ("held: tail", {"for": "j10"})
    (ban,) = found["j2 sweep (low): banned"]
    assert (ban["name"], ban["args"]["ratio"]) == ("banned from operators [1, 3) of j10", 1.7)
    (mark,) = found["j2 sweep (low): steps"]
    assert (mark["ph"], mark["name"]) == ("i", "paused")


def test_arrows_lead_from_each_step_to_its_pieces():
    content = made(
        piece(first=3, end=4, started=0.2, ended=0.3, number=1), piece(), StepRan("j10", 5, 0.05, 0.35, 0.05, 0.1),
        StepRan("j10", 6, 0.4, 0.5, 0.05, 0.1), piece("j2", 0, 0),
    )  # fmt: skip
    check(content)
    arrows = [event for event in content["traceEvents"] if event["ph"] in "stf"]
    assert [(a["ph"], a["ts"]) for a in arrows] == [("s", 50_000.0), ("t", 100_000.0), ("f", 200_000.0)]
    assert len({a["id"] for a in arrows}) == 1
    assert [a["pid"] for a in arrows] == [2, 1, 1], "from the job's steps to the device"
    (wait,) = [event for event in content["traceEvents"] if event.get("cat") == "wait"]
    assert (wait["name"], wait["ts"], wait["dur"]) == ("step 5 waits", 50_000.0, 50_000.0), "until the first piece"


def test_a_step_that_ran_when_the_recording_began_has_arrows_between_its_pieces_alone():
    content = made(piece(started=-0.1, ended=0.1), piece(started=0.2, ended=0.3), StepRan("j10", 5, 0.0, 0.4, 0.0, 0.1))
    check(content)
    arrows = [event for event in content["traceEvents"] if event["ph"] in "stf"]
    assert [(a["ph"], a["pid"], a["ts"]) for a in arrows] == [("s", 1, 0.0), ("f", 1, 200_000.0)]


def test_counters_show_each_jobs_queue_and_memory():
    content = made(LoadSeen("j10", 0.25, 3, 1, 5 << 20))
    check(content)
    counters = {e["name"]: (e["ts"], e["args"]) for e in content["traceEvents"] if e["ph"] == "C"}
    assert counters == {
        "j10 steps": (250_000.0, {"queued": 3, "running": 1}),
        "j10 memory (MiB)": (250_000.0, {"charged": 5.0}),
    }


def test_steps_in_flight_together_get_a_track_each():
    content = made(*[StepRan("j10", n, 0.1 * n, 0.1 * n + 0.15, 0.0, 0.1) for n in range(5)])
    assert len(check(content)["j10 bert (high): steps"]) == 5
    assert sum(e["name"] == "thread_name" for e in content["traceEvents"]) == 2


@given(st.lists(st.tuples(st.floats(-1.0, 3.0), st.floats(0.0, 2.0)), max_size=30), st.floats(0.001, 2.0))
def test_whatever_is_recorded_lies_within_the_recording_and_nothing_overlaps(spans, seconds):
    steps = [StepRan("j10", n, at, at + lasts, 0.0, lasts) for n, (at, lasts) in enumerate(spans)]
    # each step has the next one's span for its piece: pieces of one step follow one another on its stream
    pieces = [piece(started=at, ended=at + lasts)._replace(step=n - 1) for n, (at, lasts) in enumerate(spans)]
    content = made(*steps, *pieces, seconds=seconds)
    found = check(content)
    json.dumps(content, allow_nan=False)
    shown = [event for events in found.values() for event in events if event["cat"] != "wait"]
    assert len(shown) == 2 * len(spans)


class FakeControl:
    def __init__(self, recorded):
        self.recorded = recorded
        self.welcome = type("Welcome", (), {"device": {"kind": "cpu", "name": "A CPU"}})

    def __call__(self, endpoint, timeout):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def record(self, seconds):
        return self.recorded


@pytest.mark.parametrize("cut", ["", "0.5 of 5 s: it was ended early"])
def test_the_file_is_written_whole_and_a_cut_is_said_and_kept(cut, tmp_path, monkeypatch, capsys):
    records = [HIGH, OPERATORS, piece(), WasHeld("j10", "j10", "gap", 0.0, 0.1)]
    monkeypatch.setattr("gpumux.cli.trace.Control", FakeControl(Recorded(records, 0.5, cut)))
    path = tmp_path / "t.json"
    path.write_text("old")
    assert main(["trace", "-o", str(path)]) == 0
    said = capsys.readouterr()
    assert "1 piece, 1 held span, 0 bans in 0.50 s" in said.out
    assert (cut in said.err) if cut else not said.err
    content = json.loads(path.read_text())
    check(content)
    assert content["otherData"]["cut"] == cut
    assert os.listdir(tmp_path) == ["t.json"]
    assert main(["trace", "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pieces"] == 1


def test_a_file_that_cannot_be_written_is_said_before_anything_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpumux.cli.trace.Control", lambda *args: pytest.fail("it recorded"))
    for target in (tmp_path, tmp_path / "none" / "t.json"):
        assert main(["trace", "-o", str(target)]) == EX_CONFIG
        assert "can't write" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["-o", "x", "--seconds", "0"], ["-o", "x", "--seconds", "long"]])
def test_wrong_usage(flags, capsys):
    assert main(["trace", *flags]) == EX_USAGE
    assert "error:" in capsys.readouterr().err
