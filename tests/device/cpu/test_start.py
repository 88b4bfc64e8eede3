"""When a job's process is started: with its first command, so that a job opened for nothing costs little."""

from __future__ import annotations

import os
import signal

import pytest

from gpumux.device.base import JobDied, JobReleased, ProgramReady
from gpumux.device.cpu.device import CpuDevice
from gpumux.program.codec import encode
from gpumux.types import Fault, Priority, ProgramId
from tests.device.cpu.support import CASE, executors, fork_server
from tests.device.cpu.test_crashes import Neighbour
from tests.device.harness import Driver
from tests.program import samples


@pytest.fixture
def own():
    device = CpuDevice(threads=1, cores=2, low_nice=5)
    device.open()
    driver = Driver(CASE, device)
    yield driver
    driver.finish()
    device.close()


def test_a_job_has_no_process_before_its_first_program_is_loaded(own: Driver) -> None:
    device = own.device
    assert isinstance(device, CpuDevice)
    job, other = own.open(), own.open()
    Neighbour(own).check()  # the fork server has had the time to fork
    assert len(executors(device)) == 1
    device.check(job.job, ProgramId(9), encode(samples.sgd_linear()))
    own.wait_for(lambda e: getattr(e, "program", None) == 9)
    assert len(executors(device)) == 1
    job.load(samples.counter(), [4])
    assert len(executors(device)) == 2
    device.unload(other.job)
    assert own.wait_for(lambda e: isinstance(e, JobReleased) and e.job == other.job)


@pytest.mark.extended
def test_a_job_without_a_process_outlives_the_fork_server(own: Driver) -> None:
    device = own.device
    assert isinstance(device, CpuDevice)
    job, neighbour = own.open(), own.open()
    neighbour.load(samples.counter(), [4])
    os.kill(fork_server(device), signal.SIGKILL)
    own.wait_for(lambda e: isinstance(e, JobDied) and e.job == neighbour.job)
    job.load(samples.counter(), [4])
    assert len(executors(device)) == 1


def test_what_is_asked_for_before_a_fork_server_is_ready_waits_for_it(own: Driver) -> None:
    """It was forked by one that ended before it was ready, and ended with it. A job that leaves meanwhile gets none."""
    device = own.device
    assert isinstance(device, CpuDevice)
    known = own.open()
    known.load(samples.counter(), [4])  # so that its check needs no process
    server = device._fork_server
    assert server is not None
    facts, server.facts = server.facts, None
    waits, leaves = own.open(), own.open()
    for job in (waits, leaves):
        job.try_load(samples.counter(), [4])
    device.unload(leaves.job)
    assert own.wait_for(lambda e: isinstance(e, JobReleased) and e.job == leaves.job)
    assert len(executors(device)) == 1
    server.facts = facts
    device.can_fork(server)
    assert own.wait_for(lambda e: isinstance(e, ProgramReady) and e.job == waits.job)
    assert len(executors(device)) == 2


def test_a_job_that_is_aborted_before_it_has_a_process_dies_of_that_fault(own: Driver) -> None:
    job = own.open()
    fault = Fault("peer_lost", "a rank has ended", "submit it again")
    assert isinstance(own.device, CpuDevice)
    own.device.abort(job.job, fault)
    died = own.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert isinstance(died, JobDied)
    assert died.fault == fault


@pytest.mark.every(2)
@pytest.mark.parametrize("priority", [Priority.HIGH, Priority.LOW])
def test_a_priority_that_is_changed_before_the_process_is_started_is_its_own(own: Driver, priority: Priority) -> None:
    device = own.device
    assert isinstance(device, CpuDevice)
    if device.may_regrade(Priority.HIGH) is not None:
        pytest.skip("this machine's user may not make processes less nice")
    job = own.open()
    device.regrade(job.job, priority)
    job.load(samples.counter(), [4])
    (pid,) = executors(device)
    expected = os.getpriority(os.PRIO_PROCESS, 0) + (5 if priority is Priority.LOW else 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == expected
