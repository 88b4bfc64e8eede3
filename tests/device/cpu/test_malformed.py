"""What a job's process may send that no sound one sends: it ends that process, and nothing else."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.device.base import Launch, ProgramChecked
from gpumux.device.cpu import device as cpu
from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cpu.jobs import ExecutorRecord, Listing
from gpumux.device.run.schedule import LoadCommand, ProfileCommand, Schedule, TransferCommand
from gpumux.device.workers import channel, checks
from gpumux.device.workers.channel import (
    CHECKED,
    DESCRIPTORS,
    DONE,
    DONE_BODY,
    EXCHANGED,
    FAILED,
    LOADED,
    MAX_BYTES,
    MORE,
    PACKET,
    PAGE_LAUNCH,
    PAGE_LAUNCH_AT,
    PAGE_TIMES,
    PAGE_TIMES_AT,
    PROFILED,
    RECUT,
    REFUSED,
    STEP_FAILED,
    TRANSFERRED,
    Channel,
    Descriptors,
    MalformedMessage,
)
from gpumux.types import Footprint, JobId, LaunchId, PieceDone, ProgramId, ProgramReady, StepId, TransferId
from tests.device.cpu.support import executors
from tests.device.harness import Case, Driver
from tests.program import samples

JOB, PROGRAM = JobId("1" * 32), ProgramId(3)
LAUNCH = Launch(LaunchId(7), JOB, StepId(1), PROGRAM, 0, 0, 0, (), 0, 1.0, 0.5)
LOAD = LoadCommand(
    program=PROGRAM, encoded=b"", new_buffers=(), binding=(), held=Descriptors(()), nbytes=0, slots=1, charge=0,
    transient=0, room=0,
)  # fmt: skip
COMMANDS: tuple[Any, ...] = (
    None, LAUNCH, LOAD, TransferCommand(TransferId(1), (0,), Descriptors(()), 4, True), ProfileCommand(PROGRAM),
)  # fmt: skip
SOUND = {  # of each message, a body that a sound process sends
    LOADED: [3, [0.1, 0.2], [0, 1, 2], ["aten.add.Tensor"], [0, 0], [1], None],
    RECUT: [3, 1, [0.1], [0, 2], {}, [], [0, 0, [64]]],
    REFUSED: [3, "program", "why", "remedy"],
    FAILED: [7, "job_failed", "why", "remedy"],
    TRANSFERRED: [1, "", "", ""],
    PROFILED: [b"{}", "", "", ""],
    EXCHANGED: [1, 1, 1.0, 2.0, [[1, 8, 8]], 0.5],
    STEP_FAILED: [7, 1.0, 2.0, 0.5, "bad_value", "why", "remedy"],
}
ANSWERED_BY = {LOADED: LOAD, TRANSFERRED: COMMANDS[3], PROFILED: COMMANDS[4], REFUSED: LOAD, STEP_FAILED: LAUNCH}


def record(page: mmap.mmap) -> ExecutorRecord:
    found = ExecutorRecord(JOB, None, page)  # type: ignore[arg-type] - nothing is read from it here
    found.programs[PROGRAM] = Listing(["aten.add.Tensor"], [0, 0], {0: [0, 1, 2]})
    found.transients[PROGRAM] = 0
    return found


@pytest.fixture
def page():
    with mmap.mmap(-1, mmap.PAGESIZE) as made:
        yield made


def running(command: Any) -> Schedule[Any]:
    schedule: Schedule[Any] = Schedule(1)
    schedule.open(JOB)
    if command is not None:
        schedule.submit(JOB, command, 0 if isinstance(command, Launch) else None)
        assert [what for _, what in schedule.hand_over()] == [command]
    return schedule


def said(tag: int, body: Any, command: Any, page: mmap.mmap) -> list[Any]:
    return cpu.answer(record(page), running(command), tag, memoryview(msgpack.packb(body)))


@pytest.mark.parametrize("tag", SOUND)
def test_sound_messages_are_understood(tag: int, page: mmap.mmap):
    events = said(tag, SOUND[tag], ANSWERED_BY.get(tag), page)
    assert len(events) == (0 if tag == FAILED else 1)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8) | st.sampled_from((0, 1, 2, 3, 7, -1, 1 << 62, float("nan"), float("inf"))),
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@st.composite
def altered(draw: st.DrawFn) -> tuple[int, Any]:
    """A sound message in which some entries are something else."""
    tag = draw(st.sampled_from(sorted(SOUND)))
    body = [draw(anything) if draw(st.booleans()) else entry for entry in SOUND[tag]]
    return tag, draw(st.sampled_from((body, body[:-1], [*body, 0], body[0])))


@settings(max_examples=600, deadline=None)
@given(altered() | st.tuples(st.integers(0, 255).filter(lambda tag: tag != DONE), anything), st.sampled_from(COMMANDS))
def test_other_messages_are_malformed_and_change_nothing(message: tuple[int, Any], command: Any):
    tag, body = message
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        executor, schedule = record(page), running(command)
        try:
            events = cpu.answer(executor, schedule, tag, memoryview(msgpack.packb(body)))
        except MalformedMessage:
            assert schedule.running(JOB) is command, "it is still to be answered"
            return
        for event in events:
            if isinstance(event, ProgramReady):
                assert event.pieces
                assert min(event.pieces) >= 0.0
                assert len(event.bounds) in (0, len(event.pieces) + 1)
                executor.programs[PROGRAM].describe(LAUNCH, 0)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 255), st.binary(max_size=64), st.sampled_from(COMMANDS))
def test_bytes_that_are_no_message_are_malformed(tag: int, body: bytes, command: Any):
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            cpu.answer(record(page), running(command), tag, memoryview(body))
        except MalformedMessage:
            pass


NAN, INF = float("nan"), float("inf")
IMPOSSIBLE = ((NAN, 2.0, 0.0), (1.0, NAN, 0.0), (2.0, 1.0, 0.0), (1.0, 1e300, 0.0), (1.0, INF, 0.0), (1.0, 2.0, NAN),
              (1.0, 2.0, INF), (1.0, 2.0, -1.0), (-5.0, 2.0, 0.0))  # fmt: skip


@pytest.mark.parametrize("times", IMPOSSIBLE)
def test_times_that_no_launch_can_have_are_not_believed(times: tuple[float, float, float], page: mmap.mmap):
    started, ended, suspended = times
    body = DONE_BODY.pack(DONE, 7, started, ended, True, suspended)[1:]
    with pytest.raises(MalformedMessage, match="impossible time"):
        cpu.answer(record(page), running(LAUNCH), DONE, memoryview(body))
    PAGE_TIMES.pack_into(page, PAGE_TIMES_AT, *times)
    PAGE_LAUNCH.pack_into(page, PAGE_LAUNCH_AT, 7)
    assert cpu.unheard(record(page), running(LAUNCH)) == []


def test_the_end_of_a_launch_counts_once_and_only_if_it_ran(page: mmap.mmap):
    body = memoryview(DONE_BODY.pack(DONE, 7, 1.0, 2.0, True, 0.0)[1:])
    schedule = running(LAUNCH)
    assert cpu.answer(record(page), schedule, DONE, body) == [PieceDone(LaunchId(7), 1.0, 2.0, True, 0.0)]
    with pytest.raises(MalformedMessage):
        cpu.answer(record(page), schedule, DONE, body)
    other = memoryview(DONE_BODY.pack(DONE, 8, 1.0, 2.0, True, 0.0)[1:])
    with pytest.raises(MalformedMessage):
        cpu.answer(record(page), running(LAUNCH), DONE, other)


def test_texts_fill_no_log_and_make_no_lines_of_their_own():
    assert channel.text("a\x1b[2J\u2028b") == "a?[2J?b"
    assert len(channel.text("x" * 1_000_000)) == channel.MAX_TEXT


# ---- The channel.


@pytest.fixture
def ends():
    ours, theirs = channel.pair()
    ours.setblocking(False)
    yield Channel(ours, daemons=True), theirs
    ours.close()
    theirs.close()


def receive_waiting(ours: Channel) -> tuple[int, Any, int]:
    """The next message, and how often there was none yet."""
    waits = 0
    while True:
        try:
            tag, body, _ = ours.receive()
            return tag, channel.unpack(body), waits
        except BlockingIOError:
            assert ours._length <= MAX_BYTES
            waits += 1


def test_descriptors_are_refused_and_none_is_kept(ends: tuple[Channel, socket.socket]):
    ours, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    theirs.send(bytes((DESCRIPTORS,)))
    socket.send_fds(theirs, [bytes((LOADED,))], [0, 1, 2])
    with pytest.raises(MalformedMessage, match="descriptors"):
        ours.receive()
    ours.receive()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_without_end_is_read_in_parts_and_refused(ends: tuple[Channel, socket.socket]):
    ours, theirs = ends
    packet = bytes((MORE,)) + bytes(PACKET - 1)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            try:
                theirs.send(packet)
            except OSError:
                return

    sender = threading.Thread(target=flood)
    sender.start()
    try:
        with pytest.raises(MalformedMessage, match="more than"):
            receive_waiting(ours)
    finally:
        stop.set()
        ours.close()
        sender.join()
    assert ours._length < MAX_BYTES + 2 * PACKET


def test_a_long_message_is_read_whole_over_several_calls(ends: tuple[Channel, socket.socket]):
    ours, theirs = ends
    text = "x" * (channel.MAX_AT_ONCE * PACKET * 2)
    sender = threading.Thread(target=lambda: Channel(theirs).send(PROFILED, [text]))
    sender.start()
    tag, body, waits = receive_waiting(ours)
    sender.join()
    assert waits >= 2
    assert (tag, body) == (PROFILED, [text])


# ---- Checkers.


@settings(max_examples=400, deadline=None)
@given(st.sampled_from((CHECKED, REFUSED, 200)), st.data())
def test_what_a_checker_says_is_looked_at(tag: int, data: st.DataObject):
    sound: list[Any] = ["hash", [1, 2, 3, 0], ["aten.add.Tensor"], ["float"], [64]]
    body = [data.draw(anything) if data.draw(st.booleans()) else entry for entry in sound]
    check = checks.Check(JOB, PROGRAM, b"", b"", None)
    try:
        answer = checks._answer(check, tag, memoryview(msgpack.packb(body)))
    except MalformedMessage:
        return
    assert isinstance(answer, ProgramChecked)
    assert isinstance(answer.footprint, Footprint)
    assert min(answer.footprint.state_bytes, answer.footprint.transient_bytes, *answer.live, 0) == 0


# ---- A device.


def test_a_process_that_sends_anything_ends_alone(monkeypatch: pytest.MonkeyPatch):
    device = CpuDevice(threads=1, cores=2)
    driver = Driver(Case("cpu", wide=lambda: device, narrow=lambda: device), device)
    device.open()
    try:
        honest, bad = driver.open(), driver.open()
        program = honest.load(samples.add_one())
        honest.step(program)
        other = bad.load(samples.add_one())
        taken = device._jobs[bad.job].channel
        receive = taken.receive
        monkeypatch.setattr(taken, "receive", lambda: (200, receive()[1], []))
        (launch, *_) = bad.launch(other)
        fault = driver.failed(launch).fault
        assert fault.code == "executor_crashed"
        assert "malformed" in fault.message
        assert "other jobs are unharmed" in fault.remedy
        honest.step(program)
        assert len(executors(device)) == 1
    finally:
        driver.finish()
        device.close()
