"""What crosses a border between layers is what the plan's cost model (plan/costs.py) says, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpumux.burst.placement import RankPlacement, nested
from gpumux.burst.programs import bytes_moved
from gpumux.plan.costs import away_share, moved_share
from gpumux.program.ir import ITEM_BYTES, Program
from tests.burst.subjects import Subject, build_inception, compare

BATCH = 16
Chain = Callable[[], nn.Module]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 1, 8, 8), torch.randint(0, 10, (BATCH,))


def elements(program: Program, view: int) -> int:
    count = 1
    for n in program.views[view].size:
        count *= n
    return count * ITEM_BYTES[program.views[view].dtype]


def borders(programs: list[Program]) -> list[int]:
    """Of each exchange, in order: the bytes that the busiest rank sends or receives."""
    found: dict[int, list[int]] = {}
    for program in programs:
        for one in program.collectives:
            if one.kind == "exchange":
                ways = [sum(elements(program, view) for _, view in each) for each in (one.sends, one.receives)]
                found.setdefault(one.sequence, []).extend(ways)
    return [max(found[sequence]) for sequence in sorted(found)]


def convolution_and_linear() -> nn.Module:
    """The flattened view of an activation is read behind the border."""
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))


def linear_and_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


class Residual(nn.Module):
    """An activation with two readers behind the border."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 128)
        self.after = nn.ModuleDict({"mid": nn.Linear(128, 128), "fc": nn.Linear(128, 10)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x.flatten(1)))
        out: torch.Tensor = self.after["fc"](x + F.gelu(self.after["mid"](x)))
        return out


CHAINS: dict[str, tuple[Chain, str, tuple[str, ...]]] = {
    "flattened": (convolution_and_linear, "0", ("3",)),
    "linear": (linear_and_linear, "1", ("3",)),
    "residual": (Residual, "stem", ("after",)),
}
SIZE = 128 * 8  # bytes of a sample at the border


def moved(name: str, before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    make, first, others = CHAINS[name]
    ranks = 1 + max(*before, *after)
    placement = RankPlacement(ranks, {first: before, **dict.fromkeys(others, after)})
    difference, gang = compare(Subject(name, make, build_inception, rows, ()), placement, 1)
    assert difference.largest <= 1e-10
    assert gang.last is not None
    return borders([rank.lowered.program for rank in gang.last.ranks])


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_between_nested_ranks_both_directions_move_what_the_model_says(name: str, before: int, after: int) -> None:
    share = BATCH * SIZE * moved_share(before, after)
    wanted = [share, share] if share else []
    assert moved(name, nested(0, before), nested(0, after)) == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 12, 16])
def test_ranks_in_nested_order_are_the_same_ranks(count: int) -> None:
    assert sorted(nested(3, count)) == list(range(3, 3 + count))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_between_disjoint_ranks_both_directions_move_what_the_model_says(name: str, before: int, after: int) -> None:
    share = BATCH * SIZE * away_share(before, after)
    assert moved(name, tuple(range(before)), tuple(range(2, 2 + after))) == [share, share]


def test_a_sum_of_gradients_moves_two_shares_through_every_rank() -> None:
    """2 (n - 1) / n of the gradients, as Network.all_reduce says."""
    make, *_ = CHAINS["linear"]
    ranks = 4
    _, gang = compare(
        Subject("linear", make, build_inception, rows, ()),
        RankPlacement(ranks, {"1": (0, 1, 2, 3), "3": (0, 1, 2, 3)}),
        1,
    )
    assert gang.last is not None
    found = bytes_moved([rank.lowered.program for rank in gang.last.ranks])
    gradients = 8 * sum(p.numel() for p in make().parameters())
    loss = 8
    for rank in range(ranks):
        sent = sum(count for (source, _), count in found.items() if source == rank)
        assert abs(sent - 2 * (ranks - 1) * (gradients + loss) / ranks) <= 2 * ranks * 8
    assert sum(found.values()) == 2 * (ranks - 1) * (gradients + loss)
