"""What is known of a partition before its arrays train: whether its trials are of one kind, and how many fit into
memory.

Both are read off captured Programs; nothing runs. One trial of a partition is captured, and a mixture of the others
that differs from it in all fusible parameters at once; only where these don't align is it worth to find out which
parameter it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpumux.errors import ConfigError, NotFusible
from gpumux.fuse.fuse import fuse
from gpumux.fuse.member import Member
from gpumux.fuse.template import align, stream_bytes
from gpumux.hostmemory import free_bytes
from gpumux.program.ir import Program
from gpumux.program.memory import footprint, plan
from gpumux.tune.checkpoints import forked
from gpumux.tune.space import Choices, Config, Space, Value
from gpumux.tune.task import Batch, Task, blame
from gpumux.tune.trainer import Work

_PHASES = 4  # of an optimizer's beginning, as `submit` walks through
_VARIANTS = 4


@dataclass(frozen=True, slots=True)
class Captured:
    """A trial's step: the Program of its first step, and the one it has once its optimizer has all its state, with the
    host scalars that one was captured with."""

    first: Program
    program: Program
    values: Sequence[float | int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of an array: `fixed` of any, `each` for every model more. `each` holds a model's state twice (see
    `array_bytes`) and its part of the temporaries' arena."""

    fixed: int
    each: int

    def of(self, models: int) -> int:
        return self.fixed + models * self.each

    def most(self, limit: int) -> int:
        """How many models fit."""
        return max(0, (limit - self.fixed) // max(1, self.each))


def capture(task: Task, work: Work, config: Config, batch: Batch, *, phases: int = _PHASES) -> Captured:
    """Capture the step of a configuration as of a fresh model. Raises TrialFailed, CaptureError and its kin."""
    with forked():
        step, model, optimizer = task.build(work.trial, config, work.seed)
    task.schedule(config, work.start, optimizer)
    member = Member(f"trial {work.trial}", step, model, optimizer, _VARIANTS)
    try:
        with blame(work.trial, config, "the step"):
            choice = first = member.choose(batch, {})
            for _ in range(phases - 1):
                before = member.state.structure
                member.advance(choice)
                choice = member.choose(batch, {})
                if member.state.structure is before:
                    break
        return Captured(first.made.lowered.program, choice.made.lowered.program, choice.values)
    finally:
        member.release()


def differ(task: Task, captured: Captured, work: Work, config: Config, batch: Batch) -> NotFusible | None:
    """Why another configuration's step is not of the captured kind, None if it is. Its first step is compared."""
    try:
        align([captured.first, capture(task, work, config, batch, phases=1).first])
    except NotFusible as error:
        return error
    return None


def check(task: Task, space: Space, works: Sequence[Work], captured: Captured, batch: Batch) -> None:
    """Whether trials of a partition, the first of which was captured, are of one kind. Raises ConfigError that names
    the fusible parameters which change the step, or NotFusible where it is none of them alone."""
    work = works[0]
    for mixed in mixtures(space, [each.config for each in works]):
        error = differ(task, captured, work, mixed, batch)
        if error is None:
            continue
        if differ(task, captured, work, work.config, batch) is not None:
            raise ConfigError(
                "the factory does not make the same step of the same configuration twice",
                "let it depend on the configuration, and on torch's generator for initial values, alone",
            ) from error
        named = [
            name
            for name, value in space.fusible(mixed).items()
            if work.config[name] != value
            and differ(task, captured, work, {**work.config, name: value}, batch) is not None
        ]
        if not named:
            raise error
        name = named[0]
        also = "".join(f"; {more} does, too" for more in named[1:])
        raise ConfigError(
            f"parameter {name!r} is marked fusible, but changes the step: {work.config[name]!r} and {mixed[name]!r}"
            f" give other operators or shapes{also} ({error.message})",
            f"take `fusible = true` from {name}, so that its values part trials into arrays of their own",
        ) from error


def mixtures(space: Space, configs: Sequence[Config]) -> list[dict[str, Value]]:
    """Configurations that differ from the first in as many fusible parameters at once as possible, with values of the
    others: every choice there is at least once, and of numbers of a range one other."""
    first = configs[0]
    others: dict[str, list[Value]] = {}
    for p in space.parameters:
        if p.fusible and p.name in first:
            seen = [v for v in dict.fromkeys(config[p.name] for config in configs) if v != first[p.name]]
            others[p.name] = seen if isinstance(p.domain, Choices) else seen[:1]
    count = max(map(len, others.values()), default=0)
    return [
        {**first, **{name: values[min(i, len(values) - 1)] for name, values in others.items() if values}}
        for i in range(count)
    ]


def guess(captured: Captured) -> Memory:
    """A generous estimate that costs nothing: of each model its state and its temporaries three times."""
    found = footprint(captured.program, plan(captured.program))
    return Memory(found.slot_bytes, 3 * (found.state_bytes + stream_bytes() + found.transient_bytes))


def predict(captured: Captured) -> Memory:
    """Bytes of arrays of this step, from the fused Programs of two and of three models: what the third adds, each
    adds."""
    two, three = (
        array_bytes([fuse([captured.program] * models, [captured.values] * models).program]) for models in (2, 3)
    )
    return Memory(max(0, 3 * two - 2 * three), max(1, three - two))


def array_bytes(programs: Sequence[Program]) -> int:
    """What an array takes whose models run in these fused Programs, one after another: their state twice, in the array
    and in the models that the factory made; an arena and a batch each."""
    total = 0
    for program in programs:
        found = footprint(program, plan(program))
        total += 2 * found.state_bytes + found.transient_bytes + found.slot_bytes
    return total


# ---- What arrays may take of this machine's memory, and what one of them took.


SHARE = 0.5  # of the free memory, for one array: the data, torch and other processes have the rest
SLACK = (
    64 << 20
)  # what capture, graphs and the allocator take whatever is trained, and the measurement can't tell apart

_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def default_limit() -> int:
    """Bytes an array may take if nobody says."""
    return int(SHARE * free_bytes())


@dataclass(frozen=True, slots=True)
class Measured:
    """One array's memory, predicted and as the kernel saw it: bytes by which the process's peak rose."""

    predicted: int
    measured: int

    @property
    def scale(self) -> float:
        """By how much predictions are to be raised: 1.0 where what was measured beyond the slack is no more."""
        return max(1.0, (self.measured - SLACK) / max(1, self.predicted))


class Meter:
    """Begun before an array is made, read when it has run a few steps and touched all of its memory."""

    def __init__(self) -> None:
        with suppress(OSError):  # the peak starts over; where that is forbidden it may be one of before, and tells less
            _REFS.write_text("5")
        self._before = _resident("VmRSS:")

    def read(self, predicted: int) -> Measured:
        return Measured(predicted, max(0, _resident("VmHWM:") - self._before))


def _resident(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
