"""The simulator beside published figures: what is committed is what the code gives, and misses are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from microbench import published
from microbench.published import CONFIGURATIONS, Compared, claims, compare, held_out, named_by_constants, read

RESULT = Path(__file__).parents[2] / "microbench/results/sim-published.json"


@pytest.fixture(scope="module")
def compared() -> dict[str, Compared]:
    return {one.id: one for one in compare(read())}


def test_what_is_committed_is_what_the_code_gives(compared: dict[str, Compared]) -> None:
    kept = {row["id"]: row for row in json.loads(RESULT.read_text())["rows"]}
    assert kept.keys() == compared.keys()
    for name, one in compared.items():
        for field in ("published", "simulated", "least", "most", "held_out"):
            value = getattr(one, field)
            assert kept[name][field] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name


def test_mechanisms_are_as_published_over_the_whole_envelope(compared: dict[str, Compared]) -> None:
    rows = [one for one in compared.values() if one.tier == "mechanism"]
    assert len(rows) == 5
    for one in rows:
        assert one.least == pytest.approx(one.published, abs=0.01 * one.published)
        assert one.most == pytest.approx(one.published, abs=0.01 * one.published)


def test_rows_without_a_model_count_as_missed(compared: dict[str, Compared]) -> None:
    missing = [one for one in compared.values() if one.simulated is None]
    assert {one.id for one in missing if one.held_out} >= {"placement-compute", "azure-H200-nvbandwidth-host_to_device"}
    assert all(one.error > 1e9 for one in missing)
    targets = json.loads(RESULT.read_text())["targets"]
    held = [one for one in compared.values() if one.held_out]
    assert targets["held-out rows within 20 %"]["target"] == len(held)
    assert targets["held-out rows within 20 %"]["value"] == sum(one.error <= 0.2 for one in held)


def test_a_row_that_a_constant_names_is_not_held_out() -> None:
    named = named_by_constants()
    assert {"launch-h100", "rule-queue", "interf-l2-32MB", "azure-H200-gemm_cublaslt-8192x8192x8192",
            "azure-A100-babelstream-dot", "azure-H200-gemm_cublaslt-1024x2145x1024"} <= named  # fmt: skip
    assert named <= set(read())
    assert not any(held_out(name, named) for name in named)
    assert sum(held_out(name, set()) for name in read()) > len(read()) / 3


def test_an_error_is_a_part_of_the_published_value() -> None:
    one = Compared("x", "calibration", 2.0, 2.2, 2.0, 2.4, held_out=True)
    assert one.error == pytest.approx(0.1)
    assert replace(one, simulated=None).error == float("inf")
    assert replace(one, published=0.0, simulated=0.0).error == 0.0
    assert replace(one, published=0.0, simulated=1.0).error == float("inf")


def test_a_claim_holds_only_if_it_does_at_every_corner() -> None:
    good = {"fifo": {"p99": 4.0}, "streams": {"p99": 3.0}, "paced": {"p99": 2.0}, "guarded": {"p99": 1.1}}
    bad = good | {"paced": {"p99": 3.5}}
    rows = [{"figure": 7, "high": "a", "low": "b", "corner": corner, **good} for corner in ("one", "two")]
    said = claims([*rows, {"figure": 7, "high": "a", "low": "c", "corner": "one", **good}])
    assert {(each["holds"], each["of"]) for each in said.values()} == {(2, 2)}
    said = claims([*rows, {"figure": 7, "high": "a", "low": "b", "corner": "three", **bad}])
    assert said["the high job's p99 is no higher under paced than under streams"] == {"holds": 0, "of": 1}
    assert said["the high job's p99 is no higher under guarded than under paced"] == {"holds": 1, "of": 1}


def test_orions_configurations_are_twenty() -> None:
    assert len(CONFIGURATIONS) == len(set(CONFIGURATIONS)) == 20
    assert [one.figure for one in CONFIGURATIONS].count(7) == 10


@pytest.mark.extended
def test_a_quick_run_says_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "published.json"
    argv = [
        "--configurations",
        "1",
        "--steps",
        "8",
        "--guarded-steps",
        "8",
        "--corners",
        "no neighbours",
        "--out",
        str(out),
    ]
    assert published.main(argv) == 0
    report = json.loads(out.read_text())
    assert [row["corner"] for row in report["orion"]] == ["no neighbours"]
    for row in report["orion"]:
        assert 0.9 < row["guarded"]["p99"] <= row["fifo"]["p99"]
        assert row["guarded"]["low"] > 0.1
    assert report["targets"].keys() == {"held-out rows within 20 %", "median error of held-out rows"}
    said = capsys.readouterr().out
    assert "resnet50_4_fwd" in said
    assert "not simulated" in said
    with pytest.raises(SystemExit):
        published.main(["--configurations", "21"])
