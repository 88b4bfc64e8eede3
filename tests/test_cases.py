"""Which cases of a parametrised test `make test` runs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import covering


@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True), min_size=1, max_size=3))
def test_each_value_occurs_and_as_few_cases_as_the_longest_parameter_has_values(parameters: list[list[str]]) -> None:
    cases = list(product(*parameters))
    kept = [cases[i] for i in covering(cases)]
    assert [set(column) for column in zip(*kept, strict=True)] == [set(values) for values in parameters]
    assert len(kept) == max(map(len, parameters))


def test_the_values_of_a_short_parameter_take_turns() -> None:
    cases = list(product("abcdef", "xy"))
    kept = [cases[i][1] for i in covering(cases)]
    assert kept.count("x") == kept.count("y") == 3


MARKED = """
import pytest

@pytest.mark.covering
@pytest.mark.parametrize("one", [1, 2, 3])
@pytest.mark.parametrize(("two", "three"), [(1, 1), (1, 2)])
def test_product(one, two, three): ...

@pytest.mark.every(2)
@pytest.mark.parametrize("one", [1, 2, 3])
def test_list(one): ...
"""
HOOK = """
import pytest
from tests.cases import mark_extended

def pytest_configure(config):
    for marker in ("extended", "covering", "every(n)"):
        config.addinivalue_line("markers", marker)

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_extended(items)
"""


def test_what_is_left_out_is_extended_and_runs_when_asked(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(HOOK)
    pytester.makepyfile(MARKED)
    pytester.inline_run("-m", "not extended").assertoutcome(passed=3 + 2)
    pytester.inline_run().assertoutcome(passed=6 + 3)
    pytester.inline_run("-m", "extended").assertoutcome(passed=3 + 1)


def test_a_marker_that_chooses_nothing_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(HOOK)
    pytester.makepyfile("import pytest\n@pytest.mark.covering\ndef test_one(): ...")
    assert pytester.inline_run().ret == pytest.ExitCode.USAGE_ERROR
