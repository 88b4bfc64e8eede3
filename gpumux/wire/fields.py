"""What a message's field may hold: one checker an annotation, made once, called for every message.

A checker returns whether a value, as msgpack gives it, fits. `type(x) is int` rather than isinstance:
True is no number here, and msgpack's Timestamp or ExtType fits nothing.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any], bool]

MAX_NAME = 256  # characters of an identifier, name or path
MAX_PROSE = 16_384  # characters of a sentence for people
MAX_BYTES = 1_024  # of a bytes field
MAX_LIST = 65_536  # items of a list field
MAX_DEPTH = 8  # containers inside containers, in all
MAX_INT = 2**63 - 1

# Sentences for people: a long one is clipped by the sender, not refused.
PROSE = frozenset({"message", "remedy", "reason"})
# Counts, sizes and ids: never negative.
NATURAL = frozenset(
    {
        "protocol", "pid", "max_message_bytes", "ref", "priority", "memory_limit", "max_inflight", "program",
        "new_buffers", "binding", "segment", "slots", "slot_bytes", "step", "slot", "frames", "transfer", "buffers",
        "nbytes", "models", "snapshot", "snapshots", "steps", "replays", "notes", "bad",
    }
)  # fmt: skip
_HEX = "0123456789abcdef"


def clip(text: str) -> str:
    """`text` at a length every receiver takes."""
    return text if len(text) <= MAX_PROSE else text[: MAX_PROSE - 4] + " ..."


def checker_for(name: str, hint: Any) -> Check:
    """The checker of field `name` with annotation `hint`. Raises TypeError for an annotation this
    protocol has no rule for, when the module is imported."""
    if name == "seed":
        return _is_seed
    if name == "scalars":
        return _are_scalars
    if hint is str:
        return _is_job if name == "job" else _is_prose if name in PROSE or name == "warnings" else _is_name
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
    """A map of plain data for people and scripts (device facts, status)."""
    return type(value) is dict and _is_plain(value, 1)


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind is dict:
        return depth < MAX_DEPTH and all(_is_prose(k) and _is_plain(v, depth + 1) for k, v in value.items())
    if kind is list:
        return depth < MAX_DEPTH and len(value) <= MAX_LIST and all(_is_plain(item, depth + 1) for item in value)
    return value is None or _is_bool(value) or _is_int(value) or _is_float(value) or _is_prose(value)


def fits_step(values: Sequence[Any]) -> bool:
    """All of Step's fields at once; the same answer as its checkers one by one, at a third of the cost."""
    job, step, program, slot, scalars, frames = values
    return (
        type(job) is str and len(job) == 32 and not job.strip(_HEX)
        and type(step) is type(program) is type(slot) is type(frames) is int
        and 0 <= step <= MAX_INT and 0 <= program <= MAX_INT and 0 <= slot <= MAX_INT and 0 <= frames <= MAX_INT
        and type(scalars) is list and (not scalars or _are_scalars(scalars))
    )  # fmt: skip


def fits_step_done(values: Sequence[Any]) -> bool:
    """The same for StepDone."""
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

# A learning rate of nan is the user's own business; the plain loop takes it, too.
_are_scalars = _list_of(_either(lambda value: type(value) is float, _is_int))
