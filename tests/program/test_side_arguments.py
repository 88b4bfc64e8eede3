"""Operators whose kernels take a size from another argument: a smaller one is refused, or does no harm."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gpumux.errors import ProgramError
from gpumux.program import check, validate
from gpumux.program.ir import ScalarRef, View
from gpumux.program.operators import ALLOWED
from tests.program import guard_pages, side_calls
from tests.program.guard_pages import Separate, accepted, separate, variants

aten = torch.ops.aten


def r(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def adam(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    lists = [[r(3, 4), r(5)] for _ in range(5)]
    return getattr(aten, name).default, (*lists, [r(1).squeeze(), r(1).squeeze()]), {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": True, "maximize": False,
    }  # fmt: skip


# A valid call of each operator that has a rule: shapes as the operator's forward pass gives them.
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten._adaptive_avg_pool2d_backward.default, (r(2, 3, 2, 2), r(2, 3, 5, 5)), {}),
    (aten._adaptive_avg_pool3d_backward.default, (r(2, 3, 2, 2, 2), r(2, 3, 4, 4, 4)), {}),
    (aten.adaptive_max_pool2d_backward.default, (r(2, 3, 2, 2), r(2, 3, 5, 5), torch.zeros(2, 3, 2, 2).long()), {}),
    (
        aten.adaptive_max_pool3d_backward.default,
        (r(2, 3, 2, 2, 2), r(2, 3, 4, 4, 4), torch.zeros(2, 3, 2, 2, 2).long()),
        {},
    ),
    (aten.avg_pool2d_backward.default, (r(2, 3, 2, 2), r(2, 3, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None), {}),
    (
        aten.avg_pool3d_backward.default,
        (r(2, 3, 2, 2, 2), r(2, 3, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, False, True, None),
        {},
    ),
    (
        aten.max_pool2d_with_indices_backward.default,
        (r(2, 3, 2, 2), r(2, 3, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, torch.zeros(2, 3, 2, 2).long()),
        {},
    ),
    (
        aten.max_pool3d_with_indices_backward.default,
        (
            r(2, 3, 2, 2, 2),
            r(2, 3, 4, 4, 4),
            [2] * 3,
            [2] * 3,
            [0] * 3,
            [1] * 3,
            False,
            torch.zeros(2, 3, 2, 2, 2).long(),
        ),
        {},
    ),
    (
        aten.grid_sampler_2d_backward.default,
        (r(2, 3, 4, 4), r(2, 3, 5, 5), r(2, 4, 4, 2), 0, 0, False, [True, True]),
        {},
    ),
    (
        aten.grid_sampler_3d_backward.default,
        (r(2, 3, 4, 4, 4), r(2, 3, 5, 5, 5), r(2, 4, 4, 4, 3), 0, 0, False, [True, True]),
        {},
    ),
    *(
        (getattr(aten, f"{kind}_pad{n}d_backward").default, (r(2, 3, *[6] * n), r(2, 3, *[4] * n), [1] * (2 * n)), {})
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    ),
    (aten._softmax_backward_data.default, (r(4, 5), r(4, 5), 1, torch.float32), {}),
    (aten._log_softmax_backward_data.default, (r(4, 5), r(4, 5), 1, torch.float32), {}),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (r(2, 3, 4, 8), r(2, 3, 6, 8), r(2, 3, 6, 8), 0.0, False),
        {"attn_mask": r(4, 6)},
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (r(2, 3, 4, 8), r(2, 3, 4, 8), r(2, 3, 6, 8), r(2, 3, 6, 8), r(2, 3, 4, 8), r(2, 3, 4), 0.0, False),
        {},
    ),
    (aten._pdist_backward.default, (r(10), r(5, 3), 2.0, r(10)), {}),
    (aten._cdist_backward.default, (r(5, 4), r(5, 3), r(4, 3), 2.0, r(5, 4)), {}),
    (aten._cdist_backward.default, (r(2, 5, 4), r(2, 5, 3), r(2, 4, 3), 1.0, r(2, 5, 4)), {}),
    (aten._weight_norm_interface.default, (r(6, 4), r(6, 1), 0), {}),
    (aten._weight_norm_interface_backward.default, (r(6, 4), r(6, 4), r(6, 1), r(6, 1), 0), {}),
    (aten._weight_norm_interface_backward.default, (r(6, 4), r(6, 4), r(1, 4), r(1, 4), 1), {}),
    (aten._embedding_bag.default, (r(9, 4), i(0, 0, 0, 0), i(0, 2), False, 0, False, r(4)), {}),
    (aten._embedding_bag_forward_only.default, (r(9, 4), i(0, 0, 0, 0), i(0, 2), False, 0, False, r(4)), {}),
    (
        aten._embedding_bag_per_sample_weights_backward.default,
        (r(2, 4), r(9, 4), i(0, 0, 0, 0), i(0, 2), i(0, 0, 0, 0), 0),
        {},
    ),
    (
        aten._embedding_bag_dense_backward.default,
        (r(2, 4), i(0, 1, 2, 1), i(0, 0, 1, 1), i(2, 2), i(), 9, False, 0, None),
        {},
    ),
    (aten.lu_unpack.default, (r(2, 4, 4), torch.ones(2, 4, dtype=torch.int32)), {}),
    (aten.native_group_norm.default, (r(2, 6, 3), r(6), r(6), 2, 6, 3, 2, 1e-5), {}),
    (
        aten.native_group_norm_backward.default,
        (r(2, 6, 3), r(2, 6, 3), r(2, 2), r(2, 2), r(6), 2, 6, 3, 2, [True] * 3),
        {},
    ),
    (
        aten.native_layer_norm_backward.default,
        (r(4, 5), r(4, 5), [5], r(4, 1), r(4, 1), r(5), r(5), [True] * 3),
        {},
    ),
    (
        aten.fractional_max_pool2d_backward.default,
        (r(2, 3, 2, 2), r(2, 3, 5, 5), [2, 2], [2, 2], torch.zeros(2, 3, 2, 2).long()),
        {},
    ),
    (
        aten.fractional_max_pool3d_backward.default,
        (r(2, 3, 2, 2, 2), r(2, 3, 5, 5, 5), [2] * 3, [2] * 3, torch.zeros(2, 3, 2, 2, 2).long()),
        {},
    ),
    (aten.rrelu_with_noise.default, (r(20), r(20), 0.1, 0.3, True), {}),
    (aten.rrelu_with_noise_.default, (r(20), r(20), 0.1, 0.3, True), {}),
    adam("_fused_adam_"),
    adam("_fused_adamw_"),
]
ROWS = json.loads(guard_pages.TABLE.read_text())
EXACT = {"aten.linspace.Tensor_Tensor"}  # none of its smaller calls pass
UNTRIED = {"tensor_lr", "rrelu_with_noise_functional"}  # share a rule with one above


@pytest.fixture(scope="module")
def process() -> Iterator[Separate]:
    with separate() as it:
        yield it


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch logs each call that its shape rules refuse."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_each_rule_has_a_call():
    missing = {str(op) for op in check._SIDES} - {str(func) for func, _, _ in CALLS}
    assert all(any(part in UNTRIED for part in name.removeprefix("aten.").split(".")) for name in missing), missing


@pytest.mark.every(2)
@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_a_valid_call_passes_and_one_with_a_smaller_argument_does_no_harm(
    process: Separate, func: Any, args: Any, kwargs: Any
):
    assert process.crashes(func, [(args, kwargs)]) == (1, [])
    tried = list(variants(args, kwargs))
    taken, crashed = process.crashes(func, tried)
    assert taken < len(tried), "the rule refuses something"
    assert crashed == []


WRITTEN = [*side_calls.written(), *side_calls.of_lists(sorted(name for name in ALLOWED if "_foreach" in name)[::12])]


@pytest.mark.parametrize(("func", "args", "kwargs"), WRITTEN, ids=[str(call[0]) for call in WRITTEN])
@pytest.mark.extended
def test_operators_that_torchs_samples_do_not_call_keep_within_their_arguments(
    process: Separate, func: Any, args: Any, kwargs: Any
):
    assert str(func) in ALLOWED
    assert process.crashes(func, [(args, kwargs)]) == (1, [])
    assert process.crashes(func, list(variants(args, kwargs)))[1] == []


def test_an_argument_that_is_too_small_without_a_rule_is_noticed(process: Separate):
    """So the tests above can fail: this operator is not allowed."""
    assert "aten._compute_linear_combination.default" not in ALLOWED
    taken, crashed = process.crashes(aten._compute_linear_combination.default, [((r(1, 4), r(2, 3)), {})])
    assert (taken, crashed) == (1, [0])


# ---- Numbers that lead a kernel past its arguments.


def antialiased(name: str, scale: Any) -> Any:
    if name.endswith("backward"):
        return (r(1, 1, 16, 16), [16, 16], [1, 1, 8, 8], False, scale, scale)
    return (r(1, 1, 8, 8), [16, 16], False, scale, scale)


@pytest.mark.parametrize("end", ["", "_backward"])
@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_scales_of_antialiased_resizing_do_not_lead_past_the_image(process: Separate, kind: str, end: str):
    name = f"_upsample_{kind}2d_aa{end}"
    func = getattr(aten, name).default
    sound = [antialiased(name, scale) for scale in (None, 2.0, 2.1, 2, 1e9)]
    assert process.crashes(func, [(args, {}) for args in sound]) == (len(sound), [])
    for scale in (1.0, 0.3, 0.01, 0.0, -2.0, float("nan")):
        assert not accepted(func, *tree_flatten((antialiased(name, scale), {}))), scale


def test_scales_that_torch_gives_antialiased_resizing_are_taken():
    taken: list[bool] = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_aa" in str(func):
                taken.append(accepted(func, *tree_flatten((args, kwargs or {}))))
            return func(*args, **(kwargs or {}))

    for size in (7, 10, 33):
        for scale in (0.1 * 3, 1.7, 3.0, 1 / 3):
            x = torch.rand(1, 1, size, size, requires_grad=True)
            with Asked():
                torch.nn.functional.interpolate(x, scale_factor=scale, mode="bicubic", antialias=True).sum().backward()
    assert len(taken) == 24
    assert all(taken)


def test_a_scale_of_antialiased_resizing_that_comes_with_each_step_is_refused():
    image = View(0, "float32", (1, 1, 8, 8), (64, 64, 8, 1), 0)
    rule = validate._RULES["aten._upsample_bilinear2d_aa.default"]
    rule([image, (16, 16), False, 2.0, 2.0])
    with pytest.raises(ProgramError, match="changes from step to step"):
        rule([image, (16, 16), False, ScalarRef(0), 2.0])


def test_indices_into_no_weights_are_refused():
    """The bound of each index is one less than the number of weights; the kernel looks at neither."""
    func = aten._embedding_bag_dense_backward.default
    bags = (i(0, 0, 1, 1), i(2, 2), i())
    for weights, taken in ((9, True), (0, False), (-1, False)):
        args = (r(2, 4), i(0, 1, 2, 1), *bags, weights, False, 0, None)
        assert accepted(func, *tree_flatten((args, {}))) == taken, weights
    empty = (r(2, 4), i(), i(), i(0, 0), i(), 0, False, 0, None)
    assert accepted(func, *tree_flatten((empty, {})))


@pytest.mark.parametrize("dims", [2, 3])
def test_the_output_size_of_fractional_pooling_is_the_gradients(dims: int):
    rule = validate._RULES[f"aten.fractional_max_pool{dims}d_backward.default"]
    gradient = View(0, "float32", (2, 3, *[2] * dims), (1,) * (2 + dims), 0)
    rule([gradient, gradient, (2,) * dims, (2,) * dims, gradient])
    for size in ((), (2,), (2,) * (dims - 1), (2,) * (dims + 1), (3,) * dims):
        with pytest.raises(ProgramError, match="the output size"):
            rule([gradient, gradient, (2,) * dims, size, gradient])


# ---- The table of all allowed operators.


def test_every_allowed_operator_has_a_row_and_no_other():
    assert set(ROWS) == set(ALLOWED)
    assert {row["by"] for row in ROWS.values()} == {"one", "rule", "kernel", "index", "gpu"}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_row_says_what_holds(name: str):
    row = ROWS[name]
    assert (row["by"] == "one") == (guard_pages.tensors(name) < 2)
    if row["by"] == "rule":
        assert guard_pages.has_rule(name)
    if row["by"] == "gpu":
        assert guard_pages.only_on_gpus(name)
    if row["by"] in ("kernel", "index"):
        assert not guard_pages.has_rule(name) or row["by"] == "index"
        assert not guard_pages.only_on_gpus(name)
        assert row["calls"] > 0 or name in EXACT, "no smaller argument passes the check"


def test_what_crashes_by_the_values_of_an_index_is_what_the_docs_say():
    assert {name for name, row in ROWS.items() if row["by"] == "index"} == {
        "aten._embedding_bag_per_sample_weights_backward.default",
        "aten.adaptive_max_pool2d_backward.default",
        "aten.adaptive_max_pool3d_backward.default",
        "aten.max_pool3d_with_indices_backward.default",
    }


def test_lists_of_a_fused_optimizer_have_one_length():
    func, args, kwargs = adam("_fused_adam_")
    for at in range(1, 6):
        shorter = [each[:1] if k == at else each for k, each in enumerate(args)]
        leaves, spec = tree_flatten((tuple(shorter), kwargs))
        assert not accepted(func, leaves, spec), at
    leaves, spec = tree_flatten(((*args[:4], [], args[5]), kwargs))
    assert not accepted(func, leaves, spec), "amsgrad needs the largest squares"
    leaves, spec = tree_flatten(((*args[:4], [], args[5]), {**kwargs, "amsgrad": False}))
    assert accepted(func, leaves, spec)
