"""What a batch may not hold, and what a trace may not have done, looked at when it is over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumux.client import blame
from gpumux.client.ledger import Record
from gpumux.errors import CaptureError, NotRepeatable
from gpumux.program.ir import ITEM_BYTES


def refuse_odd_tensors(tensors: Sequence[Any]) -> None:
    """Only plain strided memory can be laid into shared memory. What is no tensor is passed over."""
    for i, tensor in enumerate(t for t in tensors if isinstance(t, torch.Tensor)):
        what, remedy = _odd(tensor)
        if what:
            raise CaptureError(f"tensor {i} of the batch is {what}", remedy)


def _odd(tensor: torch.Tensor) -> tuple[str, str]:
    if tensor.is_nested:
        return "a nested tensor", "pass it padded, with its lengths or a mask"
    if tensor.layout is not torch.strided:
        return f"laid out as {tensor.layout}", "pass .to_dense()"
    if tensor.is_quantized:
        return "quantized", "pass .dequantize() or .int_repr()"
    if tensor.is_meta:
        return "on the meta device and has no values", "pass a real tensor"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        return f"of type {dtype}", f"convert it to one of {', '.join(ITEM_BYTES)}"
    return "", ""


def refuse_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
    """A call that never got into the step is about the batch, not about a line of it."""
    if not isinstance(error, TypeError):
        return
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        raise CaptureError(
            f"the step ({blame.definition(fn)}) can't be called with this batch: {error}",
            "give one value for each of its arguments, in example= and at every call",
        ) from error
    except ValueError:
        return  # it has no signature


def refuse_batch_gradients(given: list[Any], fakes: list[Any]) -> None:
    tensors = [(g, f) for g, f in zip(given, fakes, strict=True) if isinstance(g, torch.Tensor)]
    for i, (tensor, fake) in enumerate(tensors):
        if fake.grad is not None or fake.requires_grad != tensor.requires_grad:
            raise CaptureError(
                f"the step makes tensor {i} of the batch require grad, and its gradient would stay in the daemon",
                "begin with x = x.detach().requires_grad_() inside the step",
            )


def refuse_draws(fn: Any, before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> None:
    """Python's own random numbers are not drawn again in the daemon: a branch that is rarely taken
    would be baked in even though two traces agree."""
    for (name, old), (_, new) in zip(before, after, strict=True):
        if old != new:
            raise NotRepeatable(
                f"the step ({blame.definition(fn)}) draws random numbers from Python's {name}",
                "draw with torch (torch.rand), or outside the step and pass the number in as a tensor",
            )


def refuse_written_batch(record: Record) -> None:
    """The batch is copied to the daemon, so a write to it would not be seen here: the plain loop's
    next use of the same tensor would differ."""
    for op in record.ops:
        for storage in op.writes:
            found = record.storages[storage]
            if found.kind == "input":
                raise CaptureError(
                    f"{op.where} writes into tensor {found.key} of the batch ({op.target.removeprefix('aten.')})",
                    "clone it first, or use the operator that returns a new tensor",
                )
