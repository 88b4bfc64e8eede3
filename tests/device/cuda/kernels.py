"""Operators that only GPUs have kernels for, written for the CPU by their definition, so that Programs for a GPU run on
a GPU of host memory. What real kernels keep for a backward is kept here, too, in other sizes and shapes than a Program
could know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

from gpumux.capture.gpu.operators import as_they_are

Tensor = torch.Tensor
aten = torch.ops.aten
ROW = 32


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], inverse: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    normal = x * inverse
    g = grad if weight is None else grad * weight
    dx = inverse * (g - normal * (g * normal).mean(dims, keepdim=True))
    dw = (grad * normal).sum(list(range(dims[0]))) if weight is not None else None
    return dx.contiguous() if wanted[0] else None, dw if wanted[1] else None


def lstm_cell(
    igates: Tensor, hgates: Tensor, cx: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = igates + hgates
    if b_ih is not None and b_hh is not None:
        gates = gates + b_ih + b_hh
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    gh = torch.zeros_like(cx) if grad_hy is None else grad_hy
    gc = torch.zeros_like(cx) if grad_cy is None else grad_cy
    t = cy.tanh()
    d_cell = gc + gh * o * (1 - t * t)
    gates = torch.cat(
        [d_cell * g * i * (1 - i), d_cell * cx * f * (1 - f), d_cell * i * (1 - g * g), gh * t * o * (1 - o)], 1
    )
    return gates, d_cell * f, gates.sum(0) if has_bias else None


def gru_cell(
    igates: Tensor, hgates: Tensor, hx: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    i = igates if b_ih is None else igates + b_ih
    h = hgates if b_hh is None else hgates + b_hh
    (ir, iz, inn), (hr, hz, hn) = i.chunk(3, 1), h.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inn + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    dn = grad * (1 - z) * (1 - n * n)
    dr, dz = dn * hn * r * (1 - r), grad * (hx - n) * z * (1 - z)
    igates, hgates = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    biases = (igates.sum(0), hgates.sum(0)) if has_bias else (None, None)
    return igates, hgates, grad * z, *biases


@contextmanager
def _native() -> Iterator[None]:
    """Without oneDNN."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _rnn(
    x: Tensor, weights: Sequence[Tensor], each: int, hx: Tensor, cx: Tensor | None, mode: int, layers: int,
    batch_first: bool, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    arguments = (list(weights), each > 3, layers, 0.0, train, bidirectional, batch_first)
    if mode == 2:
        assert cx is not None
        return torch.lstm(x, (hx, cx), *arguments)
    layer = (torch.rnn_relu, torch.rnn_tanh, None, torch.gru)[mode]
    assert layer is not None
    return layer(x, hx, *arguments)  # type: ignore[no-any-return]


def cudnn_rnn(
    x: Tensor, weights: Sequence[Tensor], each: int, buffer: Tensor | None, hx: Tensor, cx: Tensor | None, mode: int,
    hidden: int, projected: int, layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
    sizes: Sequence[int], state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dropout == 0
    with _native():
        out, *last = _rnn(x, weights, each, hx, cx, mode, layers, batch_first, train, bidirectional)
    cell = last[1] if mode == 2 else hx.new_empty(0)
    reserve = torch.full((77 if train else 0,), 7, dtype=torch.uint8)
    return out.clone(), last[0].clone(), cell, reserve, torch.cat([w.reshape(-1) for w in weights])


def cudnn_rnn_backward(
    x: Tensor, weights: Sequence[Tensor], each: int, buffer: Tensor, hx: Tensor, cx: Tensor | None, out: Tensor,
    grad_out: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, sizes: Sequence[int],
    state: Tensor | None, reserve: Tensor, wanted: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    assert reserve.tolist() == [7] * 77, "not what the forward kept"
    assert buffer.numel() == sum(w.numel() for w in weights)
    with torch.inference_mode(False), torch.enable_grad(), _native():
        leaves = [t.clone().detach().requires_grad_() for t in (x, hx, *([cx] if cx is not None else []), *weights)]
        states = 2 if cx is not None else 1
        made = _rnn(
            leaves[0],
            leaves[1 + states :],
            each,
            leaves[1],
            leaves[2] if states == 2 else None,
            mode,
            layers,
            batch_first,
            train,
            bidirectional,
        )
        given = [
            g.clone() if g is not None else torch.zeros_like(m) for m, g in zip(made, (grad_out, grad_hy, grad_cy))
        ]
        dx, dhx, *rest = torch.autograd.grad(made, leaves, given)
    dcx = rest.pop(0) if states == 2 else None
    return dx if wanted[0] else None, dhx if wanted[1] else None, dcx, rest if wanted[3] else []


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    causal: bool,
    seed: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    if dropout_p > 0:
        keep = torch.rand(weights.shape, generator=torch.Generator().manual_seed(int(seed))) >= dropout_p
        weights = weights * keep / (1 - dropout_p)
    return weights @ v, scores.logsumexp(-1)


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keeps: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed = torch.randint(1 << 30, ()) if dropout_p > 0 else torch.zeros((), dtype=torch.int64)
    out, sums = _attention(q, k, v, bias, dropout_p, is_causal, seed, scale)
    rows = (
        F.pad(sums.float(), (0, -sums.shape[-1] % ROW), value=float("inf")) if keeps else sums.float()[..., :0].clone()
    )
    return out.transpose(1, 2).contiguous().transpose(1, 2), rows, seed, torch.zeros((), dtype=torch.int64)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, dropout_p: float, wanted: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert sums.shape[-1] % ROW == 0
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.clone().detach().requires_grad_() for t in (q, k, v)]
        again, _ = _attention(*leaves, None if bias is None else bias.clone(), dropout_p, is_causal, seed, scale)
        torch.testing.assert_close(again, out.clone())
        made = torch.autograd.grad(again, leaves, grad.clone())
    return *(g.transpose(1, 2).contiguous().transpose(1, 2) for g in made), None


def grid_sampler(x: Tensor, grid: Tensor) -> Tensor:
    return aten.grid_sampler_2d.default(x, grid, 0, 0, True)  # type: ignore[no-any-return]


def grid_sampler_backward(x: Tensor, grid: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return aten.grid_sampler_2d_backward.default(grad, x, grid, 0, 0, True, [True, True])  # type: ignore[no-any-return]


KERNELS: dict[str, Callable[..., Any]] = {
    "_fused_rms_norm_backward": rms_norm_backward,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_cudnn_rnn": cudnn_rnn,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "cudnn_grid_sampler": grid_sampler,
    "cudnn_grid_sampler_backward": grid_sampler_backward,
}


def _below(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        with as_they_are():  # what it is made of is the CPU's
            return kernel(*args, **kwargs)

    return run


@contextmanager
def of_a_gpu() -> Iterator[None]:
    """Inside this context the CPU has these operators."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in KERNELS.items():
            library.impl(name, _below(kernel), "CPU")
        yield
    finally:
        library._destroy()
