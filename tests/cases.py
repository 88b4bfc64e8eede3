"""Which cases of a parametrised test `make test` runs. The others are marked `extended`: `make test-all` runs them.

`@pytest.mark.covering`: of a product of `parametrize`s, as many cases that each value of each one occurs.
`@pytest.mark.every(n)`: the first of each `n` cases, in their order.

Both go by the order in which the test lists its values alone, so a run and the next one choose the same cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest


def covering(cases: Sequence[Sequence[str]]) -> list[int]:
    """The places of some cases, of which each is one value of each parameter, in which each value occurs. The case with
    the most values that are missing yet is taken first; of equal ones, that whose values were taken least often, so
    that the values of a short parameter take turns; and of these, that which stands first."""
    taken = Counter[tuple[int, str]]()
    wanted = {pair for case in cases for pair in enumerate(case)}
    kept: list[int] = []
    while missing := wanted - taken.keys():

        def rank(place: int, missing: set[tuple[int, str]] = missing) -> tuple[int, int, int]:
            pairs = set(enumerate(cases[place]))
            return -len(missing & pairs), sum(taken[pair] for pair in pairs), place

        kept.append(min(range(len(cases)), key=rank))
        taken.update(enumerate(cases[kept[-1]]))
    return sorted(kept)


def mark_extended(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that a test's marker leaves out. Raises pytest.UsageError for a marker that chooses nothing."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if any(item.get_closest_marker(name) for name in ("covering", "every")):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        for place in set(range(len(cases))) - set(_kept(name, cases)):
            cases[place].add_marker(pytest.mark.extended)


def _kept(name: str, cases: Sequence[pytest.Item]) -> list[int]:
    if not all(hasattr(case, "callspec") for case in cases):
        raise pytest.UsageError(f"{name} has no parameters: remove its marker `covering` or `every`")
    if (every := cases[0].get_closest_marker("every")) is not None:
        return list(range(0, len(cases), *every.args))
    return covering([case.callspec._idlist for case in cases])  # type: ignore[attr-defined]
