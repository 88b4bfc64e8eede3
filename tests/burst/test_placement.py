"""Which placements there can be."""

from typing import Any

import pytest

from gpumux.burst.placement import RankPlacement, nested
from gpumux.errors import ConfigError


@pytest.mark.parametrize(
    "ranks", [0, None, "01", (), [], (0, 0), (0, 2), (-1,), [0, 2], (0.0,), (True,), ("a",)], ids=repr
)
def test_ranks_that_can_not_be_are_refused(ranks: Any) -> None:
    with pytest.raises(ConfigError, match="fc is on ranks") as refusal:
        RankPlacement(2, {"fc": ranks})
    assert "from 0 to 1" in refusal.value.remedy


@pytest.mark.parametrize("count", [0, 65])
def test_numbers_of_ranks_that_can_not_be_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} ranks"):
        RankPlacement(count)


def test_lists_of_ranks_are_taken_and_later_changes_of_the_mapping_are_not() -> None:
    layers: dict[str, Any] = {"body": [1, 0], "head": (1,)}
    placement = RankPlacement(2, layers)
    layers["head"] = (0,)
    layers["body"].append(5)
    assert placement.layers == {"body": (1, 0), "head": (1,)}
    assert placement.counts == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 12])
def test_nested_ranks_keep_the_samples_they_had_on_fewer(count: int) -> None:
    """The first half of each doubled part stays where the part was."""
    ranks = nested(3, count)
    assert sorted(ranks) == list(range(3, 3 + count))
    if count % 2 == 0:
        assert ranks[::2] == nested(3, count // 2)
