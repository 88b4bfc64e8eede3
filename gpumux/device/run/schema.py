"""Operators by name, what their schemas say, and numerics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from gpumux.errors import ProgramError
from gpumux.program.check import overload, written
from gpumux.program.ir import Arg, Complex, Numerics, Op, ScalarRef, Tag, TensorRef
from gpumux.program.validate import op_args, out_views, tensor_refs

# ---- Operators by name, and what their schemas say about arguments.


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


@cache
def takes_generator(target: str) -> bool:
    """Whether the operator takes a random generator as an argument."""
    return any(a.name == "generator" for a in overload(target)._schema.arguments)


def constant(tag: Tag) -> Any:
    if tag.kind == "dtype":
        return DTYPES[tag.name]
    if tag.kind == "memory_format":
        return MEMORY_FORMATS[tag.name]
    if tag.kind == "layout":
        return getattr(torch, tag.name)
    return torch.device("cpu")


def views_read(op: Op) -> Iterator[int]:
    for ref in tensor_refs(op_args(op)):
        yield ref.view
    if op.stream is not None:
        yield op.stream


def views_made(op: Op) -> Iterator[int]:
    yield from out_views(op.outs)


def views_written(op: Op) -> Iterator[int]:
    """The views that an operator changes in place, with batch norm's running statistics and random streams."""
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


# ---- Process-wide settings that change results, as recorded in the Program.


class CurrentNumerics:
    """The settings in force, so that steps of the same settings need not set them again."""

    def __init__(self) -> None:
        self._now: Numerics | None = None

    def apply(self, wanted: Numerics) -> None:
        """Set the numerics. Raises ProgramError if this machine can't."""
        if wanted is self._now or wanted == self._now:
            return
        self._now = None
        torch.set_float32_matmul_precision(wanted.matmul_precision)
        # Not torch.use_deterministic_algorithms: that imports the compiler to set it there, too, which takes a second.
        torch._C._set_deterministic_algorithms(wanted.deterministic, warn_only=False)
        if not torch.set_flush_denormal(wanted.flush_denormal) and wanted.flush_denormal:
            raise ProgramError("this CPU can't flush denormal numbers", "train without torch.set_flush_denormal(True)")
        torch.backends.mkldnn.set_flags(_enabled=wanted.mkldnn)
        torch.set_default_dtype(DTYPES[wanted.default_dtype])
        self._now = wanted
