"""Attention and batch norm as torch itself would carry them out on a GPU.

A Program that was traced on the CPU has the CPU's operators for both, forward and backward apart, with what the forward
one leaves for the other as tensors of the Program. On a GPU torch chooses by shape and type between kernels of several
libraries; here the same choice is made again, by torch's own rules. Each pair of kernels leaves the same two things
behind as the CPU's does (attention: the logarithm of the softmax's sums; batch norm: mean and inverse deviation), so a
backward may follow any forward, and nothing else has to cross from piece to piece:

- what the kernels keep of random numbers is for dropout, which the CPU's operator never has. Attention with dropout, or
  with a mask, comes as a GPU's operator (capture/gpu/operators.py), which leaves that for its backward;
- efficient attention wants its rows of sums padded to ROW: they are padded again;
- cuDNN's batch norm may want a block of its own kept (for channels-last). Where it does, the native kernels are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = range(4)  # as torch numbers its ways of attention
ROW = 32  # efficient attention's rows of sums, in elements
WIDEST = 128  # elements a head, within which every kernel has a backward on every card


# ---- attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None, way: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """_scaled_dot_product_flash_attention_for_cpu: the output and the logarithm of the softmax's sums. `way`: None for
    torch's choice."""
    form = FORWARD[choice(q, k, v, is_causal, attn_mask, scale) if way is None else way]
    return form(q, k, v, is_causal, attn_mask, scale)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dropout_p: float, is_causal: bool, *,
    attn_mask: Tensor | None = None, scale: float | None = None, way: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its backward: gradients of q, k and v."""
    form = BACKWARD[choice(q, k, v, is_causal, attn_mask, scale) if way is None else way]
    return form(grad, q, k, v, out, sums, is_causal, attn_mask, scale)


def choice(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> int:
    """Torch's choice; the mathematical form with a mask, where kernels differ in what rows that see nothing come to."""
    if not q.is_cuda or mask is not None or q.dim() != 4 or not (q.numel() and k.numel()):
        return MATH
    if q.shape[-1] > WIDEST or q.shape[-1] % 8 or q.shape[-1] != v.shape[-1]:
        return MATH
    way = _torchs_choice(q, k, v, 0.0, is_causal, scale)
    return way if way in FORWARD else MATH


def _torchs_choice(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> int:
    """With what stands in for cuDNN's attention where torch would take that. Flash attention aligns a causal mask with
    the last row and column, where torch's operator and the other kernels align it with the first ones: it is only for
    equal lengths."""
    way = int(torch._fused_sdp_choice(q, k, v, None, dropout_p, is_causal, scale=scale))
    if way in (FLASH, CUDNN):
        return EFFICIENT if is_causal and q.shape[2] != k.shape[2] else FLASH
    return way


def _scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(allowed.logical_not(), float("-inf"))
    return scores if mask is None else scores + mask


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def mathematical(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(_wide(q), _wide(k), is_causal, mask, scale)
    sums = torch.logsumexp(scores, dim=-1)
    # A row that may look at nothing has sums of -inf; the CPU's kernel makes its output 0.
    weights = torch.exp(scores - sums.unsqueeze(-1)).nan_to_num(0.0)
    return (weights @ _wide(v)).to(q.dtype), sums


def mathematical_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g, wq, wk, wv = _wide(grad), _wide(q), _wide(k), _wide(v)
    weights = torch.exp(_scores(wq, wk, is_causal, mask, scale) - sums.unsqueeze(-1)).nan_to_num(0.0)
    delta = (g * _wide(out)).sum(dim=-1, keepdim=True)
    d_scores = weights * (g @ wv.transpose(-2, -1) - delta)
    d_scores = d_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    dq, dk, dv = d_scores @ wk, d_scores.transpose(-2, -1) @ wq, weights.transpose(-2, -1) @ g
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: None, scale: float | None) -> tuple[Tensor, Tensor]:
    out, sums, *_ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, sums


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, mask: None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    seed, offset = _undrawn(FLASH, q)
    rows = (None, None, q.shape[2], k.shape[2])
    made: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, sums.contiguous(), *rows, 0.0, is_causal, seed, offset, scale=scale
    )
    return made


def efficient(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: None, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, sums, *_ = aten._scaled_dot_product_efficient_attention.default(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, sums[..., : q.shape[2]]


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, mask: None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    seed, offset = _undrawn(EFFICIENT, q)
    # The forward kernel fills its padding with infinity, so that no weight comes of it.
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % ROW), value=float("inf")).contiguous()
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, None, out, padded, seed, offset, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    return dq, dk, dv


FORWARD: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {MATH: mathematical, FLASH: flash, EFFICIENT: efficient}
BACKWARD: dict[int, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    MATH: mathematical_backward, FLASH: flash_backward, EFFICIENT: efficient_backward,
}  # fmt: skip


def _undrawn(way: int, like: Tensor) -> list[Tensor]:
    """What the forward operator returns as seed and offset: nobody reads them where nothing is dropped."""
    return [torch.zeros(size, dtype=torch.int64, device=like.device).view(dtype) for size, dtype in _drawn(way)]


@cache
def _drawn(way: int) -> Sequence[tuple[torch.Size, torch.dtype]]:
    """As torch says of its kernels without running them."""
    q = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
    if way == FLASH:
        made = torch.ops.aten._scaled_dot_product_flash_attention.default(q, q, q)[6:8]
    else:
        made = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, q, q, None, True)[2:4]
    return [(tensor.shape, tensor.dtype) for tensor in made]


# ---- attention with a mask or dropout, which clients tell as efficient attention


def chosen(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keeps: bool, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """_scaled_dot_product_efficient_attention, or flash where torch would choose that: the output, the logarithm of the
    softmax's sums if it `keeps` them, and where the random numbers began."""
    if not _flashes(q, k, v, bias, dropout_p, is_causal, scale):
        made: tuple[Tensor, Tensor, Tensor, Tensor] = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, bias, keeps, dropout_p, is_causal, scale=scale
        )
        return made
    out, sums, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention.default(
        q, k, v, dropout_p, is_causal, False, scale=scale
    )
    # Outside a capture the kernels leave both in host memory, and their backward reads them there. What a step leaves
    # goes to its backward as it is, so steps that run operator by operator and captured ones each fit themselves.
    if seed.numel() == 2:  # both in one
        seed, offset = seed.view(torch.int64).unbind()
    rows = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % ROW), value=float("inf"))
    return out, rows if keeps else rows[..., :0].contiguous(), seed.clone(), offset.clone()


def chosen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, dropout_p: float, wanted: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Its backward: gradients of q, k, v and the bias, where they are wanted."""
    if not _flashes(q, k, v, bias, dropout_p, is_causal, scale):
        made: tuple[Tensor | None, ...] = aten._scaled_dot_product_efficient_attention_backward.default(
            grad, q, k, v, bias, out, sums, seed, offset, dropout_p, wanted, is_causal, scale=scale
        )
        return made
    if _drawn(FLASH)[0][0].numel() == 2:
        seed, offset = torch.stack([seed, offset]).view(_drawn(FLASH)[0][1]), _undrawn(FLASH, q)[1]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, sums[..., : q.shape[2]].contiguous(), None, None, q.shape[2], k.shape[2], dropout_p, is_causal,
        seed, offset, scale=scale,
    )  # fmt: skip
    return dq, dk, dv, None


def _flashes(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> bool:
    if not q.is_cuda or bias is not None:
        return False
    return _torchs_choice(q, k, v, dropout_p, is_causal, scale) == FLASH


# ---- batch norm


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """native_batch_norm: the output, and the batch's mean and inverse deviation."""
    if cudnn_takes(x, weight, bias, mean, var, eps, training):
        out, batch_mean, inverse, _ = aten.cudnn_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
        return out, batch_mean, inverse
    made: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm.default(
        x, weight, bias, mean, var, training, momentum, eps
    )
    return made


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, var: Tensor | None, batch_mean: Tensor | None,
    inverse: Tensor | None, train: bool, eps: float, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """native_batch_norm_backward: gradients of its input, weight and bias, where they are wanted."""
    if train and cudnn_takes(x, weight, weight, mean, var, eps):
        nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
        made = aten.cudnn_batch_norm_backward.default(x, grad, weight, mean, var, batch_mean, inverse, eps, nothing)
        dx, dw, db = (tensor if want else None for tensor, want in zip(made, wanted, strict=True))
        return dx, dw, db
    native: tuple[Tensor | None, Tensor | None, Tensor | None] = aten.native_batch_norm_backward.default(
        grad, x, weight, mean, var, batch_mean, inverse, train, eps, wanted
    )
    return native


def cudnn_takes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float,
    training: bool = True,
) -> bool:  # fmt: skip
    """Whether torch would take cuDNN, and cuDNN wants nothing kept. `bias` only has to be there."""
    if not x.is_cuda or weight is None or bias is None or not x.is_contiguous():
        return False
    if mean is None and var is None and training:
        mean = var = weight  # torch only asks whether both are there or neither is
    if mean is None or var is None:
        return False
    choose, reserve = (getattr(torch._C, name, None) for name in ("_select_batch_norm_backend", RESERVE))
    if choose is None or reserve is None:
        return False
    taken = choose(x, weight, bias, mean, var, training, eps)
    return bool(taken == torch._C._BatchNormBackend.Cudnn and (not training or reserve(x, True) == 0))  # type: ignore[attr-defined]


RESERVE = "_get_cudnn_batch_norm_reserve_space_size"

FORMS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
    "aten._scaled_dot_product_efficient_attention.default": chosen,
    "aten._scaled_dot_product_efficient_attention_backward.default": chosen_backward,
    "aten.native_batch_norm.default": batch_norm,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
}

# For code that is compiled: the compiler knows these better than kernels it can't look into.
COMPILED: dict[str, Callable[..., Any]] = {
    name: partial(form, way=MATH) for name, form in FORMS.items() if form in (attention, attention_backward)
}
