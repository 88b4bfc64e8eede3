"""Layers of an LSTM on the CPU, which torch runs through oneDNN: shapes, and the workspace between the two passes.

The forward operator computes by two kernels, which may round differently. Where gradients are on it runs the one for
training, which also returns a workspace for the backward operator; else the one for inference, without a workspace.
torch's shape rules know neither the workspace nor that the gradients of the two biases are two tensors. A Program
says which kernel it wants by whether it declares a workspace.

The workspace holds numbers in a layout that oneDNN chooses by the processor. Its size is therefore asked of the kernel
at capture, on the client's machine, and declared in the Program. The daemon's check takes the declared size, and the
executor compares it with the real one in the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpumux.program.ir import Out

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
TARGETS = (str(LAYER), str(BACKWARD))
WORKSPACE = 3  # its position among the results of LAYER
GIVEN = 22  # and among the arguments of BACKWARD
REMEDY = "set torch.backends.mkldnn.enabled = False before you submit (and in runs you compare with)"

_LSTM = 2  # torch's number for the kind of layer
_GATES = 4
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Of a call: length, rows, width of the input, hidden size, type, biases, backwards in time.
Layer = tuple[int, int, int, int, torch.dtype, bool, bool]


class RunOp(Protocol):
    """An operator of a Program, or one that is being recorded."""

    @property
    def target(self) -> str: ...
    @property
    def outs(self) -> tuple[Out, ...]: ...


def workspace_view(op: RunOp) -> int | None:
    """The view of the workspace that `op` makes; None if it makes none."""
    out = op.outs[WORKSPACE] if op.target == TARGETS[0] else None
    return out if isinstance(out, int) else None


def for_training(op: RunOp) -> bool:
    """Whether this is a layer that must run with gradients on."""
    return workspace_view(op) is not None


def as_captured(op: RunOp) -> AbstractContextManager[Any]:
    """A context in which `op` runs the kernel that it ran at capture, within a block without gradients."""
    return torch.enable_grad() if for_training(op) else nullcontext()


def layer_made(args: Sequence[Any]) -> Layer:
    """What the kernel is made for in a call of LAYER. Raises ValueError."""
    return _layer(args[0], args[1:5], args[5:7], args[7], args[8], args[9], args[10], args[12])


def layer_used(args: Sequence[Any]) -> Layer:
    """What the kernel is made for in a call of BACKWARD. Raises ValueError."""
    return _layer(args[0], args[1:5], (*args[5:7], *args[8:10]), args[13], args[20], args[14], args[15], args[17])


def _layer(
    x: Any, weights: Sequence[Any], states: Sequence[Any], reverse: bool, batch_sizes: Sequence[int], mode: int,
    hidden: int, has_biases: bool,
) -> Layer:  # fmt: skip
    """What the kernel is made for. Raises ValueError for arguments that it does not check itself, and would read beyond
    their ends."""
    if mode != _LSTM or batch_sizes or x.dim() != 3 or x.dtype not in _FLOATS or x.numel() == 0:
        raise ValueError("oneDNN's layers are taken for an LSTM, with plain batches of low or single precision")
    length, rows, width = x.shape
    sizes = [(_GATES * hidden, width), (_GATES * hidden, hidden), *[(_GATES * hidden,)] * 2]
    given = [tuple(w.shape) for w in weights]
    if given[: len(sizes) if has_biases else 2] != sizes[: len(sizes) if has_biases else 2]:
        raise ValueError(f"weights of {given} for an input of {width} and a hidden size of {hidden}")
    if any(tuple(state.shape) != (rows, hidden) for state in states):
        raise ValueError(f"states of {[tuple(s.shape) for s in states]} for {rows} rows and a hidden size of {hidden}")
    if {each.dtype for each in (*weights, *states)} != {x.dtype}:
        raise ValueError(f"weights or states of another type than the input's {x.dtype}")
    if not all(each.is_contiguous() for each in (x, *states)):
        raise ValueError("an input or a state that is not contiguous")
    return length, rows, width, hidden, x.dtype, has_biases, reverse


def layer(*args: Any, declared: int | None = None) -> tuple[Any, Any, Any, Any]:
    """The results of LAYER as fake tensors. `declared`: bytes of the workspace; None: as the kernel says. As in the
    kernel, there is one where gradients are on."""
    made = layer_made(args)
    length, rows, _, hidden, *_ = made
    x = args[0]
    out, hy, cy = (x.new_empty(size) for size in ((length, rows, hidden), (rows, hidden), (rows, hidden)))
    if not torch.is_grad_enabled():
        return out, hy, cy, None
    nbytes = workspace_bytes(made) if declared is None else declared
    return out, hy, cy, x.new_empty(nbytes, dtype=torch.uint8)


def backward(*args: Any) -> tuple[Any, ...]:
    """The results of BACKWARD as fake tensors: the gradients of input, weights, biases (two tensors, biases or not) and
    states, always in float32 and contiguous."""
    length, rows, width, hidden, dtype, *_ = layer_used(args)
    x, out, grad_out, grad_hy, grad_cy, workspace = (args[i] for i in (0, 7, 10, 11, 12, GIVEN))
    wide, state = (length, rows, hidden), (rows, hidden)
    for tensor, size in ((out, wide), (grad_out, wide), (grad_hy, state), (grad_cy, state)):
        if tensor is not None and (tuple(tensor.shape) != size or tensor.dtype != dtype):
            raise ValueError(f"outputs or their gradients of {tuple(tensor.shape)} for an input of {tuple(x.shape)}")
    if not out.is_contiguous() or workspace.dtype != torch.uint8:
        raise ValueError("outputs that are not contiguous, or a workspace of another type than bytes")
    gates = _GATES * hidden
    sizes = [(length, rows, width), (gates, width), (gates, hidden), (gates,), (gates,), state, state]
    return tuple([x.new_empty(size, dtype=torch.float32) for size in sizes])


@cache
def workspace_bytes(made_for: Layer) -> int:
    """The size of the workspace on this machine. Runs the kernel once, on zeros: nothing else says it."""
    length, rows, width, hidden, dtype, has_biases, reverse = made_for
    gates = _GATES * hidden
    sizes = [(length, rows, width), (gates, width), (gates, hidden)]
    sizes += [(gates,), (gates,)] if has_biases else sizes[1:]
    sizes += [(rows, hidden), (rows, hidden)]
    with _disable_current_modes(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        zeros = [torch.zeros(size, dtype=dtype, device="cpu") for size in sizes]
        made = LAYER(*zeros, reverse, [], _LSTM, hidden, 1, has_biases, False, False, True)
        nbytes: int = made[WORKSPACE].numel()
    return nbytes
