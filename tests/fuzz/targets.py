"""What the fuzzers call: every decoder that reads what the other side of a connection sent.

A target takes any bytes. It returns whether they were a valid message, and raises only where a decoder broke its
promise: another error than the typed one, a message that can't be sent again, or two decoders that disagree.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumux.errors import ProgramError, ProtocolError
from gpumux.program import codec as programs
from gpumux.program.codec import outline
from gpumux.program.ir import ProgramLimits, slot_layout
from gpumux.program.validate import validate
from gpumux.wire import messages as records
from gpumux.wire.channel import PACKET, decode_packet
from gpumux.wire.codec import decode, decode_step, decode_step_done, encode
from gpumux.wire.limits import Limits
from gpumux.wire.messages import FROM_CLIENT

MOST = Limits().max_control_bytes
SMALL = ProgramLimits(body_bytes=1 << 20)


def message(data: bytes) -> bool:
    """A message from a client, as the router reads it: the first byte says how many empty payload frames follow."""
    if not data:
        return False
    frames = [data[1:], *[b""] * (data[0] % 4)]
    try:
        found, payload = decode(frames, MOST)
    except ProtocolError:
        return False
    again = encode(found, payload)
    assert repr(decode(again)) == repr((found, payload)), "it does not survive the way back"  # nan equals nothing
    return type(found) in FROM_CLIENT


def channel(data: bytes) -> bool:
    """A packet on a local channel: the quick decoder takes what the whole one takes, and nothing else."""
    if len(data) > PACKET:
        return False
    quick, whole = _outcome(lambda: decode_step(data, MOST)), _outcome(lambda: decode((data,), MOST)[0])
    assert repr(quick) == repr(whole), "the quick decoder of steps disagrees with the whole one"
    done = _outcome(lambda: decode_step_done(data, MOST))
    assert repr(done) == repr(whole), "the quick decoder of answers disagrees with the whole one"
    return not isinstance(_outcome(lambda: decode_packet(data, MOST)), ProtocolError)


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except ProtocolError as error:
        return error


def program(data: bytes) -> bool:
    """An encoded Program, as a checker decodes and validates it and the daemon then reads its edge."""
    try:
        found = programs.decode(data, SMALL)
    except ProgramError:
        return False
    assert programs.encode(found) == data, "the encoding is not canonical"
    try:
        validate(found)
    except ProgramError:
        return False
    edge = outline(data)
    assert edge.layout == slot_layout(found), "the outline lays a slot out otherwise"
    assert edge.scalars == len(found.scalars)
    return True


def edge(data: bytes) -> bool:
    """The daemon's own look at an encoded Program, without the checker before it."""
    try:
        outline(data)
    except ProgramError:
        return False
    return True


def trace(data: bytes) -> bool:
    """A part of a recording, as a client reads it."""
    try:
        found = records.unpack(data)
    except ProtocolError:
        return False
    assert repr(records.unpack(records.pack(found))) == repr(found)
    return True


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "message": message,
    "channel": channel,
    "program": program,
    "edge": edge,
    "trace": trace,
}
