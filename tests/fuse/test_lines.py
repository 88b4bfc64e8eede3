"""State of one model alone is a part of the line of all models."""

from __future__ import annotations

import pytest

from gpumux.errors import NotFusible
from gpumux.fuse.job import on_lines
from gpumux.program.ir import Program, Storage, View


def program(*views: View) -> Program:
    storages = (Storage("state", 16, 0), Storage("temp", 16), Storage("state", 16, 1), Storage("state", 48, 2))
    return Program(storages, views, (), (), ())


def test_slots_of_one_line_become_one_storage():
    made = on_lines(
        program(View(0, "float32", (4,), (1,)), View(1, "float32", (4,), (1,)), View(2, "float32", (2,), (1,), 2),
                View(3, "float64", (6,), (1,))),
        [(0, 48, 32), (0, 48, 0), (1, 48, 0)],
    )  # fmt: skip
    assert made.storages == (Storage("state", 48, 0), Storage("temp", 16), Storage("state", 48, 1))
    assert [(v.storage, v.offset) for v in made.views] == [(0, 8), (1, 0), (0, 2), (2, 0)]


def test_what_is_no_whole_element_is_refused():
    with pytest.raises(NotFusible, match="amid an element, at byte 12"):
        on_lines(program(View(0, "float64", (2,), (1,))), [(0, 48, 12), (1, 16, 0), (2, 48, 0)])
