"""Commands and faults that devices have in common. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from gpumux.device.base import DeviceEvent
from gpumux.device.workers.channel import Descriptors
from gpumux.types import Fault, JobId, ProgramId, TransferId

UNKNOWN_JOB = Fault("unknown_job", "the device holds no such job", "open the job first")
BAD_SEED = Fault("program", "the seed is not a 64-bit integer", "choose another")
NO_FORK_SERVER = Fault(
    "executor_crashed", "the process that starts executors is gone", "restart the daemon; see its log"
)


@dataclass(frozen=True, slots=True)
class TransferCommand:
    """A transfer to carry out, as Device.transfer was given it."""

    transfer: TransferId
    buffers: tuple[int, ...]
    held: Descriptors  # the segment
    nbytes: int
    into_device: bool


@dataclass(frozen=True, slots=True)
class ProfileCommand:
    """A request for a program's operator times."""

    program: ProgramId


def is_seed(seed: int) -> bool:
    """Whether torch's generators take it: an integer of 64 bits, signed or not."""
    return -(1 << 63) <= seed < 1 << 64


def of_job(event: DeviceEvent, job: JobId) -> bool:
    """Whether an event names the job. PieceDone and PieceFailed name none."""
    return getattr(event, "job", None) == job
