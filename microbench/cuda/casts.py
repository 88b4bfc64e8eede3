"""Which casts does torch.autocast("cuda") make? Found out from a CUDA build of torch, without a GPU.

    python -m microbench.cuda.casts --out FILE.json    # seconds

The calls of microbench/cuda/operators.py, and some more, are made under autocast on fake tensors of a GPU, forward and
backward, and what reaches the backends is written down with the types of its tensors, by their first letters.
tests/client/test_casts.py holds what gpumux traces on the CPU against it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from microbench.cuda.operators import CALLS, Operators, _labels, _ones, _x, asked

Tensor = torch.Tensor


@contextmanager
def under(dtype: torch.dtype, enabled: bool = True) -> Iterator[None]:
    """torch.autocast("cuda"), also without a GPU, where torch turns it off."""
    on, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", on)
        torch.set_autocast_dtype("cuda", before)


def _shared(d: torch.dtype) -> Tensor:
    """Weights used twice, through a view, with and without a gradient, and for two autocasts one after the other."""
    x, w, b = torch.empty(2, 16, dtype=d), _x(d, 16, 16), _x(d, 16)
    with under(torch.get_autocast_dtype("cuda")):
        y = F.linear(F.linear(x, w, b), w, b) + x @ w.t() + F.linear(x, w[:16])
        with under(torch.float16, enabled=False):
            y = y.float() + torch.mm(x, w)
        with torch.no_grad():
            z = F.linear(x, torch.ones_like(w))
        return y + z


def _twice(d: torch.dtype) -> Tensor:
    x, w = torch.empty(2, 16, dtype=d), _x(d, 16, 16)
    torch.set_autocast_enabled("cuda", False)
    outs = []
    for _ in range(2):
        with under(torch.get_autocast_dtype("cuda")):
            outs.append(F.linear(x, w))
    return outs[0] + outs[1]


def _half(x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_dtype("cuda"))


def _attention(d: torch.dtype) -> Tensor:
    q, k, v = (_x(d, 2, 4, 8, 16) @ _x(d, 16, 16) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_x(d, 8, 8).detach())


CAST: dict[str, Callable[[torch.dtype], Any]] = {
    "a weight used often": _shared,
    "a weight of two autocasts": _twice,
    "products of a tensor": lambda d: torch.tensordot(_x(d, 3, 4), _x(d, 4, 3), 1),
    "products of halves": lambda d: torch.tensordot(_half(_x(d, 3, 4)), _half(_x(d, 4, 3)), 1),
    "products of both": lambda d: torch.addcmul(_half(_x(d, 3)), _x(d, 3), _half(_x(d, 3))),
    "distance of halves": lambda d: torch.cdist(_half(_x(d, 5, 4)), _half(_x(d, 6, 4))),
    "norm of halves": lambda d: _half(_x(d)).norm(),
    "norm of halves, along": lambda d: torch.norm(_half(_x(d)), 2, [1], True),
    "sum of halves": lambda d: _half(_x(d)).sum(),
    "sum of halves, as halves": lambda d: _half(_x(d)).sum(dtype=torch.float16),
    "softmax of halves": lambda d: _half(_x(d)).softmax(-1),
    "log softmax of halves": lambda d: F.log_softmax(_half(_x(d)), -1),
    "power of halves": lambda d: _half(_x(d)) ** 2 + 2 ** _half(_x(d)),
    "layer norm of halves": lambda d: F.layer_norm(_half(_x(d)), (16,), _x(d, 16), _x(d, 16)),
    "rms norm of halves": lambda d: F.rms_norm(_half(_x(d)), (16,), _x(d, 16)),
    "cross entropy of halves": lambda d: F.cross_entropy(_half(_x(d, 5, 16)), _labels(5)),
    "mean squared error of both": lambda d: F.mse_loss(_half(_x(d)), _x(d)),
    "grid sample of both": lambda d: F.grid_sample(_half(_x(d)), _x(d, 2, 3, 3, 2), align_corners=False),
    "joined": lambda d: torch.cat([_half(_x(d)), _x(d)]).add(torch.stack([_half(_x(d)), _x(d)]).flatten(0, 1)),
    "scattered": lambda d: _half(_x(d, 5, 4)).index_put([_labels(5)], _x(d, 5, 4)),
    "gelu of a product": lambda d: F.gelu(_x(d, 2, 16) @ _x(d, 16, 16)).mul(2.0).exp(),
    "attention of a product": _attention,
    "gru of halves": lambda d: nn.GRU(16, 12, 2, dtype=d)(_half(_x(d, 3, 5, 16))),
    "in double": lambda d: F.linear(_x(torch.float64, 2, 16), _x(torch.float64, 16, 16)),
    "binary cross entropy, unsafe": lambda d: F.binary_cross_entropy(_x(d), _ones(d, 2, 4, 8, 16)),
}


def named(name: str) -> Callable[[], Any]:
    return partial((CALLS | CAST)[name], torch.float32)


def cast(call: Callable[[], Any], dtype: torch.dtype, device: str, operators: Operators) -> str:
    """`call()` under autocast, or why it could not be found out."""

    def made(_: torch.dtype) -> Any:
        with under(dtype):
            return call()

    return asked(made, torch.float32, device, operators)


def main() -> int:
    parser = argparse.ArgumentParser(prog="microbench.cuda.casts", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    if not torch.backends.cuda.is_built():
        print(f"torch {torch.__version__} is built without CUDA, and can't walk a GPU's backward", file=sys.stderr)
        return 69
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    recorded = {
        f"{name}, {str(dtype).removeprefix('torch.')}": cast(named(name), dtype, "cuda", Operators(typed=True))
        for name in CALLS | CAST
        for dtype in (torch.float16, torch.bfloat16)
    }
    unknown = [name for name, each in recorded.items() if each.startswith("!")]
    print(f"{len(recorded) - len(unknown)} calls were recorded, {len(unknown)} not: {', '.join(unknown)}")
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "calls": recorded}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
