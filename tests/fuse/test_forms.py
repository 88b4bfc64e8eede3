"""The place of a view of one model in the storage of all models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumux.fuse.layout import Batched, recognise, stack_view
from gpumux.program.ir import View


@st.composite
def placed(draw: st.DrawFn) -> tuple[View, int, int]:
    """(a view, the bytes of its storage, a block)"""
    size = draw(st.lists(st.integers(1, 4), max_size=4))
    order = draw(st.permutations(range(len(size))))
    stride, at = [0] * len(size), 1
    for d in order:
        stride[d] = at
        at *= size[d]
    rest = draw(st.integers(1, 3))
    sub = [draw(st.integers(1, n)) for n in size]
    offset = sum(draw(st.integers(0, n - m)) * s for n, m, s in zip(size, sub, stride, strict=True))
    total = at * rest
    block = draw(st.sampled_from([k for k in range(1, total + 1) if total % k == 0]))
    return View(0, "float32", tuple(sub), tuple(stride), offset), total * 4, block * 4


def addresses(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> list[int]:
    found = [offset]
    for n, s in zip(size, stride, strict=True):
        found = [a + i * s for a in found for i in range(n)]
    return found


@given(placed(), st.integers(1, 4))
def test_every_element_is_where_the_form_says(case: tuple[View, int, int], models: int):
    view, _, block = case
    made = stack_view(view, block, models)
    if made is None:
        return
    k = block // 4
    plain = addresses(view.size, view.stride, view.offset)
    for model in range(models):
        wanted = [a // k * k * models + model * k + a % k for a in plain]
        assert addresses(made.size, made.stride, made.offset + model * made.step) == wanted


@given(placed(), st.integers(1, 4))
def test_whole_storages_hold_every_view(case: tuple[View, int, int], models: int):
    view, nbytes, _ = case
    made = stack_view(view, nbytes, models)
    assert made is not None
    assert (made.stride, made.offset, made.step) == (view.stride, view.offset, nbytes // 4)


@given(placed(), st.integers(2, 4))
def test_a_form_is_recognised_by_its_strides(case: tuple[View, int, int], models: int):
    view, nbytes, block = case
    made = stack_view(view, block, models)
    if made is not None:
        assert recognise(view, nbytes, made, models) == block


def test_models_between_sample_and_channel():
    view = View(0, "float32", (2, 3, 5), (15, 5, 1))
    assert stack_view(view, 15 * 4, 4) == Batched((2, 3, 5), (60, 5, 1), 0, 15)


def test_a_dimension_across_blocks_is_no_view():
    assert stack_view(View(0, "float32", (6, 5), (5, 1)), 15 * 4, 4) is None
