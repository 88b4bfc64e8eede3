"""Results and views over fake tensors have the strides of real ones, also where a dimension has one element."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gpumux.program.check import fake_call
from gpumux.program.layouts import view_strides

aten = torch.ops.aten
MODE = FakeTensorMode(allow_fallback_kernels=False)


@st.composite
def tensors(draw: Any, least: int = 1) -> torch.Tensor:
    """A permuted part of a larger tensor, with many dimensions of one element."""
    size = draw(st.lists(st.sampled_from((1, 1, 2, 3)), min_size=least, max_size=4))
    around = [n + draw(st.sampled_from((0, 0, 1))) for n in size]
    whole = torch.arange(prod(around), dtype=torch.float32).reshape(around)
    return whole[tuple(slice(0, n) for n in size)].permute(draw(st.permutations(range(len(size)))))


def strides(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Of real and of fake results."""

    def of(out: Any) -> list[Any]:
        return [(t.dtype, tuple(t.shape), t.stride()) for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]

    with MODE:
        fakes = pytree.tree_map_only(torch.Tensor, MODE.from_tensor, args)
        fake = of(fake_call(func, fakes, {}, "cpu"))
    return of(func(*args)), fake


@given(tensors(), st.data())
def test_views_have_the_strides_of_eager_mode(x: torch.Tensor, data: st.DataObject):
    ones = [n for n in x.shape if n > 1] or [1]
    shape = data.draw(st.sampled_from([[*x.shape], [1, *x.shape], [*x.shape, 1], ones, [1, *ones, 1]]))
    want = view_strides(x.shape, x.stride(), shape)
    assert want is None or want == x.view(shape).stride()
    for func in (aten.view.default, aten._unsafe_view.default):
        real, fake = strides(func, (x, shape))
        assert fake == real


def test_a_view_that_does_not_exist_has_no_strides():
    assert view_strides((4, 4), (8, 1), (16,)) is None
    assert view_strides((0, 4), (4, 1), (4, 0)) is None
    assert view_strides((), (), (1, 1)) == (1, 1)


ELEMENTWISE = (
    aten.relu.default, aten.gelu.default, aten.neg.default, aten.sigmoid.default, aten.empty_like.default,
    aten.zeros_like.default, aten.clone.default,
)  # fmt: skip
OF_TWO = (aten.add.Tensor, aten.mul.Tensor, aten.gelu_backward.default, aten.silu_backward.default)


@given(tensors(), st.sampled_from(ELEMENTWISE), st.sampled_from(OF_TWO))
def test_elementwise_results_have_the_strides_of_the_kernels(x: torch.Tensor, func: Any, of_two: Any):
    for call, args in ((func, (x,)), (of_two, (x, x)), (of_two, (x, torch.ones(x.shape)))):
        real, fake = strides(call, args)
        assert fake == real, call


@given(tensors(least=2), st.integers(0, 3))
def test_results_of_other_operators_have_the_strides_of_the_kernels(x: torch.Tensor, at: int):
    dim = at % x.dim()
    for func, args in (
        (aten.flip.default, (x, [dim])), (aten.sort.default, (x, dim)), (aten.tril.default, (x,)),
        (aten._softmax.default, (x, dim, False)), (aten.sum.dim_IntList, (x, [dim], True)),
    ):  # fmt: skip
        real, fake = strides(func, args)
        assert fake == real, func


FORMATS = {"contiguous": lambda x: x, "channels-last": lambda x: x.to(memory_format=torch.channels_last)}
TURNED = {"as it is": lambda x: x, "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("of_input", FORMATS)
@pytest.mark.parametrize("of_gradient", FORMATS)
def test_a_batch_norm_is_laid_out_like_its_input_also_backward(of_gradient: str, of_input: str, training: bool):
    x, grad = FORMATS[of_input](torch.rand(2, 4, 3, 3)), FORMATS[of_gradient](torch.rand(2, 4, 3, 3))
    row = torch.ones(4)
    given = (grad, x, row, row.clone(), row.clone(), row.clone(), row.clone(), training, 1e-5, [True] * 3)
    real, fake = strides(aten.native_batch_norm_backward.default, given)
    assert fake == real


@pytest.mark.parametrize("of_input", TURNED)
@pytest.mark.parametrize("of_gradient", TURNED)
def test_a_batch_norm_over_sequences_makes_contiguous_results(of_gradient: str, of_input: str):
    x, grad = TURNED[of_input](torch.rand(2, 4, 5)), TURNED[of_gradient](torch.rand(2, 4, 5))
    row = torch.ones(4)
    given = (grad, x, row, row.clone(), row.clone(), row.clone(), row.clone(), True, 1e-5, [True] * 3)
    real, fake = strides(aten.native_batch_norm_backward.default, given)
    assert fake == real
    real, fake = strides(aten.native_batch_norm.default, (x, row, row, row.clone(), row.clone(), True, 0.1, 1e-5))
    assert fake == real


@pytest.mark.parametrize("of_input", TURNED)
@pytest.mark.parametrize("of_gradient", TURNED)
def test_the_gradient_of_a_layer_norm_is_contiguous(of_gradient: str, of_input: str):
    x, grad = TURNED[of_input](torch.rand(2, 3, 4)), TURNED[of_gradient](torch.rand(2, 3, 4))
    _, mean, deviation = torch.native_layer_norm(x, [4], torch.ones(4), torch.ones(4), 1e-5)
    given = (grad, x, [4], mean, deviation, torch.ones(4), torch.ones(4), [True] * 3)
    real, fake = strides(aten.native_layer_norm_backward.default, given)
    assert fake == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_are_those_of_the_kernel(dtype: torch.dtype):
    def matrix(*size: int) -> torch.Tensor:
        return torch.rand(size, dtype=dtype)

    ends = torch.tensor([8, 8, 16], dtype=torch.int32)
    for call in (
        (matrix(16, 8), matrix(3, 8, 24), ends),
        (matrix(16, 8), matrix(3, 5, 8).transpose(1, 2), ends),
        (matrix(8, 16).t(), matrix(3, 8, 24), ends),
        (matrix(3, 5, 8), matrix(8, 16), ends),
        (matrix(5, 16), matrix(16, 8), ends),
        (matrix(3, 7, 8), matrix(3, 8, 16), None),
    ):
        real, fake = strides(aten._grouped_mm.default, call)
        assert fake == real


def test_products_of_groups_that_do_not_fit_are_refused():
    ends = torch.tensor([2, 6], dtype=torch.int32)
    for call in (
        (torch.rand(6, 4), torch.rand(3, 4, 8), ends),
        (torch.rand(6, 4), torch.rand(2, 8, 8), ends),
        (torch.rand(6, 4), torch.rand(2, 4, 8), None),
        (torch.rand(6, 4), torch.rand(2, 4, 8), ends.long()),
        (torch.rand(6, 4), torch.rand(2, 4, 8).double(), ends),
        (torch.rand(6, 4), torch.rand(2, 4, 5), ends),
        (torch.rand(2, 6, 4), torch.rand(3, 4, 8), None),
        (torch.rand(4), torch.rand(4, 8), ends),
    ):
        with pytest.raises(ValueError, match=r"products|groups"):
            strides(aten._grouped_mm.default, call)
