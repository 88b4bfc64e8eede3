"""Attention and batch norm in CUDA's own kernels: the arguments they get, and what passes from a forward to its
backward. tests/gpu/test_fused.py checks on a GPU that they compute the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumux.device.cuda import kernels

aten = torch.ops.aten
Tensor = torch.Tensor
CPU, CPU_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
TAKEN = {
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_flash_attention_backward":
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
        "philox_offset scale",
    "_scaled_dot_product_efficient_attention":
        "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    "_scaled_dot_product_efficient_attention_backward":
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
        "is_causal scale",
    "cudnn_batch_norm": "input weight bias running_mean running_var training exponential_average_factor epsilon",
    "cudnn_batch_norm_backward":
        "input grad_output weight running_mean running_var save_mean save_var epsilon reserveSpace",
    "native_batch_norm": "input weight bias running_mean running_var training momentum eps",
    "native_batch_norm_backward":
        "grad_out input weight running_mean running_var save_mean save_invstd train eps output_mask",
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_the_kernels_take_what_they_are_given(name: str) -> None:
    """Arguments in this order, with this torch: a change of order fails here, without a GPU."""
    operator = getattr(aten, name).default
    assert [argument.name for argument in operator._schema.arguments] == TAKEN[name].split()


def batch(rows: int = 40, columns: int = 40, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(2, 3, rows, 16), (2, 3, columns, 16), (2, 3, columns, 16), (2, 3, rows, 16)]
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("backend", [kernels.MATH, kernels.FLASH, kernels.EFFICIENT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_makes_what_the_program_declares(backend: int, dtype: torch.dtype) -> None:
    """Sizes and types, as torch itself says of its kernels."""
    q, k, v, grad = batch(40, 24, dtype)
    out, sums = CPU(q, k, v)
    grads = CPU_BACKWARD(grad, q, k, v, out, sums, 0.0, False)
    mq, mk, mv, mgrad = batch(40, 24, dtype, "meta")
    made_out, made_sums = kernels.attention(mq, mk, mv, backend=backend)
    made = kernels.attention_backward(mgrad, mq, mk, mv, made_out, made_sums, 0.0, False, backend=backend)
    for want, got in zip((out, sums, *grads), (made_out, made_sums, *made), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)


class Kernels:
    """Attention on a GPU, as far as it can be checked without one: in its mathematical form, with what the real kernels
    keep beside it, which their backward must get."""

    def __init__(self) -> None:
        self.called: list[str] = []
        own = self

        class Space(SimpleNamespace):
            def __getattr__(self, name: str) -> Any:
                return SimpleNamespace(default=getattr(own, name, None) or getattr(aten, name).default)

        self.space = Space()

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, keep: bool, dropout: float, causal: bool, *, scale: Any
    ) -> Any:
        self.called.append("forward")
        assert keep
        out, sums = kernels.mathematical(q, k, v, causal, None, scale)
        padded = torch.full((*sums.shape[:2], -(-sums.shape[2] // 32) * 32), float("inf"))
        padded[..., : sums.shape[2]] = sums
        return out, padded, torch.tensor(0), torch.tensor(0)

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, sums: Tensor, seed: Tensor,
        offset: Tensor, dropout: float, wanted: list[bool], causal: bool, *, scale: Any,
    ) -> Any:  # fmt: skip
        self.called.append("backward")
        rows = q.shape[2]
        assert sums.is_contiguous()
        assert sums.shape[2] % 32 == 0
        assert torch.isposinf(sums[..., rows:]).all()
        assert (seed.shape, seed.dtype, offset.dtype) == ((), torch.int64, torch.int64)
        assert wanted == [True, True, True, False]
        return (*kernels.mathematical_backward(grad, q, k, v, out, sums[..., :rows], causal, None, scale), None)

    def cudnn_batch_norm(self, x: Tensor, *rest: Any) -> Any:
        self.called.append("forward")
        return (*aten.native_batch_norm.default(x, *rest), torch.empty(0, dtype=torch.uint8))

    def cudnn_batch_norm_backward(
        self, x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, var: Tensor, batch_mean: Tensor, inverse: Tensor,
        eps: float, kept: Tensor,
    ) -> Any:  # fmt: skip
        self.called.append("backward")
        assert (kept.numel(), kept.dtype) == (0, torch.uint8)
        wanted = [True, True, True]
        return aten.native_batch_norm_backward.default(
            grad, x, weight, mean, var, batch_mean, inverse, True, eps, wanted
        )


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels()
    monkeypatch.setattr(kernels, "aten", made.space)
    return made


@pytest.mark.parametrize("rows", [40, 64])
@pytest.mark.parametrize(("causal", "scale"), [(True, None), (False, 0.3)])
def test_efficient_attention_gets_its_rows_padded_again(
    rows: int, causal: bool, scale: float | None, recorder: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "attention_backend", lambda *_: kernels.EFFICIENT)
    q, k, v, grad = batch(rows, rows)
    want = CPU(q, k, v, 0.0, causal, scale=scale)
    got = kernels.attention(q, k, v, 0.0, causal, scale=scale)
    wanted = CPU_BACKWARD(grad, q, k, v, *want, 0.0, causal, scale=scale)
    made = kernels.attention_backward(grad, q, k, v, *got, 0.0, causal, scale=scale)
    for a, b in zip((*want, *wanted), (*got, *made), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert recorder.called == ["forward", "backward"]


@pytest.mark.parametrize("taken", [True, False])
def test_batch_norm_goes_to_cudnn_where_torch_would_and_keeps_nothing_beside(
    taken: bool, recorder: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cudnn_takes", lambda *_: taken)
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(4, 3, 5, 5, generator=draw) for _ in range(2))
    weight, bias = torch.rand(3, generator=draw), torch.rand(3, generator=draw)
    runs = []
    for forward, backward in (
        (aten.native_batch_norm.default, aten.native_batch_norm_backward.default),
        (kernels.batch_norm, kernels.batch_norm_backward),
    ):
        mean, var = torch.zeros(3), torch.ones(3)
        out, batch_mean, inverse = forward(x, weight, bias, mean, var, True, 0.1, 1e-5)
        wanted = [True, False, True]
        grads = backward(grad, x, weight, mean, var, batch_mean, inverse, True, 1e-5, wanted)
        assert grads[1] is None
        runs.append([out, batch_mean, inverse, mean, var, grads[0], grads[2]])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
    assert recorder.called == (["forward", "backward"] if taken else [])


def test_on_the_cpu_nothing_of_a_gpu_is_asked() -> None:
    q, k, v, _ = batch()
    assert kernels.attention_backend(q, k, v, False, None, None) == kernels.MATH
    x, w = torch.ones(4, 3, 5, 5), torch.ones(3)
    assert not kernels.cudnn_takes(x, w, w, w, w, 1e-5)


class OnAGpu(Tensor):
    """A tensor of the CPU with is_cuda."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_torchs_choice_is_followed_where_every_kernel_has_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = (t.as_subclass(OnAGpu) for t in batch())
    for chosen, way in (
        (1, kernels.FLASH),
        (2, kernels.EFFICIENT),
        (3, kernels.FLASH),
        (0, kernels.MATH),
        (-1, kernels.MATH),
    ):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, chosen=chosen, **__: chosen)
        assert kernels.attention_backend(q, k, v, True, None, None) == way
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: pytest.fail("there is no choice"))
    assert kernels.attention_backend(q, k, v, False, torch.ones(40, 40), None) == kernels.MATH
    for width in (12, 256):
        wide = torch.zeros(1, 1, 4, width).as_subclass(OnAGpu)
        assert kernels.attention_backend(wide, wide, wide, False, None, None) == kernels.MATH


@pytest.mark.parametrize("taken", [kernels.FLASH, kernels.CUDNN])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_causal_mask_of_unequal_lengths_never_goes_to_flash(
    taken: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash aligns it with the last row and column. Torch's operator, and the kernel that is taken instead, with the
    first ones."""
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: taken)

    def ways(columns: int, causal: bool) -> tuple[int, bool]:
        q, k, v, _ = (t.as_subclass(OnAGpu) for t in batch(24, columns, torch.bfloat16))
        return kernels.attention_backend(q, k, v, causal, None, None), kernels._takes_flash(
            q, k, v, None, dropout, causal, None
        )

    assert ways(40, True) == (kernels.EFFICIENT, False)
    assert ways(24, True) == ways(40, False) == (kernels.FLASH, True)
    q, k, v, _ = batch(24, 40)
    first = torch.ones(24, 40, dtype=torch.bool).tril()  # what the operator means, which `mathematical` computes
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=first)
    torch.testing.assert_close(kernels.mathematical(q, k, v, True, None, None)[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(CPU(q, k, v, 0.0, True)[0], want, rtol=1e-4, atol=1e-5)


class Drawn(OnAGpu):
    """A seed or an offset on the GPU."""

    def cpu(self) -> Tensor:  # type: ignore[override]
        return torch.tensor(int(self))


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("where", [Drawn, Tensor])
def test_efficient_attention_outside_a_capture_gets_seed_and_offset_in_host_memory(
    capturing: bool, where: type[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads them there. Its forward has left them on the GPU if its piece is captured, and this one is not."""
    got: list[Tensor] = []

    def backward(*arguments: Any, **options: Any) -> Any:
        got.extend(arguments[7:9])
        return (None,) * 4

    name = "_scaled_dot_product_efficient_attention_backward"
    monkeypatch.setattr(kernels, "aten", SimpleNamespace(**{name: SimpleNamespace(default=backward)}))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: kernels.EFFICIENT)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    q, k, v, grad = (t.as_subclass(OnAGpu) for t in batch())
    drawn = [torch.tensor(number).as_subclass(where) for number in (7, 12)]
    wanted = [True, True, True, False]
    kernels.masked_attention_backward(grad, q, k, v, None, q, q, *drawn, 0.1, wanted)
    assert [int(x) for x in got] == [7, 12]
    assert {type(x) for x in got} == {where if capturing else Tensor}


def test_cudnn_is_taken_by_torchs_own_rule_and_if_it_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.ones(4, 3, 5, 5).as_subclass(OnAGpu), torch.ones(3)
    backends = torch._C._BatchNormBackend  # type: ignore[attr-defined]
    for backend, reserve, taken in (
        (backends.Cudnn, 0, True),
        (backends.Cudnn, 64, False),
        (backends.Native, 0, False),
    ):
        monkeypatch.setattr(torch._C, "_select_batch_norm_backend", lambda *_, backend=backend: backend)
        monkeypatch.setattr(torch._C, kernels.RESERVE, lambda *_, reserve=reserve: reserve)
        assert kernels.cudnn_takes(x, w, w, w, w, 1e-5) == taken
    assert not kernels.cudnn_takes(x, w, w, None, None, 1e-5)
