"""Users of other loops change at most five lines, get the same bits, and keep their logs."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clients import integrations
from microbench.daemon import RunningDaemon, running_daemon
from tests.client.parity import assert_same
from tests.clients.leaving import jobs_left

MOST = 5  # lines that a user changes
HOME = Path(integrations.__file__).parent
NEEDS = {
    "loop": ["tensorboard"],
    "huggingface": ["tensorboard", "transformers", "accelerate"],
    "lightning": ["tensorboard", "lightning"],
    "accelerate": ["tensorboard", "accelerate"],
}

# torch's warnings of its own use by these packages, and theirs of each other, are not ours to mend.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(threads=1) as running:
        yield running


def changed(name: str) -> list[str]:
    """Lines of the plain program that went, or of the other that came, whichever are more."""
    before, after = ((HOME / f"{name}_{kind}.py").read_text().splitlines() for kind in ("plain", "gpumux"))
    lines = [line for line in difflib.unified_diff(before, after, n=0) if not line.startswith(("---", "+++", "@@"))]
    gone, come = ([line for line in lines if line[0] == sign] for sign in "-+")
    return max(gone, come, key=len)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """All that was logged for TensorBoard below a directory, but for how long things took."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            if not tag.endswith(("runtime", "per_second")):
                found.setdefault(tag, []).extend((e.step, e.value) for e in events.Scalars(tag))
    return found


@pytest.mark.parametrize("name", NEEDS)
def test_at_most_five_lines_change(name: str):
    lines = changed(name)
    assert 0 < len([line for line in lines if line[1:].strip()]) <= MOST, lines


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.every(4)
def test_the_results_and_the_logs_are_the_same(
    name: str, daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for package in NEEDS[name]:
        pytest.importorskip(package, reason="the extra `test` brings it")
    monkeypatch.setenv("GPUMUX_ENDPOINT", daemon.endpoint)
    ran: dict[str, Any] = {}
    for kind in ("plain", "gpumux"):
        ran[kind] = importlib.import_module(f"clients.integrations.{name}_{kind}").main(str(tmp_path / kind))
    assert_same(ran["gpumux"], ran["plain"], "state")
    logged = scalars(tmp_path / "gpumux")
    assert logged == scalars(tmp_path / "plain")
    losses = [value for _, value in logged["train/loss" if name == "huggingface" else "loss"]]
    assert len(losses) >= 10
    assert len(set(losses)) > 5, "something was trained"
    assert jobs_left(daemon) == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="pip install wandb: it weighs 100 MB, so no extra brings it")
def test_what_is_logged_for_weights_and_biases_is_the_same(daemon: RunningDaemon, tmp_path: Path):
    """Without an account and without a network."""
    losses = {}
    for kind, endpoint in (("plain", []), ("gpumux", [daemon.endpoint])):
        (tmp_path / kind).mkdir()
        command = [sys.executable, "-m", "tests.clients.wandb_loop", str(tmp_path / kind), *endpoint]
        environment = os.environ | {"WANDB_SILENT": "true"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        losses[kind] = json.loads(done.stdout)
        (log,) = (tmp_path / kind).glob("wandb/offline-run-*/run-*.wandb")
        written = log.read_bytes()
        assert all(json.dumps(loss).encode() in written for loss in losses[kind])
    assert losses["gpumux"] == losses["plain"]
    assert len(set(losses["plain"])) == 5, "something was trained"
