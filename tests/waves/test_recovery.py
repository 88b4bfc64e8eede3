"""A job of two waves whose executor or daemon is killed goes on with the bits of an undisturbed one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from microbench.kills import Phoenix
from tests.waves.reference import WaveReference
from tests.waves.test_training import adamw, batches, convolutions, equal, loss_of, submit


@pytest.mark.parametrize("kind", ["executor", "daemon"])
def test_kills_in_the_middle_of_pairs_change_no_bit(kind: str, tmp_path: Path):
    data = batches(24)
    reference = WaveReference(convolutions, adamw, loss_of)
    torch.manual_seed(4)
    expected = [reference.step(batch).item() for batch in data]
    daemon = Phoenix(tmp_path)
    rng = random.Random(kind)
    try:
        daemon.wait_until_ready()
        model, opt, job = submit(daemon.endpoint, convolutions, adamw)
        with job:
            torch.manual_seed(4)
            losses = []
            for m, batch in enumerate(data):
                losses.append(job.step(*batch))
                if m in (5, 6, 13):
                    losses[-1 - rng.randrange(2)].item()
                    daemon.kill_executors() if kind == "executor" else daemon.kill()
                elif m == 10:
                    job.state_dict()
            losses = [loss.item() for loss in losses]
        daemon.stop()
    finally:
        daemon.close()
    assert losses == expected
    assert equal(model, opt, reference)
