"""The process-wide settings a step is captured under: those that change results without being operators.

How much float32 work may be rounded has two interfaces in torch, `set_float32_matmul_precision` and
`torch.backends.*.fp32_precision`. Asking the first raises once the second was used, so both are read where
they meet: by backend and kind of operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from gpumux.errors import CaptureError
from gpumux.program.ir import Numerics, Op, Program, TensorRef
from gpumux.program.validate import leaves, op_args

_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_BACKENDS = ("mkldnn", "cuda")
_MATMUL = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
_CONV = {"none": "ieee", "ieee": "ieee", "tf32": "tf32"}  # of convolutions and recurrent layers on a GPU
_ON_THE_CPU = ("none", "ieee")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv")
_CONVOLUTIONS = ("convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward")


def precisions() -> tuple[str, ...]:
    """Of every backend this torch has, for every kind of operator. Equal answers are identical strings."""
    return tuple([sys.intern(_precision(b, kind)) for b in _BACKENDS for kind in ("matmul", "conv", "rnn")])


def numerics_now(device: str = "cpu") -> Numerics:
    """What a Program for this device type must be run under. Raises CaptureError for a setting that
    Programs don't carry."""
    tiny = torch.tensor(1e-310, dtype=torch.float64)
    backend = "mkldnn" if device == "cpu" else "cuda"
    return Numerics(
        matmul_precision=_MATMUL[_precision(backend, "matmul")],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        flush_denormal=bool((tiny * 1.0).item() == 0.0),
        mkldnn=bool(torch.backends.mkldnn.enabled),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        conv_precision=_of_convolutions(backend),
    )


def uses_tf32(program: Program) -> bool:
    """Whether a GPU rounds float32 to TF32 in it, where algorithms for the same operator differ by more than in
    float32."""
    rounded: tuple[str, ...] = _CONVOLUTIONS if program.numerics.conv_precision == "tf32" else ()
    if program.numerics.matmul_precision != "highest":
        rounded += _PRODUCTS
    targets = {f"aten.{name}.default" for name in rounded}
    return any(
        op.target in targets and any(program.views[view].dtype == "float32" for view in _tensors(op))
        for op in program.ops
    )


def _of_convolutions(backend: str) -> str:
    """And of recurrent layers, which a GPU has a switch of its own for."""
    conv, rnn = (_precision(backend, kind) for kind in ("conv", "rnn"))
    if backend == "cuda":
        if _CONV[conv] != _CONV[rnn]:
            raise CaptureError(
                f"torch.backends.cudnn.conv.fp32_precision is {conv!r} and torch.backends.cudnn.rnn.fp32_precision "
                f"{rnn!r}, and jobs take one setting along for both",
                "set both to the same before you submit, as torch.backends.cudnn.allow_tf32 does",
            )
        return _CONV[conv]
    for kind, found in (("conv", conv), ("rnn", rnn)):
        if found not in _ON_THE_CPU:
            name = f"torch.backends.{backend}.{kind}.fp32_precision"
            raise CaptureError(
                f"{name} is {found!r}, itself or by way of torch.backends.fp32_precision, and jobs can't take that along",
                f"set {name} = {_ON_THE_CPU[-1]!r} before you submit (and in runs you compare with)",
            )
    return Numerics().conv_precision


def _tensors(op: Op) -> Iterator[int]:
    return (leaf.view for leaf in leaves(op_args(op)) if isinstance(leaf, TensorRef))
