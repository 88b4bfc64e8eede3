"""Devices that `gpumux cluster run` holds for a script's first job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpumux import client
from gpumux.client.placed.handover import ENVIRONMENT, Handover, take
from gpumux.errors import ConfigError
from gpumux.wire import messages as m
from microbench.kills import Phoenix
from tests.client.placed.coordinator import FakeCoordinator

CLUSTER = "tcp://10.0.0.1:7777"
HELD = Handover(CLUSTER, "a" * 32, 0, 2, 2**20, {"b": "ipc:///b/gpumux.sock"})
ASKS = m.PlaceJob(0, "b" * 32, "mine", 0, 2, 2**20, [], 0, True, 0)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "job.json"
    file.write_text(HELD.text())
    return {ENVIRONMENT: str(file)}


def test_the_first_job_has_what_is_held_and_no_other(environ: dict[str, str]):
    assert take(CLUSTER, ASKS, {}) is None
    assert take("tcp://10.0.0.2:7777", ASKS, environ) is None  # a job of another cluster
    assert take(CLUSTER, ASKS, environ) == HELD
    assert take(CLUSTER, ASKS, environ) is None
    assert HELD.local(["a", "b"], ["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"]) == (
        "tcp://10.0.0.1:1",
        "ipc:///b/gpumux.sock",
    )


def test_a_job_that_needs_other_devices_is_told_what_to_reserve(environ: dict[str, str]):
    for wrong, remedy in (
        (replace(ASKS, priority=1), "--priority high --gpus 2"),
        (replace(ASKS, devices=1), "--priority low --gpus 1"),
        (replace(ASKS, nbytes=2**20 + 1), "--memory 2MiB"),
    ):
        with pytest.raises(ConfigError) as refused:
            take(CLUSTER, wrong, environ)
        assert remedy in refused.value.remedy
    assert take(CLUSTER, ASKS, environ) == HELD  # they are still held


@pytest.mark.parametrize("text", ["", "[]", '{"job": 1}', "{"])
def test_a_file_that_is_none_is_said_to_be(environ: dict[str, str], text: str):
    Path(environ[ENVIRONMENT]).write_text(text)
    with pytest.raises(ConfigError, match="can't be read") as refused:
        take(CLUSTER, ASKS, environ)
    assert "gpumux cluster run" in refused.value.remedy


def test_a_job_goes_on_under_the_id_that_devices_are_held_for(
    daemons: list[Phoenix], coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is reached without a network, whatever the coordinator calls its daemon."""
    file = tmp_path / "job.json"
    job_id = "c" * 32
    file.write_text(Handover(coordinator.endpoint, job_id, 0, 1, 2**30, {"node-0": daemons[0].endpoint}).text())
    monkeypatch.setenv(ENVIRONMENT, str(file))
    monkeypatch.setenv("GPUMUX_CLUSTER", coordinator.endpoint)
    coordinator.places = ["tcp://192.0.2.1:7777"]
    model = torch.nn.Linear(4, 2)
    with client.submit(model, example=torch.ones(8, 4), model=model, cluster="auto") as job:
        assert torch.equal(job.step(torch.ones(8, 4)).result(), model(torch.ones(8, 4)))
        assert job.id == job_id
    asked = coordinator.hear(m.PlaceJob)
    assert (asked.job, asked.nbytes) == (job_id, 2**30)
    assert not file.exists()
