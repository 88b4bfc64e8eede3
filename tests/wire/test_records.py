"""A recording's parts: what is packed comes back, and nothing else does."""

from __future__ import annotations

from typing import get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.errors import ProtocolError
from gpumux.wire.messages import KINDS, PieceRan, pack, unpack

_OF = {
    int: st.integers(-1, 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=9),
    bool: st.booleans(),
    list[str]: st.lists(st.text(max_size=9), max_size=4),
}


def records():
    return st.one_of(
        [st.tuples(*map(_OF.get, get_type_hints(kind).values())).map(kind._make) for kind in KINDS.values()]
    )


@given(st.lists(records(), max_size=9))
def test_what_is_packed_comes_back(found):
    back = unpack(pack(found))
    assert back == found
    assert list(map(type, back)) == list(map(type, found))


@given(st.binary(max_size=64) | st.lists(st.lists(st.integers(0, 9) | st.text(max_size=3))).map(msgpack.packb))
def test_anything_else_is_a_protocol_error(frame):
    try:
        unpack(frame)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "row", [[99], [], [5, "j1", "j2", "tail", 0.0], [5, "j1", "j2", "tail", 0.0, "soon"], [2, "j1", 0, [1]], {"a": 1}]
)
def test_a_record_of_another_shape_is_refused(row):
    with pytest.raises(ProtocolError, match="none"):
        unpack(msgpack.packb([row]))


def test_whole_numbers_may_stand_for_seconds():
    made = PieceRan("j1", 1, 5, 0, 0, 0, 3, 1, 0, 0, 1, "done")
    (back,) = unpack(pack([made]))
    assert back == made
    assert type(back.ended) is float
