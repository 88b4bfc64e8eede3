"""The file of a space, and the configurations drawn from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.errors import ConfigError
from gpumux.tune.run import read_space
from gpumux.tune.space import Choices, Range, Space
from tests.tune.fakes import SPACE


@given(st.integers(0, 2**32), st.integers(0, 10_000))
def test_what_is_drawn_is_in_the_space(seed: int, number: int):
    config = SPACE.sample(seed, number)
    assert 1e-3 <= config["lr"] <= 1.0
    assert config["batch"] in (16, 32, 64)
    assert ("momentum" in config) == (config["optimizer"] == "sgd")
    assert config == SPACE.sample(seed, number)


@given(
    low=st.floats(1e-6, 1e3), width=st.floats(0, 1e3), log=st.booleans(), whole=st.booleans(), number=st.integers(0, 99)
)
def test_numbers_lie_between_the_ends(low: float, width: float, log: bool, whole: bool, number: int):
    ends = (max(1, int(low)), max(1, int(low)) + int(width)) if whole else (low, low + width)
    space = Space.read({"x": {"low": ends[0], "high": ends[1], "log": log}})
    value = space.sample(0, number)["x"]
    assert ends[0] <= value <= ends[1]
    assert isinstance(value, int) == whole


def test_steps_are_kept_to():
    space = Space.read({"x": {"low": 8, "high": 31, "step": 8}, "y": {"low": 0.0, "high": 1.0, "step": 0.25}})
    drawn = [space.sample(0, n) for n in range(200)]
    assert {d["x"] for d in drawn} == {8, 16, 24}
    assert {d["y"] for d in drawn} == {0.0, 0.25, 0.5, 0.75, 1.0}


def test_whole_numbers_reach_both_ends_evenly():
    drawn = [Space.read({"x": {"low": 1, "high": 4}}).sample(0, n)["x"] for n in range(400)]
    assert all(70 < drawn.count(value) < 130 for value in (1, 2, 3, 4))
    log = [Space.read({"x": {"low": 1, "high": 4, "log": True}}).sample(0, n)["x"] for n in range(400)]
    assert set(log) == {1, 2, 3, 4}
    assert log.count(1) > log.count(4)


def test_one_more_parameter_changes_no_others_values():
    more = Space.read({"extra": {"choices": [1, 2]}, **_again(SPACE)})
    for number in range(20):
        config = dict(more.sample(7, number))
        config.pop("extra")
        assert config == SPACE.sample(7, number)


def _again(space: Space) -> dict[str, Any]:
    body = {}
    for p in space.parameters:
        if isinstance(p.domain, Choices):
            table: dict[str, Any] = {"choices": list(p.domain.values)}
        else:
            table = {"low": p.domain.low, "high": p.domain.high, "log": p.domain.log}
        body[p.name] = {**table, "fusible": p.fusible, "when": {name: list(v) for name, v in p.when}}
    return body


def test_conditions_may_come_before_what_they_name():
    space = Space.read({"m": {"low": 0.0, "high": 1.0, "when": {"o": "sgd"}}, "o": {"choices": ["sgd", "adam"]}})
    assert [p.name for p in space.parameters] == ["o", "m"]


def test_what_trials_must_have_in_common():
    config = SPACE.sample(0, 0)
    assert dict(SPACE.infusible(config)) == {"batch": config["batch"], "optimizer": config["optimizer"]}
    assert SPACE.fusible(config).keys() <= {"lr", "momentum"}


def test_the_ends_of_a_range_where_they_may_be_drawn():
    assert Range(0.0, 1.0).ends() == ()
    assert Range(1, 4, whole=True).ends() == (1, 4)
    assert Range(3, 3, whole=True).ends() == (3,)
    assert Range(0.0, 1.0, step=0.3).ends() == pytest.approx((0.0, 0.9))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "no parameters"),
        ({"lr": 0.1}, "make it a table"),
        ({"lr": {"low": 0.1}}, "neither choices nor numbers"),
        ({"lr": {"low": 1.0, "high": 0.1}}, "above high"),
        ({"lr": {"low": 0.0, "high": 0.1, "log": True}}, "needs low above 0"),
        ({"lr": {"low": float("nan"), "high": 0.1}}, "neither choices nor numbers"),
        ({"lr": {"low": 0.0, "high": 0.1, "fusable": True}}, "unknown key 'fusable'"),
        ({"lr": {"low": 0.0, "high": 0.1, "fusible": "yes"}}, "fusible is 'yes'"),
        ({"lr": {"low": 0, "high": 9, "step": 0.5}}, "step 0.5"),
        ({"lr": {"low": 1, "high": 9, "step": 2, "log": True}}, "step 2"),
        ({"lr": {"choices": []}}, "no list of values"),
        ({"lr": {"choices": [1, 1]}}, "twice"),
        ({"lr": {"choices": [[1]]}}, "no value"),
        ({"lr": {"choices": [1], "low": 2}}, "both choices and low"),
        ({"m": {"choices": [1], "when": {"o": "sgd"}}}, "no parameter"),
        ({"m": {"choices": [1], "when": {"o": 1}}, "o": {"choices": [1, 2], "fusible": True}}, "leave o infusible"),
        ({"a": {"choices": [1], "when": {"b": 1}}, "b": {"choices": [1], "when": {"a": 1}}}, "circle: a, b"),
        ({"a": {"choices": [1], "when": 3}}, "when is 3"),
    ],
)
def test_a_wrong_space_is_named(body: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        Space.read(body)


def test_files(tmp_path: Path):
    toml, body = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('[lr]\nlow = 0.1\nhigh = 1.0\nfusible = true\n[o]\nchoices = ["a", "b"]\n')
    body.write_text('{"lr": {"low": 0.1, "high": 1.0, "fusible": true}, "o": {"choices": ["a", "b"]}}')
    assert read_space(toml) == read_space(body)
    toml.write_text("[lr\n")
    with pytest.raises(ConfigError, match="is no TOML"):
        read_space(toml)
    with pytest.raises(ConfigError, match="can't read"):
        read_space(tmp_path / "absent.toml")
    body.write_text("[1]")
    with pytest.raises(ConfigError, match="holds no table"):
        read_space(body)
