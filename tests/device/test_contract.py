"""What every device must do, whatever it is made of (gpumux/device/base.py)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from time import monotonic

import pytest

from gpumux.device.base import (
    GENERATOR,
    AnswerForm,
    Answering,
    Device,
    Launch,
    ProcessGroups,
    ProgramChecked,
    ProgramProfiled,
    ProgramRefused,
    SegmentHandle,
)
from gpumux.program.codec import encode
from gpumux.program.ir import Op, Program, Storage, TensorRef, View, slot_layout
from gpumux.program.profile import loads, op_shapes
from gpumux.types import (
    GENERATOR_BYTES,
    Fault,
    Gang,
    JobDied,
    JobId,
    JobReleased,
    JobSpec,
    LaunchId,
    PieceDone,
    PieceFailed,
    ProgramId,
    ProgramReady,
    StepId,
    TransferEnded,
    TransferId,
)
from tests.device.harness import Case, Driver, SharedMemory, floats, numbers
from tests.leaks import snapshot
from tests.program import samples


def descriptors(case: Case) -> dict[str, int]:
    """How many there are: of the kinds a device makes itself, where a library opens others that stay for the process'
    life."""
    if case.shares_process:
        held = snapshot()
        return {kind: held.count(kind) for kind in ("eventfd", "epoll", "memfd")}
    return {"all": len(os.listdir("/proc/self/fd"))}


def test_open_says_what_the_device_is_and_close_can_be_repeated_and_frees_its_descriptors(case: Case) -> None:
    """One device for both: it takes seconds to open."""
    before = descriptors(case)
    device = case.narrow()
    info = device.open()
    try:
        assert info.kind == case.name
        assert info.parallel == 1
        assert info.memory_bytes > 0
        assert set(info.piece_target_s) == {"low", "high"}
        assert device.filenos()
        device.open_job(JobId("a" * 32), JobSpec("left open"))
    finally:
        device.close()
    device.close()
    assert device.poll() == []
    assert descriptors(case) == before


def test_check_tells_size_and_hash(driver: Driver) -> None:
    job = driver.open()
    program = samples.sgd_linear()
    driver.device.check(job.job, ProgramId(7), encode(program))
    answer = driver.until(ProgramChecked, job.job)
    assert answer.program == 7
    assert answer.operators == tuple(op.target for op in program.ops)
    assert answer.footprint.state_bytes >= 12
    assert answer.footprint.slot_bytes == slot_layout(program).nbytes
    assert len(answer.content_hash) == 64


@pytest.mark.parametrize("encoded", [b"", b"nonsense", encode(samples.add_one())[:-3]], ids=["empty", "noise", "cut"])
def test_check_refuses_what_is_no_program(driver: Driver, encoded: bytes) -> None:
    job = driver.open()
    driver.device.check(job.job, ProgramId(1), encoded)
    assert driver.until(ProgramRefused, job.job).fault.code == "program"


def test_check_refuses_an_operator_outside_the_list_by_name(driver: Driver) -> None:
    view = View(0, "float32", (1,), (1,))
    op = Op("aten.from_file.default", (TensorRef(0),), outs=(0,))
    program = Program((Storage("state", 4, 0),), (view,), (op,), (), ())
    job = driver.open()
    driver.device.check(job.job, ProgramId(1), encode(program))
    assert "from_file" in driver.until(ProgramRefused, job.job).fault.message


def test_load_needs_the_very_bytes_that_were_checked(driver: Driver) -> None:
    job = driver.open()
    driver.device.check(job.job, ProgramId(1), encode(samples.add_one()))
    driver.until(ProgramChecked, job.job)
    shared = SharedMemory(4096)
    other = encode(samples.counter())
    driver.device.load_program(job.job, ProgramId(1), other, [4], [0], shared.segment, 1)
    assert driver.until(ProgramRefused, job.job).fault.code == "program"
    shared.close()


def test_a_step_takes_inputs_and_gives_results(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.add_one())
    for slot in (0, 1, 0):
        job.put(program, 0, floats(1, 2, 3, slot), slot)
        job.step(program, slot=slot)
        if driver.case.computes:
            assert numbers(job.get(program, 0, 16, slot)) == (2, 3, 4, slot + 1)


def test_an_empty_program_runs(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.empty())
    for _ in range(5):
        (done,) = job.step(program)
        assert done.started <= done.ended


def test_state_starts_at_zero_and_lives_across_steps_and_cuts(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    for count in range(1, 14):
        job.step(program, [0.5])
        if driver.case.computes:
            assert numbers(job.get(program, 0, 4)) == (0.5 * count,)


def test_a_measured_program_is_cut_anew(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.sgd_linear(), [12])
    for _ in range(2):
        job.step(program, [0.1])
    recut = driver.until(ProgramReady, job.job)
    assert recut.cut == 1
    assert recut.program == program
    assert len(recut.pieces) >= 1
    assert all(seconds >= 0 for seconds in recut.pieces)
    job.step(program, [0.1])


def test_a_loaded_program_is_cut_as_it_is_told(driver: Driver) -> None:
    job = driver.open()
    view, relu = View(0, "float32", (1 << 14,), (1,)), Op("aten.relu_.default", (TensorRef(0),), outs=(0,))
    program = job.load(Program((Storage("state", 4 << 14, 0),), (view,), (relu,) * 12, (), ()), [4 << 14])
    for _ in range(2):
        job.step(program)
    usual = driver.until(ProgramReady, job.job)
    assert len(usual.pieces) < 12
    for target_s, pieces in ((1e-9, {12}), (None, range(1, 12)), (1e-9, {12}), (10.0, {1})):
        driver.device.cut(job.job, program, target_s)
        begun = [*job.launch(program), *job.launch(program)]  # both under the cut that is to go
        recut = driver.until(ProgramReady, job.job)
        assert recut.program == program
        assert len(recut.pieces) in pieces
        assert recut.bounds[0] == 0
        assert recut.bounds[-1] == 12
        for launch in begun:
            driver.done(launch)
        job.step(program)
    for stranger, number in ((JobId("e" * 32), program), (job.job, ProgramId(9))):
        driver.device.cut(stranger, number, 1e-3)
    job.step(program)


def test_a_measured_program_has_a_profile_and_the_job_goes_on(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.sgd_linear(), [12])
    driver.device.profile(job.job, program)
    early = driver.until(ProgramProfiled, job.job)
    assert early.fault is not None
    assert early.fault.remedy
    for _ in range(2):
        job.step(program, [0.1])
    driver.until(ProgramReady, job.job)
    driver.device.profile(job.job, program)
    job.step(program, [0.1])
    answer = driver.until(ProgramProfiled, job.job)
    assert (answer.program, answer.fault) == (program, None)
    profile = loads(answer.text.decode())
    expected = [(op.target, op_shapes(job.programs[program], op)) for op in job.programs[program].ops]
    assert [(op.target, op.shapes) for op in profile.ops] == expected
    assert all(op.seconds > 0 for op in profile.ops)
    assert set(profile.sources()) == {"measured" if driver.case.computes else "model"}
    assert profile.batch == job.programs[program].views[job.programs[program].inputs[0]].size[0]


def test_no_profile_of_what_is_not_there(driver: Driver) -> None:
    job = driver.open()
    driver.device.profile(job.job, ProgramId(9))
    assert driver.until(ProgramProfiled, job.job).fault is not None
    stranger = JobId("e" * 32)
    driver.device.profile(stranger, ProgramId(1))
    assert driver.until(ProgramProfiled, stranger).fault is not None


def test_a_step_that_began_before_a_recut_keeps_its_cut(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    job.step(program, [1.0])
    launches = [*job.launch(program, [1.0]), *job.launch(program, [1.0]), *job.launch(program, [1.0])]
    for launch in launches:  # all of them under cut 0; the device cuts after the first
        driver.done(launch)
    driver.until(ProgramReady, job.job)
    job.step(program, [1.0])
    if driver.case.computes:
        assert numbers(job.get(program, 0, 4)) == (5.0,)


def test_two_programs_share_a_jobs_state(driver: Driver) -> None:
    job = driver.open()
    first = job.load(samples.counter(), [4])
    second = job.load(samples.counter(), [], [0])
    job.step(first, [1.0])
    job.step(second, [10.0])
    if driver.case.computes:
        assert numbers(job.get(second, 0, 4)) == (11.0,)


def test_launches_of_a_job_run_in_order(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    launches = [launch for _ in range(6) for launch in job.launch(program, [1.0])]
    times = [driver.done(launch) for launch in launches]
    for earlier, later in pairwise(times):
        assert earlier.ended <= later.started


def test_a_free_slot_goes_to_the_highest_priority_then_to_the_oldest(narrow: Driver) -> None:
    jobs = [narrow.open() for _ in range(4)]
    programs = [job.load(samples.counter(), [4]) for job in jobs]
    running, old, young, high = jobs
    # No event is read in between, so the device can't have noticed that the first one ended.
    first = running.launch(programs[0], [1.0], stream=0)[0]
    second = old.launch(programs[1], [1.0], stream=0)[0]
    third = young.launch(programs[2], [1.0], stream=0)[0]
    urgent = high.launch(programs[3], [1.0], stream=1)[0]
    again = running.launch(programs[0], [1.0], stream=0)[0]
    done = [narrow.done(launch) for launch in (first, urgent, second, third, again)]
    assert done == sorted(done, key=lambda d: d.started)
    for earlier, later in pairwise(done):
        assert earlier.ended <= later.started


def test_transfers_go_both_ways_in_order_with_launches(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4, 8], [0])
    job.transfer([1, 0], [8, 4], b"ABCDEFGH".ljust(64, b"\0") + floats(5.0))
    job.launch(program, [1.0])
    job.launch(program, [1.0])
    pulled = job.transfer([0, 1], [4, 8])
    if driver.case.computes:
        assert numbers(pulled[:4]) == (7.0,)
    assert pulled[64:72] == b"ABCDEFGH"


def test_the_generator_goes_out_and_back_behind_the_buffers(driver: Driver) -> None:
    """Two jobs that draw: from the same state come the same draws, wherever it is put."""
    program, sizes = samples.dropout(), [4, GENERATOR_BYTES]
    one, other = driver.open(seed=1), driver.open(seed=2)
    drawn = []
    for job in (one, other):
        job.load(samples.counter(), [4])
        drawing = job.load(program)
        job.put(drawing, 0, floats(*[1.0] * 64))
        job.step(drawing)
    state = one.transfer([0, GENERATOR], sizes)
    length = int.from_bytes(state[64:72], "little")
    assert 0 <= length <= GENERATOR_BYTES - 8
    assert not any(state[72 + length :])
    other.transfer([0, GENERATOR], sizes, state)
    for job in (one, other):
        job.step(drawing)
        drawn.append([job.get(drawing, i, 256) for i in range(3)])
    assert drawn[0] == drawn[1]
    assert other.transfer([0, GENERATOR], sizes) == one.transfer([0, GENERATOR], sizes)
    other.transfer([GENERATOR], [GENERATOR_BYTES], bytes(GENERATOR_BYTES))  # of length 0: as it is
    assert other.transfer([0, GENERATOR], sizes) == one.transfer([0, GENERATOR], sizes)


@pytest.mark.parametrize("length", [1, 5000, GENERATOR_BYTES, 1 << 62])
def test_what_is_no_generator_is_answered_and_the_job_lives_on(driver: Driver, length: int) -> None:
    job = driver.open()
    shared = SharedMemory(GENERATOR_BYTES)
    shared.memory[:8] = length.to_bytes(8, "little")
    driver.device.transfer(job.job, TransferId(1), [GENERATOR], shared.segment, True)
    refused = driver.until(TransferEnded, job.job).fault is not None
    assert refused == driver.case.computes, "a device that draws nothing has no generator to refuse it for"
    shared.close()
    job.step(job.load(samples.add_one()))


@pytest.mark.parametrize(
    "buffers",
    [[1], [-2], [0, 0], [GENERATOR]],
    ids=["no such", "negative", "too many for the segment", "a generator in too small a segment"],
)
def test_a_bad_transfer_is_answered_and_the_job_lives_on(driver: Driver, buffers: list[int]) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    shared = SharedMemory(64)
    driver.device.transfer(job.job, TransferId(1), buffers, shared.segment, True)
    answer = driver.until(TransferEnded, job.job)
    assert answer.fault is not None
    shared.close()
    job.step(program, [2.0])
    if driver.case.computes:
        assert numbers(job.get(program, 0, 4)) == (2.0,)


def test_a_load_that_does_not_fit_is_refused_and_the_job_lives_on(driver: Driver) -> None:
    job = driver.open()
    held = driver.device.memory().by_job[job.job]
    job.try_load(samples.counter(), [1 << 50])
    assert driver.until(ProgramRefused | ProgramReady, job.job).fault.code == "admission_refused"
    assert driver.device.memory().by_job[job.job] == held
    program = job.load(samples.counter(), [4])
    job.step(program, [1.0])


@pytest.mark.parametrize("binding", [[], [1], [-1]], ids=["missing", "no such", "negative"])
def test_a_load_with_a_wrong_binding_is_refused_and_gives_its_memory_back(driver: Driver, binding: list[int]) -> None:
    job = driver.open()
    held = driver.device.memory().by_job[job.job]
    job.try_load(samples.counter(), [4], binding)
    refused = driver.until(ProgramRefused | ProgramReady, job.job)
    assert isinstance(refused, ProgramRefused)
    assert driver.device.memory().by_job[job.job] == held


def test_memory_is_charged_and_comes_back(driver: Driver) -> None:
    free = driver.device.memory().free_bytes
    job = driver.open()
    job.load(samples.counter(), [4, 1 << 20], [0])
    figures = driver.device.memory()
    assert figures.by_job[job.job] >= (1 << 20) + 4
    assert figures.free_bytes <= free - (1 << 20)
    driver.unload(job.job)
    assert driver.device.memory().free_bytes == free
    assert job.job not in driver.device.memory().by_job


def test_unload_in_the_middle_says_nothing_more_of_the_job(driver: Driver) -> None:
    job, other = driver.open(), driver.open()
    program, kept = job.load(samples.counter(), [4]), other.load(samples.counter(), [4])
    launches = {launch for _ in range(50) for launch in job.launch(program, [1.0])}
    driver.done(min(launches))
    driver.unread.clear()
    driver.unload(job.job)
    other.step(kept, [1.0])
    spoken = [e for e in driver.unread if isinstance(e, PieceDone | PieceFailed) and e.launch in launches]
    assert spoken == []
    assert not [e for e in driver.unread if isinstance(e, JobDied | JobReleased)]


def test_unload_is_idempotent(driver: Driver) -> None:
    job = driver.open()
    driver.device.unload(job.job)
    driver.unload(job.job)
    driver.unload(job.job)


def test_unload_drops_a_check_under_way(driver: Driver) -> None:
    job, other = driver.open(), driver.open()
    driver.device.check(job.job, ProgramId(1), encode(samples.sgd_linear()))
    driver.unload(job.job)
    other.load(samples.counter(), [4])
    assert not [e for e in driver.unread if isinstance(e, ProgramChecked | ProgramRefused) and e.job == job.job]


def test_verbs_on_an_unknown_job_are_answered(driver: Driver) -> None:
    job, shared = JobId("f" * 32), SharedMemory(64)
    driver.device.launch(Launch(LaunchId(1 << 40), job, StepId(0), ProgramId(1), 0, 0, 0, (), 0))
    assert driver.failed(LaunchId(1 << 40)).fault.code == "unknown_job"
    assert driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job)
    driver.device.transfer(job, TransferId(1), [0], shared.segment, False)
    assert driver.until(TransferEnded, job).fault is not None
    driver.device.load_program(job, ProgramId(1), b"", [], [], shared.segment, 1)
    assert driver.until(ProgramRefused, job).fault.code == "unknown_job"
    driver.unload(job)
    shared.close()


@pytest.mark.parametrize(
    ("program", "cut", "piece", "slot", "scalars"),
    [(9, 0, 0, 0, (1.0,)), (1, 5, 0, 0, (1.0,)), (1, 0, 3, 0, (1.0,)), (1, 0, 0, 2, (1.0,)), (1, 0, 0, 0, ())],
    ids=["program", "cut", "piece", "slot", "scalars"],
)
def test_a_launch_of_what_is_not_there_fails_the_job(
    driver: Driver, program: int, cut: int, piece: int, slot: int, scalars: tuple[float, ...]
) -> None:
    job = driver.open()
    job.load(samples.counter(), [4])
    launch = LaunchId((1 << 41) + hash((program, cut, piece, slot, len(scalars))) % 1000)
    driver.device.launch(Launch(launch, job.job, StepId(0), ProgramId(program), cut, piece, slot, scalars, 0))
    fault = driver.failed(launch).fault
    lost = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert isinstance(lost, JobDied)
    assert lost.fault == fault


@pytest.mark.covering
@pytest.mark.parametrize("count", [3600, 3700, 20_000, 28_000])
def test_a_step_may_have_many_scalars(driver: Driver, count: int) -> None:
    job = driver.open()
    many = replace(samples.counter(), scalars=("float",) * count)
    program = job.load(many, [4])
    for _ in range(3):
        job.step(program, [0.5] * count)
    if driver.case.computes:
        assert struct.unpack("f", job.get(program, 0, 4)) == (1.5,)


def test_a_scalar_may_be_no_number(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    for value in (1.0, float("inf"), float("nan"), float("-inf")):
        job.step(program, [value])
    if driver.case.computes:
        (state,) = struct.unpack("f", job.get(program, 0, 4))
        assert state != state


def test_a_check_says_which_scalars_a_step_brings(driver: Driver) -> None:
    job = driver.open()
    mixed = replace(samples.counter(), scalars=("float", "int", "float"))
    driver.device.check(job.job, ProgramId(1), encode(mixed))
    checked = driver.until(ProgramChecked, job.job)
    assert isinstance(checked, ProgramChecked)
    assert checked.scalars == mixed.scalars


def test_a_gang_of_one_runs_and_ends_as_it_is_told(driver: Driver) -> None:
    device = driver.device
    if not isinstance(device, ProcessGroups):
        pytest.skip("this device takes no ranks of a gang")
    alone = Gang("ab" * 16, 0, 1, "127.0.0.1:29500")
    assert device.may_join(alone) is None
    jobs = [driver.open(gang=alone) for _ in range(2)]
    for job in jobs:
        program = job.load(samples.counter(), [4])
        assert job.gated[program] == ()
        job.step(program, [0.5])
        if driver.case.computes:
            assert numbers(job.get(program, 0, 4)) == (0.5,)
    device.leave(jobs[0].job)
    jobs[0].step(program, [0.5])  # it has no collectives, for which it would need its peers
    fault = Fault("peers_lost", "another rank is gone", "submit it again")
    device.abort(jobs[1].job, fault)
    died = driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == jobs[1].job)
    assert isinstance(died, JobDied)
    assert died.fault == fault
    jobs[0].step(program, [0.5])
    if driver.case.computes:
        assert numbers(jobs[0].get(program, 0, 4)) == (1.5,)


def test_a_lost_job_takes_everything_outstanding_with_it(driver: Driver) -> None:
    job = driver.open()
    program = job.load(samples.counter(), [4])
    shared = SharedMemory(64)
    bad = job.launch(program, [], 0)
    behind = [launch for _ in range(3) for launch in job.launch(program, [1.0])]
    driver.device.transfer(job.job, TransferId(3), [0], shared.segment, False)
    driver.device.profile(job.job, program)
    for launch in (*bad, *behind):
        assert driver.failed(launch).fault.message
    transferred = driver.wait_for(lambda e: isinstance(e, TransferEnded) and e.job == job.job)
    assert isinstance(transferred, TransferEnded)
    assert transferred.fault is not None
    profiled = driver.wait_for(lambda e: isinstance(e, ProgramProfiled) and e.job == job.job)
    assert isinstance(profiled, ProgramProfiled)
    assert profiled.fault is not None
    assert driver.wait_for(lambda e: isinstance(e, JobDied) and e.job == job.job)
    assert job.job not in driver.device.memory().by_job
    shared.close()


def test_the_callers_descriptors_stay_its_own(driver: Driver) -> None:
    job = driver.open()
    program, encoded = samples.add_one(), encode(samples.add_one())
    driver.device.check(job.job, ProgramId(1), encoded)
    driver.until(ProgramChecked, job.job)
    nbytes = slot_layout(program).nbytes
    fd = os.memfd_create("mine")
    os.ftruncate(fd, nbytes)
    driver.device.load_program(job.job, ProgramId(1), encoded, [], [], SegmentHandle(fd, nbytes), 1)
    os.close(fd)  # the device has its own by now
    assert driver.until(ProgramReady, job.job)


def test_devices_keep_the_protocol(case: Case) -> None:
    device: Device = case.narrow()
    for name in ("open", "filenos", "poll", "check", "open_job", "load_program", "launch", "transfer", "unload",
                 "memory", "close"):  # fmt: skip
        assert callable(getattr(device, name))


# ---- devices that answer steps themselves

FORM = AnswerForm(b"head" + bytes(32) + b"tail", 4, 12, 20, 28)


@pytest.fixture
def channel(driver: Driver) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The end the device answers on, and the client's. Only for devices that answer."""
    if not isinstance(driver.device, Answering):
        pytest.skip("this device leaves all answers to its caller")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.settimeout(30.0)
        yield ours, theirs


def answering(driver: Driver) -> Answering:
    assert isinstance(driver.device, Answering)
    return driver.device


def test_an_answer_is_the_filled_form_and_agrees_with_what_is_reported(driver: Driver, channel) -> None:
    ours, theirs = channel
    job = driver.open()
    program = job.load(samples.add_one())
    answering(driver).answer_on(job.job, ours.fileno(), FORM)
    ours.close()  # the caller's own descriptor
    for step in range(12):  # through all cuts
        submitted = monotonic()
        done = [driver.done(launch) for launch in job.launch(program, submitted=submitted)]
        assert [event.answered for event in done] == [False] * (len(done) - 1) + [True]
        packet = theirs.recv(100)
        assert (packet[:4], packet[36:]) == (b"head", b"tail")
        number, queue_s, device_s, total_s = struct.unpack(">Qddd", packet[4:36])
        assert number == step
        assert queue_s == max(0.0, done[0].started - submitted)
        assert device_s == pytest.approx(sum(event.ended - event.started for event in done))
        assert total_s == done[-1].ended - submitted


def test_only_a_launch_that_says_so_is_answered(driver: Driver, channel) -> None:
    ours, theirs = channel
    job, other = driver.open(), driver.open()
    programs = job.load(samples.add_one()), other.load(samples.add_one())
    answering(driver).answer_on(job.job, ours.fileno(), FORM)
    assert not job.step(programs[0])[-1].answered
    (launch,) = other.launch(programs[1], submitted=monotonic())  # of a job without a channel
    assert not driver.done(launch).answered
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(100)


def test_a_full_channel_is_left_to_the_caller_for_good(driver: Driver, channel) -> None:
    ours, theirs = channel
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it the least there is
    job = driver.open()
    program = job.load(samples.add_one())
    answering(driver).answer_on(job.job, ours.fileno(), FORM)
    answered = [driver.done(job.launch(program, submitted=monotonic())[-1]).answered for _ in range(60)]
    sent = answered.index(False)
    assert sent > 0
    assert not any(answered[sent:])
    assert [int.from_bytes(theirs.recv(100)[4:12], "big") for _ in range(sent)] == list(range(sent))
    assert not driver.done(job.launch(program, submitted=monotonic())[-1]).answered  # room, but out of order


def test_a_client_that_is_gone_does_not_hurt_the_job(driver: Driver, channel) -> None:
    ours, theirs = channel
    job = driver.open()
    program = job.load(samples.add_one())
    answering(driver).answer_on(job.job, ours.fileno(), FORM)
    theirs.close()
    assert not driver.done(job.launch(program, submitted=monotonic())[-1]).answered
    assert not driver.done(job.launch(program)[-1]).answered


def test_catching_up_knows_every_step_that_was_answered(driver: Driver, channel) -> None:
    ours, theirs = channel
    job = driver.open()
    program = job.load(samples.add_one())
    answering(driver).answer_on(job.job, ours.fileno(), FORM)
    launches = []
    for _ in range(200):
        (launch,) = job.launch(program, submitted=monotonic())
        theirs.recv(100)
        heard = answering(driver).catch_up(job.job)
        driver.unread += heard
        assert [e.answered for e in driver.unread if isinstance(e, PieceDone) and e.launch == launch] == [True]
        assert not [e for e in heard if isinstance(e, ProgramReady) and len(e.pieces) != 1]
        for event in heard:
            if isinstance(event, ProgramReady):
                job.pieces[program], job.cut[program] = event.pieces, event.cut
        launches.append(launch)
    job.step(program)  # whatever was still to be said has been said
    done = [e.launch for e in driver.unread if isinstance(e, PieceDone)]
    assert done == launches
    assert answering(driver).catch_up(JobId("f" * 32)) == []
