"""Hypothesis strategies for messages, made from the same annotations the codec reads."""

from __future__ import annotations

import types
import typing
from typing import Any

from hypothesis import strategies as st

from gpumux.wire import messages
from gpumux.wire.codec import MAX_INT, NATURAL
from gpumux.wire.messages import REGISTRY, LoadProgram

JOB = "0123456789abcdef" * 2

_text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp", "Cn", "Co", "Zs"]), max_size=20)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_ints = st.integers(-MAX_INT - 1, MAX_INT)
_naturals = st.integers(0, MAX_INT)
_leaves = st.none() | st.booleans() | _ints | _floats | _text
_trees = st.dictionaries(
    _text,
    st.recursive(_leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3)).filter(
        lambda tree: _depth(tree) < 7
    ),
    max_size=4,
)


def _depth(tree: Any) -> int:
    if isinstance(tree, dict):
        return 1 + max(map(_depth, tree.values()), default=0)
    if isinstance(tree, list):
        return 1 + max(map(_depth, tree), default=0)
    return 0


def _field(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if name in ("job", "gang"):
        return st.text("0123456789abcdef", min_size=32, max_size=32)
    if name == "frames":
        return st.integers(0, 4)
    if name == "protocol":
        return st.just(messages.PROTOCOL_VERSION)
    if name == "seed":
        return st.integers(0, 2**64 - 1)
    if isinstance(hint, types.UnionType):
        return st.one_of([_field(name, option) for option in typing.get_args(hint)])
    if typing.get_origin(hint) is list:
        return st.lists(_field(name, typing.get_args(hint)[0]), max_size=20)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: _naturals if name in NATURAL else _ints,
        float: _floats,
        str: _text,
        bool: st.booleans(),
        bytes: st.binary(max_size=64),
        type(None): st.none(),
    }
    return simple.get(hint, _trees)


def message_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, vars(messages))
    return st.builds(cls, **{name: _field(name, hints[name]) for name in cls.__match_args__})


def any_message() -> st.SearchStrategy[Any]:
    return st.one_of([message_of(cls) for cls in REGISTRY.values()])


def payload_for(message: Any) -> list[bytes]:
    """As many payload frames as the message announces."""
    count = 1 if isinstance(message, LoadProgram) else getattr(message, "frames", 0)
    return [bytes([n]) * (n + 1) for n in range(count)]
