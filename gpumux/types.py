"""The nouns of gpumux, each with one meaning everywhere, and the events that devices emit and the scheduler takes
unchanged. Plain data, no behaviour.

Programs and their operators are in `program/ir.py`. Times are seconds, sizes are bytes, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, NewType, NotRequired, TypedDict, final

JobId = NewType("JobId", str)  # chosen by the client: 32 hex digits
SessionId = NewType("SessionId", str)  # chosen by the daemon, one a client connection
ProgramId = NewType("ProgramId", int)  # chosen by the client, unique within its job
StepId = NewType("StepId", int)  # chosen by the client, increasing within its job
LaunchId = NewType("LaunchId", int)  # chosen by the scheduler, unique in the daemon's life
TransferId = NewType("TransferId", int)  # chosen by the client, unique within its job

# Size of a job's random generator in a segment: its length (8 bytes, little-endian), its bytes, zeros.
GENERATOR_BYTES = 8192


def generator_region(state: bytes) -> bytes:
    """A generator's state as it lies in a segment, GENERATOR_BYTES long."""
    return (len(state).to_bytes(8, "little") + state).ljust(GENERATOR_BYTES, b"\0")


def generator_state(region: bytes) -> bytes:
    """The state in such a region; empty for a generator that was never used. Raises ValueError for a length that no
    region can hold."""
    length = int.from_bytes(region[:8], "little")
    if length > GENERATOR_BYTES - 8:
        raise ValueError(f"a generator of {length} bytes")
    return region[8 : 8 + length]


MAX_JOB_NAME = 200  # characters
MOST_LEASE_S = 120.0  # of a reservation
WEIGHTS = (1e-3, 1e3)  # of a job, the least and the most; beyond these, a device can't keep shares


class Priority(IntEnum):
    """A job's class. Larger is more important, so that comparison reads naturally."""

    LOW = 0
    HIGH = 1


PRIORITIES = {priority.name.lower(): priority for priority in Priority}  # by the names that people write


@dataclass(frozen=True, slots=True)
class Grant:
    """A part of the device for the holder of a secret token. `max_bytes` of device memory bound its open jobs together;
    its jobs of one class together weigh `weight`, the part of the device that was granted (0 to 1)."""

    name: str
    shares: int
    of: int
    max_bytes: int
    max_priority: Priority

    @property
    def weight(self) -> float:
        return self.shares / self.of


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, as the kernel reports it; `groups` are its supplementary ones. Over tcp each
    client key has a negative uid of its own, `key` is the name of its file, and gid and pid are -1. So has each
    grant; its holders have no groups."""

    uid: int
    gid: int
    pid: int
    groups: tuple[int, ...] = ()
    key: str = ""
    grant: Grant | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """The jobs that run one training step together, each on a device of its own: this job is `rank` of `ranks`. `id`:
    32 hex digits, the same for all of them. `store`: host:port of the TCPStore of torch.distributed through which they
    find each other, which the client runs. A peer that does not come, or stops, is given `timeout_s` seconds."""

    id: str
    rank: int
    ranks: int
    store: str
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A client's request when it opens a job. `memory_limit` None means no limit of its own. `arena`: the user
    whose jobs share one arena for temporaries with it, None for memory of its own. `models`: number of models
    that a step trains; it only changes what is shown of the job. `gang`: the job is one rank of several. `user`: the
    user of this machine that it belongs to, None if it is not known. `fusible`: its steps may run as one with those of
    jobs that have the same Program."""

    name: str
    priority: Priority = Priority.LOW
    weight: float = 1.0
    max_slowdown: float = 1.10
    memory_limit: int | None = None
    max_inflight: int = 2
    seed: int = 0
    models: int = 1
    gang: Gang | None = None
    arena: int | None = None
    user: int | None = None
    fusible: bool = False


class GroupPlace(NamedTuple):
    """How a step ran in a group of jobs: of `models` of them, at `place`, as part of one fused step (`fused`) or by its
    job's own Program on that part of the stacked state. `program`: the content hash of the group's fused Program."""

    models: int
    place: int
    fused: bool
    program: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """Device memory a program adds. Persistent state and transient bytes are separate because jobs
    that never run at once could share the transient part. When it is offered to the scheduler,
    `state_bytes` are only the buffers that the job did not have yet, and `slot_bytes` are all slots together.
    `arena_bytes`: of the transient bytes, those that the steps of a job's two waves share; 0 for other programs."""

    state_bytes: int
    transient_bytes: int
    slot_bytes: int
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as data: a code from `gpumux.errors`, a sentence and a remedy."""

    code: str
    message: str
    remedy: str = ""


class StepTimes(NamedTuple):
    """A step's times: waiting in its queue, running on the device, and in all."""

    queue_s: float
    device_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Facts about a device. `parallel` is how many pieces it can truly run at once, None if only
    windows limit it. `threads` is intra-op threads a piece (CPU), 0 if it has no meaning. `checks` is the number of
    Programs it checks at once. `shares` are the parts of its multiprocessors a launch can be confined to, largest first
    (only 1.0: it can confine nothing). `run_s`: consecutive pieces that take so long together may be one launch where
    no job waits for their end; 0: each is a launch of its own."""

    kind: str
    name: str
    memory_bytes: int
    parallel: int | None
    threads: int
    torch_version: str
    piece_target_s: dict[str, float]  # by priority name, lower case: the length of a piece to aim at
    checks: int = 2
    shares: tuple[float, ...] = (1.0,)
    run_s: float = 0.0


# ---- Events that a device emits and the scheduler takes. Named tuples where there is one for every piece, since they
# are cheaper. The device's other events need work of the daemon first (device/base.py), and the scheduler's others come
# from clients (scheduler/events.py).


class PieceDone(NamedTuple):
    """A launch has ended. `answered`: it ended its step, and the device has sent the step's answer to the client
    itself. `suspended`: seconds between start and end in which it stood still and the device did something else, where
    a device can do that. `fault`: it ended a step that failed alone, after which the job's state is as before it."""

    launch: LaunchId
    started: float
    ended: float
    answered: bool = False
    suspended: float = 0.0
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """The launch failed, and the job's state is lost. A JobDied for its job follows."""

    launch: LaunchId
    fault: Fault


class WavePieces(NamedTuple):
    """The pieces of a program for one of a job's two waves. A step of it may run beside the step before it, of the
    other lane, as far as both fit into the arena. `tail`: the first piece that runs only when that step has ended.
    `heights`: bytes of the arena that each piece needs (program/waves.py)."""

    lane: int
    tail: int
    heights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgramReady:
    """The program can be launched (cut 0), or has been cut anew, after it was measured or after CutProgram (a later
    one). Steps that start after this event use cut `cut`; steps that have begun keep the cut they began with. `pieces`
    are predicted seconds, of cut 0 unmeasured guesses, at least one piece; piece i is operators [bounds[i],
    bounds[i + 1]), or one operator a piece where `bounds` is empty. `gated`: pieces that begin with a collective,
    rising and never the first. Such a piece may be launched when CollectiveEnded has come for it. `wave`: of a program
    for one of a job's two waves."""

    job: JobId
    program: ProgramId
    cut: int
    pieces: tuple[float, ...]
    bounds: tuple[int, ...] = ()
    gated: tuple[int, ...] = ()
    wave: WavePieces | None = None


class CollectiveEnded(NamedTuple):
    """The data before a gated piece have been exchanged, from `started` (the piece before had ended) to `ended`. It
    comes after the PieceDone of the piece before. `moved`: for each peer its rank and the bytes sent to and received
    from it, without headers. `exchange_s`: of that time, what the exchange took when the peers were there; the rest the
    rank waited for them."""

    job: JobId
    step: StepId
    piece: int
    started: float
    ended: float
    moved: tuple[tuple[int, int, int], ...] = ()
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer has ended; with a fault, its data is not complete."""

    job: JobId
    transfer: TransferId
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class JobDied:
    """The job failed or its process ended. Nothing of it is left on the device."""

    job: JobId
    fault: Fault


@dataclass(frozen=True, slots=True)
class JobReleased:
    """`unload` has ended: the device has released the job's memory."""

    job: JobId


# ---- What users are told of a job: Job.stats(), and `gpumux jobs --json` but for the first part.


@final
class HighPromise(TypedDict):
    """How a high job's promise stands over the window that is judged. Ratios are to the step alone; None: not measured
    yet."""

    verdict: str
    slowdown: float | None
    slowdown_p99: float | None
    promised: float
    promised_p99: float
    steps: int
    kept: bool | None
    steps_over: int
    broken_for_s: float
    solo_step_s: float | None
    bans: int


@final
class LowPromise(TypedDict):
    """What a low job is held for now, if `held` is a reason and not ""; `held_s`: seconds held by now, by reason;
    `too_long`: its piece that fits into no gap of a high job, and what would fit."""

    held: str
    held_by: str
    held_by_name: NotRequired[str]
    held_by_job: NotRequired[str]
    held_for_s: float
    held_s: dict[str, float]
    too_long: dict[str, Any] | None
    bans: int


class FusionStatistics(TypedDict):
    """Of a job submitted with fusible=True. `possible`: whether its daemon fuses jobs; `jobs`: how many run as one now,
    itself included; `steps`: its own steps that ran in a group so far; `why`: the sentence that says why."""

    possible: bool
    jobs: int
    steps: int
    why: str


class JobStatistics(TypedDict):
    """Job.stats(). Sizes are in bytes, times in seconds.

    `exactness`, `because`, `tolerance` (by dtype, relative to a tensor's largest element) and `microbatches` (parts, by
    function) say how results compare with the reference run's; the last three are there for "equivalent" results only.
    `promise` is None under policies without a guard, `fusion` unless the job was submitted with fusible=True. `ranks`
    has the statistics of each rank of a job over several devices, `waves` is there for a job in waves.
    """

    exactness: Literal["bit-equal", "equivalent"]
    because: NotRequired[list[str]]
    tolerance: NotRequired[dict[str, float]]
    microbatches: NotRequired[dict[str, int]]
    waves: NotRequired[int]
    ranks: NotRequired[list[dict[str, Any]]]
    rng: Literal["client", "own"]

    job: str
    short: str
    name: str
    uid: int
    pid: int
    priority: Literal["high", "low"]
    weight: float
    state: str
    paused: bool
    queued: int
    running: int
    outstanding: int
    memory_bytes: int
    measured_bytes: int
    device_busy_s: float
    steps_done: int
    steps_failed: int
    programs: int
    transfers: int
    opened_s_ago: float
    max_slowdown: float
    models: int
    gang: dict[str, Any] | None
    fusion: FusionStatistics | None
    promise: HighPromise | LowPromise | None
    mine: bool
