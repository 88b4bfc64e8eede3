"""The process-wide settings a step is captured under: those that change results without being operators.

How much float32 work may be rounded has two interfaces in torch, `set_float32_matmul_precision` and
`torch.backends.*.fp32_precision`. Asking the first raises once the second was used, so both are read where
they meet: by backend and kind of operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from gpumux.errors import CaptureError
from gpumux.program.ir import Numerics

_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_BACKENDS = ("mkldnn", "cuda") if torch.version.cuda else ("mkldnn",)
_MATMUL = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
_USUAL = {"mkldnn": ("none", "ieee"), "cuda": ("tf32",)}  # of convolutions and recurrent layers


def precisions() -> tuple[str, ...]:
    """Of every backend this torch has, for every kind of operator. Equal answers are identical strings."""
    return tuple([sys.intern(_precision(b, kind)) for b in _BACKENDS for kind in ("matmul", "conv", "rnn")])


def numerics_now(device: str = "cpu") -> Numerics:
    """What a Program for this device type must be run under. Raises CaptureError for a setting that
    Programs don't carry."""
    tiny = torch.tensor(1e-310, dtype=torch.float64)
    return Numerics(
        matmul_precision=_matmul_precision("mkldnn" if device == "cpu" else "cuda"),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        flush_denormal=bool((tiny * 1.0).item() == 0.0),
        mkldnn=bool(torch.backends.mkldnn.enabled),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
    )


def _matmul_precision(backend: str) -> str:
    for kind in ("conv", "rnn"):
        found = _precision(backend, kind)
        if found not in _USUAL[backend]:
            name = f"torch.backends.{'cudnn' if backend == 'cuda' else backend}.{kind}.fp32_precision"
            raise CaptureError(
                f"{name} is {found!r}, itself or by way of torch.backends.fp32_precision, and jobs can't take that along",
                f"set {name} = {_USUAL[backend][-1]!r} before you submit (and in runs you compare with)",
            )
    return _MATMUL[_precision(backend, "matmul")]
