"""A job of two waves whose executor or daemon is killed goes on with the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from microbench.kills import Phoenix
from tests.waves.reference import WaveReference
from tests.waves.test_training import adamw, batches, convolutions, equal, loss_of, submit


@pytest.mark.extended
def test_kills_in_the_middle_of_pairs_change_no_bit(tmp_path: Path):
    """Of the executor, twice in a row, then of the daemon. In one job, because a start of a daemon takes seconds."""
    data = batches(24)
    reference = WaveReference(convolutions, adamw, loss_of)
    torch.manual_seed(4)
    expected = [reference.step(batch).item() for batch in data]
    daemon = Phoenix(tmp_path)
    kills = {5: daemon.kill_executors, 6: daemon.kill_executors, 13: daemon.kill}
    try:
        daemon.wait_until_ready()
        model, opt, job = submit(daemon.endpoint, convolutions, adamw)
        with job:
            torch.manual_seed(4)
            losses = []
            for m, batch in enumerate(data):
                losses.append(job.step(*batch))
                if m in kills:
                    losses[-1 - m % 2].item()
                    kills[m]()
                elif m == 10:
                    job.state_dict()
            losses = [loss.item() for loss in losses]
        daemon.stop()
    finally:
        daemon.close()
    assert losses == expected
    assert equal(model, opt, reference)
