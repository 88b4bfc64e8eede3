"""What a card is asked to run, beside what torch runs on it: operators by name, and attention with a mask or dropout,
recurrent layers and norms in numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpumux.capture.gpu.operators import as_on_a_gpu
from gpumux.capture.patches import RngTape
from gpumux.device.cuda import kernels
from microbench.cuda.casts import CAST, under
from microbench.cuda.operators import CALLS, types_of, walk
from tests.client.test_casts import ours
from tests.client.test_casts import plain as without_windows
from tests.client.test_ongpu import DIFFER, LEFT_TO_THE_DAEMON, NOT_RECORDED, plain, replaced
from tests.gpu.test_fused import captured


class Names(TorchDispatchMode):
    def __init__(self, typed: bool = False) -> None:
        super().__init__()
        self.names: list[str] = []
        self.typed = typed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func not in (torch.ops.aten.detach.default, torch.ops.aten.empty.memory_format):
            name = str(func).removeprefix("aten.").removesuffix(".default")
            self.names.append(f"{name}({types_of(args)})>{types_of(out)}" if self.typed else name)
        return out


def run_here(name: str, dtype: torch.dtype, low: torch.dtype | None = None) -> str:
    """`low`: under autocast to it, with the types of all tensors."""
    with torch.device("cuda"), Names(low is not None) as names, under(low) if low else nullcontext():
        out = (CALLS | CAST)[name](dtype)
        names.names.append("-")
        with torch.no_grad():
            walk([t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.grad_fn is not None])
    return " ".join(names.names)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_call_is_told_as_this_card_runs_it(
    name: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    try:
        want = run_here(name, dtype)
    except RuntimeError:
        if dtype == torch.float16:
            return  # a type that torch has no kernel for
        raise
    if name in LEFT_TO_THE_DAEMON or name in DIFFER:
        record_property(name, want)
        return
    assert plain(replaced(name, dtype)) == plain(want)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted((CALLS | CAST).keys() - DIFFER.keys() - LEFT_TO_THE_DAEMON - NOT_RECORDED))
def test_a_call_is_cast_as_this_card_casts_it(
    name: str, low: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    if name in ("attention of a product", "gru of halves", "quantile"):
        return  # chosen by the card, and by cuDNN; refused
    if name.endswith("unsafe"):
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            run_here(name, torch.float32, low)
        return
    want = run_here(name, torch.float32, low)
    record_property(name, want)
    assert without_windows(ours(name, low)) == without_windows(want)


def attend(dropout: float, masked: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """Torch's own attention with its gradients, and the daemon's, from one state of the generator."""
    draw = torch.Generator("cuda").manual_seed(1)
    q, k, v, grad = (torch.randn(2, 4, 96, 64, device="cuda", generator=draw).to(dtype) for _ in range(4))
    bias = None
    if masked:
        allowed = torch.ones(96, 96, dtype=torch.bool, device="cuda").tril()
        bias = torch.zeros(96, 96, device="cuda", dtype=dtype).masked_fill(~allowed, float("-inf")).expand(2, 4, 96, 96)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.manual_seed(5)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=bias, dropout_p=dropout)
    want = (out, *torch.autograd.grad(out, leaves, grad))

    def body() -> Any:
        made, sums, seed, offset = kernels.masked_attention(q, k, v, bias, True, dropout)
        wanted = [True, True, True, False]
        return made, *kernels.masked_attention_backward(grad, q, k, v, bias, made, sums, seed, offset, dropout, wanted)[
            :3
        ]

    torch.manual_seed(5)
    eager = body()
    return want, eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dropout", "masked"), [(0.0, True), (0.2, False), (0.2, True)])
def test_attention_is_torchs_own(
    dropout: float, masked: bool, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    want, got = attend(dropout, masked, dtype)
    record_property("bit-equal", all(torch.equal(a, b) for a, b in zip(want, got, strict=True)))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_can_be_captured_and_are_torchs_own(kind: Any) -> None:
    layer = kind(16, 12, 2, batch_first=True, device="cuda")
    draw = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(4, 8, 16, device="cuda", generator=draw)
    want = layer(x)[0]
    with as_on_a_gpu(RngTape(), True):
        got = captured(lambda: layer(x)[0].detach())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
