"""Jobs at a daemon that only simulates its device."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch

from gpumux import client
from gpumux.errors import SimulatedDeviceWarning
from microbench.daemon import GPUMUX, RunningDaemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(device="sim", policy="guarded", flags=["--gpu-model", "h200"]) as daemon:
        yield daemon


def test_a_job_runs_gets_zeros_and_is_told_so(daemon: RunningDaemon) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(16, 8)
    with pytest.warns(SimulatedDeviceWarning, match="SIMULATES its device") as caught:
        job = client.submit(step, example=(x,), model=model, optimizer=optimizer, priority="high",
                            endpoint=daemon.endpoint)  # fmt: skip
    assert caught[0].filename == __file__, "the warning must point at the user's line"
    with job:
        answers = [job.step(x) for _ in range(5)]
        assert [float(answer) for answer in answers] == [0.0] * 5
        job.sync()
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "nothing was trained"


def test_everything_an_operator_sees_says_that_it_is_simulated(daemon: RunningDaemon) -> None:
    assert daemon.status()["device"]["kind"] == "sim"
    assert "simulated NVIDIA H200" in daemon.status()["device"]["name"]
    assert "this daemon SIMULATES its device" in daemon.log.read_text()
    doctor = subprocess.run([*GPUMUX, "doctor", "--endpoint", daemon.endpoint], capture_output=True, text=True)
    assert "it computes nothing" in doctor.stdout
