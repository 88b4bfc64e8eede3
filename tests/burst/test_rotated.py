"""A step split over ranks as model-parallel waves are: the parts of the batch rotate over the ranks."""

from __future__ import annotations

import pytest

from gpumux.burst.placement import rotated
from gpumux.errors import ConfigError
from gpumux.waves.rotation import rotation
from tests.burst.norms import NORMED
from tests.burst.subjects import SUBJECTS, compare

BOUND = 1e-10


def parts_of(layers: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    """The layers as so many partitions, each with one at least."""
    bounds = [i * len(layers) // count for i in range(count + 1)]
    return [layers[bounds[i] : bounds[i + 1]] for i in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_parts_of_the_batch_are_where_the_rotation_has_them(ranks: int) -> None:
    placement = rotated([(f"layer{c}",) for c in range(ranks)])
    for box in rotation(ranks).boxes:
        assert placement.layers[f"layer{box.partition}"][box.batch] == box.device


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rotation_computes_what_plain_torch_computes(ranks: int) -> None:
    """Between two partitions a sample goes on to the next rank, and its gradient comes back."""
    subject = SUBJECTS["vgg"]
    difference, gang = compare(subject, rotated(parts_of(subject.layers, ranks)), 3)
    assert difference.largest <= BOUND
    assert gang.ranks.moved == gang.predicted
    assert gang.last is not None
    for rank, step in enumerate(gang.last.ranks):
        sent = set()
        for one in step.lowered.program.collectives:
            if one.kind == "exchange":
                sent |= {target for target, _ in one.sends}
        assert sent <= {(rank + 1) % ranks, (rank - 1) % ranks}
        assert (rank + 1) % ranks in sent


def test_batch_norms_of_a_rotation_normalise_each_part_by_itself() -> None:
    """As data parallelism on the same ranks does: what is computed does not depend on where."""
    subject = NORMED["convolutions"]
    layers = [("0", "1"), ("3", "4", "7")]
    _, turning = compare(subject, rotated(layers), 3, batch_norm="rank")
    _, fixed = compare(subject, rotated([tuple(sum(layers, ())), ()]), 3, batch_norm="rank")
    for mine, its in zip(turning.table.models[0].parameters(), fixed.table.models[0].parameters(), strict=True):
        assert (mine - its).abs().max() <= BOUND


def test_a_layer_in_two_partitions_is_refused() -> None:
    with pytest.raises(ConfigError, match="two partitions"):
        rotated([("a",), ("a",)])
