"""Batch norm over ranks: refused, of each rank's samples, or of the whole batch."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from gpumux.burst.placement import RankPlacement, data_parallel
from gpumux.burst.ranks import BurstSplitter
from gpumux.errors import ConfigError, NotSplittable
from tests.burst.distributed import train
from tests.burst.emulate import Gang
from tests.burst.norms import NORMED
from tests.burst.subjects import compare, random_placement


@pytest.mark.every(6)
@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_statistics_over_all_ranks_are_those_of_one_device(name: str, ranks: int) -> None:
    rng = random.Random(f"{name} {ranks}")
    subject = NORMED[name]
    for placement in (data_parallel(ranks), *(random_placement(subject.layers, ranks, rng) for _ in range(2))):
        difference, gang = compare(subject, placement, 4, batch_norm="sync")
        assert difference.largest <= 1e-10, placement
        assert gang.ranks.moved == gang.predicted


def test_statistics_over_all_ranks_take_two_sums_a_layer_and_one_in_its_backward_pass() -> None:
    """Running statistics are then the same on all ranks, and need not be sent."""
    normed = NORMED["convolutions"]
    plain = replace(normed, make=lambda: nn.Sequential(*[m for m in normed.make() if "Norm" not in str(m)]))
    counts = []
    for subject in (normed, plain):
        _, gang = compare(subject, data_parallel(2), 2, batch_norm="sync")
        assert gang.last is not None
        kinds = [one.kind for one in gang.last.ranks[0].lowered.program.collectives]
        assert set(kinds) == {"all_reduce"}
        counts.append(len(kinds))
    assert counts[0] - counts[1] == 2 * 3


@pytest.mark.parametrize("name", ["convolutions", "flat"])
@pytest.mark.every(2)
def test_statistics_of_each_rank_are_those_of_distributed_data_parallel(name: str) -> None:
    subject = NORMED[name]
    torch.manual_seed(0)
    model = subject.make()
    batches = [subject.batch() for _ in range(4)]
    wanted = train(subject, batches, 2)
    models, optimizers, steps = subject.build(model)
    gang = Gang(models, optimizers, steps, data_parallel(2), over=BurstSplitter(data_parallel(2), "rank"))
    for batch in batches:
        gang(*batch)
    gang.sync()
    found = model.state_dict()
    for key, value in wanted.items():
        assert float((found[key].double() - value.double()).abs().max()) <= 1e-12, key


def test_statistics_of_each_rank_on_one_rank_are_the_same_bits() -> None:
    placement = RankPlacement(2, dict.fromkeys(NORMED["convolutions"].layers, (1,)))
    difference, _ = compare(NORMED["convolutions"], placement, 3, batch_norm="rank")
    assert difference.largest == 0.0


@pytest.mark.parametrize("batch_norm", ["rank", "sync"])
def test_a_step_in_eval_reads_the_running_statistics_on_all_ranks_of_the_layer(batch_norm: str) -> None:
    """Gang.sync asserts that all ranks hold one value."""
    subject = NORMED["convolutions"]
    torch.manual_seed(0)
    plain = subject.make()
    model = copy.deepcopy(plain)
    placement = RankPlacement(2, default=(0, 1))
    _, _, (plain_step,) = subject.build(plain)
    models, optimizers, (step,) = subject.build(model)

    def evaluate(x: torch.Tensor, of: torch.nn.Module) -> torch.Tensor:
        of.eval()
        with torch.no_grad():
            scores: torch.Tensor = of(x)
        of.train()
        return scores

    over = BurstSplitter(placement, "sync" if batch_norm == "sync" else "rank")
    gang = Gang(models, optimizers, [step, lambda x: evaluate(x, model)], placement, over=over)
    batch = subject.batch()
    plain_step(*batch)
    gang(*batch)
    scores = gang(batch[0], which=1)
    gang.sync()
    if batch_norm == "sync":
        torch.testing.assert_close(scores, evaluate(batch[0], plain), rtol=0, atol=1e-10)
    else:
        torch.testing.assert_close(scores, evaluate(batch[0], model), rtol=0, atol=1e-10)


def test_without_a_choice_batch_norm_is_refused_by_an_error_that_names_the_choice() -> None:
    with pytest.raises(NotSplittable, match="batch norm in training mode") as error:
        compare(NORMED["convolutions"], data_parallel(2), 1)
    assert "'sync'" in str(error.value.remedy)
    assert "'rank'" in str(error.value.remedy)


def test_a_choice_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_norm is 'all'"):
        BurstSplitter(data_parallel(2), "all")  # type: ignore[arg-type]
