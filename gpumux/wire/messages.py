"""Every message of protocol 2: dataclasses in an explicit registry (docs/protocol.md). Step and StepDone, of which each
step has one, are named tuples, because those are made faster.

A message is one ZeroMQ frame of msgpack: [tag, field, field, ...] in declaration order. Large payloads (Programs,
inline tensors) follow as further frames; the field `frames` counts them in messages that can have any. A tag never
changes its meaning; a changed message gets a new tag.

    client -> daemon                    daemon -> client
    Hello                               Welcome | Refusal
    OpenJob / OpenGangJob               JobOpened | Refusal
    OpenFusibleJob                      JobOpened | Refusal
    LoadProgram (+1 frame: Program)     ProgramLoaded | Refusal   (its segment by the channel)
    Step (+ inline inputs on TCP)       StepDone (+ inline results on TCP) | StepFailed
                                        GroupStepDone: StepDone of a step that ran in a group
    OpenTransfer (+ inline on TCP push) TransferSegment, then TransferDone | Refusal
    FillTransfer                        TransferDone (pushes: segment filled, copy it in)
    PauseJob / ResumeJob / CloseJob     Done | Refusal; JobEnded when it is over
    ChangeJob                           Done | Refusal
    StepAwaited                         (nothing) | Refusal
    JobStats / GetStatus                Report | Refusal
    ProfileJob                          JobProfile (+1 frame: a profile) | Refusal
    RecordTrace                         TracePart (+1 frame: records) ... | Refusal
    (snapshots and recovery: the next section)
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
# is lost").
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
# The daemon does not read notes: one client writes them, for itself or for the client that resumes the job.


MAX_NOTES = 16 << 20  # bytes
MAX_ASKED = 16  # snapshots a ReadSnapshot names


@dataclass(frozen=True, slots=True)
class PrepareSnapshot:
    """Allocate memory for a copy of the job's state beforehand, so that no step waits for that."""

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
    """The end of a snapshot. `seconds`: from TakeSnapshot to the end of writing. With a `code` it could not be saved,
    and the one before stays."""

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
    """Find the newest job of this user with this name whose snapshots were kept."""

    ref: int
    name: str


@dataclass(frozen=True, slots=True)
class KeptFound:
    """The answer to FindKept: the job's id, under which it is to be opened again, and its snapshots, newest first."""

    ref: int
    job: str
    snapshots: list[int]


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """Read the first of `snapshots` that exists and is undamaged. The job need not be open; it must be this user's."""

    ref: int
    job: str
    snapshots: list[int]


@dataclass(frozen=True, slots=True)
class SnapshotRead:
    """The answer to ReadSnapshot. `segment` (0 on TCP, where one frame follows) holds `nbytes`: the state buffers, each
    aligned to 64 bytes, the generator, and `notes` bytes of notes at the end. `bad`: the requested snapshots that are
    damaged."""

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
    """The first message of a connection. `role` is "client" or "control". `inline`: the client can't receive
    descriptors (TCP), so tensors travel as frames."""

    protocol: int
    gpumux_version: str
    role: str
    pid: int
    torch_version: str
    inline: bool


@dataclass(frozen=True, slots=True)
class GrantedHello(Hello):
    """Hello of a program that was granted a part of the device. `grant`: the secret token (gpumux/wire/grants.py)."""

    grant: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to Hello: the session is open. `channel` is the AF_UNIX path of the local channel, "" for an inline
    session; `nonce` opens this session's (OpenChannel). `device` is types.DeviceInfo as a map."""

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
    shares_memory: bool = False


@dataclass(frozen=True, slots=True)
class OpenFusibleJob(OpenJob):
    """OpenJob of a job whose steps may run as one with those of jobs that have the same Program."""


@dataclass(frozen=True, slots=True)
class OpenGangJob:
    """OpenJob for one rank of a job on several devices; its last fields are those of gpumux.types.Gang. It shares no
    memory with other jobs."""

    ref: int
    job: str
    name: str
    priority: int
    weight: float
    max_slowdown: float
    memory_limit: int | None
    max_inflight: int
    seed: int
    models: int
    gang: str
    rank: int
    ranks: int
    store: str
    timeout_s: float


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
    """The program is loaded. Its data segment (`slots` x `slot_bytes`) was passed on the channel under `segment` (0 for
    an inline session). `warnings` are for the user."""

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
class GroupStepDone:
    """StepDone of a step that ran in a group of jobs; its last fields are those of gpumux.types.GroupPlace."""

    job: str
    step: int
    queue_s: float
    device_s: float
    total_s: float
    frames: int
    models: int
    place: int
    fused: bool
    program: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    job: str
    step: int
    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Copy state buffers, laid end to end, each aligned to 64 bytes. push: from the client to the device."""

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
    """The copy has ended. The client may read the segment (pull), and unmaps it. On TCP one frame follows a pull: the
    bytes."""

    job: str
    transfer: int
    code: str  # "" on success
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
    """Close the job. `drain`: first answer the steps that were submitted; otherwise they fail."""

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
    """Ask for all that `gpumux status` and `gpumux jobs` show."""

    ref: int


@dataclass(frozen=True, slots=True)
class Report:
    ref: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """Ask for the times of a program's operators; None: of the program that ran most steps. Only a session that may
    change the job may ask."""

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
    """Ask why the job is slow or held -> Report, with sentences. Only a session that may change the job may ask."""

    ref: int
    job: str


@dataclass(frozen=True, slots=True)
class GetInterference:
    """Ask which programs slow which others down, as far as it was measured -> Report. `program`: only pairs with the
    program of a job of this name, or whose content hash begins so; "": all."""

    ref: int
    program: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hold `nbytes` of the device's memory, and for a high job its high place, for the job that is to be opened under
    this id, for `lease_s` -> Done. The same again begins the lease anew."""

    ref: int
    job: str
    priority: int
    nbytes: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class ConfirmReservation:
    """The job may be opened now: hold what is reserved for it for `lease_s` from now on -> Done."""

    ref: int
    job: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class ReleaseReservation:
    """Forget what is reserved for the job, if anything is -> Done."""

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
    """Record what the device runs for `seconds` -> TraceParts. 0 ends this session's recording now, and has no answer
    of its own."""

    ref: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TracePart:
    """A part of a recording. One frame follows: records (the last section), in no particular order. `seconds` have been
    recorded. With `last` the recording has ended, and `reason` says why it is shorter than asked, "" if it is not."""

    ref: int
    last: bool
    seconds: float
    reason: str
    frames: int


@dataclass(frozen=True, slots=True)
class StepAwaited:
    """A thread of the client waits for this step, and steps the jobs `before` as well, which therefore get no step
    before it is answered. `over`: the thread waits no longer, though there was no answer. The only answer is a
    Refusal."""

    ref: int
    job: str
    step: int
    before: list[str]
    over: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Each end sends one when it has sent nothing for heartbeat_s."""

    sent: float


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The client leaves; its jobs close."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The daemon shuts down; every open call of the client fails with DaemonGone at once."""

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
    """Shared memory of `nbytes`, whose descriptor comes with this packet. A later message refers to it by `segment`."""

    segment: int
    nbytes: int


# ---- Messages of a cluster: between a client and the coordinator, which decides which daemons its job runs at
# (docs/cluster.md). The client then opens the job there itself, under the id it was placed by.
#
#     client -> coordinator                   coordinator -> client
#     PlaceJob                                Done | Refusal        it waits for devices, or goes on
#                                             JobPlaced             open it at these endpoints
#     JobNotStarted                           (nothing)             it could not be opened there: it waits again
#     ProgramsKnown                           (nothing)
#     GangSizes                               (nothing)
#                                             VacateDevices         leave these devices
#     DevicesVacated                          (nothing)             they are free; it waits again
#     PlacedJobEnded                          Done | Refusal
#                                             JobAnswered           it gets no device any more
#     DrainNode                               Done | Refusal
#
# GetStatus, ExplainJob and CloseJob (to cancel) have the meaning they have at a daemon. A message about an attempt that
# is over is ignored.


@dataclass(frozen=True, slots=True)
class PlaceJob:
    """Find devices for a job -> Done; JobPlaced when it has some. `nbytes`: memory on each device; `programs`: content
    hashes, as far as they are known; `movable`: it can go on elsewhere from a snapshot. The same again, in a new
    session, says that the job is still there, and runs under `attempt` (0: nowhere)."""

    ref: int
    job: str
    name: str
    priority: int
    devices: int
    nbytes: int
    programs: list[str]
    urgency: int
    movable: bool
    attempt: int


@dataclass(frozen=True, slots=True)
class JobPlaced:
    """Every device is reserved: open the job at these endpoints, rank by rank. `nodes`: their names. `resumed`: it ran
    before."""

    job: str
    attempt: int
    endpoints: list[str]
    nodes: list[str]
    resumed: bool


@dataclass(frozen=True, slots=True)
class JobNotStarted:
    """The job could not be opened where it was placed. `nbytes`: what it needs on a device, if that is more than was
    asked for, else 0."""

    job: str
    attempt: int
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class ProgramsKnown:
    """Content hashes of what the job runs."""

    job: str
    programs: list[str]


@dataclass(frozen=True, slots=True)
class GangSizes:
    """With which numbers of devices, fewer than PlaceJob asked for, the job may go on once the cluster has no more.
    Only for a coordinator whose Welcome has `gang_sizes`."""

    job: str
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class VacateDevices:
    """Leave the devices of this attempt -> DevicesVacated; it is sent again until that comes. `keep`: the job goes on
    elsewhere; otherwise it ends."""

    job: str
    attempt: int
    keep: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DevicesVacated:
    """The job holds nothing any more of what this attempt gave it."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PlacedJobEnded:
    """The job has ended, and holds nothing any more -> Done. `fault`: why it failed, "" if it did not."""

    ref: int
    job: str
    fault: str


@dataclass(frozen=True, slots=True)
class JobAnswered:
    """The job gets no device any more. `outcome`: "refused", "cancelled" or "failed"."""

    job: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Give the node no more jobs, and move those away that can be moved -> Done; `drain` False: give it jobs again.
    For operators."""

    ref: int
    node: str
    drain: bool


CLUSTER_REGISTRY: dict[int, type[Any]] = {
    52: PlaceJob, 53: JobPlaced, 54: JobNotStarted, 55: ProgramsKnown, 56: VacateDevices, 57: DevicesVacated,
    58: PlacedJobEnded, 59: JobAnswered, 60: DrainNode, 61: GangSizes,
}  # fmt: skip
CLUSTER_FROM_CLIENT: frozenset[type[Any]] = frozenset(
    {PlaceJob, JobNotStarted, ProgramsKnown, GangSizes, DevicesVacated, PlacedJobEnded, DrainNode}
)
ClusterMessage = (
    PlaceJob | JobPlaced | JobNotStarted | ProgramsKnown | VacateDevices | DevicesVacated | PlacedJobEnded | JobAnswered
    | DrainNode | GangSizes
)  # fmt: skip


Message = (
    Hello | Welcome | Refusal | OpenJob | JobOpened | LoadProgram | ProgramLoaded | Step | StepDone | StepFailed
    | OpenTransfer | TransferSegment | FillTransfer | TransferDone | PauseJob | ResumeJob | CloseJob | JobEnded | Done
    | JobStats | GetStatus | Report | Heartbeat | Goodbye | Leaving | ProfileJob | JobProfile | ExplainJob
    | RecordTrace | TracePart | ChangeJob | StepAwaited | OpenChannel | ChannelOpened | SegmentPassed | OpenGangJob
    | GetInterference | Reserve | ConfirmReservation | ReleaseReservation | SnapshotMessage
    | ClusterMessage | GrantedHello | OpenFusibleJob | GroupStepDone
)  # fmt: skip

# Tag -> class. Never reuse a tag.
REGISTRY: dict[int, type[Any]] = {
    1: Hello, 2: Welcome, 3: Refusal, 5: JobOpened, 6: LoadProgram, 7: ProgramLoaded, 8: Step, 9: StepDone,
    10: StepFailed, 11: OpenTransfer, 12: TransferSegment, 13: FillTransfer, 14: TransferDone, 15: PauseJob,
    16: ResumeJob, 17: CloseJob, 18: JobEnded, 19: Done, 20: JobStats, 21: GetStatus, 22: Report, 23: Heartbeat,
    24: Goodbye, 25: Leaving, 26: ProfileJob, 27: JobProfile, 28: ExplainJob, 29: RecordTrace, 30: TracePart,
    31: ChangeJob, 32: StepAwaited, 33: OpenChannel, 34: ChannelOpened, 35: SegmentPassed, 36: OpenGangJob,
    37: OpenJob, 38: GetInterference,
    **SNAPSHOT_REGISTRY,
    49: Reserve, 50: ConfirmReservation, 51: ReleaseReservation,
    **CLUSTER_REGISTRY,
    62: GrantedHello, 63: OpenFusibleJob, 64: GroupStepDone,
}  # fmt: skip

# What a client may send; any other message from a client is a protocol error.
FROM_CLIENT: frozenset[type[Any]] = frozenset(
    {Hello, OpenJob, LoadProgram, Step, OpenTransfer, FillTransfer, PauseJob, ResumeJob, CloseJob, JobStats, GetStatus,
     Heartbeat, Goodbye, ProfileJob, ExplainJob, RecordTrace, ChangeJob, StepAwaited, OpenChannel, OpenGangJob,
     GetInterference, Reserve, ConfirmReservation, ReleaseReservation, *SNAPSHOT_FROM_CLIENT,
     *CLUSTER_FROM_CLIENT, GrantedHello, OpenFusibleJob}
)  # fmt: skip


# ---- The records of a recording (docs/protocol.md, RecordTrace): named tuples, packed as msgpack arrays.
#
# All times are seconds since the recording began. Jobs are named by their short ids. Of a job that the session may not
# change (`JobSeen.own` is false) programs, ranges and messages are left empty.


MAX_ITEMS = 1 << 20  # of an array in a part


class JobSeen(NamedTuple):
    """The first record of a job. `priority` is "high" or "low"."""

    job: str
    name: str
    priority: str
    own: bool


class ProgramSeen(NamedTuple):
    """The operators of one program by name, in captured order. It precedes the program's pieces."""

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
    """A step, from its arrival to its answer. Its first piece started after `queue_s`, and its pieces ran for
    `device_s`."""

    job: str
    step: int
    submitted: float
    answered: float
    queue_s: float
    device_s: float


class WasHeld(NamedTuple):
    """A low job could have run, and the guard held it back for `high`. Reasons are those of
    gpumux/scheduler/guard/decisions.py."""

    job: str
    high: str
    reason: str
    since: float
    until: float


class WasBanned(NamedTuple):
    """`low` was banned from running beside operators [first, end) of `high`, or beside the collective before `first`
    where both are the same, which took `ratio` times as long with it; on a `share`. Both are 0 for peers that may not
    know the range."""

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
    """An event: `what` happened, in a few words, and a sentence for a session that may change the job."""

    job: str
    when: float
    what: str
    message: str


class LoadSeen(NamedTuple):
    """From `when` on the job had so many steps without a launched piece, and so many with one that were not answered,
    and was charged so many bytes of device memory. There is one for each job at first, and one for each change."""

    job: str
    when: float
    queued: int
    running: int
    memory_bytes: int


Record = JobSeen | ProgramSeen | PieceRan | StepRan | WasHeld | WasBanned | Happened | LoadSeen
KINDS: dict[int, type[Any]] = {
    1: JobSeen, 2: ProgramSeen, 3: PieceRan, 4: StepRan, 5: WasHeld, 6: WasBanned, 7: Happened, 8: LoadSeen,
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
