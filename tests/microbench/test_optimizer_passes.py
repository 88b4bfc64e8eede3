"""How often a step on a GPU goes over the parameters."""

from __future__ import annotations

import pytest

from microbench.optimizer_passes import FUSED, passes


@pytest.mark.parametrize("name", ["Adam", "AdamW", "AdamW, amsgrad", "Adamax", *FUSED])
def test_a_step_passes_over_the_parameters_no_oftener_than_torchs_own_captured_one(name: str) -> None:
    found = passes(name)
    assert found["gpumux"] <= found["capturable"]


@pytest.mark.parametrize("name", ["SGD", "SGD, momentum", "RMSprop", "Adagrad"])
def test_where_torch_captures_none_the_learning_rate_costs_two_passes(name: str) -> None:
    found = passes(name)
    assert found["gpumux"] == pytest.approx(found["eager"] + 2)


def test_what_is_counted() -> None:
    """Adam by hand: lerp 3, mul 2, addcmul 4, sqrt 2, div 2, add 2, addcdiv 4."""
    assert passes("Adam")["eager"] == pytest.approx(19)
