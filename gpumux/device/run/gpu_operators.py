"""Operators of a GPU that the CPU has no kernels for, on the CPU: a fused Program for a GPU is proven in this process.

They compute what the GPU's kernels do, in the type of their operands, and are as slow as their formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpumux.errors import NotFusible
from gpumux.program.check import schema
from gpumux.program.ir import Program

SUMS_ROW = 32  # efficient attention's rows of sums are padded to a multiple of so many elements


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The softmax of the scores, and the logarithm of its sums."""
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(allowed.logical_not(), float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def _kept(weights: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """By what dropout multiplies each of the weights."""
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.rand(weights.shape, generator=generator)
    return (drawn >= dropout_p).to(weights.dtype) / (1 - dropout_p)


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keeps_sums: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """_scaled_dot_product_efficient_attention. The seed of its dropout is drawn."""
    weights, sums = _weights(q, k, bias, is_causal, scale)
    seed, offset = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    if dropout_p:
        seed = torch.randint(1 << 62, ())
        weights = weights * _kept(weights, seed, dropout_p)
    rows = pad(sums, (0, -sums.shape[-1] % SUMS_ROW), value=float("inf")) if keeps_sums else sums[..., :0].clone()
    return _as_on_a_gpu(weights @ v), rows, seed, offset


def efficient_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, dropout_p: float, wanted: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """_scaled_dot_product_efficient_attention_backward."""
    weights, _ = _weights(q, k, bias, is_causal, scale)
    d_weights, used = grad @ v.transpose(-2, -1), weights
    if dropout_p:
        kept = _kept(weights, seed, dropout_p)
        d_weights, used = d_weights * kept, weights * kept
    d_scores = weights * (d_weights - (grad * out).sum(-1, keepdim=True))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    made = (
        _as_on_a_gpu(d_scores @ k * factor), _as_on_a_gpu(d_scores.transpose(-2, -1) @ q * factor),
        _as_on_a_gpu(used.transpose(-2, -1) @ grad), d_scores,
    )  # fmt: skip
    return tuple(tensor if want else None for tensor, want in zip(made, wanted, strict=True))


def _as_on_a_gpu(tensor: Tensor) -> Tensor:
    """Heads behind rows in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
}
_TARGETS = frozenset(f"aten.{name}.default" for name in _KERNELS)


@contextmanager
def on_the_cpu(program: Program) -> Iterator[None]:
    """Inside this context the CPU has kernels for the operators of `program` that are listed here. Raises NotFusible
    for operators that a GPU alone has."""
    targets = {op.target for op in program.ops}
    for target in sorted(targets - _TARGETS):
        name = schema(target).overload.name()
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
            raise NotFusible(
                f"the CPU has no kernel for {target}, with which the fused step would be verified",
                'fuse nothing: choose="per-model"',
            )
    if not targets & _TARGETS:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()
