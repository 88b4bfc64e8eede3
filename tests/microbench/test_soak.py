"""The soak's plan and accounts, and a short soak itself: what it finds in five minutes is in microbench/results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from microbench import soak
from microbench.soaking import plan, watch
from microbench.soaking.counters import FIELDS, SharedCounters


def test_equal_seeds_plan_the_same_and_others_do_not():
    one, same, other = (plan.make(seed, 300.0, 100) for seed in (7, 7, 8))
    assert one == same
    assert plan.digest(one) == plan.digest(same) != plan.digest(other)
    assert one[0] != one[1], "the second round is another one"


@pytest.mark.parametrize(("seconds", "clients"), [(300.0, 100), (6.0, 8), (10.0, 1)])
def test_a_plan_has_everything_it_should(seconds: float, clients: int):
    for round_ in plan.make(1, seconds, clients, 2):
        assert [slot.number for slot in round_.slots] == list(range(clients))
        assert round_.seconds == seconds / 2
        what = [h.what for h in round_.disturbances]
        assert what.count("kill") >= 1
        assert ("stun" in what) == (round_.seconds > 3 * plan.SUSPEND_S)
        assert all(0 < h.at_s < round_.seconds for h in round_.disturbances)
        assert {h.which for h in round_.disturbances if h.what in ("kill", "stun")} <= set(round_.processes)
        for process in round_.processes:
            kinds = {slot.kind.partition(":")[0] for slot in round_.of(process)}
            assert "torch" not in kinds or kinds == {"torch"}, "a process of light clients has no torch"


@pytest.mark.parametrize(("seconds", "clients", "rounds"), [(0.0, 5, 1), (5.0, 0, 1), (5.0, 5, 0)])
def test_a_plan_for_nothing_is_refused(seconds: float, clients: int, rounds: int, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        soak.main(["--seconds", str(seconds), "--clients", str(clients), "--rounds", str(rounds)])
    assert "a soak needs" in capsys.readouterr().err


def test_what_a_killed_process_counted_is_not_lost(tmp_path: Path):
    counters = SharedCounters.create(tmp_path / "counters", 3)
    count = (
        "import os, sys; from pathlib import Path; from microbench.soaking.counters import SharedCounters\n"
        "counters = SharedCounters(Path(sys.argv[1]), 3); counters.add(2, 'right', 41); counters.add(2, 'right')\n"
        "counters.trouble(2, 'words'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", count, str(counters.path)]).returncode == -9
    assert (counters.get(2, "right"), counters.total("right"), counters.get(1, "right")) == (42, 42, 0)
    assert (counters.total("trouble"), counters.troubles()) == (1, ["slot 2: words"])
    assert {name: counters.total(name) for name in FIELDS} == dict.fromkeys(FIELDS, 0) | {"right": 42, "trouble": 1}
    counters.close()


def test_what_a_process_holds_is_seen():
    before = watch.holding(os.getpid())
    segment = os.memfd_create("soak")
    pipe = os.pipe()
    mark = str(os.getpid())  # all processes of the machine are looked at, and another run of the tests may have its own
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "SOAK_X": mark}
    )
    try:
        now = watch.holding(os.getpid())
        assert now.segments == before.segments + 1
        assert now.processes == before.processes + 1
        assert now.descriptors >= before.descriptors + 3
        assert watch.marked(f"SOAK_X={mark}") == [child.pid]
        assert watch.marked("SOAK_X=") == []
    finally:
        child.communicate(b"\n")
        for fd in (segment, *pipe):
            os.close(fd)


@pytest.mark.slow
@pytest.mark.extended
def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With light clients, one that trains, hostile clients and an operator; and one process is killed."""
    threads = torch.get_num_threads()
    out = tmp_path / "soak.json"
    try:
        assert soak.main(["--seconds", "3", "--clients", "7", "--rounds", "1", "--out", str(out)]) == 0, (
            capsys.readouterr()
        )
    finally:
        torch.set_num_threads(threads)
    report = json.loads(out.read_text())
    assert report["met"]
    assert all(check["met"] for check in report["checks"].values())
    assert (
        report["counted"]["right"] + report["trained"]["results"] == report["checks"]["steps acknowledged"]["value"] > 0
    )
    assert report["happened"]["kill"] >= 1
    assert sum(report["vandalism"].values()) > 0
    assert report["invariants"]["checks"] > 0
    (rest,) = [point for point in report["curve"] if point.get("at_rest")]
    assert rest["daemon"] > 0
    assert rest["threads"] > 0
    assert rest["executors"] == 0
    assert "BROKEN" not in capsys.readouterr().out
