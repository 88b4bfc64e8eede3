"""Operators whose kernels take a size from another argument: a smaller one is refused, or does no harm."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from gpumux.program import check
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
UNTRIED = {"_fused_adam", "_fused_adamw", "tensor_lr", "rrelu_with_noise_functional"}  # share a rule with one above


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


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_a_valid_call_passes_and_one_with_a_smaller_argument_does_no_harm(
    process: Separate, func: Any, args: Any, kwargs: Any
):
    leaves, spec = tree_flatten((args, kwargs))
    assert accepted(func, leaves, spec)
    assert process.crashes(func, [leaves], spec) == []
    tried = list(variants(leaves))
    passed = [call for _, call in tried if accepted(func, call, spec)]
    assert len(passed) < len(tried), "the rule refuses something"
    assert process.crashes(func, passed, spec) == []


def test_an_argument_that_is_too_small_without_the_rules_is_noticed(process: Separate, monkeypatch: pytest.MonkeyPatch):
    """So the test above can fail."""
    monkeypatch.setattr(check, "_SIDES", {})
    func, args, kwargs = next(call for call in CALLS if call[0] is aten._pdist_backward.default)
    leaves, spec = tree_flatten((args, kwargs))
    assert process.crashes(func, [call for _, call in variants(leaves) if accepted(func, call, spec)], spec)


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
