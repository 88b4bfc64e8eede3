"""Operators by name, and what their schemas say about arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from gpumux.program.ir import Arg, Complex, Op, ScalarRef, Tag, TensorRef
from gpumux.program.schemas import schema, written
from gpumux.program.validate import op_args, out_views, tensor_refs

DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64, "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def overload(target: str) -> Any:
    """The torch operator called `target`. Raises ProgramError when this torch build has none."""
    return schema(target).overload


@cache
def takes_generator(target: str) -> bool:
    """Whether the operator can be told which random generator to draw from."""
    return any(a.name == "generator" for a in overload(target)._schema.arguments)


def constant(tag: Tag) -> Any:
    if tag.kind == "dtype":
        return DTYPES[tag.name]
    if tag.kind == "memory_format":
        return MEMORY_FORMATS[tag.name]
    if tag.kind == "layout":
        return getattr(torch, tag.name)
    return torch.device("cpu")


def named_arguments(op: Op) -> list[tuple[Any, Arg, bool]]:
    """(schema argument, value, given) for every argument of the operator, in schema order. Where the
    Program gives none (`given` is false) the value is torch's own default, as a plain value."""
    kwargs = dict(op.kwargs)
    rows: list[tuple[Any, Arg, bool]] = []
    for index, argument in enumerate(overload(op.target)._schema.arguments):
        if index < len(op.args):
            rows.append((argument, op.args[index], True))
        elif argument.name in kwargs:
            rows.append((argument, kwargs[argument.name], True))
        else:
            rows.append((argument, argument.default_value, False))
    return rows


def views_read(op: Op) -> Iterator[int]:
    for ref in tensor_refs(op_args(op)):
        yield ref.view
    if op.stream is not None:
        yield op.stream


def views_made(op: Op) -> Iterator[int]:
    yield from out_views(op.outs)


def views_written(op: Op) -> Iterator[int]:
    """The views an operator changes in place, batch norm's running statistics and random streams included."""
    for ref in tensor_refs(tuple(written(op))):
        yield ref.view
    if op.stream is not None:
        yield op.stream


def evaluate(arg: Arg, views: Any, scalars: Sequence[float | int]) -> Any:
    """An argument as torch takes it. `views` maps a view's index to a tensor."""
    if isinstance(arg, TensorRef):
        return views(arg.view)
    if isinstance(arg, ScalarRef):
        return scalars[arg.index]
    if isinstance(arg, tuple):
        return [evaluate(item, views, scalars) for item in arg]
    if isinstance(arg, Tag):
        return constant(arg)
    if isinstance(arg, Complex):
        return complex(arg.re, arg.im)
    return arg
