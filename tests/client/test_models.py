"""Tiny workloads of the HFTA paper through a job: equal to their plain loops bit for bit, under a schedule."""

from __future__ import annotations

import pytest

from clients.models.workloads import scheduler, workload
from tests.client.parity import Work, check

STEPS = 6


def work(name: str) -> Work:
    made = workload(name)
    config = {"seed": 3, "gamma": 0.5, "step_size": 2, "feature_transform": name == "pointnet_seg"}
    step, models, optimizers = made.factory(config)
    several = isinstance(models, tuple)
    chosen = list(models) if several else [models]
    kept = list(optimizers) if several else [optimizers]
    data = [made.batch(seed) for seed in range(3)]
    schedules = [scheduler(each, config) for each in kept]

    def loop(call):
        results = []
        for i in range(STEPS):
            results.append(call(*data[i % 3]))
            for schedule in schedules:
                schedule.step()
        return results

    return Work(chosen, kept, [(step, data[0])], loop)


# The others hold nothing that these or the tests beside this one do not; tests/fuse captures all of them.
@pytest.mark.parametrize("name", ["pointnet_seg", "mobilenet_v3", "transformer"])
def test_equal_to_the_plain_loop(name: str, endpoint: str):
    check(lambda: work(name), endpoint)
