"""What the CUDA device keeps of each job, and the commands it carries out for it. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpumux.device import base as dev
from gpumux.device.base import DeviceEvent, Launch
from gpumux.device.run.device_base import DeviceJob
from gpumux.device.run.schedule import LoadCommand, ProfileCommand, TransferCommand
from gpumux.types import Fault, JobId, JobSpec, PieceFailed, ProgramId, TransferEnded

if TYPE_CHECKING:
    from gpumux.device.cuda.program import CudaProgram


@dataclass(frozen=True, slots=True)
class Capture:
    """Capture a new cut of a program. `whole`: for as long as the job is alone on the GPU; the cut there is stays
    beside it."""

    program: ProgramId
    bounds: tuple[int, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Instrument:
    """Capture a program's newest cut with events between its operators, to measure them."""

    program: ProgramId


@dataclass(frozen=True, slots=True)
class DropUnused:
    """Drop graphs that no step can use any more (`CudaJob.unused_graphs`)."""


Command = Launch | LoadCommand | TransferCommand | ProfileCommand
InternalCommand = Capture | Instrument | DropUnused  # the device's own: no event answers them


@dataclass(slots=True)
class CudaJob(DeviceJob):
    """One job. `backlog`: commands handed over that wait. All wait while `busy`; those for the worker's thread also
    wait until nothing of the job is in flight."""

    WHERE: ClassVar[str] = " on the GPU"
    id: JobId
    spec: JobSpec
    backlog: deque[Command | InternalCommand] = field(default_factory=deque)
    busy: bool = False  # the worker's thread carries out one of its commands
    current: Command | InternalCommand | None = None  # that command, or the last one
    in_flight: int = 0
    releasing: bool = False
    fault: Fault | None = None  # why it is lost
    logged: bool = False  # a failure of it is in the log, with its traceback
    warned: bool = False  # it is in the log that a piece of it can't be captured
    stream: int = 0  # the one it runs on, or ran on last; 0: none
    order_event: int = 0  # orders work on two of its streams; 0: none was needed yet
    programs: dict[ProgramId, CudaProgram] = field(default_factory=dict)
    buffers: list[Any] = field(default_factory=list)  # of torch.Tensor; used by the worker's thread alone
    unused_graphs: list[Any] = field(default_factory=list)  # no step can use them; the worker's thread drops them
    capture_stream: int = 0
    capture_class: int = 0  # priority of that stream, and of the kernels captured on it
    confined: dict[float, int] = field(default_factory=dict)  # streams to capture on, by share below the whole
    stale: set[ProgramId] = field(default_factory=set)  # programs to capture anew: the job's priority has changed
    unmerged: set[ProgramId] = field(default_factory=set)  # programs that can't be captured as a whole
    profiling: deque[ProgramId] = field(default_factory=deque)  # programs whose operator times were asked for
    generator: Any = None
    streams: dict[tuple[int, int], Any] = field(default_factory=dict)  # generators, by buffer and offset of their state
    pool: Any = None

    def captures(self, program: ProgramId) -> bool:
        """Whether graphs of a program are being captured, or a command to capture them waits."""
        now = [self.current] if self.busy else []
        return any(isinstance(each, Capture | Instrument) and each.program == program for each in (*now, *self.backlog))

    @property
    def ended(self) -> bool:
        return self.unloading or self.fault is not None

    @property
    def idle(self) -> bool:
        """Whether it has nothing outstanding."""
        return not (self.busy or self.in_flight or self.backlog)


def release(command: Command | InternalCommand) -> None:
    """Close the descriptors of a command that will not be carried out."""
    if isinstance(command, LoadCommand | TransferCommand):
        command.held.close()


def unanswered(job: JobId, command: Command | InternalCommand, fault: Fault) -> list[DeviceEvent]:
    """The events that answer a command of a lost job."""
    release(command)
    if isinstance(command, Launch):
        return [PieceFailed(command.launch, fault)]
    if isinstance(command, LoadCommand):
        return [dev.ProgramRefused(job, command.program, fault)]
    if isinstance(command, TransferCommand):
        return [TransferEnded(job, command.transfer, fault)]
    if isinstance(command, ProfileCommand):
        return [dev.ProgramProfiled(job, command.program, b"", fault)]
    return []
