"""Executors at work: seeds, failing operators, allocation failures, numerics settings."""

from __future__ import annotations

import struct

import pytest
import torch

from gpumux.device.base import ProgramRefused
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.run.schema import CurrentNumerics
from gpumux.program.ir import Numerics, Program, TensorRef
from gpumux.types import JobDied, JobId, JobSpec, PieceDone, ProgramReady
from tests.device.harness import Driver
from tests.program import samples


def test_a_job_draws_from_a_generator_of_its_own_seed(driver: Driver) -> None:
    ones = torch.ones(64)
    generator = torch.Generator().manual_seed(11)
    jobs = [driver.open(seed=seed) for seed in (11, 11, 12)]
    got: list[list[bytes]] = []
    for job in jobs:
        program = job.load(samples.dropout())
        job.put(program, 0, ones.numpy().tobytes())
        got.append([])
        for _ in range(4):  # over both ways of running it
            job.step(program)
            got[-1].extend(job.get(program, position, 256) for position in (0, 2))
    direct = [torch.bernoulli(ones, 0.5, generator=generator).numpy().tobytes() for _ in range(8)]
    assert got[0] == direct
    assert got[1] == direct
    assert got[2] != direct


def doublings(times: int) -> Program:
    """input: float32[64], doubled so many times, each time from the temporary before."""
    d = samples._Draft()
    given = value = d.tensor("input", (64,), slot=0)
    for _ in range(times):
        value, before = d.tensor("temp", (64,)), value
        d.op("aten.add.Tensor", TensorRef(before), TensorRef(before), out=value)
    return d.program(inputs=(given,), results=(value,))


def test_several_pieces_are_one_launch(driver: Driver, device: CpuDevice) -> None:
    job = driver.open()
    program = job.load(doublings(12))
    ones = torch.rand(64, generator=torch.Generator().manual_seed(3))
    job.put(program, 0, ones.numpy().tobytes())
    device.cut(job.job, program, 1e-9)
    for _ in range(3):  # the first two are measured
        job.step(program)
    assert len(job.pieces[program]) == 12, "each operator is a piece"
    runs = ((0, 5), (5, 1), (6, 6))
    for pieces in (runs, [(0, 12)], runs):
        asked = job.pieces_of_step(program)
        launches = [asked[first]._replace(pieces=count) for first, count in pieces]
        for launch in launches:
            device.launch(launch)
        done = [driver.done(launch.launch) for launch in launches]
        assert all(one.started <= one.ended for one in done)
        assert job.get(program, 0, 256) == (ones * 2**12).numpy().tobytes()
        job.put(program, 0, ones.numpy().tobytes())
    assert not [event for event in driver.unread if isinstance(event, PieceDone)], "one answer each"


def test_pieces_behind_a_launch_of_several_are_in_their_order(driver: Driver, device: CpuDevice) -> None:
    job = driver.open()
    program = job.load(doublings(12))
    device.cut(job.job, program, 1e-9)
    for _ in range(3):
        job.step(program)
    asked = job.pieces_of_step(program)
    device.launch(asked[0]._replace(pieces=5))
    device.launch(asked[4])
    driver.done(asked[0].launch)
    assert "out of order" in driver.failed(asked[4].launch).fault.message


def derived_embedding() -> Program:
    """input: int64[1]; looks up row input + input of a table of four."""
    d = samples._Draft()
    table, index = d.tensor("state", (4, 2), slot=0), d.tensor("input", (1,), "int64", slot=0)
    doubled, out = d.tensor("temp", (1,), "int64"), d.tensor("temp", (1, 2))
    d.op("aten.add.Tensor", TensorRef(index), TensorRef(index), out=doubled)
    d.op("aten.embedding.default", TensorRef(table), TensorRef(doubled), out=out)
    return d.program(inputs=(index,), results=(out,))


@pytest.mark.parametrize("steps_before", [0, 3], ids=["operator by operator", "as a graph"])
def test_an_operator_that_raises_fails_the_job_by_name(driver: Driver, steps_before: int) -> None:
    job = driver.open()
    program = job.load(derived_embedding(), [32])
    for _ in range(steps_before):
        job.step(program)
    assert job.cut[program] == (1 if steps_before else 0)
    job.put(program, 0, struct.pack("q", 9))
    fault = driver.failed(job.launch(program)[0]).fault
    assert fault.code == "job_failed"
    assert "aten.embedding.default" in fault.message
    assert "index out of range" in fault.message
    assert "Traceback" not in fault.message
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert isinstance(lost, JobDied)
    assert lost.fault == fault


def test_an_allocation_that_fails_refuses_the_program_alone(
    driver: Driver, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = driver.open()
    monkeypatch.setattr(device, "_total", 1 << 62)  # so that it comes to the allocation
    job.try_load(samples.counter(), [4, 1 << 50])
    refused = driver.until(ProgramRefused | ProgramReady, job.job)
    assert isinstance(refused, ProgramRefused)
    assert refused.fault.code == "admission_refused"
    program = job.load(samples.counter(), [4])
    job.step(program, [2.0])
    assert struct.unpack("f", job.get(program, 0, 4)) == (2.0,)


def test_a_seed_torch_cannot_take_loses_the_job(driver: Driver, device: CpuDevice) -> None:
    job = JobId("e" * 32)
    device.open_job(job, JobSpec("seeded", seed=1 << 64))
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job)
    assert isinstance(lost, JobDied)
    assert "seed" in lost.fault.message


def test_a_scalar_without_an_encoding_fails_the_job(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    fault = driver.failed(job.launch(program, [1 << 70])[0]).fault
    assert fault.code == "job_failed"


def test_numerics_are_set_and_set_back() -> None:
    current = CurrentNumerics()
    wanted = Numerics(matmul_precision="medium", deterministic=True, mkldnn=False, default_dtype="float64")

    def now() -> Numerics:
        return Numerics(
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            mkldnn=torch.backends.mkldnn.enabled,
            default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        )

    before = now()
    try:
        current.apply(wanted)
        assert now() == wanted
        current.apply(Numerics())
        assert now() == Numerics()
    finally:
        current.apply(before)
