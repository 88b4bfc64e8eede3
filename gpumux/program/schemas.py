"""Operator calls held against torch's own schemas: how many arguments, of what kind, under what names.

Imports torch: for the process that checks Programs and for executors, never for the daemon itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gpumux.errors import ProgramError
from gpumux.program import allowlist
from gpumux.program.ir import Arg, Complex, Op, ScalarRef, Tag, TensorRef

# A host scalar here would decide a size, which must not change from step to step.
_SIZED_BY_NUMBERS = frozenset(
    f"aten.{name}" for name in ("arange.default", "arange.start", "arange.start_step", "range.default", "range.step")
)

Accepts = Callable[[Arg], bool]


@dataclass(frozen=True, slots=True)
class Param:
    """One argument of a schema. `kind` is its type as torch prints it, such as List[int]."""

    name: str
    kind: str
    keyword_only: bool
    required: bool
    written: bool
    accepts: Accepts


@dataclass(frozen=True, slots=True)
class Schema:
    """An operator. `returns`: "Tensor", "List[Tensor]" or "int", one a return."""

    overload: Any
    positional: tuple[Param, ...]
    keyword: dict[str, Param]
    returns: tuple[str, ...]


@cache
def schema(target: str) -> Schema:
    """The schema of an allowed `target`. ProgramError when this torch build has no such operator."""
    parts = target.split(".")
    found: Any = torch.ops
    for part in parts if len(parts) == 3 else ():
        found = getattr(found, part, None) if part.isidentifier() else None
    if not isinstance(found, torch._ops.OpOverload):
        raise ProgramError(
            f"this torch build ({torch.__version__}) has no operator {target!r:.200}",
            "capture and run with the same torch version",
        )
    declared = found._schema
    hidden = allowlist.written_args(target) if target in allowlist.HIDDEN_WRITES else ()
    params = [_param(argument, index in hidden) for index, argument in enumerate(declared.arguments)]
    return Schema(
        found,
        tuple(p for p in params if not p.keyword_only),
        {p.name: p for p in params if p.keyword_only},
        tuple(str(r.real_type) for r in declared.returns),
    )


def match(op: Op) -> Schema:
    """The schema of `op`, whose arguments fit it in number, kind and name; else ProgramError."""
    known = schema(op.target)
    if len(op.args) > len(known.positional):
        raise ProgramError(f"{len(op.args)} positional arguments; the operator takes {len(known.positional)}")
    for param, arg in zip(known.positional, op.args, strict=False):
        _check(op, param, arg)
    missing = [p.name for p in known.positional[len(op.args) :] if p.required]
    given = dict(op.kwargs)
    missing += [p.name for p in known.keyword.values() if p.required and p.name not in given]
    if missing:
        raise ProgramError(f"the argument {missing[0]} is missing")
    for name, arg in op.kwargs:
        keyword = known.keyword.get(name)
        if keyword is None:
            raise ProgramError(f"the operator has no keyword-only argument {name!r:.40}")
        _check(op, keyword, arg)
    if len(op.outs) != len(known.returns):
        raise ProgramError(f"{len(op.outs)} outputs are declared; the operator returns {len(known.returns)}")
    return known


def written(op: Op) -> list[Arg]:
    """The arguments that `op` changes."""
    known = schema(op.target)
    args = [arg for param, arg in zip(known.positional, op.args, strict=False) if param.written]
    return args + [arg for name, arg in op.kwargs if known.keyword[name].written]


# Where torch itself gives nothing though the schema says a tensor: an undefined one.
_UNDEFINED = {("aten._scaled_dot_product_efficient_attention_backward.default", "attn_bias")}


def _check(op: Op, param: Param, arg: Arg) -> None:
    if arg is None and (op.target, param.name) in _UNDEFINED:
        return
    if not param.accepts(arg):
        raise ProgramError(f"the argument {param.name} takes {param.kind}, not {_kind(arg)}", _remedy(param, arg))
    if param.name == "pin_memory" and arg:
        raise ProgramError("pinned memory is not a Program's to ask for")
    if isinstance(arg, ScalarRef) and op.target in _SIZED_BY_NUMBERS:
        raise ProgramError(f"a host scalar as {param.name} would change the output's size from step to step")


def _kind(arg: Arg) -> str:
    if isinstance(arg, tuple):
        kinds = sorted({_kind(item) for item in arg})
        return f"a list of {' and '.join(kinds)}" if kinds else "an empty list"
    if isinstance(arg, Tag):
        return f"a {arg.kind}"
    names = {TensorRef: "a tensor", ScalarRef: "a host scalar", Complex: "a complex number", type(None): "nothing"}
    return names.get(type(arg), f"a {type(arg).__name__}")


def _remedy(param: Param, arg: Arg) -> str:
    if "Tensor" in param.kind and isinstance(arg, (int, float, ScalarRef, Complex)):
        return "use the operator's .Scalar overload for numbers"
    return ""


# ---- which values a schema type takes ------------------------------------------------------------


def _param(argument: Any, hidden_write: bool) -> Param:
    kind = str(argument.real_type)
    accepts = _accepts(kind)
    if argument.N is not None and kind == "List[int]":  # int[2]: one number stands for all
        accepts = _either(accepts, _is_int)
    required = not argument.has_default_value()
    alias = argument.alias_info
    writes = hidden_write or (alias is not None and alias.is_write)
    return Param(argument.name, kind, argument.kwarg_only, required, writes, accepts)


def _accepts(kind: str) -> Accepts:
    if kind.startswith("Optional[") and kind.endswith("]"):
        return _either(_is_none, _accepts(kind[9:-1]))
    if kind.startswith("List[") and kind.endswith("]"):
        return _each(_accepts(kind[5:-1]))
    return _LEAF_KINDS.get(kind, _is_none)


def _either(one: Accepts, other: Accepts) -> Accepts:
    return lambda arg: one(arg) or other(arg)


def _each(item: Accepts) -> Accepts:
    return lambda arg: isinstance(arg, tuple) and all(map(item, arg))


def _is_none(arg: Arg) -> bool:
    return arg is None


def _is_int(arg: Arg) -> bool:
    return type(arg) is int


def _tag(kind: str) -> Accepts:
    return lambda arg: isinstance(arg, Tag) and arg.kind == kind


# A type that is not here takes nothing: Generator (random slots say it), Storage, Stream and the like.
_LEAF_KINDS: dict[str, Accepts] = {
    "Tensor": lambda arg: isinstance(arg, TensorRef),
    "number": lambda arg: isinstance(arg, (bool, int, float, Complex, ScalarRef)),
    "float": lambda arg: type(arg) in (int, float, ScalarRef),
    "int": _is_int,
    "bool": lambda arg: type(arg) is bool,
    "str": lambda arg: type(arg) is str,
    "ScalarType": _tag("dtype"),
    "Layout": _tag("layout"),
    "MemoryFormat": _tag("memory_format"),
    "Device": _tag("device"),
}
