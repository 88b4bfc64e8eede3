"""A crash, a kill, a failing operator: one job is lost with a typed error, other jobs are not affected."""

from __future__ import annotations

import errno
import os
import select
import signal
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import pytest

from gpumux.device.base import DeviceEvent, ProgramChecked, ProgramRefused
from gpumux.device.cpu.device import CpuDevice
from gpumux.errors import ConfigError
from gpumux.program.codec import encode
from gpumux.program.ir import Program
from gpumux.types import JobDied, PieceFailed, ProgramId
from tests.daemon.victim import long
from tests.device.cpu.support import CASE, children, executors, fork_server
from tests.device.harness import GIVE_UP_S, Driver, LoadedJob
from tests.program import samples


@pytest.fixture
def own() -> Iterator[Driver]:
    """A driver of a device whose fork server a test may kill."""
    device = CpuDevice(threads=1, cores=2)
    device.open()
    driver = Driver(CASE, device)
    yield driver
    driver.finish()
    device.close()


class Neighbour:
    """Another job that counts; whatever happens next door, it counts on."""

    def __init__(self, driver: Driver) -> None:
        self.job = driver.open()
        self.program = self.job.load(samples.counter(), [4])
        self.count = 0

    def check(self) -> None:
        for _ in range(4):
            self.job.step(self.program, [1.0])
            self.count += 1
            assert struct.unpack("f", self.job.get(self.program, 0, 4)) == (self.count,)


def lose(driver: Driver, job: LoadedJob, program: ProgramId) -> JobDied:
    """Run a step that fails; the loss of its job, which says what the launch said."""
    (launch,) = job.launch(program)
    failed = driver.failed(launch)
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert isinstance(lost, JobDied)
    assert lost.fault == failed.fault
    return lost


def crash_maxpool(driver: Driver) -> tuple[LoadedJob, ProgramId]:
    job = driver.open()
    program = job.load(samples.crash_maxpool(derived=True))
    job.put(program, 2, struct.pack("4q", 1, 1, 1, 1))
    return job, program


def crash_div(driver: Driver) -> tuple[LoadedJob, ProgramId]:
    job = driver.open()
    program = job.load(samples.crash_div())
    job.put(program, 0, struct.pack("4q", *[-(1 << 63)] * 4))
    job.put(program, 1, struct.pack("4q", *[-1] * 4))
    return job, program


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("make", "signal_name", "operator"),
    [(crash_maxpool, "SIGSEGV", "max_pool2d_with_indices_backward"), (crash_div, "SIGFPE", "aten.div.Tensor_mode")],
)
def test_a_crashing_kernel_loses_its_job_alone(driver: Driver, make, signal_name: str, operator: str) -> None:
    neighbour = Neighbour(driver)
    job, program = make(driver)
    neighbour.check()
    fault = lose(driver, job, program).fault
    assert fault.code == "executor_crashed"
    assert signal_name in fault.message
    assert operator in fault.message
    neighbour.check()


@pytest.mark.parametrize("make", [crash_maxpool, crash_div])
def test_a_crash_in_a_measured_piece_names_its_operators(driver: Driver, make) -> None:
    job, program = make(driver)
    data = job.data[program].memory
    bad = bytes(data)
    data[:] = bytes(len(bad)) if make is crash_maxpool else bad.replace(b"\xff" * 8, (1).to_bytes(8, "little"))
    for _ in range(3):
        job.step(program)
    assert job.cut[program] == 1
    data[:] = bad
    fault = lose(driver, job, program).fault
    assert fault.code == "executor_crashed"
    assert samples_operator(job.programs[program]) in fault.message


def samples_operator(program: Program) -> str:
    return program.ops[-1].target


def test_a_killed_executor_is_noticed_while_idle(driver: Driver, device: CpuDevice) -> None:
    neighbour = Neighbour(driver)
    before = set(executors(device))
    job = driver.open()
    job.load(samples.counter(), [4])
    (pid,) = set(executors(device)) - before
    os.kill(pid, signal.SIGKILL)
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert isinstance(lost, JobDied)
    assert lost.fault.code == "executor_crashed"
    assert "SIGKILL" in lost.fault.message
    assert "out of memory" in lost.fault.remedy
    assert job.job not in device.memory().by_job
    neighbour.check()


def test_the_fork_servers_death_loses_jobs_and_no_checks_and_new_jobs_can_be_opened(own: Driver) -> None:
    """One device for both, because a start takes seconds: it starts a new fork server by itself."""
    driver, device = own, own.device
    assert isinstance(device, CpuDevice)
    job = driver.open()
    program = job.load(samples.counter(), [4])
    launches = [launch for _ in range(3) for launch in job.launch(program, [1.0])]
    old = fork_server(device)
    running = executors(device)
    os.kill(old, signal.SIGKILL)
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert isinstance(lost, JobDied)
    assert lost.fault.code == "executor_crashed"
    assert "ended with the process that started it" in lost.fault.message
    assert "operator" not in str(lost.fault), "no operator has to do with it"
    for event in driver.unread:
        if isinstance(event, PieceFailed):
            assert event.launch in launches
    assert running
    assert not [pid for pid in running if Path(f"/proc/{pid}/exe").exists()]
    assert fork_server(device) != old
    Neighbour(driver).check()  # so that the new one has got as far as forking
    job = driver.open()
    device.check(job.job, ProgramId(1), encode(samples.sgd_linear(rows=23)))  # which was never checked
    os.kill(fork_server(device), signal.SIGKILL)

    def answers(event: DeviceEvent) -> bool:
        of_job = getattr(event, "job", None) == job.job
        return of_job and (isinstance(event, JobDied) or getattr(event, "program", None) == 1)

    assert isinstance(driver.wait_for(answers), ProgramChecked), "by a process of the next fork server"


@pytest.mark.extended
def test_a_process_that_outlives_its_fork_server_for_a_moment_is_taken_for_no_other(
    own: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills the fork server's children after it: the end of one may be heard when the next server has forked
    already. Both servers' first processes had one token, so that this end was that of the new one, and left the other
    jobs closing for ever."""
    driver, device = own, own.device
    assert isinstance(device, CpuDevice)
    old = driver.open()
    old.load(samples.counter(), [4])
    record, hear = device._jobs[old.job], device._hear
    monkeypatch.setattr(device, "_hear", lambda executor: executor is not record and hear(executor))
    server = fork_server(device)
    os.kill(server, signal.SIGKILL)
    began = monotonic()
    while device._fork_server is None or fork_server(device) == server:
        driver.poll()
        assert monotonic() - began < GIVE_UP_S
    neighbour = Neighbour(driver)
    monkeypatch.undo()
    assert isinstance(driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == old.job), JobDied)
    neighbour.check()
    os.kill(*executors(device), signal.SIGKILL)
    driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == neighbour.job.job)


def test_nothing_is_left_after_close() -> None:
    device = CpuDevice(threads=1, cores=2)
    device.open()
    driver = Driver(CASE, device)
    Neighbour(driver).check()
    job = driver.open()
    driver.device.check(job.job, ProgramId(1), encode(samples.sgd_linear()))
    with ExitStack() as stack:
        pids = [fork_server(device), *children(fork_server(device))]
        watches = [os.pidfd_open(pid) for pid in pids]
        for watch in watches:
            stack.callback(os.close, watch)
        assert len(pids) >= 2
        device.close()
        for (
            watch
        ) in watches:  # the kernel kills a checker with its fork server, and it dies once it has a processor for that
            assert select.select([watch], [], [], GIVE_UP_S)[0], "a process is left"
    for held in driver.jobs.values():
        for data in held.data.values():
            data.close()


def test_executors_ignore_an_interrupt_and_have_a_process_group_of_their_own(driver: Driver, device: CpuDevice) -> None:
    neighbour = Neighbour(driver)
    for pid in children(fork_server(device)):
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(0), "niceness counts only within a session"
        os.kill(pid, signal.SIGINT)
    neighbour.check()


def test_a_command_that_can_not_be_sent_fails_its_job_and_no_other(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = driver.open(), driver.open()
    program, others = job.load(samples.counter(), [4]), other.load(samples.counter(), [4])

    def full(channel: object, command: object) -> None:
        raise OSError(errno.EMSGSIZE, "Message too long")

    with monkeypatch.context() as patched:
        patched.setattr("gpumux.device.cpu.device._send", full)
        (launch,) = job.launch(program, [1.0])
    assert "Message too long" in driver.failed(launch).fault.message
    assert driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    other.step(others, [2.0])


def test_a_check_that_computes_for_too_long_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    job = driver.open()
    assert isinstance(driver.device, CpuDevice)
    monkeypatch.setitem(driver.device._checks._settings, "cpu_s", 1)
    driver.device.check(job.job, ProgramId(1), long(150_000))
    refused = driver.until(ProgramRefused, job.job)
    assert "took longer than 1 s" in refused.fault.message
    job.load(samples.counter(), [4])


def checkers(device: CpuDevice) -> list[int]:
    """The processes that check something, by their names."""
    named = [(pid, Path(f"/proc/{pid}/comm").read_text().strip()) for pid in children(fork_server(device))]
    return [pid for pid, name in named if name == "gpumux-checker"]


def test_two_checks_run_side_by_side_on_two_cores(driver: Driver) -> None:
    hog, job = driver.open(), driver.open()
    assert isinstance(driver.device, CpuDevice)
    driver.device.check(hog.job, ProgramId(1), long(40_000))
    while not checkers(driver.device):
        driver.poll()
    os.kill(checkers(driver.device)[0], signal.SIGSTOP)  # it takes longer than the other, however busy the machine is
    job.load(samples.sgd_linear(rows=22), [12])  # which was never checked
    assert not any(isinstance(event, ProgramChecked) for event in driver.unread)
    driver.unload(driver.jobs.pop(hog.job).job)
    while driver.device._checks.running:  # its process is killed, and its end has to arrive
        driver.case.wait(driver.device)
        driver.poll()


def test_an_allowed_operator_that_torch_lacks_is_named() -> None:
    device = CpuDevice(threads=1, cores=1, allow_ops=("aten.add.Tensor", "aten.nope.default"))
    with pytest.raises(ConfigError, match=r"allow_ops names aten\.nope\.default, which torch does not have"):
        device.open()


def test_a_job_closed_before_its_checking_process_ends_takes_it_along(driver: Driver, device: CpuDevice) -> None:
    job = driver.open()
    device.check(job.job, ProgramId(0), encode(samples.sgd_linear(rows=23)))
    driver.until(ProgramChecked, job.job)
    assert len(checkers(device)) == 1, "it waits for another Program"
    driver.unload(driver.jobs.pop(job.job).job)
    while device._checks.processes:
        driver.case.wait(device)
        driver.poll()
    assert not checkers(device)


def test_equal_programs_are_checked_in_one_process(driver: Driver, device: CpuDevice, monkeypatch: pytest.MonkeyPatch):
    """A second job's check is answered from what the first one's found."""
    forked: list[str] = []
    server = device._fork_server
    assert server is not None
    fork = server.fork
    monkeypatch.setattr(server, "fork", lambda kind, *rest: (forked.append(kind), fork(kind, *rest))[1])
    program = samples.sgd_linear(rows=21)
    answers = []
    for _ in range(2):
        job = driver.open()
        device.check(job.job, ProgramId(0), encode(program))
        answers.append(driver.until(ProgramChecked, job.job))
    assert forked.count("checker") == 1
    assert answers[0].content_hash == answers[1].content_hash
    assert answers[0].footprint == answers[1].footprint
