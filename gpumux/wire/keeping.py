"""Messages of recovery: snapshots of a job's state, and how a client gets one back (docs/architecture.md, "Nothing
is lost"). Their tags are in messages.py, with all others.

    client -> daemon                        daemon -> client
    PrepareSnapshot                         Done | Refusal        there is memory to copy the state to
    TakeSnapshot (+1 frame: notes)          Done | Refusal        its place among the job's steps is fixed
                                            SnapshotSaved         later: it is on the disk, or why not
                                            SnapshotWanted        the daemon is about to leave
    FindKept                                KeptFound | Refusal
    ReadSnapshot                            SnapshotRead | Refusal (segment fd by the side channel)
    Replay (+1 frame: the generator)        Done | Refusal

The daemon never looks into notes: what they say is between the client that wrote them and the one that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_NOTES = 16 << 20  # bytes
MAX_ASKED = 16  # snapshots a ReadSnapshot names


@dataclass(frozen=True, slots=True)
class PrepareSnapshot:
    """Make room for a copy of the job's state, so that taking it keeps no step waiting."""

    ref: int
    job: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Copy the state behind all steps submitted so far. `snapshot` is the client's number, larger than all before;
    `steps` how many steps have run, for people. One frame follows: notes, MAX_NOTES bytes at most."""

    ref: int
    job: str
    snapshot: int
    steps: int
    frames: int


@dataclass(frozen=True, slots=True)
class SnapshotSaved:
    """`seconds` from TakeSnapshot to the end of writing. With a `code` it could not be saved, and the one before stays."""

    job: str
    snapshot: int
    nbytes: int
    seconds: float
    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """The daemon leaves soon: a snapshot taken now spares the client steps to run again."""

    job: str


@dataclass(frozen=True, slots=True)
class FindKept:
    """The newest job of this user's that is called so and was kept."""

    ref: int
    name: str


@dataclass(frozen=True, slots=True)
class KeptFound:
    """Its id, under which it is to be opened again, and its snapshots, newest first."""

    ref: int
    job: str
    snapshots: list[int]


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """The first of `snapshots` that is there and whole. The job need not be open; it must be this user's."""

    ref: int
    job: str
    snapshots: list[int]


@dataclass(frozen=True, slots=True)
class SnapshotRead:
    """`segment` (0 on TCP, where one frame follows) holds `nbytes`: the state buffers, each on 64 bytes, the generator,
    and `notes` bytes of notes at the end. `bad`: those of the request that are there and damaged."""

    ref: int
    job: str
    snapshot: int
    segment: int
    nbytes: int
    notes: int
    bad: list[int]
    frames: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The client has put the job's state back; the generator's comes with this (one frame, as a segment has it, or b""
    for a generator that was never used), and `replays` steps that ran before will run again."""

    ref: int
    job: str
    replays: int
    frames: int


KeepingMessage = (
    PrepareSnapshot | TakeSnapshot | SnapshotSaved | SnapshotWanted | FindKept | KeptFound | ReadSnapshot | SnapshotRead
    | Replay
)  # fmt: skip
REGISTRY: dict[int, type[Any]] = {
    40: PrepareSnapshot, 41: TakeSnapshot, 42: SnapshotSaved, 43: SnapshotWanted, 44: FindKept, 45: KeptFound,
    46: ReadSnapshot, 47: SnapshotRead, 48: Replay,
}  # fmt: skip
FROM_CLIENT: frozenset[type[Any]] = frozenset({PrepareSnapshot, TakeSnapshot, FindKept, ReadSnapshot, Replay})
