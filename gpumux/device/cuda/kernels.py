"""Attention and batch norm, run by the kernels that torch itself would choose on a GPU.

A Program that was traced on the CPU has the CPU's operators for both: a forward and a backward one, with what the
forward leaves for the backward as tensors of the Program. On a GPU torch chooses by shape and type between kernels of
several libraries, and the same choice is made here by torch's own rules. Each pair of kernels leaves the same two
tensors as the CPU's does (attention: the logarithm of the softmax's sums; batch norm: mean and inverse deviation). So a
backward may follow any forward, and no other tensor has to pass from piece to piece:

- kernels keep random numbers for dropout alone, which the CPU's operator never has. Attention with dropout, or with a
  mask, is traced as a GPU's operator (capture/gpu/operators.py), which leaves them for its backward;
- efficient attention wants its rows of sums padded to a multiple of SUMS_ROW: they are padded again;
- cuDNN's batch norm may want a block of its own kept (for channels-last). Then the native kernels are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gpumux.device.run.gpu_operators import SUMS_ROW

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = range(4)  # as torch numbers its backends of attention
MAX_HEAD = 128  # elements of a head up to which every kernel has a backward on every card


# ---- attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None, backend: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """_scaled_dot_product_flash_attention_for_cpu. Returns the output and the logarithm of the softmax's sums.
    `backend`: None for torch's choice."""
    form = FORWARD[attention_backend(q, k, v, is_causal, attn_mask, scale) if backend is None else backend]
    return form(q, k, v, is_causal, attn_mask, scale)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dropout_p: float, is_causal: bool, *,
    attn_mask: Tensor | None = None, scale: float | None = None, backend: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `attention`. Returns the gradients of q, k and v."""
    form = BACKWARD[attention_backend(q, k, v, is_causal, attn_mask, scale) if backend is None else backend]
    return form(grad, q, k, v, out, sums, is_causal, attn_mask, scale)


def attention_backend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> int:
    """The backend torch would choose. MATH with a mask: kernels differ in the result of rows that are all masked."""
    if not q.is_cuda or mask is not None or q.dim() != 4 or not (q.numel() and k.numel()):
        return MATH
    if q.shape[-1] > MAX_HEAD or q.shape[-1] % 8 or q.shape[-1] != v.shape[-1]:
        return MATH
    backend = _torch_backend(q, k, v, 0.0, is_causal, scale)
    return backend if backend in FORWARD else MATH


def _torch_backend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> int:
    """torch's choice, with another backend instead of cuDNN's. Flash attention aligns a causal mask with the last row
    and column; torch's operator and the other kernels align it with the first ones. So flash is for equal lengths
    only."""
    backend = int(torch._fused_sdp_choice(q, k, v, None, dropout_p, is_causal, scale=scale))
    if backend in (FLASH, CUDNN):
        return EFFICIENT if is_causal and q.shape[2] != k.shape[2] else FLASH
    return backend


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
    # A row that is all masked has a sum of -inf; the CPU's kernel makes its output 0.
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
    seed, offset = _unused_seed(FLASH, q)
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
    seed, offset = _unused_seed(EFFICIENT, q)
    # The forward kernel fills its padding with infinity, so that its weights are 0.
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % SUMS_ROW), value=float("inf")).contiguous()
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, None, out, padded, seed, offset, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    return dq, dk, dv


FORWARD: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {MATH: mathematical, FLASH: flash, EFFICIENT: efficient}
BACKWARD: dict[int, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    MATH: mathematical_backward, FLASH: flash_backward, EFFICIENT: efficient_backward,
}  # fmt: skip


def _unused_seed(backend: int, like: Tensor) -> list[Tensor]:
    """Zeros for the seed and offset that a backward takes. It does not read them without dropout."""
    return [
        torch.zeros(size, dtype=torch.int64, device=like.device).view(dtype) for size, dtype in _seed_layout(backend)
    ]


@cache
def _seed_layout(backend: int) -> Sequence[tuple[torch.Size, torch.dtype]]:
    """Shape and type of a forward's seed and offset, as torch's meta kernels give them."""
    q = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
    if backend == FLASH:
        made = torch.ops.aten._scaled_dot_product_flash_attention.default(q, q, q)[6:8]
    else:
        made = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, q, q, None, True)[2:4]
    return [(tensor.shape, tensor.dtype) for tensor in made]


# ---- attention with a mask or dropout, which clients trace as efficient attention


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keeps_sums: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """_scaled_dot_product_efficient_attention, or flash attention if torch would choose that. Returns the output, the
    logarithm of the softmax's sums if `keeps_sums`, and the seed and offset of the random numbers."""
    if not _takes_flash(q, k, v, bias, dropout_p, is_causal, scale):
        made: tuple[Tensor, Tensor, Tensor, Tensor] = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, bias, keeps_sums, dropout_p, is_causal, scale=scale
        )
        return made
    out, sums, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention.default(
        q, k, v, dropout_p, is_causal, False, scale=scale
    )
    # Outside a capture the kernels leave both in host memory, and their backward reads them there. They go to the
    # backward of the same step unchanged, so this is right for captured steps and for those that run operator by
    # operator; `masked_attention_backward` sees to steps of which only a part is captured.
    if seed.numel() == 2:  # seed and offset in one tensor
        seed, offset = seed.view(torch.int64).unbind()
    rows = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % SUMS_ROW), value=float("inf"))
    return out, rows if keeps_sums else rows[..., :0].contiguous(), seed.clone(), offset.clone()


def masked_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    wanted: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """The backward of `masked_attention`. Returns the gradients of q, k, v and the bias; None for those not wanted."""
    if not _takes_flash(q, k, v, bias, dropout_p, is_causal, scale):
        if dropout_p and seed.is_cuda and not torch.cuda.is_current_stream_capturing():
            # Outside a capture this kernel reads both at their addresses in host memory. They lie on the GPU if one of
            # the two pieces is captured, and this one can't be.
            seed, offset = seed.cpu(), offset.cpu()
        made: tuple[Tensor | None, ...] = aten._scaled_dot_product_efficient_attention_backward.default(
            grad, q, k, v, bias, out, sums, seed, offset, dropout_p, wanted, is_causal, scale=scale
        )
        return made
    if _seed_layout(FLASH)[0][0].numel() == 2:
        seed, offset = torch.stack([seed, offset]).view(_seed_layout(FLASH)[0][1]), _unused_seed(FLASH, q)[1]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        grad,
        q,
        k,
        v,
        out,
        sums[..., : q.shape[2]].contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        dropout_p,
        is_causal,
        seed,
        offset,
        scale=scale,
    )
    return dq, dk, dv, None


def _takes_flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> bool:
    if not q.is_cuda or bias is not None:
        return False
    return _torch_backend(q, k, v, dropout_p, is_causal, scale) == FLASH


# ---- batch norm


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """native_batch_norm. Returns the output, and the batch's mean and inverse deviation."""
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
    """native_batch_norm_backward. Returns the gradients of input, weight and bias; None for those not wanted."""
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
    """Whether torch would use cuDNN, and cuDNN wants no block kept. `bias`: only whether it is None matters."""
    if not x.is_cuda or weight is None or bias is None or not x.is_contiguous():
        return False
    if mean is None and var is None and training:
        mean = var = weight  # torch only looks whether both or neither are None
    if mean is None or var is None:
        return False
    choose, reserve = (getattr(torch._C, name, None) for name in ("_select_batch_norm_backend", RESERVE))
    if choose is None or reserve is None:
        return False
    taken = choose(x, weight, bias, mean, var, training, eps)
    cudnn = torch._C._BatchNormBackend.Cudnn  # type: ignore[attr-defined]
    return bool(taken == cudnn and (not training or reserve(x, True) == 0))


RESERVE = "_get_cudnn_batch_norm_reserve_space_size"

FORMS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
    "aten._scaled_dot_product_efficient_attention.default": masked_attention,
    "aten._scaled_dot_product_efficient_attention_backward.default": masked_attention_backward,
    "aten.native_batch_norm.default": batch_norm,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
}

# For compiled programs: the compiler fuses these operators, and can't look into other kernels.
COMPILED: dict[str, Callable[..., Any]] = {
    name: partial(form, backend=MATH) for name, form in FORMS.items() if form in (attention, attention_backward)
}
