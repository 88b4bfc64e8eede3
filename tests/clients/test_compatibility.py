"""Every idiom of clients/compatibility, plainly and through a daemon: equal in every bit, or refused as listed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from clients.compatibility import table, themes
from clients.compatibility.suite import REGISTRY, Idiom, difference, run_plainly, run_through

AS_WRITTEN = 0.85  # the share of idioms that work as written
EACH = {True: 11, False: 3}  # of the idioms that work as written, and of the others, `make test` runs one in so many


def cases() -> list[Any]:
    """All idioms. The first of each theme, and one in so many of the others, are no extended test."""
    found, themes_met, seen = [], set(), {True: 0, False: 0}
    for one in REGISTRY:
        kept = one.theme not in themes_met or seen[one.works] % EACH[one.works] == 0
        themes_met.add(one.theme)
        seen[one.works] += 1
        found.append(pytest.param(one, id=one.name, marks=() if kept else pytest.mark.extended))
    return found


@pytest.mark.parametrize("idiom", cases())
def test_an_idiom_does_what_the_table_says(idiom: Idiom, endpoint: str) -> None:
    for package in idiom.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if idiom.differs:
        assert difference(run_plainly(idiom.script), run_through(idiom.script, endpoint)) is not None
        return
    if idiom.refused is not None:
        with pytest.raises(idiom.refused) as caught:
            run_through(idiom.script, endpoint)
        assert caught.value.remedy
        if idiom.changed is None:
            return
    script = idiom.changed or idiom.script
    assert difference(run_plainly(script), run_through(script, endpoint)) is None


def test_most_idioms_work_as_written() -> None:
    assert sorted({one.theme for one in REGISTRY}) == themes.THEMES
    others = [one.name for one in REGISTRY if not one.works]
    assert len(REGISTRY) >= 120
    assert len(others) <= (1 - AS_WRITTEN) * len(REGISTRY), others


def test_names_are_unique() -> None:
    assert len({one.name for one in REGISTRY}) == len(REGISTRY)


def test_the_page_has_the_table() -> None:
    assert table.PAGE.read_text() == table.page()


def test_a_difference_in_one_bit_is_found() -> None:
    import torch

    one = [{"loss": torch.tensor([1.0, 2.0])}, 0.5]
    assert difference(one, [{"loss": torch.tensor([1.0, 2.0])}, 0.5]) is None
    assert difference(one, [{"loss": torch.tensor([1.0, 2.0000002])}, 0.5]) is not None
    assert difference(one, [{"loss": torch.tensor([1.0, 2.0])}, 0.25]) is not None
    assert difference(one, [{"other": torch.tensor([1.0, 2.0])}, 0.5]) is not None
