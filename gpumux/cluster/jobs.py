"""What the placement knows of nodes, devices and jobs. Plain state, changed by `placement.py` alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

from gpumux.cluster.events import ClusterJob, DeviceFacts, DeviceId, JobOutcome
from gpumux.types import JobId, Priority


class JobPhase(Enum):
    """Where a job stands. From CLAIMING on it holds its devices."""

    WAITING = "waiting"  # for its turn, or for room
    CLAIMING = "claiming"  # a high job has its devices, and waits until low jobs have left them
    RESERVING = "reserving"
    CONFIRMING = "confirming"
    RUNNING = "running"
    STOPPING = "stopping"  # until all its ranks are gone


class Refusals(NamedTuple):
    """How often in a row a device's daemon refused a job, and until when the job is not tried there again."""

    in_a_row: int
    until: float


@dataclass(slots=True, eq=False)
class PlacedJob:
    """A job that is not answered yet. Jobs have numbers in the order in which they come.

    `request.devices`: how many it has, or waits for; `asked`: how many it was submitted for; `sizes`: see SizesKnown.
    `waits_on`: devices whose answers the phase needs; `due`: when those are too late. `held_since`: when it got its
    devices, while it has some. `turn_at`: when it was first in its class's order and found no room; `blocked_at`: when
    it was the first that did not fit in a quota. `kept`: devices that no other job of its class gets while it waits.
    `had`: with how many it ran when it was stopped to get all that it was submitted for, until it runs again; 0 for
    others. `races_lost`: how often in a row it then went on with as many as before.
    `began`: it ran, and goes on from a snapshot. `moves`: how often it was stopped for others. `stopped_for`: why it is
    being stopped, `keep`: with a snapshot, `outcome`: how it is then answered, None if it is to go on elsewhere."""

    request: ClusterJob
    number: int
    submitted_at: float
    held_since: float = 0.0
    phase: JobPhase = JobPhase.WAITING
    attempt: int = 0
    devices: tuple[DeviceId, ...] = ()
    waits_on: set[DeviceId] = field(default_factory=set)
    due: float = inf
    turn_at: float = inf
    blocked_at: float = inf
    kept: frozenset[DeviceId] = frozenset()
    began: bool = False
    moves: int = 0
    stopped_for: str = ""
    outcome: JobOutcome | None = None
    keep: bool = True
    asked: int = field(init=False)
    sizes: tuple[int, ...] = ()
    had: int = 0
    races_lost: int = 0
    refusals: dict[DeviceId, Refusals] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asked = self.request.devices

    @property
    def id(self) -> JobId:
        return self.request.id

    @property
    def high(self) -> bool:
        return self.request.priority is Priority.HIGH

    @property
    def holds(self) -> bool:
        return self.phase is not JobPhase.WAITING


@dataclass(slots=True, eq=False)
class ClusterDevice:
    """A device, the jobs on it, and what they hold. `high`: the job in the device's high place. `claimed`: a high job's
    that waits until there is room; it is in `jobs` when it reserves. `retry_at`: until then the device gets nothing."""

    id: DeviceId
    facts: DeviceFacts
    jobs: dict[JobId, PlacedJob] = field(default_factory=dict)
    claimed: PlacedJob | None = None
    high: PlacedJob | None = None
    retry_at: float = 0.0

    @property
    def used_bytes(self) -> int:
        return sum([job.request.memory_bytes for job in self.jobs.values()])

    @property
    def free_bytes(self) -> int:
        """What no job holds or has claimed; below 0 while low jobs have yet to leave for a high one."""
        claimed = 0 if self.claimed is None else self.claimed.request.memory_bytes
        return self.facts.memory_bytes - self.used_bytes - claimed

    @property
    def free_places(self) -> int:
        return self.facts.max_jobs - len(self.jobs) - (self.claimed is not None)

    @property
    def lows(self) -> list[PlacedJob]:
        """Low jobs that are to stay."""
        return [job for job in self.jobs.values() if not job.high and job.phase is not JobPhase.STOPPING]


@dataclass(slots=True, eq=False)
class ClusterNode:
    """A node and its devices. `host`: its machine."""

    name: str
    devices: list[ClusterDevice]
    host: str
    draining: bool = False
    said_empty: bool = False


def evictions(device: ClusterDevice, memory_bytes: int) -> list[PlacedJob] | None:
    """Low jobs that have to leave the device before a high one of so many bytes fits; None if it never does. Those go
    first that were moved least, and of these the newest. Jobs that stop already are not among them."""
    stopping = [job for job in device.jobs.values() if job.phase is JobPhase.STOPPING]
    room = device.free_bytes + sum([job.request.memory_bytes for job in stopping])
    places = device.free_places + len(stopping)
    chosen: list[PlacedJob] = []
    movable = [job for job in device.lows if job.request.movable or job.phase is not JobPhase.RUNNING]
    for job in sorted(movable, key=_least_moved):
        if room >= memory_bytes and places > 0:
            break
        chosen.append(job)
        room += job.request.memory_bytes
        places += 1
    return chosen if room >= memory_bytes and places > 0 else None


def _least_moved(job: PlacedJob) -> tuple[int, int]:
    return job.moves, -job.number
