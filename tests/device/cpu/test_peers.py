"""Collectives between executors: what they compute, what they move, and how they fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpumux.device.cpu.device import CpuDevice
from tests.device.cpu.gangs import gangs, open_ranks, step, summing
from tests.device.cpu.support import CASE
from tests.device.harness import Driver


@pytest.fixture(scope="module")
def devices() -> Iterator[list[CpuDevice]]:
    made = [CpuDevice(threads=1, cores=2) for _ in range(2)]
    for device in made:
        device.open()
    yield made
    for device in made:
        device.close()


@pytest.fixture
def drivers(devices: list[CpuDevice]) -> Iterator[list[Driver]]:
    made = [Driver(CASE, device) for device in devices]
    yield made
    for driver in made:
        driver.finish()


def values(rank: int, dtype: str, size: tuple[int, ...]) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 + rank)
    kind = getattr(torch, dtype)
    return (
        torch.randint(-1000, 1000, size, generator=g)
        if dtype == "int64"
        else torch.randn(size, generator=g, dtype=torch.float64).to(kind)
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_those_of_float64_for_every_type_and_size(drivers, ranks):
    sizes = [
        ("float64", (7, 3)),
        ("float32", ()),
        ("float32", (5000, 3)),
        ("bfloat16", (129,)),
        ("int64", (1001,)),
        ("float64", (0, 4)),
    ]
    with gangs(ranks) as gang:
        held = open_ranks(drivers, gang, [summing(r, ranks, sizes) for r in range(ranks)])
        for rank, one in enumerate(held):
            one.put(*[values(rank, *each) for each in sizes])
        for _ in range(3):  # cut 0, then graphs
            step(held)
        for position, (dtype, size) in enumerate(sizes):
            parts = [2 * values(rank, dtype, size) for rank in range(ranks)]
            wanted = parts[0].clone()
            for part in parts[1:]:
                wanted += part
            for one in held:
                assert torch.equal(one.get(position), wanted), (dtype, size)
            exact = sum(part.double() for part in parts)
            assert torch.allclose(
                wanted.double(),
                exact,
                rtol=0.05 if dtype == "bfloat16" else 1e-5,
                atol=0.1 if dtype == "bfloat16" else 1e-4,
            )
