"""Whether B captured steps are one template, and where they differ in numbers.

They may differ in the bytes of constants, in numbers given to operators (a slope, a dropout probability), in
host scalars and in the values of state. All else must be equal: operators, sizes, strides, state slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch

from gpumux.errors import NotFusible
from gpumux.program.check import schema
from gpumux.program.ir import Label, Op, Program, ScalarRef, labels
from gpumux.program.validate import describe_op

Source: TypeAlias = "float | int | ScalarRef"


@dataclass(frozen=True, slots=True)
class Varying:
    """A number that is another for each model: a literal, or a scalar of that model's own Program."""

    values: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """What B models have in common. `ops` are the first model's, with Varying where numbers differ; scalars are
    numbered as in each model's own Program. `consts`: per constant slot, the bytes of each model (or of its owner)."""

    program: Program
    models: int
    ops: tuple[Op, ...]
    labels: tuple[Label | None, ...]
    consts: tuple[tuple[bytes, ...], ...]
    owners: tuple[int | None, ...]  # of each operator, whose alone it is
    storage_owners: tuple[int | None, ...]
    randoms: tuple[tuple[int | None, ...], ...]  # of each operator, each model's random slot (its owner's alone)
    slots: tuple[tuple[int | None, ...], ...]  # of each state slot, each model's own; None: it has none


def align(programs: Sequence[Program], differs: frozenset[int] = frozenset(), last: int | None = None) -> Template:
    """The template of some Programs. `differs`: scalars that are not equal for all models, by index. `last`: what
    errors call the last model, if not its place here. Raises NotFusible, naming the first operator that differs and its
    layer."""
    first = programs[0]
    found = tuple(labels(first))
    ops = list(first.ops)
    for place, program in enumerate(programs[1:], 1):
        model = place if last is None or place < len(programs) - 1 else last
        _same_ops(first, program, model, found)
        _same_rest(first, program, model)
    for index in range(len(ops)):
        ops[index] = merge([p.ops[index] for p in programs], differs)
    consts = tuple(tuple(p.consts[i] for p in programs) for i in range(len(first.consts)))
    models = len(programs)
    slots = sum(s.kind == "state" for s in first.storages)
    return Template(
        first, models, tuple(ops), found, consts, (None,) * len(ops), (None,) * len(first.storages),
        tuple((op.random,) * models for op in ops), tuple((slot,) * models for slot in range(slots)),
    )  # fmt: skip


def layer_name(label: Label | None) -> str:
    if label is None:
        return "outside the modules"
    return f"in layer {label.layer!r}{', backward' if label.backward else ''}"


def _different(first: Program, other: Program, model: int, index: int, found: Sequence[Label | None]) -> NotFusible:
    def text(program: Program) -> str:
        return describe_op(program, index).strip() if index < len(program.ops) else "the end of the step"

    label = found[index] if index < len(found) else None
    return NotFusible(
        f"models 0 and {model} are not of one kind: operator {index}, {layer_name(label)}, is `{text(first)}` in one "
        f"and `{text(other)}` in the other",
        "put models of one architecture and batch shape into an array; learning rates, seeds and other numbers may"
        " differ if they are written with a point (2.0, not 2), but 0 where others aren't leaves operators out (weight"
        " decay, momentum, dropout)",
    )


def _same_ops(first: Program, other: Program, model: int, found: Sequence[Label | None]) -> None:
    for index, (a, b) in enumerate(zip(first.ops, other.ops, strict=False)):
        if a.target == b.target and _other_arguments(a, b):
            a, b = written_out(a), written_out(b)
        same = (
            a.target == b.target and a.outs == b.outs and a.random == b.random and _fits(a.args, b.args)
            and [k for k, _ in a.kwargs] == [k for k, _ in b.kwargs]
            and _fits([v for _, v in a.kwargs], [v for _, v in b.kwargs])
            and all(first.views[v] == other.views[v] for v in _views(a))
        )  # fmt: skip
        if not same:
            raise _different(first, other, model, index, found)
    if len(first.ops) != len(other.ops):
        raise _different(first, other, model, min(len(first.ops), len(other.ops)), found)


def _views(op: Op) -> list[int]:
    from gpumux.program.validate import op_args, out_views, tensor_refs

    return [*(r.view for r in tensor_refs(op_args(op))), *out_views(op.outs)]


def _is_number(arg: Any) -> bool:
    return isinstance(arg, ScalarRef) or (isinstance(arg, (int, float)) and not isinstance(arg, bool))


def _fits(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_fits(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is type(b) and a == b:
        return True
    # Sizes and dimensions are ints; a number that may differ is a float in at least one model.
    return _is_number(a) and _is_number(b) and not (type(a) is int and type(b) is int)


def _same_rest(first: Program, other: Program, model: int) -> None:
    for name, what in (
        ("storages", "tensors of another size"), ("views", "tensors of another shape"), ("inputs", "another batch"),
        ("results", "other results"), ("numerics", "other numeric settings"), ("device", "another device"),
        ("gates", "other gates"),
    ):  # fmt: skip
        if getattr(first, name) != getattr(other, name):
            raise NotFusible(
                f"models 0 and {model} are not of one kind: their steps use {what}",
                "put models of one architecture and batch shape into an array",
            )


def written_out(op: Op) -> Op:
    """With the numbers that a Program leaves out, because they are the schema's defaults: a dropout of 0.5, a slope of
    0.01."""
    found = [a for a in schema(op.target).overload._schema.arguments if a.name != "generator"]
    args, kwargs = list(op.args), dict(op.kwargs)
    for argument in [a for a in found if not a.kwarg_only][len(args) :]:
        if argument.name in kwargs or type(argument.default_value) is not float:
            break
        args.append(argument.default_value)
    kwargs |= {
        a.name: a.default_value
        for a in found
        if a.kwarg_only and a.name not in kwargs and type(a.default_value) is float
    }
    return replace(op, args=tuple(args), kwargs=tuple(sorted(kwargs.items())))


def _other_arguments(a: Op, b: Op) -> bool:
    return len(a.args) != len(b.args) or [k for k, _ in a.kwargs] != [k for k, _ in b.kwargs]


def merge(ops: Sequence[Op], differs: frozenset[int]) -> Op:
    """One operator of several models', with Varying where numbers differ or are scalars of `differs`."""
    if any(_other_arguments(ops[0], op) for op in ops[1:]):
        ops = [written_out(op) for op in ops]
    first = ops[0]
    args = _merge([op.args for op in ops], differs)
    kwargs = tuple((key, _merge([op.kwargs[i][1] for op in ops], differs)) for i, (key, _) in enumerate(first.kwargs))
    return replace(first, args=args, kwargs=kwargs)


def _merge(values: Sequence[Any], differs: frozenset[int]) -> Any:
    first = values[0]
    if isinstance(first, tuple):
        return tuple(_merge([v[i] for v in values], differs) for i in range(len(first)))
    if isinstance(first, ScalarRef) and first.index in differs:
        return Varying(tuple(values))
    same = all(type(v) is type(first) and (v == first or (v != v and first != first)) for v in values[1:])
    return first if same else Varying(tuple(values))


# ---- What fusing gives: a Program for all models, and how each operator came into it.


# "fused" wherever there is a way, "per-model", or the operators that run once a model.
Choose: TypeAlias = Literal["fused", "per-model"] | frozenset[int]
How: TypeAlias = Literal["alike", "fused", "per-model"]


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers that differ between models, as one more input: `rows` by B, of `dtype`."""

    dtype: str
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """How one operator of the template runs. `why`: of fused, by what ("rule", "pointwise", "batched"); of per-model,
    the reason. `sizes`: of its operands, in one model. `fused_s`, `each_s`: seconds for all models at once and one
    after another, where measured."""

    op: int
    target: str
    layer: str
    how: How
    why: str = ""
    sizes: str = ""
    fused_s: float | None = None
    each_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """`program`'s inputs are the batch (one of all models, or B with `batch_per_model`, as [B, ...]) and then the
    `tables`; its state slots are the template's, each B times as large, models one after another; its results are
    the template's with the model dimension first. `scalars`: of each host scalar, whose it is: (model, index)."""

    program: Program
    models: int
    scalars: tuple[tuple[int, int], ...]
    tables: tuple[Table, ...]
    decisions: tuple[Decision, ...]
    batch_per_model: bool
    slots: tuple[
        tuple[int | None, ...], ...
    ]  # of each state slot, each model's own; None: it has none, and no part in it
    streams: bool  # whether there is one more state slot: the models' random generators, `stream_bytes()` each


def numbers(fused: Fused, values: Sequence[Sequence[float | int]]) -> list[torch.Tensor]:
    """The contents of the tables, [rows, B] of float64 each, for these host scalars of each model."""
    return [
        torch.tensor(
            [[values[b][s.index] if isinstance(s, ScalarRef) else s for b, s in enumerate(row)] for row in table.rows],
            dtype=torch.float64,
        )
        for table in fused.tables
    ]


@cache
def stream_bytes() -> int:
    """Of the state of a random generator on the CPU."""
    return int(torch.default_generator.get_state().numel())
