"""Encodes messages as frames, and decodes them (docs/protocol.md). Decoding raises ProtocolError (or its subclass
VersionMismatch) and no other error, whatever the bytes.

Every field is checked against its annotation when a message is encoded as when it is decoded, so that what one side can
send the other can read. The checkers are made once for each class of message.
"""

from __future__ import annotations

import operator
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import msgpack

from gpumux.errors import ProtocolError, VersionMismatch
from gpumux.wire import messages
from gpumux.wire.messages import (
    PROTOCOL_VERSION,
    REGISTRY,
    GrantedHello,
    Hello,
    LoadProgram,
    Message,
    OpenChannel,
    Step,
    StepDone,
    Welcome,
)

# ---- What a field of a message may hold: a checker for each field, made from its annotation.
#
# A checker returns whether a value, as msgpack decoded it, is valid. It compares types (`type(x) is int`) instead of
# using isinstance: True is no number here, and msgpack's Timestamp and ExtType are never valid.


Check: TypeAlias = Callable[[Any], bool]

MAX_NAME = 256  # characters of an identifier, name or path
MAX_PROSE = 16_384  # characters of a sentence for people
MAX_BYTES = 1_024  # of a bytes field
MAX_LIST = 65_536  # items of a list field
MAX_DEPTH = 8  # containers inside containers, in all
MAX_INT = 2**63 - 1

# Fields that hold sentences for people. The sender clips a long one; it is not refused.
PROSE = frozenset({"message", "remedy", "reason"})
# Fields that hold counts, sizes and ids, which are never negative.
NATURAL = frozenset(
    {
        "protocol", "pid", "max_message_bytes", "ref", "priority", "memory_limit", "max_inflight", "program",
        "new_buffers", "binding", "segment", "slots", "slot_bytes", "step", "slot", "frames", "transfer", "buffers",
        "nbytes", "models", "snapshot", "snapshots", "steps", "replays", "notes", "bad", "rank", "ranks",
        "sizes",
    }
)  # fmt: skip
_HEX = "0123456789abcdef"


def clip(text: str) -> str:
    """`text`, clipped to the length that every receiver accepts."""
    return text if len(text) <= MAX_PROSE else text[: MAX_PROSE - 4] + " ..."


def checker_for(name: str, hint: Any) -> Check:
    """The checker of field `name` with annotation `hint`. Raises TypeError for an annotation that the protocol has no
    rule for; that happens when the module is imported."""
    if name == "seed":
        return _is_seed
    if name == "scalars":
        return _are_scalars
    if hint is str:
        return _is_job if name in ("job", "gang") else _is_prose if name in PROSE or name == "warnings" else _is_name
    simple = _SIMPLE.get(hint)
    if simple is not None:
        return _is_natural if hint is int and name in NATURAL else simple
    if isinstance(hint, types.UnionType):
        first, second = (checker_for(name, option) for option in typing.get_args(hint))
        return _either(first, second)
    if typing.get_origin(hint) is list:
        return _list_of(checker_for(name, typing.get_args(hint)[0]))
    if hint == dict[str, Any]:
        return _is_tree
    raise TypeError(f"no wire form for {name}: {hint}")


def _is_int(value: Any) -> bool:
    return type(value) is int and -MAX_INT - 1 <= value <= MAX_INT


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_seed(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _is_float(value: Any) -> bool:
    return type(value) is float and isfinite(value)


def _is_bool(value: Any) -> bool:
    return value is True or value is False


def _is_none(value: Any) -> bool:
    return value is None


def _is_bytes(value: Any) -> bool:
    return type(value) is bytes and len(value) <= MAX_BYTES


def _is_name(value: Any) -> bool:
    # Names reach terminals and logs, where control characters could write anything.
    return type(value) is str and len(value) <= MAX_NAME and value.isprintable()


def _is_job(value: Any) -> bool:
    return type(value) is str and len(value) == 32 and not value.strip(_HEX)


def _is_prose(value: Any) -> bool:
    if type(value) is not str or len(value) > MAX_PROSE:
        return False
    # Lone surrogates can't be written as UTF-8.
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _list_of(item: Check) -> Check:
    def check(value: Any) -> bool:
        return type(value) is list and len(value) <= MAX_LIST and all(map(item, value))

    return check


def _either(first: Check, second: Check) -> Check:
    return lambda value: first(value) or second(value)


def _is_tree(value: Any) -> bool:
    """Whether it is a map of plain data for people and scripts (facts about the device, status)."""
    return type(value) is dict and _is_plain(value, 1)


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind is dict:
        return depth < MAX_DEPTH and all(_is_prose(k) and _is_plain(v, depth + 1) for k, v in value.items())
    if kind is list:
        return depth < MAX_DEPTH and len(value) <= MAX_LIST and all(_is_plain(item, depth + 1) for item in value)
    return value is None or _is_bool(value) or _is_int(value) or _is_float(value) or _is_prose(value)


def fits_step(values: Sequence[Any]) -> bool:
    """Check all fields of a Step at once: the same result as its checkers one by one, faster."""
    job, step, program, slot, scalars, frames = values
    return (
        type(job) is str and len(job) == 32 and not job.strip(_HEX)
        and type(step) is type(program) is type(slot) is type(frames) is int
        and 0 <= step <= MAX_INT and 0 <= program <= MAX_INT and 0 <= slot <= MAX_INT and 0 <= frames <= MAX_INT
        and type(scalars) is list and (not scalars or _are_scalars(scalars))
    )  # fmt: skip


def fits_step_done(values: Sequence[Any]) -> bool:
    """Check all fields of a StepDone at once."""
    job, step, queue_s, device_s, total_s, frames = values
    return (
        type(job) is str and len(job) == 32 and not job.strip(_HEX)
        and type(step) is type(frames) is int and 0 <= step <= MAX_INT and 0 <= frames <= MAX_INT
        and type(queue_s) is type(device_s) is type(total_s) is float
        and isfinite(queue_s) and isfinite(device_s) and isfinite(total_s)
    )  # fmt: skip


_SIMPLE: dict[Any, Check] = {
    int: _is_int,
    float: _is_float,
    bool: _is_bool,
    bytes: _is_bytes,
    type(None): _is_none,
}

# A float may be nan or infinite here: the plain loop takes such a learning rate, too.
_are_scalars = _list_of(_either(lambda value: type(value) is float, _is_int))


# ---- Encoding and decoding messages.


MAX_CONTROL_BYTES = 16 << 20  # of a message's first frame; the router allows clients far less
Frame = TypeVar("Frame", bytes, memoryview)

_PACK_BYTES = 512
_SMALL_BYTES = 512

_UNPACKABLE = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)
MAX_FRAMES = 4096  # payload frames of one message


class _Spec(NamedTuple):
    tag: int
    make: Callable[..., Any]
    names: tuple[str, ...]
    read: Callable[[Any], tuple[Any, ...]]
    checks: tuple[Check, ...]
    fits: Callable[[Sequence[Any]], bool]  # all checks at once
    arity: int
    floats: tuple[int, ...]  # positions where an int from Python code becomes a float
    prose: tuple[int, ...]  # positions of sentences, clipped rather than refused
    frames: int  # position of the field that counts payload frames, or -1
    fixed_frames: int  # payload frames where no field counts them


def _spec(tag: int, cls: type[Any]) -> _Spec:
    hints = get_type_hints(cls, vars(messages))
    names: tuple[str, ...] = cls.__match_args__
    getter = operator.attrgetter(*names) if names else None
    read: Callable[[Any], tuple[Any, ...]]
    if getter is None:
        read = _no_fields
    elif issubclass(cls, tuple):
        read = tuple
    elif len(names) == 1:
        read = _one_field(getter)
    else:
        read = getter
    checks = tuple(checker_for(name, hints[name]) for name in names)
    return _Spec(
        tag=tag,
        make=cls,
        names=names,
        read=read,
        checks=checks,
        fits=_AT_ONCE.get(cls) or partial(_all_fit, checks),
        arity=len(names),
        floats=tuple(i for i, name in enumerate(names) if hints[name] is float),
        prose=tuple(i for i, name in enumerate(names) if name in PROSE),
        frames=names.index("frames") if "frames" in names else -1,
        fixed_frames=1 if cls is LoadProgram else 0,
    )


def _all_fit(checks: tuple[Check, ...], values: Sequence[Any]) -> bool:
    return all(map(operator.call, checks, values))


# Faster checkers for the messages that each step has.
_AT_ONCE: dict[type[Any], Callable[[Sequence[Any]], bool]] = {Step: fits_step, StepDone: fits_step_done}


def _no_fields(message: Any) -> tuple[Any, ...]:
    return ()


def _one_field(getter: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda message: (getter(message),)


_BY_TAG: dict[int, _Spec] = {tag: _spec(tag, cls) for tag, cls in REGISTRY.items()}
_BY_CLASS: dict[type[Any], _Spec] = {cls: _BY_TAG[tag] for tag, cls in REGISTRY.items()}
_HANDSHAKE = frozenset(_BY_CLASS[cls].tag for cls in (Hello, GrantedHello, Welcome, OpenChannel))


def encode(msg: Message, frames: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """The ZeroMQ frames of `msg` and its payload. Raises ProtocolError if a field does not fit its annotation, or the
    payload is not what the message announces."""
    spec = _BY_CLASS.get(type(msg))
    if spec is None:
        raise ProtocolError(f"{type(msg).__name__} is not a message")
    values = spec.read(msg)
    if not spec.fits(values):
        values = _mend(spec, values)
    expected = values[spec.frames] if spec.frames >= 0 else spec.fixed_frames
    if len(frames) != expected or expected > MAX_FRAMES:
        raise ProtocolError(f"{type(msg).__name__} announces {expected} payload frames and has {len(frames)}")
    # By default a Packer allocates a quarter of a megabyte, which costs system calls and page faults.
    head: bytes = msgpack.Packer(buf_size=_PACK_BYTES).pack((spec.tag, *values))
    if len(head) > MAX_CONTROL_BYTES:
        raise ProtocolError(f"{type(msg).__name__} is {len(head)} bytes long, {MAX_CONTROL_BYTES} at most are allowed")
    return [head, *frames]


def encode_alone(msg: Step | StepDone) -> bytes | memoryview:
    """The only frame of a message without payload: the same as `encode`, faster."""
    spec = _BY_CLASS[type(msg)]
    if msg.frames == 0 and spec.fits(msg):
        head: bytes = msgpack.Packer(buf_size=_PACK_BYTES).pack((spec.tag, *msg))
        if len(head) <= MAX_CONTROL_BYTES:
            return head
    return encode(msg)[0]


def step_done_form(job: str) -> tuple[bytes, int, int, int, int]:
    """An encoded StepDone of `job` without payload, and the offsets of its step number and its queue, device and total
    seconds: 8 bytes each, as struct's ">Q" and ">d". For a process that answers steps instead of the daemon."""
    uint64, float64, zeros = b"\xcf", b"\xcb", bytes(8)
    head = bytes((0x90 + 1 + len(StepDone._fields), _BY_CLASS[StepDone].tag, 0xD9, len(job))) + job.encode("ascii")
    at = len(head) + 1
    packet = head + uint64 + zeros + 3 * (float64 + zeros) + b"\x00"
    return packet, at, at + 9, at + 18, at + 27


def _mend(spec: _Spec, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert ints in float fields, and clip long sentences: our own code may send these. Raises ProtocolError if any
    other field is invalid."""
    mended = list(values)
    for i in spec.floats:
        if type(mended[i]) is int and abs(mended[i]) <= 2**53:
            mended[i] = float(mended[i])
    for i in spec.prose:
        if isinstance(mended[i], str):
            mended[i] = clip(mended[i])
    if not spec.fits(mended):
        raise _misfit(spec, mended)
    return tuple(mended)


def decode(frames: Sequence[Frame], max_control_bytes: int = MAX_CONTROL_BYTES) -> tuple[Message, list[Frame]]:
    """The message in `frames`, and its payload frames unchanged. Raises ProtocolError for anything that is not exactly
    one message of this protocol."""
    if not frames:
        raise ProtocolError("a message without frames")
    head = frames[0]
    size = len(head)
    if size > max_control_bytes:
        raise ProtocolError(f"a first frame of {size} bytes, {max_control_bytes} at most are allowed")
    body = _unpack(head, size)
    spec = _BY_TAG.get(body[0]) if type(body[0]) is int else None
    if spec is None:
        raise ProtocolError("an unknown message tag")
    values = body[1:]
    if spec.tag in _HANDSHAKE:
        _check_version(spec, values)
    if len(values) != spec.arity:
        raise ProtocolError(f"{spec.make.__name__} has {spec.arity} fields, {len(values)} came")
    if not spec.fits(values):
        raise _misfit(spec, values)
    expected = values[spec.frames] if spec.frames >= 0 else spec.fixed_frames
    if len(frames) - 1 != expected or expected > MAX_FRAMES:
        raise ProtocolError(f"{spec.make.__name__} announces {expected} payload frames, {len(frames) - 1} came")
    return spec.make(*values), list(frames[1:])


def _decoder_of(cls: type[Any]) -> Callable[..., Message]:
    """A `decode` for messages of one frame that are probably of class `cls`: the same result, faster if they are."""
    tag, fits, fields = _BY_CLASS[cls].tag, _BY_CLASS[cls].fits, _BY_CLASS[cls].arity
    new: Callable[..., Message] = tuple.__new__  # past the check of arity, which is made here
    unpack = msgpack.unpackb

    def decode_probable(head: bytes, max_control_bytes: int = MAX_CONTROL_BYTES) -> Message:
        size = len(head)
        if size <= _SMALL_BYTES and size <= max_control_bytes:
            try:
                body = unpack(head, max_array_len=size, max_map_len=size, max_ext_len=0)
            except _UNPACKABLE:  # `decode` meets it again
                body = None
            if type(body) is list and len(body) == fields + 1 and type(body[0]) is int and body[0] == tag:
                del body[0]
                if fits(body) and body[-1] == 0:  # the last field counts payload frames
                    return new(cls, body)
        return decode((head,), max_control_bytes)[0]

    return decode_probable


decode_step = _decoder_of(Step)
decode_step_done = _decoder_of(StepDone)


def _unpack(head: bytes | memoryview, size: int) -> list[Any]:
    # msgpack allocates a list of the announced length before it reads the items, so a few kilobytes of nested headers
    # could allocate gigabytes. In a small frame the announced lengths are bounded by its size.
    most = size
    if size > _SMALL_BYTES:
        most = MAX_LIST
        if _wide_containers(bytes(head)) > MAX_DEPTH:
            _walk(bytes(head))
    try:
        body = msgpack.unpackb(head, max_array_len=most, max_map_len=most, max_ext_len=0)
    except _UNPACKABLE as error:
        raise ProtocolError(f"a first frame that is not msgpack: {type(error).__name__}") from error
    if type(body) is not list or not body:
        raise ProtocolError("a first frame that is not a msgpack array")
    return body


def _wide_containers(head: bytes) -> int:
    """An upper bound on the number of array16/32 and map16/32 headers."""
    return head.count(0xDC) + head.count(0xDD) + head.count(0xDE) + head.count(0xDF)


# Bytes after the type byte, for the types of fixed size (0xC0 to 0xDF); containers and runs below.
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
    0xD3: 8,
}  # fmt: skip
_RUNS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes and strings: size of the length
_WIDE = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # size of the length, values an item


def _walk(head: bytes) -> None:
    """Raise ProtocolError if containers nest deeper than any message does."""
    at, end = 0, len(head)
    left = [1]  # values still to come, of each open container
    while left:
        if left[-1] == 0:
            left.pop()
            continue
        left[-1] -= 1
        if at >= end:
            raise ProtocolError("a first frame that ends too soon")
        kind = head[at]
        at += 1
        if 0x80 <= kind <= 0x9F:
            left.append((kind & 15) * (2 if kind < 0x90 else 1))
        elif 0xA0 <= kind <= 0xBF:
            at += kind & 31
        elif kind in _WIDE:
            width, each = _WIDE[kind]
            left.append(int.from_bytes(head[at : at + width]) * each)
            at += width
        elif kind in _RUNS:
            width = _RUNS[kind]
            at += width + int.from_bytes(head[at : at + width])
        elif 0xC0 <= kind <= 0xDF:
            if kind not in _FIXED:
                raise ProtocolError("a first frame with a msgpack extension type")
            at += _FIXED[kind]
        if len(left) > MAX_DEPTH + 2:
            raise ProtocolError("a first frame nested too deep")


def _check_version(spec: _Spec, values: list[Any]) -> None:
    theirs = values[0] if values else None
    if type(theirs) is int and theirs != PROTOCOL_VERSION:
        raise version_mismatch(theirs, "daemon" if spec.make is Welcome else "client")


def version_mismatch(theirs: int, side: str) -> VersionMismatch:
    """The error that both ends raise if their protocols differ; it names both versions. `side`: the other end, "client"
    or "daemon"."""
    ours = "client" if side == "daemon" else "daemon"  # the text is read at either end
    return VersionMismatch(
        f"the {side} speaks protocol {theirs}, the {ours} speaks protocol {PROTOCOL_VERSION}",
        "install the same gpumux version on both sides",
    )


def _misfit(spec: _Spec, values: Sequence[Any]) -> ProtocolError:
    """The error for values of which one is invalid; it names the first such field."""
    triples = zip(spec.names, spec.checks, values, strict=True)
    name, value = next((name, value) for name, check, value in triples if not check(value))
    shown = repr(value) if isinstance(value, (bool, int, float)) else type(value).__name__
    return ProtocolError(f"{spec.make.__name__}.{name} does not fit its type or limits ({shown[:80]})")
