"""Aligns models that differ in some blocks and share the rest (HFTA, appendix H.4).

The operators that all models have, in one order, are found by matching runs of equal ones. Tensors in corresponding
places of those operators are one storage of the template. All else belongs to one model, and runs for it alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any

from gpumux.errors import NotFusible
from gpumux.fuse.template import Template, merge, with_defaults
from gpumux.program.ir import Label, Op, Program, ScalarRef, Storage, TensorRef, View, labels
from gpumux.program.validate import op_args, out_views, tensor_refs


def align_partly(programs: Sequence[Program], names: Sequence[Sequence[Hashable]]) -> Template:
    """The template of the operators that `programs` have in common and of those that only one of them has. names: for
    each model and state slot, a name; slots are shared only under equal names. Raises NotFusible if batches or results
    differ."""
    union = _StorageUnion(programs, names)
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
    full = with_defaults(op)
    return op.target, bare(full.args), tuple((k, bare(v)) for k, v in full.kwargs), shapes, shape, op.random is None


def _common(programs: Sequence[Program]) -> list[tuple[int, ...]]:
    """For each operator that all programs have, its position in each; positions rise in every program."""
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


class _StorageUnion:
    """Maps the models' storages to storages of the template: shared ones and those of one model."""

    def __init__(self, programs: Sequence[Program], names: Sequence[Sequence[Hashable]]) -> None:
        self.programs = programs
        self.names = names
        self.storages: list[Storage] = []
        self.maps: list[dict[int, int]] = [{} for _ in programs]  # for each model: its storage -> the template's
        self.owners: list[int | None] = []
        self.slots: list[tuple[int | None, ...]] = []  # for each state slot of the template: each model's
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
        """Share the tensors of one operator of each model. Returns whether that is possible."""
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
                    return False  # two tensors of one model correspond to one tensor of another
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
        """The template's storage for a model's storage; a new one, of this model alone, if it has none yet."""
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
    """Writes the operators of all models in one sequence. Before each common operator come, for each model, its own."""

    def __init__(self, programs: Sequence[Program], union: _StorageUnion) -> None:
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
        every = frozenset(range(1 << 16))  # treat every scalar as one that may differ
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
