"""Each benchmark runs, briefly, and reports what it claims to measure, next to a baseline of the same run.
How large its figures are means nothing here; that they are there and fit together does."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumux.cli.main import main
from microbench import common
from microbench.daemon import RunningDaemon, running_daemon
from microbench.draws import perceptron

Report = dict[str, Any]

QUICK = {
    "overhead": ["--repeats", "2", "--steps", "5"],
    "priority": ["--policies", "fifo", "paced"],
    "rtt": ["--repeats", "2", "--trips", "20"],
    "launches": ["--models", "vgg", "--repeats", "2", "--steps", "10"],
    "guard_trials": [
        "--trials",
        "undisturbed",
        "noise of 20 %",
        "4 high jobs",
        "--corners",
        "as it is",
        "--pairs",
        "1",
        "--steps",
        "60",
    ],
    "restart": ["--pairs", "1", "--learned", "250", "--steps", "100"],
    "confinement": ["--repeats", "2", "--trips", "20", "--steps", "2"],
    "copies": ["--repeats", "3"],
    "draws": ["--models", "perceptron", "--repeats", "2", "--seconds", "0.05"],
    "core_rate": ["--repeats", "1", "--events", "500", "--jobs", "10"],
    "gangs": ["--ranks", "2", "--low", "small-kernels-b4", "--steps", "50", "--warm-up", "100"],
    "microbatches": ["--repeats", "1", "--steps", "2", "--batch", "16", "--parts", "1", "4"],
    "real_sizes": ["--size", "tiny", "--models", "bert-base", "--lengths"],
    "temporaries": ["--workloads", "cnn:tiny", "bert-base:tiny", "--run", "cnn:tiny"],
    "snapshots": ["--turns", "2", "--seconds", "0.3", "--interval", "0.1", "--batch", "8", "--widths", "32"],
}


def measured(policy: str, *given: Any, **options: Any) -> dict[str, Any]:
    """What microbench.priority measures. Itself it runs, under two policies, in the test of the demo
    (tests/clients/test_gpumux.py)."""
    alone, shared = [0.010], [0.012 if policy == "paced" else 0.030]
    slowdown = [b / a for a, b in zip(alone, shared, strict=True)]
    samples = {"alone_s": alone, "shared_s": shared, "low_steps_per_s": [2.0]}
    return {
        **{name: common.figure(values) for name, values in samples.items()},
        "slowdown": common.figure(slowdown),
        "samples": samples,
    }


# Capturing takes time by operators, and what is reported does not depend on how many there are.
SMALLER: dict[str, dict[str, Any]] = {
    "overhead": {
        "STEP_S": 0.003, "WARM_UP": 20,
        "PROGRAMS": {
            "few operators": {"layers": 4, "width": 128, "adam": False},
            "more operators": {"layers": 8, "width": 120, "adam": True},
        },
    },
    "priority": {"measure": measured},
    "confinement": {"WORK": perceptron},
}  # fmt: skip


def is_figure(figure: Report, repeats: int) -> None:
    assert figure["repeats"] == repeats
    assert 0 < figure["low"] <= figure["median"] <= figure["high"]


def is_ratio(ratio: Report, ours: list[float], baseline: list[float]) -> None:
    """Made of samples that took turns in this run, and of nothing else."""
    quotients = [a / b for a, b in zip(ours, baseline, strict=True)]
    is_figure(ratio, len(quotients))
    assert (ratio["low"], ratio["high"]) == pytest.approx((min(quotients), max(quotients)))


def overhead(report: Report) -> None:
    assert report["programs"]
    assert report["targets"].keys() == report["programs"].keys()
    assert [p["operators"] for p in report["programs"].values()] == sorted(
        {p["operators"] for p in report["programs"].values()}
    )
    for name, program in report["programs"].items():
        samples = program["samples"]
        is_figure(program["plain_steps_per_s"], 2)
        is_figure(program["gpumux_steps_per_s"], 2)
        is_ratio(program["ratio"], samples["gpumux"], samples["plain"])
        assert program["operators"] > 0
        assert report["targets"][name]["value"] == program["ratio"]["median"]


def priority(report: Report) -> None:
    assert report["policies"].keys() == {"fifo", "paced"}
    for policy in report["policies"].values():
        samples = policy["samples"]
        is_figure(policy["alone_s"], 1)
        is_figure(policy["shared_s"], 1)
        is_ratio(policy["slowdown"], samples["shared_s"], samples["alone_s"])
        assert policy["low_steps_per_s"]["median"] >= 0
    (target,) = report["targets"].values()
    assert target["value"] == report["policies"]["paced"]["slowdown"]["median"]
    assert target["target"] == report["policies"]["fifo"]["slowdown"]["median"]


def rtt(report: Report) -> None:
    assert {"direct", "echo", "wire"} < report["ways"].keys()
    for way in report["ways"].values():
        is_figure(way["median_s"], 2)
        assert 0 < way["p90_s"] <= way["p99_s"] <= way["p999_s"]
    is_figure(report["ratio"], 2)
    echo = report["ways"].pop("echo")["median_s"]
    medians = [report["ways"][name]["median_s"] for name in report["ways"].keys() - {"direct", "wire"}]
    ratio = report["ratio"]["median"]
    assert any(ours["low"] / echo["high"] <= ratio <= ours["high"] / echo["low"] for ours in medians)


def confinement(report: Report) -> None:
    assert report["steps"].keys() == report["targets"].keys()
    for name, step in report["steps"].items():
        is_figure(step["ratio"], 2)
        is_figure(step["seconds"]["auto"], 2)
        is_figure(step["seconds"]["off"], 2)
        assert report["targets"][name]["value"] == step["ratio"]["median"]


def copies(report: Report) -> None:
    is_figure(report["call_s"], 3)
    is_figure(report["one_copy_s"], 3)
    is_figure(report["ratio"], 3)
    assert report["targets"]["copies counted"]["value"] == report["bytes_written"] / report["batch_bytes"]
    assert report["targets"]["call over one copy"]["value"] == report["ratio"]["median"]
    assert report["from_samples"] == {"collate": 1.0, "torch": 2.0}


def draws(report: Report) -> None:
    is_figure(report["seconds_a_word"]["skipped"], 2)
    (model,) = report["models"].values()
    assert model["words"] > 0
    assert model["chosen"] in ("skip", "wait")
    assert model["over_plain"].keys() == {"own", "skipped", "waited for", "as chosen"}
    for figure in (*model["over_plain"].values(), model["over_own"]):
        is_figure(figure, 2)
    (target,) = report["targets"].values()
    assert target["value"] == model["over_own"]["median"]


def core_rate(report: Report) -> None:
    figures = [value for value in leaves(report) if isinstance(value, dict) and "repeats" in value]
    assert figures
    for figure in figures:
        is_figure(figure, 1)


def gangs(report: Report) -> None:
    """On a virtual clock, so this is what the guard does, and no time of this machine."""
    apart, together = report["runs"]
    assert (apart["guard"], together["guard"]) == ("apart", "together")
    assert apart["slowdown"] > 1.2
    assert together["slowdown"] <= report["max_slowdown"] == 1.1
    assert together["slowdown_p99"] <= 1.33  # of 50 steps it is the longest
    assert together["low"] > 0.2
    assert together["bans"] > 0
    (target,) = report["targets"].values()
    assert target == {"target": 1.1, "value": together["slowdown"], "met": True}


def microbatches(report: Report) -> None:
    assert report["parts"].keys() == {"1", "4"}
    for part in report["parts"].values():
        for figure in part.values():
            is_figure(figure, 1)
    one, four = (report["parts"][k]["longest_operator_s"]["median"] for k in ("1", "4"))
    (target,) = report["targets"].values()
    assert target["value"] == four / one
    assert report["parts"]["4"]["temporary_bytes"]["median"] < report["parts"]["1"]["temporary_bytes"]["median"]


def temporaries(report: Report) -> None:
    assert list(report["workloads"]) == ["cnn:tiny", "bert-base:tiny"]
    for each in report["workloads"].values():
        assert each["live_bytes"] <= each["plan_bytes"] == min(each["plans"].values()) <= each["first_fit_bytes"]
        assert each["plans"][each["chosen"]] == each["plan_bytes"]
    ran, captured = report["workloads"].values()
    assert ran["declared_bytes"] >= ran["state_bytes"] + ran["first_fit_bytes"]
    assert ran["charged_bytes"] >= ran["declared_bytes"]
    assert ran["measured_bytes"] > 0
    assert "measured_bytes" not in captured


def snapshots(report: Report) -> None:
    (size,) = report["sizes"]
    assert size["snapshots"] > 0
    is_figure(size["snapshot_costs_s"] | {"low": 1, "median": 1, "high": 1}, size["snapshot_costs_s"]["repeats"])
    assert size["extra_s_a_step"] == size["step_s"]["kept"] - size["step_s"]["plain"]
    for rate in size["rate"].values():
        is_figure(rate, 2)
    (target,) = report["targets"].values()
    assert target["value"] == size["snapshot_costs_s"]["median"] / 30.0


def real_sizes(report: Report) -> None:
    model = report["models"]["bert-base"]
    phases = model["memory"]["phases"]
    assert {"submit", "steps", "sync"} <= phases.keys()
    assert model["memory"]["peak"] == max(phase["total"] for phase in phases.values())
    assert {"client", "daemon", "executor", "fork server"} <= model["memory"]["by_role"].keys()
    assert all(sum(phase["then"].values()) == phase["total"] for phase in phases.values())
    mark = 1.3 * model["plain_memory"] + model["job"]["state_bytes"] + (600 << 20)
    assert model["memory_over_mark"] == pytest.approx(model["memory"]["peak"] / mark)
    assert model["job"]["charged"] > 0
    spent = model["job"]["submit"]
    assert spent["whole"] == pytest.approx(sum(spent[part] for part in ("capture", "check", "load", "state")))
    assert model["first_over_plain"] == pytest.approx(model["first"]["job"] / model["first"]["plain"])
    assert (model["equal"], model["unequal"]) == (True, 0)
    assert model["tensors"] > 30
    is_figure(model["rate_over_plain"], 5)


def leaves(value: object) -> list[object]:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value, *(leaf for item in inner for leaf in leaves(item))]


def guard_trials(report: Report) -> None:
    rows = report["rows"]
    assert [(row["trial"], row["job"]) for row in rows] == [
        ("undisturbed", "high0"), ("noise of 20 %", "high0"), *[("4 high jobs", f"high{at}") for at in range(4)],
    ]  # fmt: skip
    calm, noisy = rows[:2]
    assert calm["after"] != noisy["after"]
    assert 1.0 <= calm["after"]["mean"] < 1.1
    assert all(row["low"] > 0.0 for row in rows[:2])


def restart(report: Report) -> None:
    (row,) = report["rows"]
    new, taken_up = row["new"], row["taken up"]
    assert new["explored"] > 10 > taken_up["explored"]
    assert new["p99"] > 1.0 < new["mean"]
    assert new["low"] > 0.0 < taken_up["low"]


def launches(report: Report) -> None:
    of = report["models"]["vgg"]
    assert of["daemon_s_ratio"]["median"] > 0
    assert all(of[way]["daemon_s"]["median"] > 0 for way in ("several pieces a launch", "each piece a launch"))


# Those that ask for a daemon as any other is share one: a start takes seconds.
SHARE = {"overhead", "rtt", "copies", "draws", "microbatches"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


CHECKS: dict[str, Callable[[Report], None]] = {
    "overhead": overhead, "priority": priority, "rtt": rtt, "copies": copies, "draws": draws, "core_rate": core_rate,
    "gangs": gangs, "microbatches": microbatches, "real_sizes": real_sizes, "snapshots": snapshots,
    "launches": launches, "temporaries": temporaries, "confinement": confinement, "restart": restart,
    "guard_trials": guard_trials,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.extended
def test_the_memory_of_waves_is_what_the_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    program = importlib.import_module("microbench.wave_memory")
    monkeypatch.setattr(program, "MODELS", {"transformer": ((1,), "sgd")})
    threads, out = torch.get_num_threads(), tmp_path / "result.json"
    try:
        assert program.main(["--out", str(out)]) == 0
        assert main(["plan", "memory", "transformer", "--batch", "1", "--optimizer", "sgd", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    (step,) = json.loads(out.read_text())["steps"].values()
    assert json.loads(said[said.rindex("\n{") :]).items() <= step.items()
    assert step["half_step_bytes"] <= step["ways"]["waves"]["total_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.extended
def test_it_runs_and_reports(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    daemon: RunningDaemon,
):  # fmt: skip
    threads = torch.get_num_threads()
    out = tmp_path / "result.json"
    program = importlib.import_module(f"microbench.{name}")
    for constant, value in SMALLER.get(name, {}).items():
        monkeypatch.setattr(program, constant, value)
    if name in SHARE:

        @contextmanager
        def shared(*, policy: str = "paced", threads: int = 1) -> Iterator[RunningDaemon]:
            assert (policy, threads) == ("paced", 1)
            yield daemon

        monkeypatch.setattr(program, "running_daemon", shared)
    try:
        assert program.main([*QUICK[name], "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(out.read_text())
    assert report["benchmark"] == name
    assert report["machine"]["cores"] >= 1
    assert {"cpu", "load_1min", "versions"} <= report["machine"].keys()
    CHECKS[name](report)
    for target in report["targets"].values():
        assert {"value", "target", "met"} <= target.keys()
    assert "cores, load" in capsys.readouterr().out
