"""What the CUDA device remembers of each job, and what it can be asked to do. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpumux.device import base as dev
from gpumux.device.base import Charges, DeviceEvent, Launch
from gpumux.device.cpu.jobs import Move, Profile
from gpumux.device.workers.channel import Descriptors
from gpumux.types import Fault, JobId, JobSpec, ProgramId

if TYPE_CHECKING:
    from gpumux.device.cuda.program import LoadedProgram


@dataclass(frozen=True, slots=True)
class Load:
    program: ProgramId
    encoded: bytes
    new_buffers: tuple[int, ...]
    binding: tuple[int, ...]
    held: Descriptors  # the data segment
    nbytes: int
    slots: int
    charge: int  # bytes it was admitted with
    transient: int  # bytes of temporaries it was admitted with, and what it could have had
    room: int


@dataclass(frozen=True, slots=True)
class Capture:
    """A program is to be cut anew; no caller asked for it. `whole`: for as long as the job is alone, beside the cut
    there is."""

    program: ProgramId
    bounds: tuple[int, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Instrument:
    """A program's operators are to be measured: its newest cut is captured with events between them."""

    program: ProgramId


@dataclass(frozen=True, slots=True)
class Sweep:
    """What no step can use any more is to be dropped (`CudaJob.garbage`)."""


Command = Launch | Load | Move | Profile
Chore = Capture | Instrument | Sweep  # what no caller waits for


@dataclass(slots=True)
class CudaJob(Charges):
    """One job. `backlog` holds commands handed over that wait for what runs: while `busy`, for the worker's thread;
    what goes to that thread also waits until nothing of the job is in the air."""

    WHERE: ClassVar[str] = " on the GPU"
    id: JobId
    spec: JobSpec
    backlog: deque[Command | Chore] = field(default_factory=deque)
    busy: bool = False
    at: Command | Chore | None = None  # what the worker does, or did last
    airborne: int = 0
    releasing: bool = False
    unloading: bool = False
    fault: Fault | None = None  # why it is lost
    logged: bool = False  # a failure of it is in the log, with its traceback
    warned: bool = False  # so is that a piece of it can't be captured
    stream: int = 0  # the one it runs on, or ran on last; 0: none
    order: int = 0  # an event between two streams; 0: none was needed yet
    charged: int = 0  # bytes of its buffers and its programs' blocks
    transients: dict[ProgramId, int] = field(default_factory=dict)  # its programs, loaded or loading
    programs: dict[ProgramId, LoadedProgram] = field(default_factory=dict)
    buffers: list[Any] = field(default_factory=list)  # of torch.Tensor; the worker's
    garbage: list[Any] = field(default_factory=list)  # graphs no step can use; the worker drops them
    capture_stream: int = 0
    capture_class: int = 0  # the class whose priority that stream has, and the kernels of what was captured on it
    confined: dict[float, int] = field(default_factory=dict)  # streams to capture on, by share below the whole
    stale: set[ProgramId] = field(default_factory=set)  # programs to capture anew: the job's class has changed
    unmerged: set[ProgramId] = field(default_factory=set)  # programs that can't be captured as a whole
    profiling: deque[ProgramId] = field(default_factory=deque)  # programs whose operator times were asked for
    generator: Any = None
    pool: Any = None

    def captures(self, program: ProgramId) -> bool:
        """Whether graphs of a program's newest cut, or of a new one, are being made, or about to be."""
        now = [self.at] if self.busy else []
        return any(isinstance(each, Capture | Instrument) and each.program == program for each in (*now, *self.backlog))

    @property
    def over(self) -> bool:
        return self.unloading or self.fault is not None

    @property
    def quiet(self) -> bool:
        """Whether it has nothing outstanding."""
        return not (self.busy or self.airborne or self.backlog)


def release(command: Command | Chore) -> None:
    """Close what a command that will never be carried out holds."""
    if isinstance(command, Load | Move):
        command.held.close()


def unanswered(job: JobId, command: Command | Chore, fault: Fault) -> list[DeviceEvent]:
    """What a lost job's command comes to."""
    release(command)
    if isinstance(command, Launch):
        return [dev.LaunchFailed(command.launch, fault)]
    if isinstance(command, Load):
        return [dev.ProgramRefused(job, command.program, fault)]
    if isinstance(command, Move):
        return [dev.TransferDone(job, command.transfer, fault)]
    if isinstance(command, Profile):
        return [dev.ProgramProfiled(job, command.program, b"", fault)]
    return []
