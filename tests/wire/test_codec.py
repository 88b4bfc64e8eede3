"""What is sent is what arrives; whatever else arrives is a ProtocolError and nothing worse."""

from __future__ import annotations

import struct
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.errors import ProtocolError, VersionMismatch
from gpumux.wire import messages as m
from gpumux.wire.codec import (
    MAX_DEPTH,
    MAX_FRAMES,
    MAX_LIST,
    MAX_PROSE,
    checker_for,
    decode,
    decode_step,
    decode_step_done,
    encode,
    encode_alone,
    fits_step,
    fits_step_done,
    step_done_form,
)
from tests.wire.samples import JOB, any_message, message_of, payload_for

STEP = m.Step(JOB, 5, 1, 0, [0.1, 3], 0)
STEP_TAG, LOAD_TAG = 8, 6


def raw(*values: Any) -> list[bytes]:
    return [msgpack.packb(list(values))]


@pytest.mark.parametrize("cls", m.REGISTRY.values(), ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_message_survives_the_trip(cls: type[Any], data: st.DataObject):
    message = data.draw(message_of(cls))
    payload = payload_for(message)
    assert decode(encode(message, payload)) == (message, payload)


def test_tags_are_frozen():
    numbers = [*range(1, 4), *range(5, 39)]  # 4 was OpenJob before jobs shared memory
    names = " ".join(m.REGISTRY[tag].__name__ for tag in numbers)
    assert list(m.REGISTRY) == [*numbers, *range(40, 65)]
    assert " ".join(m.REGISTRY[tag].__name__ for tag in range(40, 65)) == (
        "PrepareSnapshot TakeSnapshot SnapshotSaved SnapshotWanted FindKept KeptFound ReadSnapshot SnapshotRead Replay "
        "Reserve ConfirmReservation ReleaseReservation "
        "PlaceJob JobPlaced JobNotStarted ProgramsKnown VacateDevices DevicesVacated PlacedJobEnded JobAnswered "
        "DrainNode GangSizes GrantedHello OpenFusibleJob GroupStepDone"
    )
    assert names == (
        "Hello Welcome Refusal JobOpened LoadProgram ProgramLoaded Step StepDone StepFailed OpenTransfer "
        "TransferSegment FillTransfer TransferDone PauseJob ResumeJob CloseJob JobEnded Done JobStats GetStatus "
        "Report Heartbeat Goodbye Leaving ProfileJob JobProfile ExplainJob RecordTrace TracePart ChangeJob "
        "StepAwaited OpenChannel ChannelOpened SegmentPassed OpenGangJob OpenJob GetInterference"
    )


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        raw(),
        [msgpack.packb({"tag": 8})],
        [msgpack.packb(8)],
        raw("8"),
        raw(True, 0.0),
        raw(8.0),
        raw(99),
        raw(-1),
        raw([8]),
        raw(STEP_TAG),
        raw(STEP_TAG, JOB, 5, 1, 0, []),
        raw(STEP_TAG, JOB, 5, 1, 0, [], 0, 0),
        [*raw(STEP_TAG, JOB, 5, 1, 0, [], 0), b"surplus"],
        raw(STEP_TAG, JOB, 5, 1, 0, [], 1),
        raw(STEP_TAG, JOB, 5, 1, 0, [], -1),
        raw(LOAD_TAG, 1, JOB, 1, [], []),
        [raw(STEP_TAG, JOB, 5, 1, 0, [], 0)[0] + b"\x00"],
        [raw(STEP_TAG, JOB, 5, 1, 0, [], 0)[0][:-1]],
        [msgpack.packb([23, msgpack.ExtType(5, b"abc")])],
        [msgpack.packb([23, msgpack.Timestamp(1)])],
    ],
    ids=str,
)
def test_malformed_frames(frames: list[bytes]):
    with pytest.raises(ProtocolError):
        decode(frames)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", b"x"),
        ("job", 7),
        ("job", "x" * 32),
        ("job", "0" * 31),
        ("step", True),
        ("step", 1.0),
        ("step", -1),
        ("step", 2**63),
        ("step", None),
        ("scalars", None),
        ("scalars", [True]),
        ("scalars", ["1"]),
        ("scalars", [[1.0]]),
        ("scalars", {"a": 1}),
        ("scalars", [0] * (MAX_LIST + 1)),
    ],
)
def test_a_field_that_does_not_fit_is_named(field: str, value: Any):
    values = STEP._asdict() | {field: value}
    with pytest.raises(ProtocolError):
        decode(raw(STEP_TAG, *values.values()))
    with pytest.raises(ProtocolError, match=rf"Step\.{field}"):
        encode(m.Step(**values))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_step_may_bring_any_float_and_nothing_else_may(value: float):
    step, payload = decode(encode(m.Step(JOB, 1, 1, 0, [1.0, value], 0)))
    assert payload == []
    assert isinstance(step, m.Step)
    assert repr(step.scalars) == repr([1.0, value])
    for message in (m.StepDone(JOB, 1, value, 0.0, 0.0, 0), m.Heartbeat(value)):
        with pytest.raises(ProtocolError):
            encode(message)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31m", "x" * 257, "\ud800"])
def test_names_can_be_shown_on_a_terminal(name: str):
    with pytest.raises(ProtocolError, match=r"OpenJob\.name"):
        encode(m.OpenJob(1, JOB, name, 0, 1.0, 1.1, None, 2, 0))


def test_trees_hold_plain_data_of_bounded_depth():
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = {"a": deep}
    for body in (deep, {"a": b"bytes"}, {1: 2}, {"a": float("nan")}, {"a": (1,)}):
        with pytest.raises(ProtocolError, match=r"Report\.body"):
            encode(m.Report(1, body))


def test_nested_announcements_cost_nothing():
    """Each header announces 65,535 items; naively believed, they are half a gigabyte of lists."""
    for head in (b"\xdc\xff\xff", b"\xdd\x00\x00\xff\xff", b"\xde\xff\xff\x01"):
        with pytest.raises(ProtocolError, match="nested too deep"):
            decode([b"\x97\x08" + head * 1000 + b"\x00" * 60_000])


def test_long_lists_with_bytes_like_headers_are_fine():
    load = m.LoadProgram(1, JOB, 1, [0xDCDCDCDC] * 5000, [0xDD] * 5000)
    assert decode(encode(load, [b"p"])) == (load, [b"p"])


def test_limits_on_size_and_frames():
    with pytest.raises(ProtocolError, match="at most"):
        decode(encode(m.Report(1, {"a": "x" * 1000})), max_control_bytes=500)
    with pytest.raises(ProtocolError):
        encode(m.Step(JOB, 1, 1, 0, [], MAX_FRAMES + 1), [b""] * (MAX_FRAMES + 1))


def test_own_code_may_say_one_for_one_point_zero_and_write_at_length():
    done, _ = decode(encode(m.StepDone(JOB, 1, 0, 1, 2, 0)))
    assert type(done.queue_s) is float
    failed, _ = decode(encode(m.StepFailed(JOB, 1, "job_failed", "x" * 100_000, "")))
    assert len(failed.message) == MAX_PROSE


def test_another_protocol_is_named_even_if_its_hello_looks_different():
    with pytest.raises(VersionMismatch, match="the client speaks protocol 7, the daemon speaks protocol 2"):
        decode(raw(1, 7, "something", "else"))
    with pytest.raises(VersionMismatch, match="the daemon speaks protocol 9"):
        decode(raw(2, 9))


def test_an_annotation_without_a_rule_is_an_error_at_import():
    with pytest.raises(TypeError, match="no wire form"):
        checker_for("x", set[int])


@given(st.binary(max_size=300))
@settings(max_examples=400, deadline=None)
def test_noise_is_a_protocol_error(noise: bytes):
    try:
        message, _ = decode([noise])
    except ProtocolError:
        return
    assert encode(message)  # whatever was taken is a message that could have been sent


@given(any_message(), st.data())
@settings(max_examples=400, deadline=None)
def test_a_mutated_message_is_a_message_or_a_protocol_error(message: Any, data: st.DataObject):
    frames = encode(message, payload_for(message))
    head = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(head) - 1))
        head[at] = data.draw(st.integers(0, 255))
    try:
        decoded, payload = decode([bytes(head), *frames[1:]])
    except ProtocolError:
        return
    assert decode(encode(decoded, payload)) == (decoded, payload)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=4), st.just(JOB), st.text(max_size=40),
    st.lists(st.one_of(st.integers(), st.floats(), st.booleans()), max_size=3), st.just(2**63), st.just(-1),
)  # fmt: skip


@pytest.mark.parametrize(("cls", "at_once"), [(m.Step, fits_step), (m.StepDone, fits_step_done)])
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_checking_all_fields_at_once_is_as_strict_as_one_by_one(cls: type[Any], at_once: Any, data: st.DataObject):
    hints = get_type_hints(cls, vars(m))
    good = data.draw(message_of(cls))
    values = list(good)
    for _ in range(data.draw(st.integers(0, 2))):
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(ODD)
    one_by_one = [checker_for(name, hints[name])(value) for name, value in zip(cls.__match_args__, values, strict=True)]
    assert at_once(values) is all(one_by_one)


@given(st.builds(m.StepDone, st.just(JOB), st.integers(0, 2**63 - 1), *[st.floats(0, 1e9)] * 3, st.just(0)))
@settings(deadline=None, max_examples=200)
def test_a_filled_form_is_a_step_done(done: m.StepDone):
    packet, *places = step_done_form(JOB)
    filled = bytearray(packet)
    for at, kind, value in zip(places, (">Q", ">d", ">d", ">d"), done[1:5], strict=True):
        struct.pack_into(kind, filled, at, value)
    assert decode([bytes(filled)]) == (done, [])
    assert decode_step_done(bytes(filled)) == done


@given(st.one_of(message_of(m.Step), message_of(m.StepDone)))
@settings(deadline=None, max_examples=200)
def test_a_message_alone_is_encoded_as_ever(message: Any):
    message = message._replace(frames=0)
    assert [encode_alone(message)] == encode(message)


def _either_way(read: Any, packet: bytes) -> Any:
    try:
        return read(packet)
    except ProtocolError as error:
        return str(error)


@given(
    st.one_of(any_message().map(lambda message: encode(message, payload_for(message))[0]), st.binary(max_size=80)),
    st.data(),
)
@settings(deadline=None, max_examples=200)
def test_decoding_what_is_probably_a_step_is_as_strict_as_ever(packet: bytes, data: st.DataObject):
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, max(0, len(packet) - 1)))
        packet = packet[:at] + data.draw(st.binary(max_size=2)) + packet[at + data.draw(st.integers(0, 2)) :]
    for read in (decode_step, decode_step_done):
        assert _either_way(read, packet) == _either_way(lambda p: decode([p])[0], packet)
