"""Which operators does torch choose by device? Found out from a CUDA build of torch, without a GPU.

    python -m microbench.cuda.operators --out FILE.json          # the calls below: seconds
    python -m microbench.cuda.operators --all --out FILE.json    # and torch's own database of calls: minutes

Each call is made on fake tensors of the CPU and of a GPU, forward and backward, and what reaches the backends is
written down. Fake tensors need no memory and no driver; autograd's engine asks a GPU for its streams, so the backward
is walked by hand, node by node. What torch asks the card itself (which fused attention, cuDNN's recurrent layers) can't
be found this way. tests/client/test_ongpu.py compares gpumux's choices with what this found. `--all` needs the package
expecttest, as torch's tests do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.program.check import fake_call
from gpumux.program.operators import ALLOWED

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SAMPLES = 10  # of each call in torch's database
_QUIET = {"aten.detach.default", "aten.empty.memory_format"}


class Operators(TorchDispatchMode):
    """Records the operators that reach the backends; `typed`: with the types of its tensors."""

    def __init__(self, typed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.typed = typed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.inside():
            out = fake_call(func, args, kwargs or {}, "")
        if func.namespace == "aten" and str(func) not in _QUIET:
            name = str(func).removeprefix("aten.").removesuffix(".default")
            self.names.append(f"{name}({types_of(args)})>{types_of(out)}" if self.typed else name)
        return out

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around each operator's shape rule."""
        yield


_SHORT = {torch.float32: "f", torch.float16: "h", torch.bfloat16: "b", torch.float64: "d"}


def types_of(values: Any) -> str:
    return "".join(_SHORT.get(t.dtype, "i") for t in pytree.tree_leaves(values) if isinstance(t, Tensor))


def chosen(call: Callable[[], Any], device: str, operators: Operators, *, grad: bool = True) -> list[str]:
    """What `call()` runs on the device, a dash, and what the backward of its results runs."""
    with FakeTensorMode(allow_fallback_kernels=False), torch.device(device), operators:
        out = call()
        if grad:
            operators.names.append("-")
            ends = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.grad_fn is not None]
            with torch.no_grad():
                walk(ends)
    return operators.names


def walk(outs: list[Tensor]) -> None:
    """Every node of the graph behind `outs`, each when its gradients are there."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(out.grad_fn, False) for out in reversed(outs)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(each, False) for each, _ in node.next_functions]
    grads: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    for out in outs:
        grads[out.grad_fn][out.output_nr] = torch.ones_like(out)
    for node in reversed(order):
        if type(node).__name__ == "AccumulateGrad" or not grads[node]:
            continue
        run = node if callable(node) else node.apply  # the latter: written in Python
        made = run(*[grads[node].get(i) for i in range(len(node._input_metadata))])
        made = made if isinstance(made, tuple) else (made,)
        if len(made) > len(node.next_functions):  # written in Python, with arguments that are no tensors
            made = tuple(grad for grad in made if grad is not None)
        for (behind, position), grad in zip(node.next_functions, made, strict=False):
            if behind is not None and grad is not None:
                wanted = behind._input_metadata[position]  # as the engine has it
                grad = grad.sum_to_size(wanted.shape).to(wanted.dtype)
                known = grads[behind].get(position)
                grads[behind][position] = grad if known is None else known + grad


# ---- calls that were suspected, or found, to differ


def _x(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.empty(size or (2, 4, 8, 16), dtype=dtype, requires_grad=True)


def _layers(kind: Any, dtype: torch.dtype, **options: Any) -> Any:
    return kind(16, 12, 2, dtype=dtype, **options)(_x(dtype, 3, 5, 16))


def _ones(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.ones(size, dtype=dtype)


def _norm(dtype: torch.dtype, training: bool) -> Tensor:
    each = [_ones(dtype, 4) for _ in range(4)]
    return F.batch_norm(_x(dtype), each[0], each[1], each[2], each[3], training)


def _attention(dtype: torch.dtype, *size: int, **options: Any) -> Tensor:
    q, k, v = (_x(dtype, *size) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, **options)


def _encoder(dtype: torch.dtype) -> Any:
    return nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, dtype=dtype)(_x(dtype, 2, 8, 16))


def _heads(dtype: torch.dtype, weights: bool) -> Any:
    layer = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True, dtype=dtype)
    x = _x(dtype, 2, 8, 16)
    return layer(x, x, x, need_weights=weights)


def _labels(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long)


CALLS: dict[str, Callable[[torch.dtype], Any]] = {
    "dropout": lambda d: F.dropout(_x(d), 0.1),
    "dropout of nothing": lambda d: F.dropout(_x(d), 0.0),
    "dropout of all": lambda d: F.dropout(_x(d), 1.0),
    "dropout, not training": lambda d: F.dropout(_x(d), 0.1, training=False),
    "dropout in place": lambda d: F.dropout(_x(d) * 1, 0.1, inplace=True),
    "dropout of channels": lambda d: F.dropout2d(_x(d), 0.1),
    "alpha dropout": lambda d: F.alpha_dropout(_x(d), 0.1, True),
    "rrelu": lambda d: F.rrelu(_x(d), training=True),
    "rms norm": lambda d: F.rms_norm(_x(d), (16,)),
    "rms norm with weight": lambda d: F.rms_norm(_x(d), (16,), _ones(d, 16), 1e-6),
    "rms norm of another type": lambda d: F.rms_norm(_x(d), (16,), _ones(torch.float32, 16)),
    "rms norm of channels last": lambda d: F.rms_norm(_x(d).to(memory_format=torch.channels_last), (16,)),
    "layer norm": lambda d: F.layer_norm(_x(d), (16,), _ones(d, 16), _ones(d, 16)),
    "group norm": lambda d: F.group_norm(_x(d), 2, _ones(d, 4), _ones(d, 4)),
    "batch norm, training": lambda d: _norm(d, True),
    "batch norm, not training": lambda d: _norm(d, False),
    "batch norm, bare": lambda d: F.batch_norm(_x(d), None, None, training=True),
    "instance norm": lambda d: F.instance_norm(_x(d), weight=_ones(d, 4), bias=_ones(d, 4)),
    "weight norm": lambda d: torch._weight_norm(_x(d), _x(d, 2, 1, 1, 1), 0),
    "softmax to float": lambda d: F.softmax(_x(d), -1, dtype=torch.float32),
    "log softmax to float": lambda d: F.log_softmax(_x(d), -1, dtype=torch.float32),
    "attention": lambda d: _attention(d),
    "attention, causal": lambda d: _attention(d, is_causal=True),
    "attention with a mask": lambda d: _attention(d, attn_mask=_ones(torch.bool, 8, 8)),
    "attention with dropout": lambda d: _attention(d, dropout_p=0.1),
    "attention in odd heads": lambda d: _attention(d, 2, 4, 8, 5),
    "attention of fewer dimensions": lambda d: _attention(d, 4, 8, 16),
    "attention in groups": lambda d: F.scaled_dot_product_attention(
        _x(d), _x(d, 2, 2, 8, 16), _x(d, 2, 2, 8, 16), enable_gqa=True
    ),
    "multi-head attention": lambda d: _heads(d, False),
    "multi-head attention with weights": lambda d: _heads(d, True),
    "encoder layer": _encoder,
    "lstm": lambda d: _layers(nn.LSTM, d),
    "lstm both ways": lambda d: _layers(nn.LSTM, d, bidirectional=True, batch_first=True),
    "gru": lambda d: _layers(nn.GRU, d),
    "rnn": lambda d: _layers(nn.RNN, d),
    "lstm cell": lambda d: nn.LSTMCell(16, 12, dtype=d)(_x(d, 5, 16)),
    "lstm cell without bias": lambda d: nn.LSTMCell(16, 12, bias=False, dtype=d)(_x(d, 5, 16)),
    "gru cell": lambda d: nn.GRUCell(16, 12, dtype=d)(_x(d, 5, 16)),
    "gru cell without bias": lambda d: nn.GRUCell(16, 12, bias=False, dtype=d)(_x(d, 5, 16)),
    "rnn cell": lambda d: nn.RNNCell(16, 12, dtype=d)(_x(d, 5, 16)),
    "grid sample": lambda d: F.grid_sample(_x(d), _x(d, 2, 3, 3, 2), align_corners=True),
    "grid sample, corners apart": lambda d: F.grid_sample(_x(d), _x(d, 2, 3, 3, 2), align_corners=False),
    "affine grid": lambda d: F.affine_grid(_x(d, 2, 2, 3), [2, 4, 8, 8], align_corners=True),
    "convolution": lambda d: F.conv2d(_x(d), _x(d, 6, 4, 3, 3), _ones(d, 6)),
    "transposed convolution": lambda d: F.conv_transpose2d(_x(d), _x(d, 4, 6, 3, 3), _ones(d, 6)),
    "depthwise convolution": lambda d: F.conv2d(_x(d), _x(d, 4, 1, 3, 3), groups=4),
    "linear": lambda d: F.linear(_x(d), _x(d, 6, 16), _ones(d, 6)),
    "bilinear": lambda d: F.bilinear(_x(d, 5, 4), _x(d, 5, 3), _x(d, 2, 4, 3)),
    "matrix product": lambda d: _x(d) @ _x(d, 16, 3),
    "batched product": lambda d: torch.bmm(_x(d, 2, 3, 4), _x(d, 2, 4, 5)),
    "einsum": lambda d: torch.einsum("bhqd,bhkd->bhqk", _x(d), _x(d)),
    "gelu": lambda d: F.gelu(_x(d), approximate="tanh"),
    "prelu": lambda d: F.prelu(_x(d), _x(d, 4)),
    "silu": lambda d: F.silu(_x(d)),
    "max pool": lambda d: F.max_pool2d(_x(d), 2),
    "max pool of one dimension": lambda d: F.max_pool1d(_x(d, 2, 4, 8), 2),
    "average pool": lambda d: F.avg_pool2d(_x(d), 2),
    "adaptive average pool": lambda d: F.adaptive_avg_pool2d(_x(d), (3, 3)),
    "adaptive average pool to one": lambda d: F.adaptive_avg_pool2d(_x(d), 1),
    "upsample": lambda d: F.interpolate(_x(d), scale_factor=2, mode="bilinear"),
    "upsample, smoothed": lambda d: F.interpolate(_x(d), scale_factor=0.5, mode="bicubic", antialias=True),
    "cross entropy": lambda d: F.cross_entropy(_x(d, 5, 16), _labels(5), label_smoothing=0.1),
    "cross entropy of images": lambda d: F.cross_entropy(_x(d), _labels(2, 8, 16)),
    "binary cross entropy": lambda d: F.binary_cross_entropy_with_logits(_x(d), _ones(d, 2, 4, 8, 16)),
    "mean squared error": lambda d: F.mse_loss(_x(d), _ones(d, 2, 4, 8, 16)),
    "kl divergence": lambda d: F.kl_div(_x(d), _x(d), reduction="batchmean"),
    "embedding": lambda d: F.embedding(_labels(2, 3), _x(d, 7, 16)),
    "embedding bag": lambda d: F.embedding_bag(_labels(2, 3), _x(d, 7, 16), mode="sum"),
    "indexing": lambda d: _x(d)[_labels(3)],
    "sort": lambda d: torch.sort(_x(d), stable=True),
    "top k": lambda d: torch.topk(_x(d), 3),
    "cumulative sum": lambda d: torch.cumsum(_x(d), 1),
    "scatter": lambda d: torch.scatter_add(_x(d, 5, 4), 0, _labels(5, 4), _x(d, 5, 4)),
    "norm": lambda d: torch.linalg.vector_norm(_x(d)),
    "clipped gradients": lambda d: torch._foreach_norm([_x(d), _x(d)]),
    "variance": lambda d: _x(d).var(),
    "quantile": lambda d: torch.quantile(_x(d), 0.5),
    "distance": lambda d: torch.cdist(_x(d, 5, 4), _x(d, 6, 4)),
    "renorm": lambda d: torch.renorm(_x(d, 5, 4), 2, 0, 1.0),
}


def asked(call: Callable[[torch.dtype], Any], dtype: torch.dtype, device: str, operators: Operators) -> str:
    """The operators, or behind an exclamation mark why they could not be found out."""
    try:
        return " ".join(chosen(lambda: call(dtype), device, operators))
    except Exception as error:  # noqa: BLE001  a shape rule may raise anything
        return f"! {type(error).__name__}: {error}".splitlines()[0][:200]


def suspected() -> dict[str, Any]:
    """The operators that run on the CPU and on a GPU, by call and type."""
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        for dtype in DTYPES:
            cpu, cuda = (asked(call, dtype, device, Operators()) for device in ("cpu", "cuda"))
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = {"cuda": cuda} | (
                {} if cpu == cuda else {"cpu": cpu}
            )
    return found


def database() -> dict[str, Any]:
    """Torch's own database of calls, in float32 and bfloat16: which are the same on both, which differ, and of which
    nothing could be found out on either."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, Any] = {"same": [], "differ": {}, "untold": []}
    for op in op_db:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{op.formatted_name}, {str(dtype).removeprefix('torch.')}"
            pairs = list(_sampled(op, dtype)) if op.supports_dtype(dtype, "cpu") else []
            known = [(a, b) for a, b in pairs if not a.startswith("!") or not b.startswith("!")]
            differ = [(a, b) for a, b in known if a != b]
            if differ:
                found["differ"][name] = {"cpu": differ[0][0], "cuda": differ[0][1]}
            elif known:
                found["same"].append(name)
            elif pairs:
                found["untold"].append(name)
    return found


def _sampled(op: Any, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    grad = op.supports_autograd
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), SAMPLES):

        def call(_: torch.dtype, sample: Any = sample) -> Any:
            here = torch.empty(0).device

            def move(x: Any) -> Any:
                if isinstance(x, Tensor):
                    like = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
                    return like.requires_grad_(x.requires_grad)
                return here if isinstance(x, torch.device) or x == "cpu" else x

            args, kwargs = pytree.tree_map(move, ((sample.input, *sample.args), sample.kwargs))
            return op(*args, **kwargs)

        cpu, cuda = (asked(call, dtype, device, Operators()) for device in ("cpu", "cuda"))
        yield cpu, cuda


def without_kernel() -> list[str]:
    """Operators that a Program may call and no GPU has a kernel for."""
    missing = []
    for target in sorted(ALLOWED):
        packet, overload = target.removeprefix("aten.").split(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if operator is not None and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(
            operator.name(), "CUDA"
        ):
            missing.append(target)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(prog="microbench.cuda.operators", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--all", action="store_true", help="torch's own database of calls, too")
    args = parser.parse_args()
    if not torch.backends.cuda.is_built():
        print(
            f"torch {torch.__version__} is built without CUDA, and can't tell what it would run there", file=sys.stderr
        )
        return 69
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"torch": torch.__version__, "calls": suspected(), "without_kernel": without_kernel()}
    differ = [name for name, each in found["calls"].items() if "cpu" in each]
    print(f"{len(found['calls']) - len(differ)} calls are the same on both, {len(differ)} differ: {', '.join(differ)}")
    if args.all:
        found["database"] = rows = database()
        print(f"of torch's database {len(rows['same'])} are the same, {len(rows['differ'])} differ")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
