"""Models that differ in some blocks share the rest (HFTA, appendix H.4).

The operators that all models have, in one order, are found by matching runs of equal ones; tensors that those
operators have in corresponding places are the same storage of the template. All else belongs to one model, and
runs for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

import torch

from gpumux.capture.step import Choice, Made
from gpumux.client.arguments import check_compile
from gpumux.client.remote import lay
from gpumux.errors import ConfigError, NotFusible
from gpumux.fuse import arguments, proof, rules
from gpumux.fuse.emit import Emitter
from gpumux.fuse.fuse import Fuser, fuse_template
from gpumux.fuse.proof import Times, cache_file, extract, join
from gpumux.fuse.template import Decision, Fused, Template, align, merge, numbers, written_out
from gpumux.program.ir import Label, Op, Program, ScalarRef, Storage, TensorRef, View, labels
from gpumux.program.validate import op_args, out_views, tensor_refs


def align_partly(programs: Sequence[Program], names: Sequence[Sequence[Hashable]]) -> Template:
    """A template of what `programs` have in common and of what each has for itself. `names`: per model and state slot,
    what the state is; only equal ones are one. Raises NotFusible where batches or results differ."""
    union = _Union(programs, names)
    first = programs[0]
    if any(p.numerics != first.numerics or len(p.results) != len(first.results) for p in programs[1:]):
        raise NotFusible(
            "the models' steps return different things, or run under other numeric settings",
            "let the steps of all models return the same",
        )
    union.inputs()
    common = [row for row in _common(programs) if union.unify(row)]
    results = [union.result([p.results[i] for p in programs]) for i in range(len(first.results))]
    return _Writer(programs, union).write(common, results)


def _views(op: Op) -> list[int]:
    return [*(r.view for r in tensor_refs(op_args(op))), *out_views(op.outs)]


def _signature(program: Program, op: Op) -> Hashable:
    def bare(arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return "tensor"
        if isinstance(arg, (float, ScalarRef)):
            return "number"
        return tuple(map(bare, arg)) if isinstance(arg, tuple) else (type(arg).__name__, arg)

    shapes = tuple((v.dtype, v.size, v.stride, v.offset) for v in (program.views[i] for i in _views(op)))
    shape = tuple(len(o) if isinstance(o, tuple) else o is None for o in op.outs)
    full = written_out(op)
    return op.target, bare(full.args), tuple((k, bare(v)) for k, v in full.kwargs), shapes, shape, op.random is None


def _common(programs: Sequence[Program]) -> list[tuple[int, ...]]:
    """Positions, one a program, of operators that all have, rising in each."""
    lines = [[_signature(p, op) for op in p.ops] for p in programs]
    found = {i: [i] for i in range(len(lines[0]))}
    known: dict[Any, dict[int, int]] = {}
    for line in lines[1:]:
        key = tuple(line)
        if key not in known:
            blocks = SequenceMatcher(None, lines[0], line, autojunk=False).get_matching_blocks()
            known[key] = {b.a + k: b.b + k for b in blocks for k in range(b.size)}
        pairs = known[key]
        found = {i: [*at, pairs[i]] for i, at in found.items() if i in pairs}
    return [tuple(at) for _, at in sorted(found.items())]


class _Union:
    """Which storages of the models are one."""

    def __init__(self, programs: Sequence[Program], names: Sequence[Sequence[Hashable]]) -> None:
        self.programs = programs
        self.names = names
        self.storages: list[Storage] = []
        self.maps: list[dict[int, int]] = [{} for _ in programs]  # of each model: its storage -> ours
        self.owners: list[int | None] = []
        self.slots: list[tuple[int | None, ...]] = []  # of each state slot of ours: each model's
        self.consts: list[tuple[bytes, ...]] = []

    def inputs(self) -> None:
        first = self.programs[0]
        for program in self.programs:
            if [program.views[v] for v in program.inputs] and len(program.inputs) != len(first.inputs):
                raise NotFusible("the models' batches differ", "give all models batches of one form")
        for position in range(len(first.inputs)):
            self._one_or_fail([p.inputs[position] for p in self.programs], "batches")

    def result(self, views: Sequence[int]) -> View:
        self._one_or_fail(views, "results")
        return self.view(0, views[0])

    def _one_or_fail(self, views: Sequence[int], what: str) -> None:
        made = [p.views[v] for p, v in zip(self.programs, views, strict=True)]
        alike = all((v.dtype, v.size, v.stride, v.offset) == (w.dtype, w.size, w.stride, w.offset) for v, w in
                    ((made[0], m) for m in made))  # fmt: skip
        if not alike or not self._merge([[v.storage for v in made]]):
            raise NotFusible(f"the models' {what} differ in shape", "give all models batches and results of one form")

    def unify(self, row: Sequence[int]) -> bool:
        """Make the tensors of one operator of each model the same; whether that is possible."""
        each = [[p.views[v].storage for v in _views(p.ops[at])] for p, at in zip(self.programs, row, strict=True)]
        return self._merge([list(column) for column in zip(*each, strict=True)])

    def _merge(self, columns: Sequence[Sequence[int]]) -> bool:
        fresh: dict[tuple[int, ...], None] = {}
        taken: list[set[int]] = [set() for _ in self.programs]
        for column in columns:
            now = [m.get(s) for m, s in zip(self.maps, column, strict=True)]
            if all(n is not None for n in now):
                if len(set(now)) > 1:
                    return False
            elif any(n is not None for n in now) or not self._may(column):
                return False
            elif tuple(column) not in fresh:
                if any(s in t for s, t in zip(column, taken, strict=True)):
                    return False  # two tensors of one model are one of another
                for s, t in zip(column, taken, strict=True):
                    t.add(s)
                fresh[tuple(column)] = None
        for new in fresh:
            self._add(new)
        return True

    def _may(self, column: Sequence[int]) -> bool:
        found = [p.storages[s] for p, s in zip(self.programs, column, strict=True)]
        if any((s.kind, s.nbytes) != (found[0].kind, found[0].nbytes) for s in found):
            return False
        if found[0].kind == "state":
            return len({n[s.slot] for n, s in zip(self.names, found, strict=True)}) == 1
        return found[0].kind != "input" or len({s.slot for s in found}) == 1

    def _add(self, column: Sequence[int]) -> None:
        found = [p.storages[s] for p, s in zip(self.programs, column, strict=True)]
        slot = self._slot(found[0], tuple(s.slot for s in found), [p.consts for p in self.programs], found)
        for mapped, s in zip(self.maps, column, strict=True):
            mapped[s] = len(self.storages)
        self.storages.append(Storage(found[0].kind, found[0].nbytes, slot))
        self.owners.append(None)

    def _slot(self, storage: Storage, slots: tuple[int | None, ...], consts: Any, found: Sequence[Storage]) -> int:
        if storage.kind == "state":
            self.slots.append(slots)
            return len(self.slots) - 1
        if storage.kind == "const":
            self.consts.append(tuple(c[s.slot] for c, s in zip(consts, found, strict=True)))
            return len(self.consts) - 1
        return storage.slot

    def own(self, model: int, storage: int) -> int:
        """Our storage for one of a model's, made its own where it has none yet."""
        at = self.maps[model].get(storage)
        if at is None:
            program = self.programs[model]
            old = program.storages[storage]
            slots = tuple(old.slot if b == model else None for b in range(len(self.programs)))
            slot = self._slot(old, slots, [program.consts], [old])
            at = self.maps[model][storage] = len(self.storages)
            self.storages.append(Storage(old.kind, old.nbytes, slot))
            self.owners.append(model)
        return at

    def view(self, model: int, index: int) -> View:
        v = self.programs[model].views[index]
        return View(self.own(model, v.storage), v.dtype, v.size, v.stride, v.offset)


class _Writer:
    """Puts the operators of all models into one line: what is before a common one in each model first."""

    def __init__(self, programs: Sequence[Program], union: _Union) -> None:
        self._programs = programs
        self._union = union
        self._found = [labels(p) for p in programs]
        self._views: dict[View, int] = {}
        self._ops: list[Op] = []
        self._owners: list[int | None] = []
        self._labels: list[Label | None] = []
        self._randoms: list[tuple[int | None, ...]] = []

    def write(self, common: Sequence[tuple[int, ...]], results: Sequence[View]) -> Template:
        models = range(len(self._programs))
        done = [0] * len(self._programs)
        for row in [*common, tuple(len(p.ops) for p in self._programs)]:
            for model in models:
                for at in range(done[model], row[model]):
                    self._add([self._op(model, at)], model, at)
            done = [at + 1 for at in row]
            if row[0] < len(self._programs[0].ops):
                self._add([self._op(model, row[model]) for model in models], None, row[0])
        first = self._programs[0]
        inputs = tuple(self._view(self._union.view(0, v)) for v in first.inputs)
        made = tuple(self._view(v) for v in results)
        program = Program(
            tuple(self._union.storages), tuple(self._views), (), inputs, made,
            numerics=first.numerics, device=first.device,
        )  # fmt: skip
        return Template(
            program, len(self._programs), tuple(self._ops), tuple(self._labels), tuple(self._union.consts),
            tuple(self._owners), tuple(self._union.owners), tuple(self._randoms), tuple(self._union.slots),
        )  # fmt: skip

    def _add(self, ops: Sequence[Op], owner: int | None, at: int) -> None:
        every = frozenset(range(1 << 16))  # no number is taken to be equal for all
        op = merge(ops, every) if owner is None else ops[0]
        self._ops.append(op)
        self._owners.append(owner)
        self._labels.append(self._found[owner or 0][at])
        self._randoms.append(tuple(o.random for o in ops))

    def _op(self, model: int, at: int) -> Op:
        op = self._programs[model].ops[at]

        def moved(arg: Any) -> Any:
            if isinstance(arg, TensorRef):
                return TensorRef(self._view(self._union.view(model, arg.view)))
            return tuple(map(moved, arg)) if isinstance(arg, tuple) else arg

        def out(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(out, value))
            return None if value is None else self._view(self._union.view(model, value))

        kwargs = tuple((k, moved(v)) for k, v in op.kwargs)
        return Op(op.target, moved(op.args), kwargs, tuple(map(out, op.outs)), op.random)

    def _view(self, view: View) -> int:
        return self._views.setdefault(view, len(self._views))


# ---- Which operators run for all models at once and which once a model: by their measured times.
#
# Every operator gets one of two labels. Each label has its time, and an operator that runs once a model before one
# that runs for all costs the time of bringing its results together, once. The cheapest labelling is a minimum
# cut of a small graph.


END = -1  # the results, which are wanted together


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one operator: for all models at once (None: there is no way), once a model, and of bringing the
    results of the latter together."""

    fused: float | None
    each: float
    join: float


def cheapest(times: Mapping[int, Timed], reads: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Of the operators in `times`, those that should run once a model. `reads`: (operator or END, operator whose result
    it takes); those with an operator that has no times are left out."""
    import networkx

    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(("fused", "each"))
    for op, timed in times.items():  # on the side of "fused" when it is
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


# ---- Fusing with a choice by measurement: three Programs, and the quickest of them.


@dataclass(frozen=True, slots=True)
class Measured:
    """`whole`: seconds of the Program that was taken, and of that which runs every operator once a model."""

    fused: Fused
    whole: tuple[float, float]


def fuse_measured(
    template: Template, values: Sequence[Sequence[float | int]], *, batch_per_model: bool,
    per_model: Collection[str], times: Times,
) -> Measured:  # fmt: skip
    """The Program whose operators run for all models or once a model as is cheapest by `times`, whichever is
    quicker as a whole of that, everything fused, and nothing fused; it is held against the last on invented numbers.
    Raises NotFusible."""

    def made(choose: Any) -> tuple[Fuser, Fused]:
        fuser = Fuser(template, Emitter(template.program.device), values, choose, per_model)
        return fuser, fuser.run(batch_per_model)

    every, each = made("fused"), made("per-model")
    timed = _timed(template.program, every[0], each[0], times)
    reads = list(every[0].reads)
    makers = every[0].makers
    reads += [
        (END, makers[s]) for s in (template.program.views[v].storage for v in template.program.results) if s in makers
    ]
    chosen = cheapest(timed, reads)
    wholes = {"every": times(stateless(every[1].program)), "each": times(stateless(each[1].program))}
    found = every[1] if not chosen else made(chosen)[1]
    best = times(stateless(found.program)) if chosen else wholes["every"]
    if chosen and wholes["every"] < best:
        found, best = every[1], wholes["every"]
    if wholes["each"] < best:
        found, best = each[1], wholes["each"]
    times.save()
    if found is not each[1]:
        proof.check(found, each[1], values)
    return Measured(replace(found, decisions=_with_times(found.decisions, timed)), (best, wholes["each"]))


def stateless(program: Program) -> Program:
    """A Program that draws from no stream, so that it runs on any bytes: for timing it."""
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
            times(join(program.storages[s].nbytes, every.homes.home(s).dtype, every.models))
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


# ---- The fused Programs of an array: one for every combination of what its models run at a step.


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
        self.per_model = arguments.operators_of(self.per_model)
        check_compile(self.compile)
        if times_file is not None and not isinstance(times_file, (str, Path)):
            raise ConfigError(f"times_file is {times_file!r:.60}", "give a path, or None to keep no times")
        self.times = Times(cache_file() if times_file == "" else None if times_file is None else Path(times_file))


@dataclass(slots=True)
class Variant:
    """One fused Program and what runs it (a Runner, in this process). `alike`: scalars that it takes to be equal for
    all models."""

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
        arguments.check_operators(self._options.per_model, there)

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
