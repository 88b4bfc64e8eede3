"""Attention and batch norm in the kernels that torch would choose: captured, beside the forms that need none of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpumux.device.cuda import kernels

NAMES = {kernels.MATH: "mathematical", kernels.FLASH: "flash", kernels.EFFICIENT: "efficient"}


def captured(body: Callable[[], Any]) -> Any:
    """What `body` returns when it is replayed. In two graphs would be as in one: nothing but tensors goes across."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = body()
    graph.replay()
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (197, 197), (128, 197), (197, 128)])
def test_attention(
    dtype: torch.dtype, causal: bool, rows: int, columns: int, record_property: Callable[[str, object], None]
) -> None:
    draw = torch.Generator("cuda").manual_seed(1)
    lengths = (rows, columns, columns, rows)
    q, k, v, grad = (torch.randn(2, 12, long, 64, device="cuda", generator=draw).to(dtype) for long in lengths)
    way = kernels.attention_backend(q, k, v, causal, None, None)
    record_property("torch chooses", NAMES[way])
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2

    def run(chosen: int) -> Any:
        out, sums = kernels.attention(q, k, v, 0.0, causal, backend=chosen)
        return out, sums, *kernels.attention_backward(grad, q, k, v, out, sums, 0.0, causal, backend=chosen)

    want = run(kernels.MATH)
    for got in (captured(lambda: run(way)), captured(lambda: run(kernels.EFFICIENT))):
        for a, b in zip(want, got, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(8, 64, 56, 56), (4, 16, 1, 1)])
def test_batch_norm(shape: tuple[int, ...], record_property: Callable[[str, object], None]) -> None:
    draw = torch.Generator("cuda").manual_seed(1)
    x, grad = (torch.randn(shape, device="cuda", generator=draw) for _ in range(2))
    weight, bias = (torch.rand(shape[1], device="cuda", generator=draw) for _ in range(2))
    start = torch.zeros(shape[1], device="cuda"), torch.ones(shape[1], device="cuda")
    record_property("cuDNN", kernels.cudnn_takes(x, weight, bias, *start, 1e-5))
    aten = torch.ops.aten

    def run(forward: Any, backward: Any) -> Any:
        mean, var = (each.clone() for each in start)
        out, batch_mean, inverse = forward(x, weight, bias, mean, var, True, 0.1, 1e-5)
        grads = backward(grad, x, weight, mean, var, batch_mean, inverse, True, 1e-5, [True, True, True])
        return out, batch_mean, inverse, mean, var, *grads

    want = run(aten.native_batch_norm.default, aten.native_batch_norm_backward.default)
    got = captured(lambda: run(kernels.batch_norm, kernels.batch_norm_backward))
    for a, b in zip(want, got, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
