"""The benchmark of fusion: what it says of what was measured, and one short run of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from microbench import charts, fusing, fusion, fusionfile, fusionplot
from microbench.common import figure

SERIAL, OURS = "serial", "fused"


def measured(name: str, batch: int, models: int, ours: float) -> dict:
    rates = {
        SERIAL: {"samples": [10.0, 12.0]},
        OURS: {"samples": [10.0 * ours, 12.0 * ours]},
        "hand": {"error": "nobody did"},
    }
    peaks = {SERIAL: {"bytes": 3 << 20}, OURS: {"bytes": 2 << 20}}
    return {
        name: {
            "batch": batch,
            "models": {str(models): fusionfile.merged({}, fusion.summary(rates, SERIAL), peaks)},
            "paper": fusion.PAPER.get(name, {}),
        }
    }


def test_ratios_are_of_turns():
    ways = fusion.summary({SERIAL: {"samples": [1.0, 4.0]}, OURS: {"samples": [2.0, 12.0]}}, SERIAL)
    assert ways[OURS]["over_serial"] == figure([2.0, 3.0])
    assert ways[SERIAL]["over_serial"].median == 1.0


@pytest.mark.parametrize(
    ("name", "batch", "models", "target"),
    [
        ("transformer", 2, 8, 2.6),
        ("transformer", 16, 8, 0.95),
        ("transformer", 2, 4, 0.95),
        ("cnn", 4, 8, 1.6),
        ("dcgan", 4, 8, 0.95),
    ],
)
def test_the_marks_are_where_they_were_set(name: str, batch: int, models: int, target: float):
    for ours in (target - 0.01, target):
        (found,) = fusion.targets(measured(name, batch, models, ours), "small", "cpu", OURS).values()
        assert found["target"] == target
        assert found["met"] == (found["value"] >= target)
    (elsewhere,) = fusion.targets(measured(name, batch, models, 1.0), "full", "cpu", OURS).values()
    assert elsewhere["target"] == fusion.FLOOR


def test_the_table_says_what_is_missing_and_why():
    text = fusion.show(measured("dcgan", 4, 8, 1.5), [SERIAL, "hand", OURS], 8)
    assert "1.50" in text
    assert "V100 4.59" in text
    assert "dcgan, hand: nobody did" in text
    (row,) = [line for line in text.splitlines() if line.startswith("dcgan, batch 4")]
    assert row.split()[4:6] == ["1.00", "-"]


@pytest.mark.parametrize("arguments", [["--workload", "nonsense"], ["--models", "0"], ["--device", "cuda"]])
def test_what_can_not_be_measured_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fusion, "DRIVER", Path("/nowhere"))
    with pytest.raises(SystemExit) as end:
        fusion.main(arguments)
    assert end.value.code == 2


@pytest.mark.extended
def test_a_short_run_measures_what_it_says(tmp_path: Path):
    """In a process of its own, since it forks. That arrays train: tests/fuse."""
    out = tmp_path / "fusion.json"
    command = [sys.executable, "-m", "microbench.fusion", "--size", "tiny", "--workload", "cnn", "--models", "2"]
    command += [
        "--repeats",
        "2",
        "--seconds",
        "0.02",
        "--threads",
        "1",
        "--ways",
        "hand",
        "processes",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    ways = found["workloads"]["cnn"]["models"]["2"]
    assert ways.keys() == {"serial", "hand", "processes"}
    for way in ways.values():
        assert len(way["samples"]) == 2
        assert way["models_steps_per_s"]["low"] > 0
        assert way["bytes"] > 0
    ratios = [a / b for a, b in zip(ways["hand"]["samples"], ways["serial"]["samples"], strict=True)]
    assert (ways["hand"]["over_serial"]["low"], ways["hand"]["over_serial"]["high"]) == pytest.approx(
        (min(ratios), max(ratios))
    )
    assert found["overhead_bytes"] > 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, list[str]]]:
    """What is measured, as (what, workload, models, ways); every way is as quick as its name is long."""
    found: list[tuple[str, str, int, list[str]]] = []

    def throughput(setting: fusing.Setting, ways: list[str]) -> dict[str, Any]:
        found.append(("rates", setting.workload.name, setting.models, list(ways)))
        rates: dict[str, Any] = {way: {"samples": [float(len(way)), 2.0 * len(way)]} for way in ways}
        if "hand" in ways:
            rates["hand"] = {"error": "nobody did"}
        return rates

    def memory(setting: fusing.Setting, ways: list[str]) -> dict[str, Any]:
        found.append(("bytes", setting.workload.name, setting.models, list(ways)))
        return {way: {"bytes": len(way) << 20} for way in ways}

    monkeypatch.setattr(fusing, "throughput", throughput)
    monkeypatch.setattr(fusing, "memory", memory)
    return found


def run(out: Path, *more: str) -> int:
    return fusion.main(["--size", "tiny", "--models", "1", "2", "--add", "--out", str(out), *more])


def test_a_measurement_is_made_in_parts(tmp_path: Path, asked: list[Any]):
    """Another command adds what is missing, and nothing twice: ways, numbers of models, workloads, memory."""
    out = tmp_path / "fusion.json"
    assert run(out, "--workload", "cnn", "--no-memory", "--ways", "hand", "fused") == 0
    assert asked == [("rates", "cnn", models, ["serial", "hand", "fused"]) for models in (1, 2)]
    asked.clear()
    assert run(out, "--workload", "cnn", "--ways", "vmap", "fused") == 0
    assert asked == [
        (what, "cnn", models, ways)
        for models in (1, 2)
        for what, ways in (("rates", ["serial", "vmap"]), ("bytes", ["serial", "vmap", "fused"]))
    ]
    asked.clear()
    assert run(out, "--workload", "cnn", "dcgan", "--no-memory", "--ways", "hand", "vmap", "fused") == 0
    assert asked == [("rates", "dcgan", models, ["serial", "hand", "vmap", "fused"]) for models in (1, 2)]
    found = json.loads(out.read_text())
    assert len(found["earlier"]) == 2
    cnn = found["workloads"]["cnn"]["models"]["2"]
    assert cnn.keys() == {"serial", "hand", "vmap", "fused"}
    assert cnn["hand"] == {"error": "nobody did"}
    assert cnn["fused"]["over_serial"]["median"] == pytest.approx(5 / 6)
    assert cnn["vmap"]["bytes"] == 4 << 20
    assert "bytes" not in found["workloads"]["dcgan"]["models"]["1"]["fused"]


def test_memory_alone_is_measured_beside_others(tmp_path: Path, asked: list[Any]):
    out = tmp_path / "fusion.json"
    assert run(out, "--workload", "cnn", "--no-throughput", "--ways", "vmap") == 0
    assert asked == [("bytes", "cnn", models, ["serial", "vmap"]) for models in (1, 2)]
    assert json.loads(out.read_text())["workloads"]["cnn"]["models"]["1"]["vmap"] == {"bytes": 4 << 20}
    asked.clear()
    assert run(out, "--workload", "cnn", "--ways", "vmap") == 0
    assert asked == [("rates", "cnn", models, ["serial", "vmap"]) for models in (1, 2)]
    found = json.loads(out.read_text())["workloads"]["cnn"]["models"]["1"]["vmap"]
    assert found["bytes"] == 4 << 20
    assert found["samples"] == [4.0, 8.0]
    with pytest.raises(SystemExit):
        run(out, "--no-throughput", "--no-memory")


def test_parts_of_other_settings_are_not_put_together(
    tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "fusion.json"
    run(out, "--workload", "cnn", "--no-memory", "--threads", "1")
    asked.clear()
    assert run(out, "--workload", "cnn", "--threads", "2") == 1
    assert f"{out} was measured with threads 1, not 2 — choose another --out" in capsys.readouterr().err
    assert run(out, "--workload", "cnn", "--threads", "1", "--batch", "5") == 1
    assert "holds cnn at batch" in capsys.readouterr().err
    out.write_text("{}")
    assert run(out, "--workload", "cnn") == 1
    assert "is no result of this benchmark" in capsys.readouterr().err
    assert asked == []
    with pytest.raises(SystemExit):
        fusion.main(["--add"])


def test_what_was_measured_before_ctrl_c_is_kept(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out, real = tmp_path / "fusion.json", fusing.throughput

    def once(setting: fusing.Setting, ways: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        return real(setting, ways)

    monkeypatch.setattr(fusing, "throughput", once)
    assert run(out, "--workload", "cnn", "--no-memory") == 130
    assert f"{out} keeps what was measured, and --add goes on" in capsys.readouterr().err
    assert json.loads(out.read_text())["workloads"]["cnn"]["models"].keys() == {"1"}
    monkeypatch.setattr(fusing, "throughput", real)
    asked.clear()
    assert run(out, "--workload", "cnn", "--no-memory") == 0
    assert [each[:3] for each in asked] == [("rates", "cnn", 2)]


def test_the_pictures_show_what_was_measured(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out, drawn = tmp_path / "fusion.json", []
    run(out, "--workload", "cnn", "dcgan", "--no-memory", "--ways", "hand", "fused")
    draw: Callable[..., Any] = charts.curves

    def curves(path: Path, title: str, panels: Any, *more: Any) -> None:
        drawn.append((title, panels))
        draw(path, title, panels, *more)

    monkeypatch.setattr(charts, "curves", curves)
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "throughput.png", tmp_path / "memory.png"]
    assert fusionplot.main([str(out), "--throughput", str(paths[0]), "--memory", str(paths[1])]) == 1
    assert f"nothing of what {paths[1]} would show was measured" in capsys.readouterr().err
    run(out, "--workload", "dcgan", "--ways", "fused")
    assert fusionplot.main([str(out), "--memory", str(paths[1])]) == 0
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    (title, rates), (_, bytes_) = drawn
    assert "tiny models" in title
    assert [panel.title for panel in rates] == ["cnn, batch 4", "dcgan, batch 4"]
    assert rates[0].curves.keys() == {"serial", "fused"}  # there is no hand-written fusion of it
    assert rates[0].curves["serial"] == [(1, 1.0, 1.0, 1.0), (2, 1.0, 1.0, 1.0)]
    assert [panel.title for panel in bytes_] == ["dcgan, batch 4"]
    assert bytes_[0].curves["fused"] == [(1, 5.0, 5.0, 5.0), (2, 5.0, 5.0, 5.0)]


@pytest.mark.parametrize("arguments", [["{out}"], ["{out}", "--memory"], []])
def test_a_picture_of_nothing_is_refused(arguments: list[str], tmp_path: Path):
    with pytest.raises(SystemExit) as end:
        fusionplot.main([each.format(out=tmp_path / "none.json") for each in arguments])
    assert end.value.code == 2


def test_a_result_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert fusionplot.main([str(tmp_path / "none.json"), "--memory", str(tmp_path / "a.png")]) == 1
    assert "can't read" in capsys.readouterr().err
