"""A short attack: it attacks, it compares, and what differs is seen."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpumux.errors import ProtocolError
from gpumux.wire import messages as m
from gpumux.wire.codec import decode, encode
from microbench import attack, kills
from microbench.killed import dropout_adam
from microbench.soaking.attackers import FIELDS, LONGEST, Attacker
from microbench.soaking.counters import SharedCounters

BRIEF = [
    "--messages", "200", "--programs", "3", "--window", "0.3", "--attacked", "1", "--least", "1", "--kills", "3",
    "--turns", "2",
]  # fmt: skip


@pytest.fixture
def _handlers_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "_handlers_restored")
@pytest.mark.extended
def test_an_attack_is_survived_counted_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(kills, "TRIALS", (dropout_adam,))
    monkeypatch.setattr(attack, "WARM_STEPS", 30)
    monkeypatch.setattr(attack, "OFTEN", {"attacker": 0.25, "executor": 0.5, "fork server": 0.25})
    out = tmp_path / "attack.json"
    assert attack.main([*BRIEF, "--out", str(out)]) == 0, capsys.readouterr()
    report = json.loads(out.read_text())
    part = report["windows"]
    counted = part["counted"]
    assert counted["messages"] + counted["malformed"] + counted["packets"] >= 200
    assert counted["programs"] >= 3
    assert min(counted["malformed"], counted["sessions"]) > 0
    assert part["steps"] > attack.WARM_STEPS
    assert (part["results_that_differ"], part["state_tensors_that_differ"], part["internal_errors"]) == (0, 0, 0)
    assert part["p99_ratio"]["repeats"] == part["windows"] >= 1
    assert report["targets"]["p99 under attack over p99"]["value"] == part["p99_ratio"]["median"]
    part = report["kills"]
    assert sum(part["blows"].get(kind, 0) for kind in attack.OFTEN) == part["blows"]["kills"] == 3
    (row,) = part["jobs"]
    assert (row["results_that_differ"], row["state_tensors_that_differ"]) == (0, 0)
    assert part["counted"]["sessions"] > 0


@pytest.fixture
def attacker(tmp_path: Path) -> Iterator[Attacker]:
    counters = SharedCounters.create(tmp_path / "counters", 2, FIELDS)
    made = Attacker("ipc:///nowhere", counters, 1, random.Random(7), "f" * 32)
    yield made
    made._context.term()
    counters.close()


def test_messages_are_changed_and_a_good_part_of_them_stays_valid(attacker: Attacker):
    made = [attacker._message("a" * 32) for _ in range(500)]
    judged = [attacker._is_valid(data, frames) for data, frames in made]
    assert judged.count(True) > 100
    assert judged.count(False) > 100
    for (data, frames), valid in zip(made, judged, strict=True):
        if valid:
            decode([data, *frames], LONGEST)
    kinds = {
        type(decode([data, *frames], LONGEST)[0]) for (data, frames), valid in zip(made, judged, strict=True) if valid
    }
    assert kinds >= {m.OpenJob, m.LoadProgram, m.CloseJob, m.GetStatus, m.TakeSnapshot}
    assert len({data for data, _ in made}) > 300


@pytest.mark.parametrize(
    ("message", "valid"),
    [(m.GetStatus(1), True), (m.Goodbye(), None), (m.OpenChannel(1, b"n" * 32), False), (m.Leaving("x"), False)],
)
def test_what_ends_a_session_or_says_hello_is_told_apart(message: m.Message, valid: bool | None, attacker: Attacker):
    assert attacker._is_valid(bytes(encode(message)[0]), []) is valid


def test_without_a_daemon_it_counts_and_goes_on(attacker: Attacker, monkeypatch: pytest.MonkeyPatch):
    tries = 0

    def once() -> None:
        nonlocal tries
        tries += 1
        if tries == 4:
            attacker.counters.add(0, "order")  # LEAVE
        raise [zmq.ZMQError(), OSError(), ProtocolError("bad")][tries % 3]

    attacker.counters.add(0, "order")  # ATTACK
    attacker.run(once)
    assert attacker.counters.get(1, "cut") == 4


def test_a_process_is_told_by_its_name():
    assert attack.kind_of(1 << 30) == ""
