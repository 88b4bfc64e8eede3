"""Checks that B captured steps are of one kind, and finds the numbers in which they differ.

Steps may differ in the bytes of constants, in numbers given to operators (a slope, a dropout probability), in
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
    """A number that differs between models: for each, a literal or a scalar of that model's own Program."""

    values: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """The common form of B models' steps. `ops` are the first model's, with Varying where numbers differ; scalars are
    numbered as in each model's own Program. `consts`: for each constant slot, each model's bytes (or its owner's)."""

    program: Program
    models: int
    ops: tuple[Op, ...]
    labels: tuple[Label | None, ...]
    consts: tuple[tuple[bytes, ...], ...]
    owners: tuple[int | None, ...]  # for each operator, the only model that has it; None: all have it
    storage_owners: tuple[int | None, ...]
    randoms: tuple[tuple[int | None, ...], ...]  # for each operator, each model's random slot (only the owner's)
    slots: tuple[tuple[int | None, ...], ...]  # for each state slot, each model's own; None: it has none


def align(programs: Sequence[Program], differs: frozenset[int] = frozenset(), last: int | None = None) -> Template:
    """The template of some Programs. differs: indices of scalars that may differ between models. last: number of the
    last model in errors, if it is not its position. Raises NotFusible, naming the first operator that differs and its
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


def first_models(template: Template, models: int) -> Template:
    """The template of its first models; itself where it has no more, or where operators belong to single models."""
    if template.models <= models or any(owner is not None for owner in template.owners):
        return template

    def fewer(arg: Any) -> Any:
        if isinstance(arg, Varying):
            return Varying(arg.values[:models])
        return tuple(map(fewer, arg)) if isinstance(arg, tuple) else arg

    ops = tuple(
        replace(op, args=fewer(op.args), kwargs=tuple((name, fewer(value)) for name, value in op.kwargs))
        for op in template.ops
    )
    return replace(
        template,
        models=models,
        ops=ops,
        consts=tuple(each[:models] for each in template.consts),
        randoms=tuple(each[:models] for each in template.randoms),
        slots=tuple(each[:models] for each in template.slots),
    )


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
            a, b = with_defaults(a), with_defaults(b)
        same = (
            a.target == b.target and a.outs == b.outs and a.random == b.random and _fits(a.args, b.args)
            and [k for k, _ in a.kwargs] == [k for k, _ in b.kwargs]
            and _fits([v for _, v in a.kwargs], [v for _, v in b.kwargs])
            and all(v < len(other.views) and first.views[v] == other.views[v] for v in _views(a))
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
        ("collectives", "other exchanges between ranks"),
    ):  # fmt: skip
        if getattr(first, name) != getattr(other, name):
            raise NotFusible(
                f"models 0 and {model} are not of one kind: their steps use {what}",
                "put models of one architecture and batch shape into an array",
            )


def with_defaults(op: Op) -> Op:
    """The op with the floats that a Program leaves out because they are the schema's defaults: a dropout of 0.5, a
    slope of 0.01."""
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
    """One operator for several models, with Varying where numbers differ or are scalars in `differs`."""
    if any(_other_arguments(ops[0], op) for op in ops[1:]):
        ops = [with_defaults(op) for op in ops]
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


# ---- The result of fusing: a Program for all models, and how each operator runs in it.


# "fused" wherever possible, "per-model", or the numbers of the operators that run once a model.
Choose: TypeAlias = Literal["fused", "per-model"] | frozenset[int]
How: TypeAlias = Literal["alike", "fused", "per-model"]


@dataclass(frozen=True, slots=True)
class ScalarTable:
    """An extra input of shape [rows, B] and type `dtype`: numbers that differ between models."""

    dtype: str
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """How one operator of the template runs. why: for "fused", the means ("rule", "pointwise", "batched"); for
    "per-model", the reason. sizes: of its operands, in one model. fused_s, each_s: seconds for all models at once and
    one after another, if measured."""

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
    """The fused Program of B models.

    Its inputs are the batch (one for all models, or with `batch_per_model` one a model, as [B, ...]) and then the
    `tables`. Its state slots are the template's, each B times as large, models one after another. Its results are the
    template's with the model dimension first. scalars: the source of each host scalar, (model, index)."""

    program: Program
    models: int
    scalars: tuple[tuple[int, int], ...]
    tables: tuple[ScalarTable, ...]
    decisions: tuple[Decision, ...]
    batch_per_model: bool
    slots: tuple[tuple[int | None, ...], ...]  # for each state slot, each model's own; None: it has no part in it
    streams: bool  # whether there is one more state slot: the models' random generators, `stream_bytes()` each


def numbers(fused: Fused, values: Sequence[Sequence[float | int]]) -> list[torch.Tensor]:
    """Contents of the tables, a float64 tensor [rows, B] each, for these host scalars of each model."""
    return [
        torch.tensor(
            [[values[b][s.index] if isinstance(s, ScalarRef) else s for b, s in enumerate(row)] for row in table.rows],
            dtype=torch.float64,
        )
        for table in fused.tables
    ]


@cache
def stream_bytes() -> int:
    """Bytes of the state of a CPU random generator. A GPU's takes the first GPU_STREAM_BYTES of as many, so that a
    fused Program does not depend on where it runs."""
    return int(torch.default_generator.get_state().numel())


GPU_STREAM_BYTES = 16  # as torch.Generator("cuda").get_state() has them: the seed, and how much was drawn
