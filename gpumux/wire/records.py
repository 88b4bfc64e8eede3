"""What a recording is made of (docs/protocol.md, "Recordings"): named tuples, packed as msgpack arrays.

All times are seconds since the recording began. Jobs go by their short ids. Of a job that is not the asker's own
(`JobSeen.own`) there are no operators: programs, ranges and messages are left empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, get_type_hints

import msgpack

from gpumux.errors import ProtocolError

MAX_ITEMS = 1 << 20  # of an array in a part


class JobSeen(NamedTuple):
    """Comes before anything else of the job. `priority` is "high" or "low"."""

    job: str
    name: str
    priority: str
    own: bool


class ProgramSeen(NamedTuple):
    """The operators of one program by name, in captured order; comes before its pieces."""

    job: str
    program: int
    operators: list[str]


class PieceRan(NamedTuple):
    """Operators [first, end) of the program ran on the job's stream. `launched` is when the piece was handed to the device;
    `how`: "done", "failed", "dropped" (the job was unloaded) or "running" (when the recording ended)."""

    job: str
    stream: int
    step: int
    program: int
    piece: int
    first: int
    end: int
    share: float
    launched: float
    started: float
    ended: float
    how: str


class StepRan(NamedTuple):
    """A step from its arrival to its answer; it waited `queue_s` for its first piece, and `device_s` is its pieces' time."""

    job: str
    step: int
    submitted: float
    answered: float
    queue_s: float
    device_s: float


class WasHeld(NamedTuple):
    """A low job could have run, and the guard held it for the sake of `high`; reasons as in gpumux/core/holds.py."""

    job: str
    high: str
    reason: str
    since: float
    until: float


class WasBanned(NamedTuple):
    """`low` was banned from operators [first, end) of `high`, where work beside took `ratio` times as long; on a `share`."""

    high: str
    low: str
    first: int
    end: int
    share: float
    ratio: float
    why: str
    since: float
    until: float


class Happened(NamedTuple):
    """One moment: what, in a few words, and for whoever may know more a sentence."""

    job: str
    when: float
    what: str
    message: str


Record = JobSeen | ProgramSeen | PieceRan | StepRan | WasHeld | WasBanned | Happened
KINDS: dict[int, type[Any]] = {
    1: JobSeen, 2: ProgramSeen, 3: PieceRan, 4: StepRan, 5: WasHeld, 6: WasBanned, 7: Happened,
}  # fmt: skip
_TAGS = {kind: tag for tag, kind in KINDS.items()}
_FIELDS = {kind: tuple(get_type_hints(kind).values()) for kind in _TAGS}


def pack(records: Iterable[Record]) -> bytes:
    """One part's frame."""
    packed: bytes = msgpack.packb([(_TAGS[type(record)], *record) for record in records])
    return packed


def unpack(frame: bytes) -> list[Record]:
    """The records of one part. Raises ProtocolError for anything else."""
    try:
        rows = msgpack.unpackb(frame, max_array_len=MAX_ITEMS, max_map_len=0, max_ext_len=0)
        return [_read(row) for row in rows]
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"a part of a recording that is none: {type(error).__name__}", "use the daemon's own version of gpumux"
        ) from error


def _read(row: list[Any]) -> Record:
    kind = KINDS[row[0]]
    values = [
        float(v) if hint is float and type(v) is int else v for v, hint in zip(row[1:], _FIELDS[kind], strict=True)
    ]
    for value, hint in zip(values, _FIELDS[kind], strict=True):
        if hint == list[str]:
            if type(value) is not list or not all(type(item) is str for item in value):
                raise ValueError("no list of names")
        elif type(value) is not hint:
            raise ValueError(f"{value!r} is no {hint}")
    record: Record = kind(*values)
    return record
