"""What the recorder needs to know of an operator's schema, worked out once an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Operators that change an argument without saying so in their schema: positions of what they write.
HIDDEN_WRITES: dict[str, tuple[int, ...]] = {
    "aten.native_batch_norm.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    kwarg_only: bool
    default: Any
    has_default: bool
    writes: bool
    is_tensor: bool
    takes_scalar: bool  # a host scalar may stand here (Scalar, float, or a list of Scalars)


@dataclass(frozen=True, slots=True)
class Schema:
    target: str
    params: tuple[Param, ...]
    mutable: bool
    random: bool
    hidden_writes: tuple[int, ...]


_cache: dict[Any, Schema] = {}
_SCALAR_TYPES = {"number", "Scalar", "float", "List[number]", "List[Scalar]", "Optional[number]", "Optional[Scalar]",
                 "Optional[float]", "List[float]"}  # fmt: skip


def schema_of(func: torch._ops.OpOverload) -> Schema:
    found = _cache.get(func)
    if found is None:
        target = str(func)
        params = tuple(
            Param(
                a.name, a.kwarg_only, a.default_value if a.has_default_value() else None, a.has_default_value(),
                a.alias_info is not None and a.alias_info.is_write, str(a.type) in ("Tensor", "Optional[Tensor]"),
                str(a.type) in _SCALAR_TYPES,
            )
            for a in func._schema.arguments
        )  # fmt: skip
        found = Schema(
            target, params, func._schema.is_mutable, torch.Tag.nondeterministic_seeded in func.tags,
            HIDDEN_WRITES.get(target, ()),
        )  # fmt: skip
        _cache[func] = found
    return found


def bind(schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Param, Any]]:
    """(parameter, value) for everything given, positionals first, in schema order."""
    bound: list[tuple[Param, Any]] = []
    for i, param in enumerate(schema.params):
        if i < len(args):
            bound.append((param, args[i]))
        elif param.name in kwargs:
            bound.append((param, kwargs[param.name]))
        elif not param.kwarg_only and any(p.name in kwargs and not p.kwarg_only for p in schema.params[i + 1 :]):
            bound.append((param, param.default))
    return bound


def functional_overload(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """For an `out=` form with one output: the form that makes its own result from the same inputs."""
    outs = [a for a in func._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
    if len(outs) != 1 or outs[0].name != "out" or len(func._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if a.name != "out"]
    for name in func.overloadpacket.overloads():
        other: torch._ops.OpOverload = getattr(func.overloadpacket, name)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted and not other._schema.is_mutable:
            return other
    return None


def scalar_overload(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch._ops.OpOverload | None:
    """For a number where the schema wants a tensor (`mul.Tensor(x, 2.0)`): the overload that takes
    the number itself, which torch defines to compute the same."""
    packet = func.overloadpacket
    wanted = {"Tensor": "Scalar", "Tensor_mode": "Scalar_mode", "self": "ScalarOther"}.get(func._overloadname)
    if wanted is None or wanted not in packet.overloads():
        return None
    other: torch._ops.OpOverload = getattr(packet, wanted)
    names = [a.name for a in func._schema.arguments]
    if [a.name for a in other._schema.arguments] != names:
        return None
    return other
