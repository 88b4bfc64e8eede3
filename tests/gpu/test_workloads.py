"""The tiny workloads and the demos' models through a live daemon, beside their reference runs on the same GPU.

A Program that was traced on the CPU is equivalent, not bit-equal (docs/gpu-notes.md, "Equal results"), and each job
says so; how near it came, and which were equal in every bit all the same, is noted with each test.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.client.parity import through
from tests.client.workload_jobs import NAMES, near_the_reference, nearness, work


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that round their operands (TF32) make much of the last bit."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("home", "dtype"), [("cuda", torch.float64), ("cpu", torch.float32)], ids=["home on the GPU", "home on the CPU"]
)
def test_near_the_reference_run(
    name: str, home: str, dtype: torch.dtype, endpoint: str, plain_products: None,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    found = near_the_reference(name, endpoint, dtype=dtype, home=home, device="cuda")
    record_property("beside the reference run", found)
    print(f"{name}, {home}, {dtype}: {found}")


@pytest.mark.parametrize("name", ["transformer", "bert_medium"])
def test_with_dropout_the_masks_are_the_reference_runs(
    name: str, endpoint: str, plain_products: None, record_property: Callable[[str, object], None]
) -> None:
    found = near_the_reference(name, endpoint, dtype=torch.float32, device="cuda", dropout=0.2)
    record_property("beside the reference run", found)


def test_with_dropout_a_job_repeats_bit_for_bit(endpoint: str) -> None:
    """The transformer, none of whose kernels adds up in an order of its own."""
    runs = [through(lambda: work("transformer", 5, dropout=0.2), endpoint) for _ in range(2)]
    found = nearness(*runs)
    assert found.equal, found
