"""Every message of protocol 1: dataclasses in an explicit registry (docs/protocol.md). Step and StepDone,
which every step pays for, are named tuples: they are made at a third of the cost.

A message is one ZeroMQ frame of msgpack: [tag, field, field, ...] in declaration order; large
payloads (Programs, inline tensors) follow as further frames, counted by `frames` where a message
has any. Tags are stable for ever; a changed message gets a new tag.

    client -> daemon                    daemon -> client
    Hello                               Welcome | Refusal
    OpenJob                             JobOpened | Refusal
    LoadProgram (+1 frame: Program)     ProgramLoaded | Refusal   (segment fd by the side channel)
    Step (+ inline inputs on TCP)       StepDone (+ inline results on TCP) | StepFailed
    OpenTransfer (+ inline on TCP push) TransferSegment, then TransferDone | Refusal
    FillTransfer                        TransferDone (pushes: segment filled, copy it in)
    PauseJob / ResumeJob / CloseJob     Done | Refusal; JobEnded when it is over
    ChangeJob                           Done | Refusal
    StepAwaited                         (nothing) | Refusal
    JobStats / GetStatus                Report | Refusal
    ProfileJob                          JobProfile (+1 frame: a profile) | Refusal
    RecordTrace                         TracePart (+1 frame: records) ... | Refusal
    (snapshots and recovery: keeping.py)
    Heartbeat                           Heartbeat
    Goodbye                             Leaving (daemon shuts down)

`ref` is the client's number for a request; the answer carries it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gpumux.wire import keeping

PROTOCOL_VERSION = 1


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
    """`side_channel` is the AF_UNIX path for descriptors, "" on TCP; `nonce` ties a side-channel
    connection to this session. `device` is model.DeviceInfo as a map."""

    protocol: int
    gpumux_version: str
    session: str
    side_channel: str
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
    """Its data segment (`slots` x `slot_bytes`) arrives on the side channel under `segment`
    (0 on TCP). `warnings` are for the user."""

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
    """What the job's operators cost; None: those of the program it ran most steps of. For its owner."""

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
    """Why the job is slow or held, in sentences -> Report. For whoever may change it."""

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
    """One frame follows: records (gpumux/wire/records.py), in no particular order. `seconds` have been recorded; with
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


Message = (
    Hello | Welcome | Refusal | OpenJob | JobOpened | LoadProgram | ProgramLoaded | Step | StepDone | StepFailed
    | OpenTransfer | TransferSegment | FillTransfer | TransferDone | PauseJob | ResumeJob | CloseJob | JobEnded | Done
    | JobStats | GetStatus | Report | Heartbeat | Goodbye | Leaving | ProfileJob | JobProfile | ExplainJob
    | RecordTrace | TracePart | ChangeJob | StepAwaited | keeping.KeepingMessage
)  # fmt: skip

# Tag -> class. Never reuse a tag.
REGISTRY: dict[int, type[Any]] = {
    1: Hello, 2: Welcome, 3: Refusal, 4: OpenJob, 5: JobOpened, 6: LoadProgram, 7: ProgramLoaded, 8: Step,
    9: StepDone, 10: StepFailed, 11: OpenTransfer, 12: TransferSegment, 13: FillTransfer, 14: TransferDone,
    15: PauseJob, 16: ResumeJob, 17: CloseJob, 18: JobEnded, 19: Done, 20: JobStats, 21: GetStatus, 22: Report,
    23: Heartbeat, 24: Goodbye, 25: Leaving, 26: ProfileJob, 27: JobProfile, 28: ExplainJob, 29: RecordTrace, 30: TracePart,
    31: ChangeJob, 32: StepAwaited, **keeping.REGISTRY,
}  # fmt: skip

# What a client may say; everything else from one is a protocol error.
FROM_CLIENT: frozenset[type[Any]] = frozenset(
    {Hello, OpenJob, LoadProgram, Step, OpenTransfer, FillTransfer, PauseJob, ResumeJob, CloseJob, JobStats, GetStatus,
     Heartbeat, Goodbye, ProfileJob, ExplainJob, RecordTrace, ChangeJob, StepAwaited,
     *keeping.FROM_CLIENT}
)  # fmt: skip
