"""Whether two traces of one step do the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpumux.capture.outside.tensors import COUNTER
from gpumux.capture.recorder import RawOp, RawStorage, TraceRecord
from gpumux.capture.source import is_user_code
from gpumux.capture.state import StateTable
from gpumux.capture.structure import frozen_leaves, map_frozen
from gpumux.capture.symbols import OF_OPTIMIZERS, Evaluator, Expr, Number
from gpumux.capture.tracer import DeviceExit, HostExit, HostResult, RawTrace, TensorResult
from gpumux.program.ir import Arg, ScalarRef, TensorRef, View


def first_difference(a: RawTrace, b: RawTrace) -> str | None:
    """How two traces of one step differ, None when they are the same."""
    for i, (x, y) in enumerate(zip(a.record.ops, b.record.ops, strict=False)):
        one, other = ((o.target, o.args, o.kwargs, o.outs, o.random) for o in (x, y))
        if one != other and repr(one) != repr(other):  # repr, because nan equals no other nan
            return f"operator {i} at {x.where}: {_brief(x)} the first time, {_brief(y)} the second"
    if len(a.record.ops) != len(b.record.ops):
        longer = a if len(a.record.ops) > len(b.record.ops) else b
        op = longer.record.ops[min(len(a.record.ops), len(b.record.ops))]
        return (
            f"{len(a.record.ops)} operators the first time, {len(b.record.ops)} the second; {op.target} at {op.where}"
            " is extra"
        )
    for i, (s, t) in enumerate(zip(a.record.storages, b.record.storages, strict=False)):
        if _identity(s) != _identity(t):
            at = next((f" ({op.target} at {op.where})" for op in a.record.ops if i in op.reads), "")
            if s.kind == t.kind == "const":
                return f"a constant made inside the step has another value each time{at}"
            return f"it computes with another tensor the second time{at}"
    if a.record.views != b.record.views or [str(e) for e in a.record.scalars] != [str(e) for e in b.record.scalars]:
        return "the sizes or the hyperparameter formulas differ"
    if (
        a.result_spec != b.result_spec
        or _results(a) != _results(b)
        or a.gradients != b.gradients
        or a.replaced != b.replaced
        or a.moved_data != b.moved_data
        or a.on_batch != b.on_batch
    ):
        return "what the step returns or leaves behind differs"
    return None


def _identity(storage: RawStorage) -> tuple[str, int | None, Any]:
    """What must be equal of one storage in two traces. Not the bytes of a tensor that the step makes, which its views
    say: torch allocates one element more for hann_window, but only until its cache of fake tensors knows the result."""
    return storage.kind, None if storage.kind == "temp" else storage.nbytes, storage.key


def same_but_for_the_optimizer(a: RawTrace, b: RawTrace) -> bool:
    """Whether two traces of a step from different structures are the same but for operators that torch.optim's own code
    runs, which are repeatable."""
    return (
        a.result_spec == b.result_spec
        and _results_kinds(a) == _results_kinds(b)
        and a.gradients.keys() == b.gradients.keys()
        and _script_operators(a.record) == _script_operators(b.record)
    )


def _script_operators(record: TraceRecord) -> list[Any]:
    """The operators that are not the optimizer's own, with temporary storages numbered in the order of their use."""
    numbers: dict[int, int] = {}

    def view(index: int) -> Any:
        found = record.views[index]
        storage = record.storages[found.storage]
        key = storage.key if storage.kind != "temp" else numbers.setdefault(found.storage, len(numbers))
        return storage.kind, key, found.dtype, found.size, found.stride, found.offset

    def described(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return view(value.view)
        if isinstance(value, ScalarRef):
            return str(record.scalars[value.index])
        if isinstance(value, tuple):
            return tuple(map(described, value))
        return repr(value) if isinstance(value, float) else value  # because nan equals no other nan

    def outs(value: Any) -> Any:
        return tuple(map(outs, value)) if isinstance(value, tuple) else value if value is None else view(value)

    return [
        (op.target, op.where, described(op.args), described(op.kwargs), outs(op.outs), op.random)
        for op in record.ops
        if not op.by_optimizer
    ]


def _results_kinds(raw: RawTrace) -> list[Any]:
    return [type(r) if isinstance(r, (TensorResult, HostResult)) else repr(r) for r in raw.results]


def _brief(op: RawOp) -> str:
    shown = [a for a in op.args if isinstance(a, (int, float, tuple))]
    return f"{op.target.removeprefix('aten.')}{shown or ''}"


def _results(raw: RawTrace) -> list[str]:
    return [
        f"view{r.view}" if isinstance(r, TensorResult) else str(r.expr) if isinstance(r, HostResult) else repr(r)
        for r in raw.results
    ]


def same_for_these_numbers(symbolic: RawTrace, plain: RawTrace) -> bool:
    """Whether two traces of a step do the same, when each formula counts as its value."""
    same: bool = (_described(symbolic), symbolic.moved) == (_described(plain), plain.moved)
    return same


def asked_for_types(trace: RawTrace, counters: bool) -> list[str]:
    """What begins the names of the numbers that code of the user's may ask for their type, as `type(n) is int`, which
    holds for no symbol. `counters`: whether there are numbers in buffers. For numbers of optimizers, code that names
    their groups must lie in the same file as code that names `type`: most models' code names that."""
    codes = [code for code, _ in trace.executed.values() if is_user_code(code)]
    asking = {code.co_filename for code in codes if "type" in code.co_names}
    groups = any("param_groups" in code.co_names and code.co_filename in asking for code in codes)
    return [*([COUNTER] if asking and counters else []), *(OF_OPTIMIZERS if groups else [])]


def _described(raw: RawTrace) -> Any:
    record = raw.record

    def value(arg: Any) -> Any:
        if isinstance(arg, ScalarRef):
            return repr(record.scalars[arg.index].value)
        if isinstance(arg, tuple):
            return tuple(map(value, arg))
        return repr(arg)

    def named(target: str, kwargs: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        usual = _defaults(target) if kwargs else {}
        return [(k, v) for k, arg in kwargs if (v := value(arg)) != usual.get(k)]

    ops = [
        (op.target, tuple(map(value, op.args)), named(op.target, op.kwargs), op.outs, op.random) for op in record.ops
    ]
    results = [
        ("view", view) if (view := getattr(r, "view", None)) is not None else repr(getattr(r, "expr", _Plain(r)).value)
        for r in raw.results
    ]
    groups = [(i, j, key, k, repr(expr.value)) for i, j, key, k, expr in raw.groups]
    storages = [_identity(s) for s in record.storages]
    return (
        ops, storages, record.views, raw.result_spec, results, raw.gradients, raw.replaced, raw.moved_data, groups,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plain:
    """A constant, as a formula is."""

    value: Any


def _defaults(target: str) -> Mapping[str, str]:
    _, packet, overload = target.split(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
    return {a.name: repr(a.default_value) for a in schema.arguments if a.has_default_value()}


# ---- the first call of a step, which may fill in variables


def numbers_of(trace: RawTrace, env: Mapping[str, Number]) -> dict[int, Number] | None:
    """The values of a trace's formulas, by their indices, for these numbers. None if a step with them takes another
    way, or if one can't be computed."""
    exits = [leaf for frozen in trace.optimizers for _, tree in frozen for leaf in frozen_leaves(tree)]
    wanted = [*trace.record.scalars, *(change[4] for change in trace.groups)]
    wanted += [each.expr for each in (*exits, *trace.results) if isinstance(each, (HostExit, HostResult))]
    values = Evaluator(wanted, trace.guards).run(env)
    return None if values is None else {expr.index: value for expr, value in zip(wanted, values, strict=True)}


def same_effects(
    first: RawTrace, later: RawTrace, made: Sequence[tuple[int, torch.Tensor]], table: StateTable,
    numbers_then: Mapping[int, Number] | None = None, numbers_first: Mapping[int, Number] | None = None,
) -> bool:  # fmt: skip
    """Whether two traces of a step compute and draw the same, whatever they leave in Python variables. `made`:
    constants that the first trace makes in these views, and copies of them which the later one may read instead.
    `numbers_then`, `numbers_first`: of the later and of the first trace, for one that was made with other numbers than
    those for which it is asked (numbers_of)."""
    views: dict[int, int] = {}
    read: dict[int, int] = {}
    for i, (view, copy) in enumerate(made):
        views[view] = i
        place = table.place(copy)
        storage = None if place is None else later.record.state_storage.get(place.buffer)
        if place is not None and storage is not None:
            dtype = str(place.dtype).removeprefix("torch.")
            known = View(storage, dtype, tuple(place.size), tuple(place.stride), place.offset)
            read |= {at: i for at, one in enumerate(later.record.views) if one == known}
    numbers: dict[Any, int] = {}
    one = _Effects(first, views, numbers, numbers_first, makes=True)
    other = _Effects(later, read, numbers, numbers_then, makes=False)
    same: bool = one.all() == other.all()
    return same


class _Effects:
    """What a trace computes, as numbers: equal numbers mean equal values. The content of a storage has the number of
    the operator that wrote it last, and an operator that of its target and of what it reads. So operators without an
    effect don't count, nor does the order of independent ones."""

    def __init__(
        self, raw: RawTrace, constants: Mapping[int, int], numbers: dict[Any, int], values: Mapping[int, Number] | None,
        *, makes: bool,
    ) -> None:  # fmt: skip
        """`constants`: the number of the constant that each of these views is, once it is made if the trace `makes`
        it. `numbers`: shared by the traces that are compared. `values`: of the formulas, by default those at the
        trace."""
        self._values = values
        self._raw = raw
        self._record = raw.record
        self._constants = constants
        self._numbers = numbers
        self._content = [self._number(("before", *_identity(s))) for s in raw.record.storages]
        self._draws: list[int] = []
        storages = {raw.record.views[view].storage: i for view, i in constants.items()}
        last = {s: at for at, op in enumerate(raw.record.ops) for s in op.writes if s in storages} if makes else {}
        kept = {s: self._number(("constant", i)) for s, i in storages.items()}
        self._content = [kept.get(s, old) if s not in last else old for s, old in enumerate(self._content)]
        self._before = list(self._content)
        for at, op in enumerate(raw.record.ops):
            self._run(op)
            for storage in op.writes:
                if last.get(storage) == at:
                    self._content[storage] = kept[storage]

    def all(self) -> Any:
        """Everything that the step draws, returns and leaves in the job."""
        raw = self._raw
        met: dict[int, int] = {}

        def view(index: int) -> Any:
            return self._view(index, met)

        def leaf(one: Any) -> Any:
            if isinstance(one, DeviceExit):
                return view(one.view)
            return (self._value(one.expr), one.dtype) if isinstance(one, HostExit) else repr(one)

        results = [
            view(r.view)
            if isinstance(r, TensorResult)
            else self._value(r.expr)
            if isinstance(r, HostResult)
            else repr(r)
            for r in raw.results
        ]
        state = {
            s.key: self._content[i]
            for i, s in enumerate(self._record.storages)
            if s.kind == "state" and self._content[i] != self._before[i]
        }
        optimizers = [[(key, map_frozen(tree, leaf)) for key, tree in one] for one in raw.optimizers]
        gradients = {i: view(at) for i, at in sorted(raw.gradients.items())}
        replaced, moved = ({place: view(at) for place, at in pairs} for pairs in (raw.replaced, raw.moved_data))
        groups = [(i, j, key, k, self._value(expr)) for i, j, key, k, expr in raw.groups]
        return (
            self._draws, results, raw.result_spec, raw.further, raw.on_batch, state, optimizers, gradients, replaced,
            moved, groups,
        )  # fmt: skip

    def _value(self, expr: Expr) -> str:
        return repr(expr.value if self._values is None else self._values[expr.index])

    def _number(self, what: Any) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _view(self, index: int, met: dict[int, int]) -> Any:
        """A view by the order in which its storage is met, by its content, and by where it lies in it."""
        view = self._record.views[index]
        where = (view.dtype, view.size, view.stride, view.offset)
        order = met.setdefault(view.storage, len(met))
        return order, self._content[view.storage], self._constants.get(index, where)

    def _run(self, op: RawOp) -> None:
        met: dict[int, int] = {}

        def value(arg: Arg) -> Any:
            if isinstance(arg, TensorRef):
                return self._view(arg.view, met)
            if isinstance(arg, ScalarRef):
                return self._value(self._record.scalars[arg.index])
            return tuple(map(value, arg)) if isinstance(arg, tuple) else repr(arg)

        def out(one: Any) -> Any:
            return tuple(map(out, one)) if isinstance(one, tuple) else one if one is None else self._view(one, met)

        usual = _defaults(op.target) if op.kwargs else {}
        keywords = tuple((k, v) for k, arg in op.kwargs if (v := value(arg)) != usual.get(k))
        done = self._number((op.target, value(op.args), keywords, out(op.outs), op.random))
        if op.random is not None:
            self._draws.append(done)
        for storage in op.writes:
            self._content[storage] = self._number((done, met.setdefault(storage, len(met))))
