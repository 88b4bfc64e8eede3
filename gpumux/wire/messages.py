"""Every message of protocol 2: dataclasses in an explicit registry (docs/protocol.md). Step and StepDone,
which every step pays for, are named tuples: they are made at a third of the cost.

A message is one ZeroMQ frame of msgpack: [tag, field, field, ...] in declaration order; large
payloads (Programs, inline tensors) follow as further frames, counted by `frames` where a message
has any. Tags are stable for ever; a changed message gets a new tag.

    client -> daemon                    daemon -> client
    Hello                               Welcome | Refusal
    OpenJob                             JobOpened | Refusal
    LoadProgram (+1 frame: Program)     ProgramLoaded | Refusal   (its segment by the channel)
    Step (+ inline inputs on TCP)       StepDone (+ inline results on TCP) | StepFailed
    OpenTransfer (+ inline on TCP push) TransferSegment, then TransferDone | Refusal
    FillTransfer                        TransferDone (pushes: segment filled, copy it in)
    PauseJob / ResumeJob / CloseJob     Done | Refusal; JobEnded when it is over
    ChangeJob                           Done | Refusal
    StepAwaited                         (nothing) | Refusal
    JobStats / GetStatus                Report | Refusal
    ProfileJob                          JobProfile (+1 frame: a profile) | Refusal
    RecordTrace                         TracePart (+1 frame: records) ... | Refusal
    (snapshots and recovery: below)
    OpenChannel                         ChannelOpened | Refusal, SegmentPassed (on the local channel)
    Heartbeat                           Heartbeat
    Goodbye                             Leaving (daemon shuts down)

`ref` is the client's number for a request; the answer carries it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import msgpack

from gpumux.errors import ProtocolError

# ---- Messages of recovery: snapshots of a job's state, and how a client gets one back (docs/architecture.md, "Nothing
# is lost"). Their tags are in messages.py, with all others.
#
#     client -> daemon                        daemon -> client
#     PrepareSnapshot                         Done | Refusal        there is memory to copy the state to
#     TakeSnapshot (+1 frame: notes)          Done | Refusal        its place among the job's steps is fixed
#                                             SnapshotSaved         later: it is on the disk, or why not
#                                             SnapshotWanted        the daemon is about to leave
#     FindKept                                KeptFound | Refusal
#     ReadSnapshot                            SnapshotRead | Refusal (its segment by the channel)
#     Replay (+1 frame: the generator)        Done | Refusal
#
# The daemon never looks into notes: what they say is between the client that wrote them and the one that reads them.


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
    """`seconds` from TakeSnapshot to the end of writing. With a `code` it could not be saved, and the one before
    stays."""

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


SnapshotMessage = (
    PrepareSnapshot | TakeSnapshot | SnapshotSaved | SnapshotWanted | FindKept | KeptFound | ReadSnapshot | SnapshotRead
    | Replay
)  # fmt: skip
SNAPSHOT_REGISTRY: dict[int, type[Any]] = {
    40: PrepareSnapshot, 41: TakeSnapshot, 42: SnapshotSaved, 43: SnapshotWanted, 44: FindKept, 45: KeptFound,
    46: ReadSnapshot, 47: SnapshotRead, 48: Replay,
}  # fmt: skip
SNAPSHOT_FROM_CLIENT: frozenset[type[Any]] = frozenset({PrepareSnapshot, TakeSnapshot, FindKept, ReadSnapshot, Replay})


# ---- All other messages, and the registry of all.


PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a connection. `role` is "client" or "control". `inline`: the client can't
    take descriptors (TCP), so tensors travel as frames."""

    protocol: int
    gpumux_version: str
    role: str
    pid: int
    torch_version: str
    inline: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    """`channel` is the AF_UNIX path of the local channel, "" for an inline session; `nonce` opens this session's
    (OpenChannel). `device` is types.DeviceInfo as a map."""

    protocol: int
    gpumux_version: str
    session: str
    channel: str
    nonce: bytes
    heartbeat_s: float
    lease_s: float
    max_message_bytes: int
    device: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    ref: int
    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class OpenJob:
    ref: int
    job: str
    name: str
    priority: int
    weight: float
    max_slowdown: float
    memory_limit: int | None
    max_inflight: int
    seed: int
    models: int = 1


@dataclass(frozen=True, slots=True)
class JobOpened:
    ref: int
    job: str


@dataclass(frozen=True, slots=True)
class LoadProgram:
    """One frame follows: the encoded Program. `new_buffers` (bytes each) are appended to the job's
    state buffers, then the program's state slot i is bound to buffer `binding[i]`."""

    ref: int
    job: str
    program: int
    new_buffers: list[int]
    binding: list[int]


@dataclass(frozen=True, slots=True)
class ProgramLoaded:
    """Its data segment (`slots` x `slot_bytes`) was passed on the channel under `segment` (0 for an inline session).
    `warnings` are for the user."""

    ref: int
    job: str
    program: int
    segment: int
    slots: int
    slot_bytes: int
    warnings: list[str]


class Step(NamedTuple):
    """Run `program` on the batch in `slot`. On TCP `frames` inline inputs follow."""

    job: str
    step: int
    program: int
    slot: int
    scalars: list[float | int]
    frames: int


class StepDone(NamedTuple):
    job: str
    step: int
    queue_s: float
    device_s: float
    total_s: float
    frames: int


@dataclass(frozen=True, slots=True)
class StepFailed:
    job: str
    step: int
    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Move state buffers, laid end to end, each starting on 64 bytes. push: client to device."""

    ref: int
    job: str
    transfer: int
    buffers: list[int]
    push: bool


@dataclass(frozen=True, slots=True)
class TransferSegment:
    """The staging segment exists. Push: fill it, then send FillTransfer. Pull: wait for TransferDone."""

    ref: int
    job: str
    transfer: int
    segment: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FillTransfer:
    """The client has filled the segment. On TCP one frame follows: the bytes."""

    ref: int
    job: str
    transfer: int
    frames: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The copy is over; the segment may be read (pull) and is the client's to unmap. On TCP a pull
    carries one frame: the bytes."""

    job: str
    transfer: int
    code: str  # "" when it went well
    message: str
    remedy: str
    frames: int


@dataclass(frozen=True, slots=True)
class PauseJob:
    ref: int
    job: str


@dataclass(frozen=True, slots=True)
class ResumeJob:
    ref: int
    job: str


@dataclass(frozen=True, slots=True)
class CloseJob:
    """`drain`: answer what was submitted first; otherwise those steps fail."""

    ref: int
    job: str
    drain: bool


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over. `code` "" means it was closed as asked."""

    job: str
    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Done:
    ref: int


@dataclass(frozen=True, slots=True)
class JobStats:
    ref: int
    job: str


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Everything `gpumux status` and `gpumux jobs` show."""

    ref: int


@dataclass(frozen=True, slots=True)
class Report:
    ref: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """Ask for the costs of a program's operators; None: the program that ran most steps. Only a session
    that may change the job may ask."""

    ref: int
    job: str
    program: int | None


@dataclass(frozen=True, slots=True)
class JobProfile:
    """One frame follows: the text of a profile file (gpumux/program/profile.py), its name empty."""

    ref: int
    job: str
    program: int
    frames: int


@dataclass(frozen=True, slots=True)
class ExplainJob:
    """Why the job is slow or held, in sentences -> Report. For sessions that may change it."""

    ref: int
    job: str


@dataclass(frozen=True, slots=True)
class ChangeJob:
    """Give the job another priority or weight; None leaves it -> Done, once it is in force."""

    ref: int
    job: str
    priority: int | None
    weight: float | None


@dataclass(frozen=True, slots=True)
class RecordTrace:
    """Record what runs for so many seconds -> TraceParts. With seconds 0: end this session's recording now; it has
    no answer of its own."""

    ref: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TracePart:
    """One frame follows: records (gpumux/wire/messages.py), in no particular order. `seconds` have been recorded; with
    `last` it is over, and `reason` says why it is shorter than asked, "" if it is not."""

    ref: int
    last: bool
    seconds: float
    reason: str
    frames: int


@dataclass(frozen=True, slots=True)
class StepAwaited:
    """A thread of the client waits for this step, and steps the jobs `before` as well, which therefore get no step
    before it is answered. `over`: it waits no longer, though there was no answer. Nothing answers it but a Refusal."""

    ref: int
    job: str
    step: int
    before: list[str]
    over: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Application heartbeat: each end sends one when it has been silent for heartbeat_s."""

    sent: float


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The client leaves; its jobs close."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The daemon shuts down; every open call fails with DaemonGone at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """The first packet of a local channel (wire/channel.py), with the nonce of the session's Welcome."""

    protocol: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class ChannelOpened:
    """The daemon's first packet: from now on the session's steps go by the channel."""


@dataclass(frozen=True, slots=True)
class SegmentPassed:
    """Shared memory of `nbytes`; its descriptor comes with this packet. Another message then names it by its id."""

    segment: int
    nbytes: int


Message = (
    Hello | Welcome | Refusal | OpenJob | JobOpened | LoadProgram | ProgramLoaded | Step | StepDone | StepFailed
    | OpenTransfer | TransferSegment | FillTransfer | TransferDone | PauseJob | ResumeJob | CloseJob | JobEnded | Done
    | JobStats | GetStatus | Report | Heartbeat | Goodbye | Leaving | ProfileJob | JobProfile | ExplainJob
    | RecordTrace | TracePart | ChangeJob | StepAwaited | OpenChannel | ChannelOpened | SegmentPassed | SnapshotMessage
)  # fmt: skip

# Tag -> class. Never reuse a tag.
REGISTRY: dict[int, type[Any]] = {
    1: Hello, 2: Welcome, 3: Refusal, 4: OpenJob, 5: JobOpened, 6: LoadProgram, 7: ProgramLoaded, 8: Step, 9: StepDone,
    10: StepFailed, 11: OpenTransfer, 12: TransferSegment, 13: FillTransfer, 14: TransferDone, 15: PauseJob,
    16: ResumeJob, 17: CloseJob, 18: JobEnded, 19: Done, 20: JobStats, 21: GetStatus, 22: Report, 23: Heartbeat,
    24: Goodbye, 25: Leaving, 26: ProfileJob, 27: JobProfile, 28: ExplainJob, 29: RecordTrace, 30: TracePart,
    31: ChangeJob, 32: StepAwaited, 33: OpenChannel, 34: ChannelOpened, 35: SegmentPassed, **SNAPSHOT_REGISTRY,
}  # fmt: skip

# What a client may say; everything else from one is a protocol error.
FROM_CLIENT: frozenset[type[Any]] = frozenset(
    {Hello, OpenJob, LoadProgram, Step, OpenTransfer, FillTransfer, PauseJob, ResumeJob, CloseJob, JobStats, GetStatus,
     Heartbeat, Goodbye, ProfileJob, ExplainJob, RecordTrace, ChangeJob, StepAwaited, OpenChannel,
     *SNAPSHOT_FROM_CLIENT}
)  # fmt: skip


# ---- What a recording is made of (docs/protocol.md, "Recordings"): named tuples, packed as msgpack arrays.
#
# All times are seconds since the recording began. Jobs go by their short ids. Of a job that is not the asker's own
# (`JobSeen.own`) there are no operators: programs, ranges and messages are left empty.


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
    """Operators [first, end) of the program ran on the job's stream. `launched` is when the piece was handed to the
    device; `how`: "done", "failed", "dropped" (the job was unloaded) or "running" (when the recording ended)."""

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
    """A step from its arrival to its answer; it waited `queue_s` for its first piece, and `device_s` is its pieces'
    time."""

    job: str
    step: int
    submitted: float
    answered: float
    queue_s: float
    device_s: float


class WasHeld(NamedTuple):
    """A low job could have run, and the guard held it for the sake of `high`; reasons as in
    gpumux/scheduler/guard/decisions.py."""

    job: str
    high: str
    reason: str
    since: float
    until: float


class WasBanned(NamedTuple):
    """`low` was banned from operators [first, end) of `high`, where work beside took `ratio` times as long; on a
    `share`."""

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
    """One moment: what, in a few words, and a sentence for a session that may know more."""

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
