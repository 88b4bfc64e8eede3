"""What is known of a partition before its arrays train: whether its trials are of one kind, and how many fit into memory.

Both are read off captured Programs; nothing runs. One trial of a partition is captured, and a mixture of the others that
differs from it in all fusible parameters at once; only where these don't align is it worth to find out which parameter it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumux.errors import ConfigError, NotFusible
from gpumux.fuse.align import align
from gpumux.fuse.fuse import fuse
from gpumux.fuse.fused import stream_bytes
from gpumux.fuse.member import Member
from gpumux.fuse.tuning.space import Choices, Config, Space, Value
from gpumux.fuse.tuning.states import forked
from gpumux.fuse.tuning.task import Batch, Task, blame
from gpumux.fuse.tuning.trainer import Work
from gpumux.program.ir import Program
from gpumux.program.plan import footprint, plan

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
    """Whether trials of a partition, the first of which was captured, are of one kind. Raises ConfigError that names the
    fusible parameters which change the step, or NotFusible where it is none of them alone."""
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
            f"parameter {name!r} is marked fusible, but changes the step: {work.config[name]!r} and {mixed[name]!r} give "
            f"other operators or shapes{also} ({error.message})",
            f"take `fusible = true` from {name}, so that its values part trials into arrays of their own",
        ) from error


def mixtures(space: Space, configs: Sequence[Config]) -> list[dict[str, Value]]:
    """Configurations that differ from the first in as many fusible parameters at once as possible, with values of the others:
    every choice there is at least once, and of numbers of a range one other."""
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
    """Bytes of arrays of this step, from the fused Programs of two and of three models: what the third adds, each adds."""
    two, three = (
        array_bytes([fuse([captured.program] * models, [captured.values] * models).program]) for models in (2, 3)
    )
    return Memory(max(0, 3 * two - 2 * three), max(1, three - two))


def array_bytes(programs: Sequence[Program]) -> int:
    """What an array takes whose models run in these fused Programs, one after another: their state twice, in the array and
    in the models that the factory made; an arena and a batch each."""
    total = 0
    for program in programs:
        found = footprint(program, plan(program))
        total += 2 * found.state_bytes + found.transient_bytes + found.slot_bytes
    return total
