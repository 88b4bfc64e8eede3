"""Steps of a job compute the same in one graph and in pieces while other jobs come and go, and nothing is left."""

from __future__ import annotations

import random

import pytest

from gpumux.device.base import ProcessGroups, ProgramProfiled, ProgramRefused
from gpumux.device.cuda.device import CudaDevice
from gpumux.errors import JobFailed
from gpumux.types import Gang, Priority
from tests.device.cpu.gangs import summing
from tests.device.cuda.running import check, compute_of, in_pieces
from tests.device.harness import Driver, LoadedJob

STEPS = 60


@pytest.mark.every(8)
@pytest.mark.parametrize("seed", range(16))
def test_steps_are_right_while_jobs_come_and_go(seed: int, driver: Driver, shared: CudaDevice) -> None:
    pick, compute = random.Random(seed), compute_of(shared)
    free, before = shared.memory().free_bytes, len(compute.graphs)
    job, number = in_pieces(driver, shared)
    others: list[LoadedJob] = []
    profiles = 0

    def fail() -> None:
        if pick.random() < 0.02:
            raise JobFailed("a capture that fails now and then")

    compute.before_capture = fail
    try:
        for _ in range(STEPS):
            what = pick.choice(["step", "step", "step", "open", "close", "regrade", "profile", "aim"])
            if what == "open" and len(others) < 2:
                others.append(driver.open(priority=pick.choice(list(Priority))))
            elif what == "close" and others:
                driver.unload(others.pop().job)
            elif what == "regrade":
                shared.regrade(job.job, pick.choice(list(Priority)))
            elif what == "profile" and not profiles:
                shared.profile(job.job, number)
                profiles += 1
            elif what == "aim":
                shared.cut(job.job, number, pick.choice([1e-9, 1e-3, None]))
            check(job, number, pick.choice([0.5, -1.0, 2.0]))
        for _ in range(profiles):
            for _ in range(8):
                check(job, number, 1.0)
            driver.until(ProgramProfiled, job.job)
    finally:
        compute.before_capture = lambda: None
    for other in others:
        driver.unload(other.job)
    driver.unload(job.job)
    assert all(graph.dropped for graph in compute.graphs[before:])
    assert shared.memory().free_bytes == free


def test_a_program_that_exchanges_data_with_other_ranks_is_refused(driver: Driver) -> None:
    held = driver.open()
    number = held.try_load(summing(0, 2, [("float32", (6,))]))
    refused = driver.until(ProgramRefused, held.job)
    assert (refused.program, refused.fault.code) == (number, "program")
    assert "exchanges data with other ranks" in refused.fault.message
    assert isinstance(driver.device, ProcessGroups)
    refusal = driver.device.may_join(Gang("ab" * 16, 0, 2, "127.0.0.1:29500"))
    assert refusal is not None
    assert "not proven" in refusal.message
