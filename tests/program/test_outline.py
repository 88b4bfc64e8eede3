"""The outline of an encoded Program agrees with the Program itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.errors import ProgramError
from gpumux.program.codec import encode, outline
from gpumux.program.ir import slot_layout

from . import samples


@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_an_outline_says_what_the_program_says(name):
    program = samples.ALL[name]()
    found = outline(encode(program))
    assert found.layout == slot_layout(program)
    assert found.scalars == len(program.scalars)
    assert found.input_bytes == tuple(program.storages[program.views[i].storage].nbytes for i in program.inputs)
    assert len(found.result_bytes) == len(program.results)


def test_results_are_packed():
    assert outline(encode(samples.sgd_linear(8, 3))).result_bytes == (4,)


@given(st.binary(max_size=64) | st.builds(lambda cut: encode(samples.sgd_linear())[:cut], st.integers(0, 400)))
def test_other_bytes_are_refused(data):
    try:
        outline(data)
    except ProgramError:
        return
    assert data == encode(samples.sgd_linear())
