"""Events, which the placement is given, and commands, which it returns. Frozen data. The clock is passed to
`handle(event, now)` separately, in seconds; sizes are bytes.

A job is placed in *attempts*, each with a number of its own: reserve its devices, confirm them when all are reserved,
start it when all are confirmed. A reservation has a lease, so what the coordinator never releases, because it died,
expires by itself. Answers name the attempt that they are for; those of an attempt that is over are ignored.

Messages to daemons and their answers may be late or lost, but those to one node arrive in the order of the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

from gpumux.errors import ConfigError
from gpumux.types import JobId, Priority


class DeviceId(NamedTuple):
    """A device of the cluster: its node's name, and its number there. It has one daemon."""

    node: str
    gpu: int

    def __str__(self) -> str:
        return f"{self.node}/{self.gpu}"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the device takes: bytes, jobs at a time, and of which classes. Raises ConfigError if that is nothing."""

    memory_bytes: int
    max_jobs: int = 8
    classes: frozenset[Priority] = frozenset(Priority)

    def __post_init__(self) -> None:
        if self.memory_bytes < 1 or self.max_jobs < 1 or not self.classes:
            raise ConfigError(
                f"a device of {self.memory_bytes} bytes for {self.max_jobs} jobs of {len(self.classes)} classes",
                "give at least one of each",
            )


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """What a user asks for: `devices` of the cluster, each with `memory_bytes`. `programs`: content hashes of what the
    job runs, as far as they are known. `urgency` orders the jobs of one user: each step of it is worth
    `PlacementConfig.urgency_s` of waiting. `movable`: the job can be stopped at a snapshot and go on elsewhere; one
    that is not movable runs where it started, and fails with its node. Raises ConfigError for a job without devices or
    memory."""

    id: JobId
    user: str
    group: str
    priority: Priority
    devices: int
    memory_bytes: int
    programs: tuple[str, ...] = ()
    urgency: int = 0
    movable: bool = True

    def __post_init__(self) -> None:
        if self.devices < 1 or self.memory_bytes < 1:
            raise ConfigError(
                f"job {self.id} asks for {self.devices} devices with {self.memory_bytes} bytes",
                "ask for at least one device, and for the memory that the job is charged",
            )


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a user or a group: devices that its jobs hold at a time, those of high jobs alone, and jobs that are
    not answered yet. None: no limit."""

    devices: int | None = None
    high_devices: int | None = None
    jobs: int | None = None


NO_QUOTA = Quota()


class DeviceChoice(Enum):
    """How a device is chosen among those that have room."""

    LEARNED = "learned"  # by what daemons measured of pairs of programs
    SPREAD = "spread"  # the one with the fewest jobs
    PACK = "pack"  # the one with the most jobs


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Settings of the placement.

    answer_s: how long an answer of a daemon is waited for. lease_s: how long a daemon holds a reservation, and again
    once it is confirmed, if no job uses it; more than twice answer_s. retry_s: how long a device that refused, or did
    not answer, gets nothing. patience_s: how long a job whose turn has come lets others pass before devices are kept
    for it. urgency_s: see ClusterJob. advance_s: what a started job is charged at least. rebalance_s: how often low
    jobs are looked at that would do better elsewhere (inf: never); move_gain: by how much of a device's work they must
    do better; moves_at_once: how many are moved each time. quotas and weights are by user, group_quotas by group.
    """

    choice: DeviceChoice = DeviceChoice.LEARNED
    answer_s: float = 10.0
    lease_s: float = 30.0
    retry_s: float = 5.0
    patience_s: float = 600.0
    urgency_s: float = 600.0
    advance_s: float = 60.0
    rebalance_s: float = 60.0
    move_gain: float = 0.2
    moves_at_once: int = 4
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    group_quotas: Mapping[str, Quota] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 < 2 * self.answer_s < self.lease_s < inf:
            raise ConfigError(
                f"leases of {self.lease_s:g} s, with answers within {self.answer_s:g} s",
                "give a lease of more than twice the time for an answer: a gang reserves, and then confirms",
            )
        times = ("retry_s", "patience_s", "urgency_s", "advance_s", "rebalance_s")
        for name, value in [(each, getattr(self, each)) for each in times]:
            if not value > 0.0:
                raise ConfigError(f"{name} is {value}, which is not above 0", "give a positive number of seconds")
        for user, weight in self.weights.items():
            if not 0.0 < weight < inf:
                raise ConfigError(f"the weight of {user} is {weight}, which is not above 0", "give a positive number")
        whole = isinstance(self.moves_at_once, int) and 0 <= self.moves_at_once < 1 << 31
        if not whole or not 0.0 <= self.move_gain < inf:
            raise ConfigError(
                f"moves_at_once {self.moves_at_once}, move_gain {self.move_gain}",
                "give a whole number of moves, and a gain of 0 or more",
            )


# ---- Events: nodes.


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """The node's daemons can be reached. One that is new runs none of our jobs; one that is known and has the same
    devices takes jobs again if it drained. `host`: its machine, which other nodes may share, "" if none does.
    `draining`: it gets no jobs until it joins again without this."""

    node: str
    devices: tuple[DeviceFacts, ...]
    host: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """The node gets no more jobs; its movable low jobs go elsewhere, all others run to their ends."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node left or died, with all that ran there."""

    node: str


# ---- Events: jobs. Job ids are the client's choice; an id that is known and not answered yet is ignored.


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    job: ClusterJob


@dataclass(frozen=True, slots=True)
class JobCancelled:
    job: JobId


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The whole job has ended and holds nothing any more. `fault`: why it failed, "" if it did not."""

    job: JobId
    attempt: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The job could not begin on its devices, for instance since a reservation had expired. No rank runs.
    `memory_bytes`: what it turned out to need on each device, if that is more than it asked for."""

    job: JobId
    attempt: int
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class JobDescribed:
    """More is known of the job: the content hashes of what it runs, and whether it can go on elsewhere."""

    job: JobId
    programs: tuple[str, ...]
    movable: bool


@dataclass(frozen=True, slots=True)
class SizesKnown:
    """With which numbers of devices, fewer than it was submitted for, the job may go on once the cluster has no more
    for it. None until this comes: a gang that has not run yet waits for all of its devices. One that runs with a number
    that is no longer among them is stopped, and goes on with another."""

    job: JobId
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankStopped:
    """Answer to StopRank: the rank is gone from its device."""

    attempt: int
    device: DeviceId


# ---- Events: answers of daemons to reservations, and what they learned.


@dataclass(frozen=True, slots=True)
class DeviceReserved:
    attempt: int
    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceConfirmed:
    attempt: int
    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceRefused:
    """There is no room, or the reservation to be confirmed has expired. The daemon holds nothing for the attempt."""

    attempt: int
    device: DeviceId
    reason: str


class PairMeasured(NamedTuple):
    """What a daemon learned of two programs (`gpumux interference`): what the high one takes beside the low one over
    alone, and solo seconds of the low one done in a second beside it."""

    high: str
    low: str
    slowdown: float
    low_speed: float
    samples: int = 1


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened but time: `due` of the placement has come."""


ClusterEvent = (
    NodeJoined | NodeDraining | NodeLost | JobSubmitted | JobCancelled | JobFinished | StartFailed | JobDescribed
    | SizesKnown | RankStopped | DeviceReserved | DeviceConfirmed | DeviceRefused | PairMeasured | TimePassed
)  # fmt: skip


# ---- Commands.


@dataclass(frozen=True, slots=True)
class ReserveDevice:
    """Hold memory, and for a high job the device's high place, for `lease_s`. Answer with DeviceReserved or
    DeviceRefused."""

    attempt: int
    device: DeviceId
    job: JobId
    priority: Priority
    memory_bytes: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class ConfirmDevice:
    """All devices of the attempt are reserved: hold this one for `lease_s` from now on, for the job to come. Answer
    with DeviceConfirmed or DeviceRefused."""

    attempt: int
    device: DeviceId
    job: JobId
    lease_s: float


@dataclass(frozen=True, slots=True)
class ReleaseDevice:
    """Forget the reservation, if there is one. No answer."""

    attempt: int
    device: DeviceId
    job: JobId


@dataclass(frozen=True, slots=True)
class StartJob:
    """Every device is confirmed: start the whole job, rank i on `devices[i]`, under the reservations of the attempt.
    `resumed`: from its newest snapshot if it has one, since it was started before."""

    job: JobId
    attempt: int
    devices: tuple[DeviceId, ...]
    resumed: bool


@dataclass(frozen=True, slots=True)
class StopRank:
    """Stop the job's rank on this device, and forget the reservation if it has not begun. `keep`: take a snapshot
    first. Answer with RankStopped, also if there is no such rank; it is sent again until that comes."""

    job: JobId
    attempt: int
    device: DeviceId
    keep: bool


class JobOutcome(Enum):
    """How a job is answered."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class AnswerJob:
    """The one answer to a submitted job, and the end of what is known of it."""

    job: JobId
    outcome: JobOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeEmpty:
    """A node that drains has no job left."""

    node: str


ClusterCommand = ReserveDevice | ConfirmDevice | ReleaseDevice | StartJob | StopRank | AnswerJob | NodeEmpty
