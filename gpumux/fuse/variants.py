"""The fused Programs of an array: one for every combination of what its models run at a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux.client.arguments import check_compile
from gpumux.client.remote import lay
from gpumux.client.variants import Choice, Made
from gpumux.errors import ConfigError
from gpumux.fuse import given, rules
from gpumux.fuse.align import Template, align, written_out
from gpumux.fuse.fuse import fuse_template
from gpumux.fuse.fused import Fused, numbers
from gpumux.fuse.measured import fuse_measured
from gpumux.fuse.partial import align_partly
from gpumux.fuse.trial import Times, cache_file
from gpumux.program.ir import Program, ScalarRef


@dataclass
class Options:
    """What the array was made with: see Array. Raises ConfigError for what makes no sense."""

    choose: Literal["measured", "fused", "per-model"]
    per_model: Sequence[str]
    times_file: InitVar[str | Path | None]
    partial: bool = False
    compile: bool = False
    times: Times = field(init=False)

    def __post_init__(self, times_file: str | Path | None) -> None:
        if self.choose not in ("measured", "fused", "per-model"):
            raise ConfigError(f"choose is {self.choose!r}", 'use "measured", "fused" or "per-model"')
        if not isinstance(self.partial, bool):
            raise ConfigError(f"partial is {self.partial!r:.60}", "use True or False")
        self.per_model = given.operators_of(self.per_model)
        check_compile(self.compile)
        if times_file is not None and not isinstance(times_file, (str, Path)):
            raise ConfigError(f"times_file is {times_file!r:.60}", "give a path, or None to keep no times")
        self.times = Times(cache_file() if times_file == "" else None if times_file is None else Path(times_file))


@dataclass(slots=True)
class Variant:
    """One fused Program and what runs it (a Runner, in this process). `alike`: scalars that it takes to be equal for all models."""

    fused: Fused
    runner: Any
    alike: tuple[int, ...]
    batch: int  # tensors of one batch
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
        """The inputs of the fused Program, as a batch to send."""
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
    """`attach(fused, choices, first)` gives what runs a fused Program on the models from `first` on, `names(choices,
    first)` what each one's state slots are."""

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
        self._keep: list[Made] = []
        self._differs: dict[int, frozenset[int]] = {}  # kept when the array changes: what differed may again
        self._first: Choice | None = None

    def get(self, choices: Sequence[Choice], first: int, per_model: bool, partly: bool = False) -> Variant:
        """The fused Program of what a run of models is about to do. `partly`: they may be at different steps of their
        optimizers, and run together what they have in common. Raises NotFusible."""
        key = (first, per_model, *[id(c.made) for c in choices])
        found = self._made.get(key)
        if found is not None and found.holds(choices):
            return found
        self._first = self._first or choices[0]
        known = self.kind(choices[0])
        values = [c.values for c in choices]
        partly = partly or self.partial
        count = 0 if partly else choices[0].made.lowered.counts[0]  # partly alike: no number is taken to be equal
        now = {i for i in range(count) if any(differ(v[i], values[0][i]) for v in values[1:])}
        differs = self._differs[known] = frozenset(now) | self._differs.get(known, frozenset())
        programs = [c.made.lowered.program for c in choices]
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
            return fuse_template(
                template, values, batch_per_model=per_model, choose=how, per_model=options.per_model
            ), None
        rules.load()
        found = fuse_measured(
            template, values, batch_per_model=per_model, per_model=options.per_model, times=options.times
        )
        return found.fused, found.whole

    def same_from_the_start(self, choice: Choice, model: int) -> None:
        """Raises NotFusible unless a model that takes its first step, number `model`, is of the array's kind."""
        if self._first is not None:
            self.same(self._first, choice, model)

    def same(self, one: Choice, other: Choice, model: int) -> None:
        """Raises NotFusible unless two models, the first and number `model`, run the same."""
        align([one.made.lowered.program, other.made.lowered.program], last=model)

    def kind(self, choice: Choice) -> int:
        """Equal for Programs that differ in numbers alone, of models whose state is bound alike."""
        made = choice.made
        found = self._kinds.get(id(made))
        if found is None:
            found = hash((_bare(made.lowered.program), made.lowered.binding))
            self._kinds[id(made)] = found
            self._keep.append(made)  # its id is a key
        return found

    def check_operators(self) -> None:
        """Raises ConfigError where an operator is to run once a model that none of the Programs made so far has."""
        there = {d.target for variant in self._made.values() for d in variant.fused.decisions}
        given.check_operators(self._options.per_model, there)

    def clear(self) -> None:
        """The array's models have changed."""
        self._made.clear()


def _bare(program: Program) -> Program:
    """The Program without the numbers in which models of one kind may differ."""

    def bare(arg: Any) -> Any:
        if isinstance(arg, (float, ScalarRef)):
            return "number"
        return tuple(bare(a) for a in arg) if isinstance(arg, tuple) else arg

    ops = tuple(
        replace(op, args=bare(op.args), kwargs=tuple((k, bare(v)) for k, v in op.kwargs))
        for op in map(written_out, program.ops)
    )
    return replace(program, ops=ops, consts=(), scalars=())


def differ(a: float | int, b: float | int) -> bool:
    """Whether two numbers are not the same to an operator."""
    return type(a) is not type(b) or not (a == b or (a != a and b != b))
