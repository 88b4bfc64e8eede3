"""Checks of a partition before its arrays train: whether its trials are of one kind, and how many fit into memory.

Both are read from captured Programs; nothing runs. One trial of a partition is captured, and a mixture of the others
that differs from it in all fusible parameters at once. Only if these don't align are parameters tried one by one, to
name the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from gpumux.client.arguments import several
from gpumux.errors import ConfigError, NotFusible
from gpumux.fuse import zeros
from gpumux.fuse.fuse import fuse
from gpumux.fuse.member import Member
from gpumux.fuse.proof import PROVEN_MODELS
from gpumux.fuse.template import align, stream_bytes
from gpumux.hostmemory import free_bytes
from gpumux.program.ir import Program
from gpumux.program.memory import first_fit, footprint
from gpumux.tune.checkpoints import preserving_random_state
from gpumux.tune.space import Choices, Config, Space, Value
from gpumux.tune.task import Batch, Task, naming_trial
from gpumux.tune.trainer import TrialWork

_PHASES = 4  # phases of an optimizer's beginning, as `submit` captures them
_VARIANTS = 4


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A trial's step: the Program of its first step, and its Program once the optimizer has all its state, with the
    host scalars at that time."""

    first: Program
    program: Program
    values: Sequence[float | int]


# Memory of capture, graphs and the allocator, which any array takes and the measurement can't separate.
SLACK = 64 << 20


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes of an array: `fixed`, and of each model its `state` and its part of the temporaries' arena.

    The state is there twice in training, in the array and in the models that the factory made. Before, the fused
    Program is proven: the models that the proof takes have their state twice, and temporaries, in float64."""

    fixed: int
    state: int
    temporaries: int

    def of(self, models: int) -> int:
        training = self.fixed + models * (2 * self.state + self.temporaries)
        proof = models * self.state + min(models, PROVEN_MODELS) * self._proven
        return SLACK + max(training, proof)

    @property
    def _proven(self) -> int:
        return 2 * (2 * self.state + self.temporaries)

    def most(self, limit: int) -> int:
        """The largest number of models that fits."""
        limit -= SLACK
        training = (limit - self.fixed) // max(1, 2 * self.state + self.temporaries)
        proof = limit // max(1, self.state + self._proven)
        if proof >= PROVEN_MODELS:
            proof = (limit - PROVEN_MODELS * self._proven) // max(1, self.state)
        return max(0, min(training, proof))


def capture(
    task: Task, work: TrialWork, config: Config, batch: Batch, *, phases: int = _PHASES, no_zeros: bool = False
) -> CapturedStep:
    """Capture the step of a configuration from a fresh model; with `no_zeros` as in an array in which no
    hyper-parameter is 0 in all models. Raises TrialFailed, CaptureError or a subclass."""
    with preserving_random_state():
        step, model, optimizer = task.build(work.trial, config, work.seed)
    task.schedule(config, work.start, optimizer)
    if no_zeros:
        zeros.stand_in_everywhere(several(optimizer, torch.optim.Optimizer, "optimizer"))
    member = Member(f"trial {work.trial}", step, model, optimizer, max_variants=_VARIANTS)
    try:
        with naming_trial(work.trial, config, "the step"):
            choice = first = member.choose(batch, {})
            for _ in range(phases - 1):
                before = member.state.structure
                member.advance(choice)
                choice = member.choose(batch, {})
                if member.state.structure is before:
                    break
        return CapturedStep(first.program.lowered.program, choice.program.lowered.program, choice.values)
    finally:
        member.release()


def differ(task: Task, captured: CapturedStep, work: TrialWork, config: Config, batch: Batch) -> NotFusible | None:
    """Why another configuration's step is not of the captured kind, which is that of `work`; None if it is. First
    steps are compared."""
    try:
        align([captured.first, capture(task, work, config, batch, phases=1).first])
        return None
    except NotFusible as error:
        reason = error
    try:
        align([capture(task, work, each, batch, phases=1, no_zeros=True).first for each in (work.config, config)])
    except NotFusible:
        return reason
    return None


def check(task: Task, space: Space, works: Sequence[TrialWork], captured: CapturedStep, batch: Batch) -> None:
    """Check that the trials of a partition, whose first one was captured, are of one kind. Raises ConfigError naming
    the fusible parameters that change the step, or NotFusible if none of them does so alone."""
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
    other trials: every choice occurs at least once, and for a range of numbers one other value, and its ends if they
    may be drawn: an end may be a special case (a dropout of 0)."""
    first = configs[0]
    if all(config == first for config in configs):
        return []
    others: dict[str, list[Value]] = {}
    for p in space.parameters:
        if p.fusible and p.name in first:
            seen = [v for v in dict.fromkeys(config[p.name] for config in configs) if v != first[p.name]]
            ends = [] if isinstance(p.domain, Choices) else [v for v in p.domain.ends() if v != first[p.name]]
            others[p.name] = seen if isinstance(p.domain, Choices) else [*dict.fromkeys([*seen[:1], *ends])]
    count = max(map(len, others.values()), default=0)
    return [
        {**first, **{name: values[min(i, len(values) - 1)] for name, values in others.items() if values}}
        for i in range(count)
    ]


def guess(captured: CapturedStep) -> MemoryModel:
    """A generous estimate without fusing: for each model its state and its temporaries three times."""
    found = footprint(captured.program, first_fit(captured.program))
    state = found.state_bytes + stream_bytes()
    return MemoryModel(found.slot_bytes, state + state // 2, 3 * found.transient_bytes)


def predict(captured: CapturedStep) -> MemoryModel:
    """Bytes of arrays of this step, extrapolated from the fused Programs of two and of three models."""
    two, three = (sizes([fuse([captured.program] * models, [captured.values] * models).program]) for models in (2, 3))
    state, temporaries = three.state - two.state, max(0, three.temporaries - two.temporaries)
    return MemoryModel(max(0, two.fixed + two.temporaries - 2 * temporaries), max(1, state), temporaries)


def sizes(programs: Sequence[Program]) -> MemoryModel:
    """The bytes of these fused Programs together, as if they were one model's."""
    found = [footprint(program, first_fit(program)) for program in programs]
    return MemoryModel(
        sum(each.slot_bytes for each in found),
        sum(each.state_bytes for each in found),
        sum(each.transient_bytes for each in found),
    )


def array_bytes(programs: Sequence[Program], models: int) -> int:
    """Bytes of an array whose models run in these fused Programs, one after another."""
    whole = sizes(programs)
    return MemoryModel(whole.fixed, whole.state // models, whole.temporaries // models).of(models)


# ---- The memory limit of arrays on this machine, and the measured memory of an array.


SHARE = 0.5  # of the free memory, for one array: the rest is for data, torch and other processes

_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def default_limit() -> int:
    """Bytes an array may take if no limit is given."""
    return int(SHARE * free_bytes())


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """Bytes of one array, predicted and measured: the rise of the process's peak, by the kernel's count."""

    predicted: int
    measured: int

    @property
    def scale(self) -> float:
        """Factor for later predictions: 1.0 if the measurement is no larger than the prediction."""
        return max(1.0, self.measured / max(1, self.predicted))


class MemoryMeter:
    """Measures the memory of an array: made before it, read when some steps have touched all of its memory."""

    def __init__(self) -> None:
        with suppress(OSError):  # resets the peak; if that is forbidden, an earlier peak may hide a smaller one
            _REFS.write_text("5")
        self._before = _resident("VmRSS:")

    def read(self, predicted: int) -> MemoryMeasurement:
        return MemoryMeasurement(predicted, max(0, _resident("VmHWM:") - self._before))


def _resident(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
