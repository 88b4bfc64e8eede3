"""The kill test, with one kill and one job; tests/client/test_recovery.py has what may happen otherwise."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path

import pytest
import torch

from microbench import kills
from microbench.killed import dropout_adam


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # as the daemon here has
@pytest.mark.extended
def test_one_kill_is_survived_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(kills, "TRIALS", (dropout_adam,))
    out = tmp_path / "kills.json"
    flags = ["--kills", "1", "--seed", "3", "--others", "0", "--turns", "2", "--out", str(out)]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert kills.main(flags) == 0, capsys.readouterr()
    finally:
        signal.signal(signal.SIGTERM, before)
    report = json.loads(out.read_text())
    assert report["bit_equal"]
    (row,) = report["jobs"]
    assert row["came_back"] == 1
    assert row["turns"] >= kills.LAST
    assert (row["results_that_differ"], row["state_tensors_that_differ"]) == (0, 0)
    assert row["state_tensors"] > 0


def test_a_tensor_that_differs_in_a_bit_or_is_missing_is_counted():
    one, other = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert kills.differences([one, one], [one, one.clone()]) == 0
    assert kills.differences([one, one], [one, other]) == 1
    assert kills.differences([one], [one, one, one]) == 2
    assert kills.differences([one], [one.double()]) == 1
    assert kills.differences([one], [one.reshape(3, 1)]) == 1
    assert kills._verdict(0, 7) == "7 equal"
    assert kills._verdict(2, 7) == "2 of 7 DIFFER"


def test_what_jobs_say_when_they_come_back_is_counted():
    heard = kills.Returns()
    for text in (
        "job 'a b': the daemon at ipc:///x is gone. It is back after 2.3 s, from snapshot 4, and 17 steps run again",
        "job 'a b': the daemon is leaving. It is back after 0.4 s, from its first state, and 3 steps run again",
        "job 'c': the daemon is gone; waiting for it to come back",
        "job 'c': something else",
    ):
        heard.emit(logging.LogRecord("gpumux.client", logging.WARNING, "f.py", 1, text, (), None))
    assert (heard.returns, heard.replayed) == ({"a b": 2}, {"a b": 20})
    assert (heard.waits, heard.other) == (1, ["job 'c': something else"])
