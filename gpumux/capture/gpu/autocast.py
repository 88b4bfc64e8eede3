"""The casts that torch.autocast("cuda") makes, for steps that are traced on the CPU and run on a GPU.

Torch makes them in kernels of its own (aten/src/ATen/autocast_mode.h), only for tensors on a GPU, and the tensors of a
traced step are on the CPU. So they are made here, by the same lists and rules: tests/client/test_casts.py compares
every operator with torch's own kernel. The installed torch tells which operators are cast.

"cuda" and "cpu" both name this autocast, because a traced tensor is on the CPU and
`torch.autocast(x.device.type, enabled=False)` has to turn off what `torch.autocast("cuda")` turned on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpumux.capture.source import user_line
from gpumux.capture.swapping import here, swapped
from gpumux.errors import CaptureError

Tensor = torch.Tensor
aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # an operator and its arguments
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_on, _dtype = torch.is_autocast_enabled, torch.get_autocast_dtype  # the originals; `_swaps` replaces them

# Operators by how autocast treats their arguments. The lists and their names are torch's.
LOWER = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
"""
FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
"""
IN_FLOAT32 = """
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
    cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList sum.dim_DimnameList
"""
NORMS = {
    "norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}  # fmt: skip
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
UNSAFE = ["binary_cross_entropy"]
RECURRENT = "_cudnn_rnn"  # only a CUDA build of torch has a cast for it


class Cast:
    """The casts of one trace: weights that were cast already, and the types that were cast to."""

    def __init__(self) -> None:
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        self.lowered: set[torch.dtype] = set()

    def forget(self) -> None:
        """Forget cast weights when the outermost autocast ends, so that later casts are made and differentiated
        anew."""
        self._weights.clear()

    def to(self, dtype: torch.dtype, value: Any) -> Any:
        """A tensor, or each tensor of a list, cast to `dtype` if it is eligible. A weight is cast to the lower type
        once for all uses."""
        if isinstance(value, (list, tuple)):
            return [self.to(dtype, each) for each in value]
        if not eligible(value) or value.dtype == dtype:
            return value
        lower = dtype == _dtype("cuda")
        if lower:
            self.lowered.add(dtype)
        weight = (
            lower and value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        )
        if not weight or not torch.is_autocast_cache_enabled() or torch.is_inference_mode_enabled():
            return value.to(dtype)
        known = self._weights.get(id(value))
        if known is None:
            with torch.enable_grad():  # a later use may need gradients even if this one is under no_grad
                known = self._weights[id(value)] = value, value.to(dtype)
        return known[1]

    def all_to(self, dtype: torch.dtype, call: Call) -> Call:
        operator, args, kwargs = call
        return operator, tuple(self.to(dtype, a) for a in args), {k: self.to(dtype, v) for k, v in kwargs.items()}


current = Cast()  # of the present trace; there is one at a time


def begin() -> None:
    global current
    current = Cast()


def enabled() -> bool:
    return _on("cuda")


def eligible(value: Any) -> bool:
    """Whether a value is cast. All tensors of a step count as on its GPU, also those made of numbers inside it."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


# ---- rules: each takes a call and returns the call to make


def lower(call: Call) -> Call:
    return current.all_to(_dtype("cuda"), call)


def float32(call: Call) -> Call:
    return current.all_to(torch.float32, call)


def in_float32(call: Call) -> Call:
    """Softmax and sums take other types and compute in float32, unless the call has a dtype."""
    operator, args, kwargs = call
    place = [argument.name for argument in operator._schema.arguments].index("dtype")
    chosen = args[place] if place < len(args) else kwargs.get("dtype")
    if not eligible(args[0]) or chosen is not None:
        return call
    return operator, args[:place], {**kwargs, "dtype": torch.float32}


def norm(call: Call) -> Call:
    """The overload that takes the type it computes in."""
    operator, args, kwargs = call
    arguments = operator._schema.arguments
    chosen = {argument.name: argument.default_value for argument in arguments}
    chosen.update(zip(chosen, args, strict=False))
    chosen.update(kwargs)
    first = chosen["self"]
    typed = getattr(aten.norm, NORMS[f"norm.{operator._overloadname}"])
    return typed, tuple(chosen.values()), {"dtype": torch.float32 if eligible(first) else first.dtype}


def widest(call: Call) -> Call:
    """Cast to the widest type of the required tensors; torch ignores an optional bias."""
    operator, args, _ = call
    found = low = _dtype("cuda")
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if eligible(each) and found != torch.float32 and str(argument.type) in ("Tensor", "List[Tensor]"):
                found = each.dtype
                if found not in (low, torch.float32):
                    raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # torch's message
    return current.all_to(found, call)


def unsafe(call: Call) -> Call:
    operator, args, kwargs = call
    operator.redispatch(CUDA, *args, **kwargs)  # raises RuntimeError with torch's own message for any arguments
    return call


def recurrent(call: Call) -> Call:
    """Cast cuDNN's layers to float16, also if autocast's type is another."""
    operator, (x, weights, each, buffer, hx, cx, *options), kwargs = call
    half = torch.float16
    x, hx, cx = (current.to(half, value) for value in (x, hx, cx))
    current.lowered.add(_dtype("cuda"))
    cast = [w.to(half) if eligible(w) else w for w in weights]  # not cached: torch casts them into one piece of memory
    return operator, (x, cast, each, buffer, hx, cx, *options), kwargs


def unknown(call: Call) -> Call:
    raise CaptureError(
        f"autocast of torch {torch.__version__} has a rule for {call[0]} that gpumux does not know",
        "leave autocast around that operator: with torch.autocast('cuda', enabled=False)",
    )


RULES: Sequence[tuple[Sequence[str], Callable[[Call], Call]]] = (
    (LOWER.split(), lower), (FLOAT32.split(), float32), (IN_FLOAT32.split(), in_float32), ([*NORMS], norm),
    (WIDEST.split(), widest), (UNSAFE, unsafe), ([RECURRENT], recurrent),
)  # fmt: skip


def rules() -> dict[str, Callable[[Call], Call]]:
    """The rules by operator ("softmax.int"), for all that the installed torch casts on a GPU."""
    known = {name: rule for names, rule in RULES for name in names}
    asked = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::") for name in asked if name.startswith("aten::")}
    return {name: known.get(name, unknown) for name in sorted(names | {RECURRENT})}


# ---- one autocast state for a step that is traced for a GPU
#
# A step contains `torch.autocast("cuda")`, or names the device of a tensor. Traced tensors are on the CPU, so for the
# length of a trace both names mean the same state, the GPU's. Elsewhere both mean the job's device (devices.py). Torch
# turns `autocast("cuda")` off if it finds no GPU; in a trace it stays on.


_Autocast = torch.amp.autocast_mode.autocast
_common = torch.cuda.amp.common
_missing: Callable[[], bool] = _common.amp_definitely_not_available


def refuse_around(gpu: bool) -> None:
    """Raises CaptureError if autocast is active around the step, because its cache of cast weights would pass from one
    step to the next."""
    on = torch.is_autocast_enabled("cpu") or (gpu and torch.is_autocast_enabled("cuda"))
    if on and torch.is_autocast_cache_enabled() and torch.is_grad_enabled():
        raise CaptureError(
            "autocast is active around the step, where its cache of casted weights would outlive the step",
            "enter torch.autocast inside the step",
        )


@contextmanager
def autocast_of_a_gpu(gpu: bool, home: torch.device | None) -> Iterator[None]:
    """Apply the autocast of a GPU for the length of a trace, in this thread. `gpu`: whether the model or the daemon
    uses a GPU; `home`: the device of the local model."""
    if not gpu:
        yield
        return
    begin()
    on_gpu = home is not None and home.type == "cuda"
    with (
        _around(on_gpu),
        swapped([(owner, name, here(getattr(owner, name), new)) for owner, name, new in _swaps(on_gpu)]),
    ):
        try:
            yield
        finally:
            begin()


@contextmanager
def _around(on_gpu: bool) -> Iterator[None]:
    """Autocast of the CPU around the step applies to the job, unless the model is on a GPU, where it casts nothing."""
    cpu, cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    if not cpu:
        yield
        return
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cpu", False)
    if not cuda and not on_gpu:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu"))
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_enabled("cuda", cuda)
        torch.set_autocast_dtype("cuda", dtype)


def _swaps(on_gpu: bool) -> list[tuple[Any, str, Callable[..., Any]]]:
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    begin: Any = _Autocast.__init__
    enter: Any = _Autocast.__enter__
    leave: Any = _Autocast.__exit__
    cast: Any = torch.amp.autocast_mode._cast
    dtype, forget = torch.get_autocast_dtype, torch.clear_autocast_cache

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.add(self)

    def on_entry(self: Any) -> Any:
        if self.device == "cuda" and not self._enabled and self not in made and not enabled() and _missing():
            warnings.warn(
                f"{user_line()} enters an autocast that was made outside the step, where torch saw no GPU and turned it"
                " off: nothing is cast. Make it inside the step",
                stacklevel=3,
            )
        with _as_cuda(self):
            return enter(self)

    def on_exit(self: Any, *raised: Any) -> Any:
        with _as_cuda(self):
            return leave(self, *raised)

    def get_dtype(device_type: str) -> torch.dtype:
        """The type that a run without gpumux would use on the model's device."""
        return dtype("cuda" if device_type == "cpu" and (on_gpu or enabled()) else device_type)

    def clear() -> None:
        current.forget()
        forget()

    def where_they_lie(value: Any, device: str, to: torch.dtype) -> Any:
        return cast(value, "cpu" if device == "cuda" else device, to)

    is_on, set_on, set_dtype = (
        _named(each) for each in (torch.is_autocast_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype)
    )
    return [
        (_Autocast, "__init__", init), (_Autocast, "__enter__", on_entry), (_Autocast, "__exit__", on_exit),
        (torch, "is_autocast_enabled", is_on), (torch, "set_autocast_enabled", set_on),
        (torch, "get_autocast_dtype", get_dtype), (torch, "set_autocast_dtype", set_dtype),
        (torch, "is_autocast_cpu_enabled", enabled), (torch, "get_autocast_cpu_dtype", partial(get_dtype, "cpu")),
        (torch, "set_autocast_cpu_enabled", partial(set_on, "cpu")),
        (torch, "set_autocast_cpu_dtype", partial(set_dtype, "cpu")),
        (torch, "clear_autocast_cache", clear),
        (torch.amp.autocast_mode, "_cast", where_they_lie),
        (_common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
    ]  # fmt: skip


@contextmanager
def _as_cuda(autocast: Any) -> Iterator[None]:
    named = autocast.device
    autocast.device = "cuda" if named == "cpu" else named
    try:
        yield
    finally:
        autocast.device = named


def _named(plain: Callable[..., Any]) -> Callable[..., Any]:
    """One of torch's functions of a device's autocast, with "cpu" replaced by "cuda". Without a device they mean a
    GPU's."""

    def of_the_job(*args: Any, **named: Any) -> Any:
        if "cpu" in (named.get("device_type"), *args[:1]):
            args, named = ("cuda", *args[1:]), {k: v for k, v in named.items() if k != "device_type"}
        return plain(*args, **named)

    return of_the_job


def refuse_lost_scaling(method: str) -> None:
    """Raises CaptureError for a GradScaler that is off in a step that casts to float16. Torch turns one off if it finds
    no GPU."""
    if torch.float16 in current.lowered and _missing():
        raise CaptureError(
            f"{user_line()} calls {method} of a scaler that is off, as torch has it where it sees no GPU, and the step"
            " casts to float16: its gradients would not be scaled",
            'make it torch.amp.GradScaler("cpu"), which scales wherever the step runs; or use torch.autocast with'
            " bfloat16, which needs no scaling",
        )
