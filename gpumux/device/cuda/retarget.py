"""Programs traced on the CPU, made to run on another device.

A client needs no GPU: it traces on the CPU, and what it sends names no device (ir.Tag: "the device the job runs
on"). Nearly all operators mean the same on both. Here is the rest: operators that only the CPU has, told in others;
operators that make tensors out of nothing, which have to be told where; random numbers drawn twice; and layouts
that kernels choose differently from what was declared. What can't be moved is refused by name at load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpumux.device.cpu.schema import DTYPES, constant
from gpumux.device.cuda import asking, fused
from gpumux.device.cuda.feeding import form, takes_numbers
from gpumux.errors import ProgramError
from gpumux.program.allowlist import RANDOM
from gpumux.program.ir import Arg, Complex, Op, Out, Program, ScalarRef, Tag, TensorRef, View
from gpumux.program.schemas import schema

_FORMS: dict[str, Callable[..., Any]] = {**asking.FORMS, **fused.FORMS}
_COMPILED: dict[str, Callable[..., Any]] = {**asking.FORMS, **fused.COMPILED}

# Recomputation draws an operator's numbers again. On a GPU the first draw is kept instead; that is the same only
# where what is drawn depends on nothing but the arguments' shapes.
_KEPT_DRAWS = frozenset(
    f"aten.{name}"
    for name in (
        "bernoulli.p", "bernoulli_.float", "rand.default", "randn.default", "rand_like.default", "randn_like.default",
        "uniform_.default", "uniform.default", "normal_.default", "exponential_.default", "random_.default",
        "native_dropout.default",
    )
)  # fmt: skip


def call(index: int, op: Op, supports: Callable[[str], bool], *, compiled: bool = False) -> Callable[..., Any]:
    """What carries out an operator on another device than the CPU. Raises ProgramError when nothing can.
    `supports`: whether the device has a kernel for an operator of torch's; `compiled`: it is to be compiled."""
    if takes_numbers(op):
        return form(index, op)
    known = (_COMPILED if compiled else _FORMS).get(op.target)
    if known is not None:
        return known
    if not supports(op.target):
        raise ProgramError(
            f"operator {index} ({op.target}) exists on the CPU alone",
            "write the step without it (for recurrent layers: torch.backends.mkldnn.flags(enabled=False) while tracing), "
            "or use --device cpu",
        )
    return schema(op.target).overload  # type: ignore[no-any-return]


def placed(op: Op) -> bool:
    """Whether the operator has to be told on which device its result is to lie."""
    known = schema(op.target)
    return "device" in known.keyword and "device" not in dict(op.kwargs)


def kept_draws(program: Program) -> frozenset[int]:
    """Random slots whose first draw must be kept for a second operator. Raises ProgramError where that won't do."""
    first: dict[int, int] = {}
    kept: set[int] = set()
    for index, op in enumerate(program.ops):
        if op.random is None:
            continue
        if op.stream is not None:
            raise ProgramError(
                f"operator {index} ({op.target}) draws from a random stream of its own, which captured graphs can't yet",
                "train models that draw (dropout) as jobs of their own, or use --device cpu",
            )
        before = first.setdefault(op.random, index)
        if before == index:
            continue
        earlier = program.ops[before]
        if (
            op.target not in _KEPT_DRAWS
            or earlier.target != op.target
            or shapes(program, earlier) != shapes(program, op)
        ):
            raise ProgramError(
                f"operator {index} ({op.target}) is to draw the numbers of operator {before} again",
                "recompute (checkpoint) nothing that draws anything but dropout masks, or use --device cpu",
            )
        kept.add(op.random)
    return frozenset(kept)


def unsized(program: Program) -> frozenset[int]:
    """Temporary storages that are as large as a kernel wants them, which a Program states as empty: what cuDNN's recurrent
    layers keep for their backward."""
    found: set[int] = set()
    for op in program.ops:
        outs: Sequence[Out] = ()
        if op.target == "aten._cudnn_rnn.default":
            outs = op.outs[3:]
        elif op.target == "aten.clone.default" and isinstance(op.args[0], TensorRef):  # for a graph that is kept
            outs = op.outs if program.views[op.args[0].view].storage in found else ()
        found |= {program.views[out].storage for out in outs if isinstance(out, int)}
    return frozenset(found)


def drawn_again(op: Op, arguments: Sequence[Any], kept: Tensor) -> Any:
    """What an operator returns that draws the numbers which are `kept` of another."""
    if op.target == "aten.native_dropout.default":
        x, p, _ = arguments
        return torch.ops.aten.native_dropout_backward.default(x, kept, 1 / (1 - p)), kept.clone()
    if op.target.split(".")[1].endswith("_"):
        return arguments[0].copy_(kept)
    return kept.clone()


def shapes(program: Program, op: Op) -> tuple[object, ...]:
    """An operator's arguments with its tensors' types and sizes in their place."""

    def describe(arg: Arg) -> object:
        if isinstance(arg, TensorRef):
            view = program.views[arg.view]
            return (view.dtype, view.size)
        return tuple(map(describe, arg)) if isinstance(arg, tuple) else arg

    return (tuple(map(describe, op.args)), tuple((name, describe(arg)) for name, arg in op.kwargs))


def draws(op: Op) -> bool:
    return op.random is not None or op.target in RANDOM


def evaluate(arg: Arg, tensor: Callable[[int], Tensor], numbers: Sequence[Any], device: torch.device) -> Any:
    """An argument as torch takes it on `device`. `tensor` maps a view's index to a tensor; `numbers` stand for the
    step's host scalars."""
    if isinstance(arg, TensorRef):
        return tensor(arg.view)
    if isinstance(arg, ScalarRef):
        return numbers[arg.index]
    if isinstance(arg, tuple):
        return [evaluate(item, tensor, numbers, device) for item in arg]
    if isinstance(arg, Tag):
        return device if arg.kind == "device" else constant(arg)
    return complex(arg.re, arg.im) if isinstance(arg, Complex) else arg


def window(base: Tensor, view: View) -> Tensor:
    """`view` onto the storage of `base`, whatever its own type, on its device."""
    made = torch.empty(0, dtype=DTYPES[view.dtype], device=base.device)
    return made.set_(base.untyped_storage(), view.offset, view.size, view.stride)


def conforming(made: Tensor, view: View, nbytes: int, arguments: frozenset[int]) -> Tensor:
    """A new tensor as the Program declares it: `made` itself if it lies so, else a copy that does. `arguments`: where
    the memory of the operator's arguments begins, which nothing new may share. Raises ProgramError when size or type
    are not as declared."""
    if tuple(made.size()) != view.size or made.dtype != DTYPES[view.dtype]:
        raise ProgramError(
            f"it returned {tuple(made.size())} of {made.dtype} where the program declares {view.size} of {view.dtype}",
            "capture the step with the daemon's torch version",
        )
    storage = made.untyped_storage()
    as_declared = (
        _used(view.size, made.stride()) == _used(view.size, view.stride)
        and (not made.numel() or made.storage_offset() == view.offset)
        and storage.nbytes() >= nbytes
        and storage.data_ptr() not in arguments
    )
    if as_declared or not made.numel():
        return made
    return window(torch.empty(nbytes, dtype=torch.uint8, device=made.device), view).copy_(made)


def _used(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of dimensions of one element are never used."""
    return tuple(s for n, s in zip(size, stride, strict=True) if n > 1)
