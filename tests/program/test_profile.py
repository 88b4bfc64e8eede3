"""Profiles survive a file, faults are named, and shapes and bytes come from Programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.errors import ConfigError
from gpumux.program.ir import Op, Program, Storage, TensorRef, View
from gpumux.program.profile import OpProfile, StepProfile, dumps, load, loads, op_nbytes, op_shapes, save
from tests.program import samples

OPS = st.builds(
    OpProfile,
    target=st.text(min_size=1, max_size=12),
    shapes=st.lists(st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple), max_size=3).map(tuple),
    seconds=st.floats(0, 1e3, allow_nan=False),
    nbytes=st.integers(0, 1 << 50),
    blocks=st.none() | st.integers(1, 1 << 20),
    per_sm=st.none() | st.integers(1, 32),
    sensitivity=st.floats(1, 10),
    source=st.sampled_from(["measured", "model", "guess"]),
)
OPS |= st.builds(replace, OPS, layer=st.text(max_size=5), backward=st.booleans())
PROFILES = st.builds(
    StepProfile,
    name=st.text(max_size=12),
    device=st.text(max_size=12),
    ops=st.lists(OPS, min_size=1, max_size=4).map(tuple),
    versions=st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3),
    recorded_at=st.none() | st.just("2026-01-02T03:04:05Z"),
    batch=st.none() | st.integers(1, 4096),
    note=st.text(max_size=12),
)
PLAIN = StepProfile("tiny", "a100", (OpProfile("aten.mm.default", ((2, 3), (3, 4), (2, 4)), 1e-5, 80),), {"torch": "2"})


@settings(deadline=None, max_examples=60)
@given(PROFILES)
def test_what_is_written_is_read_back(profile: StepProfile) -> None:
    assert loads(dumps(profile)) == profile


def test_a_file_keeps_it_too(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(PLAIN, path)
    assert load(path) == PLAIN
    assert PLAIN.seconds == 1e-5
    assert PLAIN.sources() == {"guess": 1}


def changed(**entries: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dumps(PLAIN))
    body.update(entries)
    return body


def with_op(**entries: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dumps(PLAIN))
    body["ops"][0].update(entries)
    return body


def without(key: str) -> dict[str, Any]:
    body = changed()
    del body[key]
    return body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (["a", "list"], "no profile"),
        (changed(format="other"), "no profile"),
        (changed(version=2), "version 2"),
        (changed(units={"seconds": "us"}), "units"),
        (changed(colour="red"), "unknown key 'colour'"),
        (without("device"), "lacks 'device'"),
        (changed(ops=[]), "no operators"),
        (changed(ops=[7]), r"ops\[0\] is 7"),
        (changed(ops={}), "ops is"),
        (changed(batch=0), "batch of 0"),
        (changed(batch="8"), "batch is '8'"),
        (changed(versions=[]), "versions is"),
        (changed(versions={"torch": 2}), "versions.torch"),
        (with_op(sums=1), r"ops\[0\] has the unknown key"),
        (with_op(seconds=-1.0), r"ops\[0\].*-1.0 seconds"),
        (with_op(seconds=float("nan")), "nan seconds"),
        (with_op(seconds=True), r"ops\[0\].seconds is True"),
        (with_op(seconds=10**400), "beyond what a float holds"),
        (with_op(nbytes=-1), "-1 bytes"),
        (with_op(nbytes=0.5), "nbytes is 0.5"),
        (with_op(blocks=0), "blocks 0"),
        (with_op(per_sm=0), "per_sm 0"),
        (with_op(sensitivity=0.5), "sensitivity of 0.5"),
        (with_op(source="rumour"), "source 'rumour'"),
        (with_op(target=""), "without a target"),
        (with_op(shapes=[[-1]]), "negative size"),
        (with_op(shapes=[3]), r"ops\[0\].shapes is 3"),
        (with_op(layer="a"), "lacks 'backward'"),
        (with_op(layer=None, backward=False), "layer is None"),
        (with_op(layer="a", backward=0), "backward is 0"),
    ],
)
def test_whatever_is_wrong_is_said_with_a_remedy(body: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        loads(json.dumps(body))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("content", "says"), [(b"{", "not JSON"), (b"\xff\xfe", "not text"), (b"[" * 100_000, "not JSON")]
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert "broken.json" in caught.value.message
    with pytest.raises(ConfigError, match=r"can't read .*missing"):
        load(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="can't write"):
        save(PLAIN, tmp_path / "nowhere" / "profile.json")


def test_shapes_and_bytes_come_from_the_program() -> None:
    program = samples.add_one()
    assert op_shapes(program, program.ops[0]) == ((4,), (4,))
    assert op_nbytes(program, program.ops[0]) == 16 + 16


def test_lists_of_tensors_count_and_an_expanded_or_repeated_view_lies_there_once() -> None:
    storages = (Storage("input", 64, 0), Storage("temp", 128))
    views = (View(0, "float32", (8, 2), (1, 0)), View(0, "float32", (8,), (1,)), View(1, "float64", (16,), (1,)))
    op = Op("aten.cat.default", ((TensorRef(0), TensorRef(1), TensorRef(1)), 0), (("out", TensorRef(1)),), ((2,), None))
    program = Program(storages, views, (op,), (1,), (2,))
    assert op_shapes(program, op) == ((8, 2), (8,), (8,), (8,), (16,))
    assert op_nbytes(program, op) == 8 * 4 + 8 * 4 + 16 * 8
