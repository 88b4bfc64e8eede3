"""A step that was captured for several ranks is the same over fewer as one that was captured for those."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpumux.burst.placement import RankPlacement, data_parallel, folded, planned
from gpumux.burst.ranks import BurstSplitter, RankedStep
from gpumux.capture.fetching import Part, is_stale, mark_stale, unmark
from gpumux.client.arguments import fewer_ranks
from gpumux.errors import TooFewRanks
from gpumux.program.codec import encode
from gpumux.program.saved_plan import PlannedLayer, PlanNetwork, PlanRow, SavedPlan, SmallerPlan
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


class NoReads:
    """A job that is away: nothing of its local model can be fetched."""

    has_newer = True

    def fetch(self, parts: frozenset[Part]) -> None:
        raise AssertionError("a local tensor was read")


def test_a_step_is_split_anew_while_the_local_model_is_stale() -> None:
    """As when the job's thread brings it back: a fetch there would bring it back once more, in the middle of it."""
    over = BurstSplitter(data_parallel(4), fewer={2: data_parallel(2)})
    step = captured(over)[-1]
    parameters = [p for model in step.made_of.table.models for p in model.parameters()]
    handler: Any = NoReads()
    for parameter in parameters:
        mark_stale(parameter, handler, Part.MODEL)
    with pytest.raises(AssertionError, match="was read"):
        parameters[0].sum()
    over.use(2)
    assert len(over.again(step).ranks) == 2
    assert all(is_stale(parameter) for parameter in parameters)
    for parameter in parameters:
        unmark(parameter)


def test_a_placement_is_folded_in_the_order_of_its_parts() -> None:
    assert folded(PLAN, 2).layers == {"0": (0, 1), "3": (0, 1), "7": (0, 1), "10": (1,)}
    assert folded(PLAN, 3).layers == {"0": (0, 2, 1), "3": (0, 1), "7": (2, 0), "10": (0,)}
    assert folded(data_parallel(4), 3) == data_parallel(3)


def test_fewer_devices_have_the_plans_own_placements_where_it_has_some() -> None:
    layers = (PlannedLayer("a", "Linear", 8, 16, 0.5), PlannedLayer("b", "Linear", 8, 16, 0.5))
    rows = (PlanRow(0, 0.0, 0.0, 1.0, 0.0, 0, 4), PlanRow(1, 1.0, 0.0, 1.0, 0.0, 0, 2, after=(0,)))
    fewer = (PlanRow(0, 0.0, 0.0, 2.0, 0.0, 0, 2), PlanRow(1, 2.0, 0.0, 1.0, 0.0, 0, 1, after=(0,)))
    plan = SavedPlan(
        model="net", device="a100", algorithm="optimal", gpus=4, batch=4, limit=2.0,
        network=PlanNetwork("n", 1e9, 1e-5), seconds=2.0, single_seconds=4.0, layers=layers, rows=rows,
        fewer=(SmallerPlan(2, fewer),),
    )  # fmt: skip
    found = fewer_ranks(planned(plan), plan, 1)
    assert {ranks: one.layers for ranks, one in found.items()} == {
        1: {"a": (0,), "b": (0,)},
        2: {"a": (0, 1), "b": (0,)},
    }
    assert list(fewer_ranks(planned(plan), plan, 2)) == [2]
    assert fewer_ranks(planned(plan), plan, 4) == {}
    assert sorted(fewer_ranks(planned(plan), None, 2)) == [2, 3]
