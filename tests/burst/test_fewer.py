"""A step that was captured for several ranks is the same over fewer as one that was captured for those."""

from __future__ import annotations

import pytest
import torch

from gpumux.burst.placement import RankPlacement, data_parallel, folded
from gpumux.burst.ranks import BurstSplitter, RankedStep
from gpumux.errors import TooFewRanks
from gpumux.program.codec import encode
from tests.burst.emulate import Gang
from tests.burst.subjects import SUBJECTS

PLAN = RankPlacement(4, {"0": (0, 2, 1, 3), "3": (0, 1), "7": (2, 3), "10": (3,)})


def captured(over: BurstSplitter, steps: int = 2) -> list[RankedStep]:
    """The steps of the small VGG, of which the first makes the optimizer's state."""
    subject = SUBJECTS["vgg"]
    torch.manual_seed(0)
    models, optimizers, functions = subject.build(subject.make())
    gang = Gang(models, optimizers, functions, over.placement, over=over)
    found: list[RankedStep] = []
    for _ in range(steps):
        gang(*subject.batch())
        assert gang.last is not None
        found.append(gang.last)
    return found


def sent(step: RankedStep) -> list[tuple[bytes, tuple[int, ...]]]:
    return [(encode(rank.lowered.program), rank.lowered.binding) for rank in step.ranks]


@pytest.mark.parametrize("placement", [data_parallel(4), PLAN], ids=["data parallel", "by a plan"])
def test_a_step_is_split_anew_over_fewer_ranks_and_over_all_again(placement: RankPlacement) -> None:
    over = BurstSplitter(placement, fewer={ranks: folded(placement, ranks) for ranks in (1, 2)})
    steps = captured(over)
    assert [over.fits(step) for step in steps] == [[1, 2, 4]] * 2
    over.use(2)
    alone = captured(BurstSplitter(folded(placement, 2)))
    assert [sent(over.again(step)) for step in steps] == [sent(step) for step in alone]
    over.use(1)
    for step in steps:
        (rank,) = over.again(step).ranks
        assert rank.lowered.program.collectives == ()
        assert rank.lowered.program is step.made_of.whole.program
    over.use(4)
    assert [sent(over.again(step)) for step in steps] == [sent(step) for step in steps]


def test_a_batch_that_a_number_of_ranks_does_not_divide_is_not_run_on_it() -> None:
    over = BurstSplitter(data_parallel(4), fewer={3: data_parallel(3), 2: data_parallel(2)})
    (step,) = captured(over, 1)  # 4 samples
    assert over.fits(step) == [2, 4]
    over.use(3)
    with pytest.raises(TooFewRanks, match="3 equal parts"):
        over.again(step)
    with pytest.raises(TooFewRanks, match="min_gpus=4"):
        captured(over, 1)


def test_a_placement_is_folded_in_the_order_of_its_parts() -> None:
    assert folded(PLAN, 2).layers == {"0": (0, 1), "3": (0, 1), "7": (0, 1), "10": (1,)}
    assert folded(PLAN, 3).layers == {"0": (0, 2, 1), "3": (0, 1), "7": (2, 0), "10": (0,)}
    assert folded(data_parallel(4), 3) == data_parallel(3)
