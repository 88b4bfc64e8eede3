"""The fused Programs of an array, and the choice of how each operator runs in them, by measured times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux.capture.step import Choice, StepProgram
from gpumux.client.arguments import check_compile
from gpumux.client.remote import lay
from gpumux.errors import ConfigError
from gpumux.fuse import arguments, proof, rules
from gpumux.fuse.emit import FusionEmitter
from gpumux.fuse.fuse import Fuser, fuse_template
from gpumux.fuse.partial import align_partly
from gpumux.fuse.proof import PROVEN_MODELS, Times, cache_file, extract, join
from gpumux.fuse.template import Choose, Decision, Fused, Template, align, first_models, numbers, with_defaults
from gpumux.program.ir import Program, ScalarRef

# ---- Which operators run for all models at once and which once a model, by measured times.
#
# Every operator gets one of two labels, and each label has a time. If an operator that runs once a model feeds one
# that runs for all at once, joining its results costs time, once. The cheapest labelling is a minimum cut of a small
# graph.


END = -1  # the results of the step, which are needed joined


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one operator: for all models at once (None: not possible), once a model, and for joining the results
    of the latter."""

    fused: float | None
    each: float
    join: float


def cheapest(times: Mapping[int, Timed], reads: Sequence[tuple[int, int]]) -> frozenset[int]:
    """The operators of `times` that should run once a model. reads: pairs (operator or END, operator whose result it
    reads); pairs with an operator that has no times are ignored."""
    import networkx

    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(("fused", "each"))
    for op, timed in times.items():  # an operator on the "fused" side of the cut runs fused
        graph.add_edge("fused", op, capacity=timed.each)
        if timed.fused is None:
            graph.add_edge(op, "each")
        else:
            graph.add_edge(op, "each", capacity=timed.fused)
        graph.add_edge(("together", op), op, capacity=timed.join)
    graph.add_edge("fused", END)
    for reader, maker in reads:
        if maker in times and (reader == END or reader in times):
            graph.add_edge(reader, ("together", maker))
    _, (_, each) = networkx.minimum_cut(graph, "fused", "each")
    return frozenset(op for op in times if op in each)


# ---- Fusing with a choice by measurement: three Programs, and the fastest of them.


@dataclass(frozen=True, slots=True)
class MeasuredFusion:
    """`whole`: seconds of a step of the chosen Program, and of the Program that runs every operator once a model."""

    fused: Fused
    whole: tuple[float, float]


def fuse_measured(
    template: Template, values: Sequence[Sequence[float | int]], *, batch_per_model: bool,
    per_model: Collection[str], times: Times,
) -> MeasuredFusion:  # fmt: skip
    """The fastest of three Programs: everything fused, every operator once a model, and the cheapest mix by `times`.
    It is verified against the second. Raises NotFusible."""

    def made(choose: Choose, template: Template = template) -> tuple[Fuser, Fused]:
        emitter = FusionEmitter(template.program.device)
        fuser = Fuser(template, emitter, values[: template.models], choose=choose, per_model=per_model)
        return fuser, fuser.run(batch_per_model)

    every, each = made("fused"), made("per-model")
    timed = _timed(template.program, every[0], each[0], times)
    reads = list(every[0].reads)
    makers = every[0].makers
    reads += [
        (END, makers[s]) for s in (template.program.views[v].storage for v in template.program.results) if s in makers
    ]
    chosen = cheapest(timed, reads)
    wholes = {"every": times(without_streams(every[1].program)), "each": times(without_streams(each[1].program))}
    found = every[1] if not chosen else made(chosen)[1]
    best = times(without_streams(found.program)) if chosen else wholes["every"]
    if chosen and wholes["every"] < best:
        found, best, chosen = every[1], wholes["every"], frozenset()
    if wholes["each"] < best:
        found, best = each[1], wholes["each"]
    times.save()
    if found is not each[1]:
        _verify(template, values, found, each[1], lambda choose, few: made(choose or chosen or "fused", few)[1])
    return MeasuredFusion(replace(found, decisions=_with_times(found.decisions, timed)), (best, wholes["each"]))


def _verify(
    template: Template, values: Sequence[Sequence[float | int]], found: Fused, each: Fused,
    made: Callable[[Choose | None, Template], Fused],
) -> None:  # fmt: skip
    """Hold a fused Program against `each`, which runs every operator once a model, on synthetic numbers: for the first
    models alone where all take much memory. `made` fuses fewer models: as `found` was (None), or as told. Raises
    NotFusible."""
    few = first_models(template, PROVEN_MODELS)
    small = few is template or proof.most_bytes((found.program, each.program)) <= proof.SMALL_BYTES
    fewer = found if small else made(None, few)
    if small or [d.how for d in fewer.decisions] != [d.how for d in found.decisions]:
        proof.check(found, each, values)  # how an operator can run may depend on how many models there are
    else:
        proof.check(fewer, made("per-model", few), values[: few.models])


def without_streams(program: Program) -> Program:
    """A Program without random streams, for timing: it runs on any bytes."""
    ops = tuple(replace(op, stream=None) if op.stream is not None else op for op in program.ops)
    return replace(program, ops=ops)


def _timed(program: Program, every: Fuser, each: Fuser, times: Times) -> dict[int, Timed]:
    found: dict[int, Timed] = {}
    for index, decision in enumerate(every.decisions):
        if decision.how == "alike":
            continue
        forced = decision.how == "per-model"
        one = 0.0 if forced else times(extract(each.emitter, *each.slices[index]))
        all_ = None if forced else times(extract(every.emitter, *every.slices[index]))
        born = sum(
            times(join(program.storages[s].nbytes, every.placements.of_storage(s).dtype, every.models))
            for s, maker in every.makers.items()
            if maker == index and program.storages[s].nbytes
        )
        found[index] = Timed(all_, one, born)
    return found


def _with_times(decisions: Sequence[Decision], timed: dict[int, Timed]) -> tuple[Decision, ...]:
    def one(decision: Decision) -> Decision:
        known = timed.get(decision.op)
        if known is None or known.fused is None:
            return decision
        return replace(decision, fused_s=known.fused, each_s=known.each)

    return tuple(map(one, decisions))


# ---- The fused Programs of an array: one for every combination of Programs that its models run at a step.


@dataclass
class Options:
    """The options of an array: see Array. Raises ConfigError for invalid ones."""

    choose: Literal["measured", "fused", "per-model"]
    per_model: Sequence[str]
    times_file: InitVar[str | Path | None]
    partial: bool = False
    compile: bool = False
    verified: bool = False  # also what is fused without measuring is verified before it is used
    times: Times = field(init=False)

    def __post_init__(self, times_file: str | Path | None) -> None:
        if self.choose not in ("measured", "fused", "per-model"):
            raise ConfigError(f"choose is {self.choose!r}", 'use "measured", "fused" or "per-model"')
        if not isinstance(self.partial, bool):
            raise ConfigError(f"partial is {self.partial!r:.60}", "use True or False")
        self.per_model = arguments.operators_of(self.per_model)
        check_compile(self.compile)
        if times_file is not None and not isinstance(times_file, (str, Path)):
            raise ConfigError(f"times_file is {times_file!r:.60}", "give a path, or None to keep no times")
        self.times = Times(cache_file() if times_file == "" else None if times_file is None else Path(times_file))


@dataclass(slots=True)
class Variant:
    """One fused Program and its executor (a ProgramRunner, in this process). `alike`: scalars assumed equal for all
    models."""

    fused: Fused
    runner: Any
    alike: tuple[int, ...]
    batch: int  # number of tensors in one batch
    whole_s: tuple[float, float] | None = None  # seconds of a step, and of one model after another

    def holds(self, choices: Sequence[Choice]) -> bool:
        first = choices[0].values
        return all(not differ(c.values[i], first[i]) for c in choices[1:] for i in self.alike)

    def run(self, choices: Sequence[Choice]) -> list[torch.Tensor]:
        inputs = self.runner.inputs
        if self.fused.batch_per_model:
            for model, choice in enumerate(choices):
                for target, source in zip(inputs[: self.batch], choice.tensors, strict=True):
                    target[model].copy_(source.detach())
        else:
            for target, source in zip(inputs[: self.batch], choices[0].tensors, strict=True):
                lay(target, source.detach())
        for target, rows in zip(inputs[self.batch :], numbers(self.fused, [c.values for c in choices]), strict=True):
            target.copy_(rows)
        results: list[torch.Tensor] = self.runner.run(self.scalars(choices))
        return results

    def tensors(self, choices: Sequence[Choice]) -> list[torch.Tensor]:
        """The inputs of the fused Program, as a batch to send to a daemon."""
        if self.fused.batch_per_model:
            batch = [
                torch.stack([t.detach() for t in each]) for each in zip(*[c.tensors for c in choices], strict=True)
            ]
        else:
            batch = choices[0].tensors
        tables = zip(self.fused.tables, numbers(self.fused, [c.values for c in choices]), strict=True)
        return [*batch, *[rows.to(getattr(torch, table.dtype)) for table, rows in tables]]

    def scalars(self, choices: Sequence[Choice]) -> list[float | int]:
        return [choices[model].values[index] for model, index in self.fused.scalars]


class Variants:
    """Cache of an array's fused Programs. attach(fused, choices, first): makes the executor of a fused Program for the
    models from `first` on. names(choices, first): the names of each model's state slots."""

    def __init__(
        self, options: Options, attach: Callable[[Fused, Sequence[Choice], int], Any],
        names: Callable[[Sequence[Choice], int], list[list[Any]]],
    ) -> None:  # fmt: skip
        self._options = options
        self._names = names
        self.partial = options.partial
        self._attach = attach
        self._made: dict[Any, Variant] = {}
        self._kinds: dict[int, int] = {}
        self._keep: list[StepProgram] = []
        self._differs: dict[int, frozenset[int]] = {}  # outlives `clear`: scalars that differed may differ again
        self._first: Choice | None = None

    def get(self, choices: Sequence[Choice], first: int, per_model: bool, partly: bool = False) -> Variant:
        """The fused Program for the next step of consecutive models. partly: models may be at different steps of their
        optimizers, and share only the operators they have in common. Raises NotFusible."""
        key = (first, per_model, *[id(c.program) for c in choices])
        found = self._made.get(key)
        if found is not None and found.holds(choices):
            return found
        self._first = self._first or choices[0]
        known = self.kind(choices[0])
        values = [c.values for c in choices]
        partly = partly or self.partial
        # Partly alike: no scalar is assumed equal. Of another number: they are not alike, as `align` says.
        count = 0 if partly else min(c.program.lowered.counts[0] for c in choices)
        now = {i for i in range(count) if any(differ(v[i], values[0][i]) for v in values[1:])}
        differs = self._differs[known] = frozenset(now) | self._differs.get(known, frozenset())
        programs = [c.program.lowered.program for c in choices]
        template = align_partly(programs, self._names(choices, first)) if partly else align(programs, differs)
        fused, whole = self._fuse(template, values, per_model)
        if self._options.compile:
            fused = replace(fused, program=replace(fused.program, kind="compiled"))
        runner = self._attach(fused, choices, first)
        alike = tuple(i for i in range(count) if i not in differs)
        made = self._made[key] = Variant(fused, runner, alike, len(choices[0].tensors), whole)
        return made

    def _fuse(self, template: Template, values: list[Any], per_model: bool) -> tuple[Fused, tuple[float, float] | None]:
        options = self._options
        if options.choose != "measured" or template.models == 1:
            how: Literal["fused", "per-model"] = "per-model" if options.choose == "per-model" else "fused"

            def made(choose: Choose | None, template: Template = template) -> Fused:
                return fuse_template(
                    template, values[: template.models], batch_per_model=per_model, choose=choose or how,
                    per_model=options.per_model,
                )  # fmt: skip

            fused = made(None)
            if options.verified and how == "fused" and template.models > 1:
                _verify(template, values, fused, made("per-model"), made)
            return fused, None
        rules.load()
        found = fuse_measured(
            template, values, batch_per_model=per_model, per_model=options.per_model, times=options.times
        )
        return found.fused, found.whole

    def same_from_the_start(self, choice: Choice, model: int) -> None:
        """Raise NotFusible unless model number `model`, at its first step, is of the array's kind."""
        if self._first is not None:
            self.same(self._first, choice, model)

    def same(self, one: Choice, other: Choice, model: int) -> None:
        """Raise NotFusible unless two models, the first and number `model`, run the same step."""
        align([one.program.lowered.program, other.program.lowered.program], last=model)

    def kind(self, choice: Choice) -> int:
        """A number that is equal for Programs that differ only in numbers, of models whose state is bound alike."""
        made = choice.program
        found = self._kinds.get(id(made))
        if found is None:
            found = hash((_bare(made.lowered.program), made.lowered.binding))
            self._kinds[id(made)] = found
            self._keep.append(made)  # keeps its id, which is a key, from being reused
        return found

    def check_operators(self) -> None:
        """Raise ConfigError if an operator in `per_model` is in none of the Programs made so far."""
        there = {d.target for variant in self._made.values() for d in variant.fused.decisions}
        arguments.check_operators(self._options.per_model, there)

    def clear(self) -> None:
        """Forget all Programs: the array's models have changed."""
        self._made.clear()


def _bare(program: Program) -> Program:
    """The Program without the numbers that may differ between models of one kind."""

    def bare(arg: Any) -> Any:
        if isinstance(arg, (float, ScalarRef)):
            return "number"
        return tuple(bare(a) for a in arg) if isinstance(arg, tuple) else arg

    ops = tuple(
        replace(op, args=bare(op.args), kwargs=tuple((k, bare(v)) for k, v in op.kwargs))
        for op in map(with_defaults, program.ops)
    )
    return replace(program, ops=ops, consts=(), scalars=())


def differ(a: float | int, b: float | int) -> bool:
    """Whether two numbers differ for an operator: in type or in value."""
    return type(a) is not type(b) or not (a == b or (a != a and b != b))
