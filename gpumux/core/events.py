"""What can happen to the core. Frozen data (named tuples where one is made for every piece: they cost a
third); `handle(event, now)` is told the clock separately.

The core never sees bytes, descriptors or programs: the daemon's loop keeps those under the ids
used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpumux.core.config import CoreConfig
from gpumux.model import (
    DeviceInfo,
    Fault,
    Footprint,
    JobId,
    JobSpec,
    LaunchId,
    Peer,
    Priority,
    ProgramId,
    SessionId,
    StepId,
    TransferId,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: SessionId
    peer: Peer


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The client left, died or lost its lease. Its jobs go with it."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class JobRequested:
    """Idempotent: the same job from the same session again gets the same answer."""

    session: SessionId
    job: JobId
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class ProgramOffered:
    """The device checked this program; the core decides whether it fits."""

    job: JobId
    program: ProgramId
    footprint: Footprint
    content_hash: str = ""  # equal programs of any job have equal ones
    operators: tuple[str, ...] = ()  # their names, in captured order, where the device says them


@dataclass(frozen=True, slots=True)
class ProgramReady:
    """First cut (0), or a later one. `pieces` are predicted seconds, at least one piece; piece i is
    operators [bounds[i], bounds[i + 1]), or one operator a piece where `bounds` is empty."""

    job: JobId
    program: ProgramId
    cut: int
    pieces: tuple[float, ...]
    bounds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramDropped:
    """Loading failed after admission: give back what was charged."""

    job: JobId
    program: ProgramId
    fault: Fault


class StepSubmitted(NamedTuple):
    """`waited`: seconds for which it was there, as far as is known, before whoever hears of steps looked."""

    job: JobId
    step: StepId
    program: ProgramId
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientWaits:
    """A thread of the client waits for this step, and steps the jobs `before` as well: they get no step before it is
    answered. `over`: it waits no longer, though it was not answered."""

    job: JobId
    step: StepId
    before: tuple[JobId, ...]
    over: bool = False


@dataclass(frozen=True, slots=True)
class TransferRequested:
    """Move state in or out, in order with the job's steps: after all submitted before it."""

    job: JobId
    transfer: TransferId
    into_device: bool


class PieceDone(NamedTuple):
    """`answered`: the step ended with it, and the device has told the client. `suspended`: seconds between start and end in
    which it stood still."""

    launch: LaunchId
    started: float
    ended: float
    answered: bool = False
    suspended: float = 0.0


@dataclass(frozen=True, slots=True)
class PieceFailed:
    launch: LaunchId
    fault: Fault


@dataclass(frozen=True, slots=True)
class TransferEnded:
    job: JobId
    transfer: TransferId
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class JobDied:
    """The device lost the job (executor crash, allocation failure at load)."""

    job: JobId
    fault: Fault


@dataclass(frozen=True, slots=True)
class JobReleased:
    """The device has let go of the job's memory."""

    job: JobId


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """By the owner or an operator. A paused job starts no further piece; what is out finishes."""

    job: JobId


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    job: JobId


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """By the owner or an operator, within what either may: another priority, another weight; None leaves it."""

    job: JobId
    priority: Priority | None
    weight: float | None


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """`drain` answers every submitted step first; otherwise they are answered with a fault."""

    job: JobId
    drain: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The daemon is leaving: fail what is queued, close every job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """Limits and access rules are others from now on; what was let in stays. The rest of `config` is as it was."""

    config: CoreConfig


@dataclass(frozen=True, slots=True)
class DeviceOpened:
    info: DeviceInfo


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; policies with timers look at the clock."""


Event = (
    SessionOpened | SessionClosed | JobRequested | ProgramOffered | ProgramReady | ProgramDropped | StepSubmitted
    | ClientWaits | TransferRequested | PieceDone | PieceFailed | TransferEnded | JobDied | JobReleased | PauseRequested
    | ResumeRequested | ChangeRequested | CloseRequested | DrainRequested | Reconfigured | DeviceOpened | Tick
)  # fmt: skip
