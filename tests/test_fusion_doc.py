"""What docs/fusion.md, docs/tuning.md and the README say was measured is what lies in microbench/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FUSION, TUNING, README = ((ROOT / page).read_text() for page in ("docs/fusion.md", "docs/tuning.md", "README.md"))
ORDER = ("cnn", "pointnet_cls", "pointnet_seg", "dcgan", "resnet18", "mobilenet_v3", "transformer", "bert_medium")
WAYS = ("captured", "hand", "vmap", "fused")
MARKED = {"cnn": ("CNN, batch 4", 4, 1.6), "transformer": ("Transformer, batch 2", 2, 2.6)}


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"microbench/results/cpu-{name}.json").read_text())
    return found


def cells(page: str, first: str) -> list[str]:
    """Of the table's row that begins so, what comes after."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip().strip("|").split("|")][1:]


def over_serial(name: str, models: int = 8) -> dict[str, dict[str, float]]:
    found = result(f"fusion-{name}")
    assert found["threads"] == 1
    assert found["workloads"][name]["batch"] == MARKED[name][1]
    return {way: of["over_serial"] for way, of in found["workloads"][name]["models"][str(models)].items()}


def test_eight_small_models_over_the_plain_loops():
    for name, (row, _, wanted) in MARKED.items():
        ratios = over_serial(name)
        said = [f"{r['median']:.2f} ({r['low']:.1f}, {r['high']:.1f})" for r in (ratios[way] for way in WAYS)]
        assert cells(FUSION, row) == [*said, f"{wanted}"]
        assert {r["repeats"] for r in ratios.values()} == {11}
        assert ratios["fused"]["median"] >= wanted
    for begins, name in (
        ("| 8 small CNNs as one array, batch 4", "cnn"),
        ("| 8 small Transformers, batch 2", "transformer"),
    ):
        (line,) = [line for line in README.splitlines() if line.startswith(begins)]
        fused, hand, vmap = (over_serial(name)[way]["median"] for way in ("fused", "hand", "vmap"))
        assert f"we want {MARKED[name][2]}" in line
        assert f"| {fused:.2f} (by hand {hand:.2f}, vmap {vmap:.2f}) |" in line


def test_the_memory_of_eight():
    workloads = result("fusion-memory")["workloads"]
    for row, name in (("8 CNNs", "cnn"), ("8 Transformers", "transformer")):
        assert workloads[name]["batch"] == 4
        ways = [workloads[name]["models"]["8"][way] for way in ("serial", "processes", "hand", "vmap", "fused")]
        assert cells(FUSION, row) == [f"{way['bytes'] / 2**20:.0f}" for way in ways]


def test_the_memory_of_eight_large_ones():
    for row, name, file in (
        ("8 large CNNs", "cnn", "fusion-memory-full"),
        ("8 large Transformers", "transformer", "fusion-memory-full-transformer"),
    ):
        workload = result(file)["workloads"][name]["models"]["8"]
        nbytes = {way: workload[way]["bytes"] for way in ("serial", "hand", "vmap", "fused")}
        said = [f"{each / 2**20:.0f}" for each in nbytes.values()]
        assert cells(FUSION, row) == [*said, f"{nbytes['fused'] / nbytes['hand']:.2f}"]
        assert nbytes["fused"] <= 1.5 * nbytes["hand"]


def test_every_workload_at_tiny_sizes():
    found = result("fusion-floor")
    workloads = found["workloads"]
    assert (found["size"], found["threads"], set(workloads)) == ("tiny", 1, set(ORDER))
    fewest = []
    for models in ("1", "2", "4", "8"):
        figures = [workloads[name]["models"][models]["fused"]["over_serial"] for name in ORDER]
        assert cells(FUSION, models) == [f"{f['median']:.2f}" for f in figures]
        assert {f["repeats"] for f in figures} == {5}
        fewest.append(min(f["median"] for f in figures))
        if models != "1":
            assert min(f["low"] for f in figures) >= 0.95, "no workload is slower as an array, in no turn"
    assert {w["batch"] for w in workloads.values()} == {4}
    assert min(fewest) >= 0.95


def test_the_sweep_by_each_scheduler():
    found = result("tuning")
    rows, asked = found["schedulers"], found["asked"]
    page = " ".join(TUNING.split())
    device, wall = ([rows[name][what]["median"] for name in asked["schedulers"]] for what in ("device_s", "wall_s"))
    assert asked["schedulers"] == ["serial", "concurrent", "fused"]
    assert (
        f"of {asked['trials']} configurations of an MLP on digits (batch {asked['batch']}, {asked['steps']} steps"
        in page
    )
    assert "{:.1f} device seconds `serial`, {:.1f} `concurrent`, {:.1f} `fused`;".format(*device) in page
    assert "{:.1f}, {:.1f} and {:.1f} s from begin to end".format(*wall) in page
    assert found["agreement"]["same_best"]
    assert found["agreement"]["largest_score_difference"] == 0.0
    assert "the same best configuration and the same scores to the last digit" in page


def test_the_results_that_are_named_are_there():
    named = re.findall(r"microbench/results/[\w.-]+\.json", FUSION + TUNING)
    assert len(named) >= 2
    assert [name for name in named if not (ROOT / name).exists()] == []
