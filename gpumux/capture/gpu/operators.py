"""The operators that torch would run on a GPU, chosen while a step is traced on the CPU.

Torch makes most choices by device below autograd, in kernels. It makes some above autograd, so that another device gets
other operators: dropout, attention, recurrent layers. While a step for a GPU is traced, such operators are intercepted
at a dispatch key of their own, above autograd and below Python. There they are cast as autocast casts them on a GPU
(autocast.py), and replaced by the operators that torch runs on a GPU. The key is one that torch reserves for a device
it does not have; nothing else is registered under it, and only traces use it. docs/gpu-notes.md ("Operators by device")
describes how the operators were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch

from gpumux.capture.gpu import autocast
from gpumux.capture.patches import RngTape

# ---- recurrent layers as torch runs them on a GPU: through cuDNN, or step by step in fused cells


Tensor = torch.Tensor
aten = torch.ops.aten
_CUDNN = (torch.float16, torch.float32, torch.float64)
RELU, TANH, LSTM, GRU = range(4)  # cuDNN's numbers
State = tuple[Tensor, ...]  # of one layer and direction: hidden state, and cell state of an LSTM


def cudnn_takes(x: Tensor) -> bool:
    """Whether torch uses cuDNN for this input, as far as can be decided without cuDNN."""
    return torch.backends.cudnn.enabled and x.dtype in _CUDNN and x.numel() > 0


def lstm(x: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _run(LSTM, x, tuple(hx), weights, *options)  # type: ignore[return-value]


def _without_cell(mode: int, x: Tensor, hx: Tensor, weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    return _run(mode, x, (hx,), weights, *options)  # type: ignore[return-value]


gru, rnn_tanh, rnn_relu = (partial(_without_cell, mode) for mode in (GRU, TANH, RELU))


def _run(
    mode: int, x: Tensor, start: State, weights: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The last layer's outputs, and the final states. Dropout between layers is torch's operator, because cuDNN's draws
    come from no generator and can't be captured."""
    ways = 2 if bidirectional else 1
    each = len(weights) // (num_layers * ways)
    drops = train and dropout > 0 and num_layers > 1
    if cudnn_takes(x) and not drops:
        return _through_cudnn(mode, x, start, weights, has_biases, num_layers, train, bidirectional, batch_first)
    if batch_first:
        x = x.transpose(0, 1)
    ends: list[State] = []
    if not cudnn_takes(x):
        states = [state.unbind(0) for state in start]
    for layer in range(num_layers):
        own = slice(layer * ways, (layer + 1) * ways)
        part = weights[own.start * each : own.stop * each]
        if cudnn_takes(x):
            first = tuple(state[own] for state in start)
            x, *last = _through_cudnn(mode, x, first, part, has_biases, 1, train, bidirectional, False)
            ends.append(tuple(last))
        else:
            outs, steps = [], x.unbind(0)
            for way in range(ways):
                held = part[way * each : (way + 1) * each]
                out, end = _steps(mode, steps, tuple(s[own.start + way] for s in states), held, has_biases, bool(way))
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, x.dim() - 1) if ways > 1 else outs[0]
        if drops and layer < num_layers - 1:
            x = torch.dropout(x, dropout, train)
    join = torch.cat if cudnn_takes(x) else torch.stack
    finals = [join(list(state), 0) for state in zip(*ends, strict=True)]
    return (x.transpose(0, 1) if batch_first else x, *finals)


def _through_cudnn(
    mode: int, x: Tensor, start: State, weights: Sequence[Tensor], has_biases: bool, num_layers: int, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    hx, cx = start[0], start[1] if len(start) > 1 else None
    hidden = (cx if cx is not None else hx).shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    each = (4 if has_biases else 2) + (1 if projected else 0)
    out, hy, cy, *_ = aten._cudnn_rnn.default(
        x, list(weights), each, None, hx.contiguous(), None if cx is None else cx.contiguous(), mode, hidden, projected,
        num_layers, batch_first, 0.0, train, bidirectional, [], None,
    )  # fmt: skip
    return (out, hy, cy) if cx is not None else (out, hy)


def _steps(
    mode: int, steps: Sequence[Tensor], state: State, weights: Sequence[Tensor], has_biases: bool, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction."""
    outs: list[Tensor] = []
    cell = _CELLS[mode]
    for step in steps[::-1] if backwards else steps:
        state = cell(step, state, weights, has_biases)
        outs.append(state[0])
    return torch.stack(outs[::-1] if backwards else outs, 0), state


def _biases(weights: Sequence[Tensor], has_biases: bool) -> tuple[Tensor | None, Tensor | None]:
    return (weights[2], weights[3]) if has_biases else (None, None)


def _lstm_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    hy, cy = lstm_cell(x, state, weights[0], weights[1], *_biases(weights, has_biases))
    projection = weights[4 if has_biases else 2 :]
    return (torch.matmul(hy, projection[0].t()) if projection else hy), cy


def _gru_step(x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool) -> State:
    return (gru_cell(x, state[0], weights[0], weights[1], *_biases(weights, has_biases)),)


def _simple_step(
    activation: Callable[[Tensor], Tensor], x: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool
) -> State:
    b_ih, b_hh = _biases(weights, has_biases)
    linear = torch.nn.functional.linear
    return (activation(linear(state[0], weights[1], b_hh).add_(linear(x, weights[0], b_ih))),)


_CELLS: dict[int, Callable[[Tensor, State, Sequence[Tensor], bool], State]] = {
    LSTM: _lstm_step,
    GRU: _gru_step,
    TANH: partial(_simple_step, torch.tanh),
    RELU: partial(_simple_step, torch.relu),
}


def lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    gates = torch.matmul(x, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)
    return hy, cy


def gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    gates = torch.matmul(x, w_ih.t()), torch.matmul(hx, w_hh.t())
    made: Tensor = aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]
    return made


# ---- switching the GPU's operators on


NAME = "AutocastIPU"
KEY = getattr(torch._C.DispatchKey, NAME)
_INTERCEPTED = torch._C.DispatchKeySet(KEY)
# Keys to skip in a redispatch with explicit keys: all operators here are composed of others.
_PASSED = (torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.BackendSelect)
_HALF = (torch.float16, torch.bfloat16)
ALIGNED, WIDEST = 8, 128  # elements a head for which every GPU has fused attention with a backward

# Of the present trace; there is one at a time.
_tape: RngTape | None = None
_replacing = True


@contextmanager
def as_on_a_gpu(tape: RngTape, gpu: bool, replace: bool = True) -> Iterator[None]:
    """Intercept operators for the length of a trace, in this thread. `gpu`: whether the model or the daemon uses a GPU,
    so that its autocast applies; `replace`: also use the operators that torch runs on a GPU."""
    global _tape, _replacing
    if not gpu:
        yield
        return
    _register()
    before, (_tape, _replacing) = (_tape, _replacing), (tape, replace)
    _switch(True)
    try:
        yield
    finally:
        _switch(False)
        _tape, _replacing = before


def as_they_are() -> AbstractContextManager[None]:
    """Inside, operators are not intercepted; used for operators that were replaced already."""
    return torch._C._ExcludeDispatchKeyGuard(_INTERCEPTED)


def _switch(on: bool) -> None:
    # Keys of this kind are left out unless both are said.
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, on)
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not on)


def below(operator: Any, like: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the operator itself; the operators that it calls are intercepted."""
    keys = torch._C._dispatch_keys(like) | torch._C._dispatch_tls_local_include_set()
    keys = (keys - torch._C._dispatch_tls_local_exclude_set()) & torch._C._dispatch_keyset_full_after(KEY)
    for passed in _PASSED:
        keys = keys.remove(passed)
    return operator.redispatch(keys, *args, **kwargs)


# ---- dropout, norms, softmax


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and x.numel():
        made: Tensor = aten.native_dropout.default(x, p, train)[0]
        return made
    return below(aten.dropout.default, x, x, p, train)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    plain = (
        x.is_complex()
        or (weight is not None and weight.dtype != x.dtype)
        or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
        or (x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous())
    )
    if plain or list(x.shape[x.dim() - len(shape) :]) != list(shape):
        return below(aten.rms_norm.default, x, x, shape, weight, eps)  # type: ignore[no-any-return]
    return _RmsNorm.apply(x, list(shape), weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    """rms_norm as one operator. Autograd on the CPU would decompose it, because the CPU has no kernel for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, inverse = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, inverse)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        dx, dw = aten._fused_rms_norm_backward.default(grad, x, ctx.shape, inverse, weight, wanted)
        return dx, None, dw if wanted[1] else None, None


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax.default(x, dim, True)  # type: ignore[no-any-return]
    return below(aten.softmax.int, x, x, dim, dtype)  # type: ignore[no-any-return]


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax.default(x, dim, True)  # type: ignore[no-any-return]
    return below(aten.log_softmax.int, x, x, dim, dtype)  # type: ignore[no-any-return]


def grid_sampler(x: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool) -> Tensor:
    bilinear = interpolation == padding == 0 and align_corners
    if bilinear and x.dim() == 4 and x.shape[1] <= 1024 and cudnn_takes(x) and cudnn_takes(grid):
        return aten.cudnn_grid_sampler.default(x, grid)  # type: ignore[no-any-return]
    made: Tensor = below(aten.grid_sampler.default, x, x, grid, interpolation, padding, align_corners)
    return made


# ---- attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention. Decides whether a fused kernel can compute it. The daemon chooses the kernel for
    its GPU (device/cuda/kernels.py)."""
    operator = aten.scaled_dot_product_attention.default
    if (
        enable_gqa
        and {q.dim(), k.dim(), v.dim()} == {4}
        and k.shape[1]
        and q.shape[1] % k.shape[1] == 0
        and k.shape[1] == v.shape[1]
    ):
        # As torch does before products. Repeating keys and values costs little compared with the scores, which are kept
        # in this case.
        k, v, enable_gqa = _repeated(k, q.shape[1]), _repeated(v, q.shape[1]), False
    if enable_gqa or (mask is not None and is_causal) or q.dim() != k.dim() or q.dim() != v.dim():
        return _as_products(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    if not _fused(q, k, v, mask, dropout_p):
        return _as_products(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    if mask is None and dropout_p == 0:
        return below(operator, q, q, k, v, None, 0.0, is_causal, scale=scale)  # type: ignore[no-any-return]
    keeps = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    bias = _bias(mask, q, k)
    return aten._scaled_dot_product_efficient_attention.default(  # type: ignore[no-any-return]
        q, k, v, bias, keeps, dropout_p, is_causal, scale=scale
    )[0]


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for all heads of their group."""
    batch, groups, length, width = x.shape
    if groups == heads:
        return x
    return x[:, :, None].expand(batch, groups, heads // groups, length, width).reshape(batch, heads, length, width)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    if q.dim() != 4 or q.dtype not in (torch.float32, *_HALF) or {k.dtype, v.dtype} != {q.dtype}:
        return False
    if q.shape[-1] % ALIGNED or q.shape[-1] > WIDEST or {k.shape[-1], v.shape[-1]} != {q.shape[-1]}:
        return False
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or not (q.numel() and k.numel()):
        return False
    if any(t.stride(-1) != 1 for t in (q, k, v)) or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    if dropout_p > 0 and _tape is not None and _tape.rewinds:
        return False  # recomputation must draw the same mask again, which no fused kernel can do
    return mask is None or (mask.dtype in (torch.bool, q.dtype) and not mask.requires_grad)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask in the form that kernels take: numbers to add, for every batch and head, in aligned rows."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        nothing = torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device)
        mask = torch.where(mask, nothing, torch.scalar_tensor(float("-inf"), dtype=q.dtype, device=q.device))
    columns = mask.shape[-1]
    if columns % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - columns % 16))[..., :columns]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _as_products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    if mask is not None and mask.dtype == torch.bool:
        nothing = torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device)
        mask = torch.where(mask, nothing, torch.scalar_tensor(float("-inf"), dtype=q.dtype, device=q.device))
    made: Tensor = aten._scaled_dot_product_attention_math.default(
        q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return made


# ---- which operators


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "rms_norm": rms_norm,
    "softmax.int": softmax,
    "log_softmax.int": log_softmax,
    "grid_sampler": grid_sampler,
    "scaled_dot_product_attention": attention,
    "lstm.input": lstm,
    "gru.input": gru,
    "rnn_tanh.input": rnn_tanh,
    "rnn_relu.input": rnn_relu,
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
}


def _kernel(operator: Any, rule: Callable[[autocast.Call], autocast.Call] | None) -> Callable[..., Any]:
    """The function that intercepts an operator. Autocast casts its arguments first, as on a GPU, and not those of the
    operators that it is composed of."""
    replacement = REPLACEMENTS.get(operator.name().removeprefix("aten::"))

    def on(*args: Any, **kwargs: Any) -> Any:
        if replacement is not None and _replacing:
            return replacement(*args, **kwargs)
        return below(operator, args[0], *args, **kwargs) if rule is None else _as_it_is(operator, args, kwargs)

    if rule is None:
        return on

    def cast(*args: Any, **kwargs: Any) -> Any:
        if not autocast.enabled():
            return on(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(autocast.CUDA):
            with torch._C.DisableTorchFunction():
                became, args, kwargs = rule((operator, args, kwargs))
            return on(*args, **kwargs) if became is operator else _as_it_is(became, args, kwargs)

    return cast


def _as_it_is(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator that autocast has a rule for. None of these is composed of an operator with a replacement, so
    nothing inside needs to be intercepted."""
    with as_they_are(), torch._C.DisableTorchFunction():
        return operator(*args, **kwargs)


@cache
def _register() -> tuple[torch.library.Library, ...]:
    """Register the functions, once a process. The cache keeps the libraries, which unregister when they are dropped."""
    others, ours = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, NAME)
    rules = autocast.rules()
    for name in {**REPLACEMENTS, **rules}:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")
        ours.impl(name, _kernel(operator, rules.get(name)), NAME)
    return others, ours
