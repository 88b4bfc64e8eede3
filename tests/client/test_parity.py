"""The comparison that other tests use can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.client.parity import assert_same

ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (ONES, ONES.reshape(-1)),
        (ONES, ONES.t()),
        (ONES, ONES.double()),
        (ONES, 1.0),
        (torch.zeros(1), -torch.zeros(1)),
        ([ONES], (ONES,)),
        ({"a": 1.0}, {"a": 1}),
        (torch.empty(0, 2), torch.empty(2, 0)),
    ],
    ids=["flattened", "transposed", "type", "number", "sign of zero", "container", "int for float", "empty"],
)
def test_what_differs_is_told_apart(a: Any, b: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same(a, b, "value")
    assert_same(a, a, "value")
