"""Operators that read their number from device memory, captured: none may ask the host, and each replay reads it
anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.device.cuda.forms import Call, calls, number_of


def run(call: Call, before: list[Any]) -> Any:
    """On the tensors as they were, in the memory they lie in."""
    for given, was in zip(call.fed, before, strict=True):
        for target, source in zip(flat(given), flat(was), strict=True):
            target.copy_(source)
    made = call.form(*call.fed, **call.options)
    return call.fed[0] if made is None else made


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list):
        return [tensor for item in value for tensor in flat(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_captured_form_reads_the_number_of_each_replay(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    number = number_of(0.3, "cuda")
    checked = 0
    for call in calls(dtype, number):
        before = [
            [t.clone() for t in item] if isinstance(item, list) and flat(item) else item.clone()
            if isinstance(item, torch.Tensor) else item
            for item in call.fed
        ]  # fmt: skip
        run(call, before)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                made = run(call, before)
        except RuntimeError as error:
            pytest.fail(f"{call.target} can't be captured: {error}")
        for value in (0.3, 0.7):
            number.f64.fill_(value)
            number.f32.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            want = call.plain(value)
            torch.testing.assert_close(
                made, want, rtol=tolerance, atol=tolerance, msg=lambda m, t=call.target: f"{t}: {m}"
            )
        checked += 1
    assert checked > 40
