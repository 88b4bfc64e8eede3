"""The niceness of a job's process follows the job's priority while it runs."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from time import monotonic

import pytest

from gpumux.device.base import Regrading
from gpumux.device.cpu import device as cpu_device
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.run import interpreter as stopwatch
from gpumux.types import JobId, Priority
from tests.device.cpu.support import executors
from tests.device.harness import Case, Driver
from tests.program import samples

LONGEST_S = 60.0  # for a process of a lower priority to lose its core to a busy one
NICE = 7
CASE = Case("cpu", wide=lambda: CpuDevice(threads=2, cores=2, low_nice=NICE), narrow=lambda: CpuDevice(low_nice=NICE))


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CASE.narrow()
    device.open()
    yield device
    device.close()


@pytest.fixture
def driver(device: CpuDevice) -> Iterator[Driver]:
    driver = Driver(CASE, device)
    yield driver
    driver.finish()


def of_threads(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}


@pytest.mark.skipif(not cpu_device.may_be_less_nice(), reason="this process may not make one less nice")
def test_a_job_gives_way_and_then_does_not_and_all_of_its_threads_with_it() -> None:
    device = CASE.wide()
    device.open()
    driver = Driver(CASE, device)
    try:
        assert isinstance(device, Regrading)
        usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
        before = set(executors(device))
        job = driver.open()
        program = job.load(samples.add_one())
        job.step(program)
        (pid,) = set(executors(device)) - before
        assert of_threads(pid) == {min(19, usual + NICE)}
        for priority, nice in ((Priority.HIGH, usual), (Priority.LOW, min(19, usual + NICE))):
            assert device.may_regrade(priority) is None
            device.regrade(job.job, priority)
            began = monotonic()
            while of_threads(pid) != {nice} and monotonic() - began < LONGEST_S:
                job.step(program)  # the fork server changes it meanwhile
            assert of_threads(pid) == {nice}
        device.regrade(JobId("f" * 32), Priority.LOW)  # no such job: nothing happens
    finally:
        driver.finish()
        device.close()


@pytest.mark.every(2)
@pytest.mark.skipif(not stopwatch._counted(), reason="this kernel does not count what a thread waits for a core")
@pytest.mark.parametrize("priority", [Priority.LOW, Priority.HIGH])
def test_a_piece_that_gives_its_core_away_says_for_how_long_it_stood_still(
    priority: Priority, driver: Driver, device: CpuDevice
) -> None:
    core = min(os.sched_getaffinity(0))
    neighbour = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        before = set(executors(device))
        job = driver.open(priority=priority)
        program = job.load(samples.dropout(1 << 16))
        (pid,) = set(executors(device)) - before
        for process in (pid, neighbour.pid):
            os.sched_setaffinity(process, {core})
        for now in (priority, Priority.HIGH if priority is Priority.LOW else Priority.LOW):
            if now is not priority:
                if device.may_regrade(now) is not None:
                    break
                device.regrade(job.job, now)
            began = monotonic()
            stood = [done.suspended for _ in range(20) for done in job.step(program)]
            while now is Priority.LOW and max(stood) == 0.0 and monotonic() - began < LONGEST_S:
                stood += [done.suspended for done in job.step(program)]  # 20 steps may fit one turn on the core
            assert (max(stood) > 0.0) == (now is Priority.LOW)  # a high job's pieces are not measured
            assert sum(stood) <= monotonic() - began  # each piece's own seconds, and none counted twice
    finally:
        neighbour.kill()
        neighbour.wait()


def test_low_jobs_run_at_the_niceness_asked_for_and_high_ones_at_ours(driver: Driver, device: CpuDevice) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    for priority, nice in ((Priority.LOW, min(19, usual + NICE)), (Priority.HIGH, usual)):
        before = set(executors(device))
        driver.open(priority=priority).load(samples.counter(), [4])
        (pid,) = set(executors(device)) - before
        assert os.getpriority(os.PRIO_PROCESS, pid) == nice


def test_a_user_that_may_not_make_a_process_less_nice_learns_what_to_do(monkeypatch, tmp_path) -> None:
    powerless = tmp_path / "status"
    powerless.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    able = tmp_path / "able"
    able.write_text("CapEff:\t0000000000800000\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, 0))
    assert not cpu_device.may_be_less_nice(powerless)
    assert cpu_device.may_be_less_nice(able)
    assert not cpu_device.may_be_less_nice(tmp_path / "absent")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20, 20))
    assert cpu_device.may_be_less_nice(powerless)
    monkeypatch.setattr(cpu_device, "may_be_less_nice", lambda: False)
    device = CpuDevice(low_nice=19)
    fault = device.may_regrade(Priority.HIGH)
    assert fault is not None
    assert "LimitNICE" in fault.remedy
    assert device.may_regrade(Priority.LOW) is None
    assert CpuDevice(low_nice=0).may_regrade(Priority.HIGH) is None
