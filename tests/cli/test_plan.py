"""`gpumux plan` from the outside: tables, JSON, pictures, and errors for bad input."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumux.cli.main import EX_CONFIG, EX_FAILED, EX_USAGE, main
from gpumux.plan import layers, plot
from gpumux.plan.network import measured as network
from gpumux.plan.network import ranks
from gpumux.plan.query import PlanQuery
from gpumux.program import saved_plan
from tests.plan.network.networks import measured

PNG = b"\x89PNG"
CNN = ["clients.models.cnn:cnn", "--input", "1,8,8"]
SMALL = ["--gpus", "4", "--global-batch", "8"]


@pytest.fixture
def profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = tmp_path / "cnn.json"
    assert (
        main(["plan", "profile", *CNN, "--batches", "1,2,8", "--repeats", "1", "--threads", "1", "-o", str(path)]) == 0
    )
    assert "5 layers (5 measured)" in capsys.readouterr().out
    return str(path)


def test_measure_then_plan(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.load(Path(profile)).sources() == {"measured": 5}
    assert main(["plan", "burst", profile, *SMALL, "--network", "200g", "--curve"]) == 0
    out = capsys.readouterr().out
    assert "cnn on 4 GPUs, global batch 8, amplification limit 2, optimal" in out
    for text in (
        "features.0",
        "classifier.4",
        "data-parallel",
        "one GPU",
        "LIMIT",
        "(measured); network 200g: 25 GB/s",
    ):
        assert text in out


def test_a_profile_of_another_device_is_refused(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "burst", profile, *SMALL, "--gpu-model", "a100"]) == EX_CONFIG
    assert "not of 'a100'" in capsys.readouterr().err
    for flag in (["--whole", "Conv2d"], ["--input", "1,8,8"]):
        assert main(["plan", "burst", profile, *SMALL, *flag]) == EX_CONFIG
        assert f"{flag[0]} with a file" in capsys.readouterr().err


def test_a_plan_is_saved_and_simulated_as_it_was_made(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "burst", profile, *SMALL, "--save", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    saved = saved_plan.load(path)
    assert saved.seconds == told["iteration_s"]
    assert [list(row.after) for row in saved.rows] == [row["after"] for row in told["timeline"]]
    widths = [max(row.first + row.gpus for row in rows) for rows in saved.data_parallel]
    assert widths == told["counts"]
    assert (saved.network.name, saved.limit, saved.batch) == ("nvswitch", 2.0, 8)
    assert main(["plan", "burst", profile, *SMALL, "--gpus", "2", "--save", str(tmp_path / "fewer.json")]) == 0
    assert [(each.gpus, each.rows) for each in saved.fewer] == [(2, saved_plan.load(tmp_path / "fewer.json").rows)]
    capsys.readouterr()
    assert main(["simulate", "--plan", str(path), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["planned_s"] == told["iteration_s"]
    assert simulated["results"][1]["iteration_s"] > told["iteration_s"]  # by the host's time
    assert main(["plan", "burst", profile, *SMALL, "--save", str(tmp_path / "nowhere" / "x.json")]) == EX_CONFIG
    assert "is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["optimal", "deeppool"])
def test_a_plan_as_json(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "plan",
        "burst",
        "alexnet",
        *SMALL,
        "--algorithm",
        algorithm,
        "--amplification",
        "none",
        "--overlap",
        "0.5",
    ]
    assert main([*asked, "--bandwidth", "100Gb", "--latency", "5e-6", "--curve", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["algorithm"] == algorithm
    assert body["amplification_limit"] is None
    assert body["network"] == {"name": "given", "bandwidth": 12.5e9, "latency": 5e-6}
    assert len(body["layers"]) == 11
    assert body["idle_gpu_s"] == pytest.approx(4 * body["iteration_s"] - body["busy_gpu_s"])
    assert [each["gpus"] for each in body["baselines"]] == [1, 4]
    times = [each["iteration_s"] for each in body["curve"]]
    assert times == sorted(times, reverse=True)  # more allowed is never slower
    assert (body["overlap"], body["counts"]) == (0.5, [1, 2, 4])
    assert any("50% of each layer's backward time" in note for note in body["notes"])
    ways = {(each["gpus"], each["strategy"]): each for each in body["sizes"]}
    assert ways.keys() == {(g, way) for g in (1, 2, 4) for way in ("weak", "strong", "batch-optimal", "burst")}
    assert ways[4, "burst"]["iteration_s"] == pytest.approx(body["iteration_s"])
    assert ways[4, "strong"]["iteration_s"] == pytest.approx(body["baselines"][1]["iteration_s"])
    assert ways[4, "weak"]["global_batch"] == 4 * body["global_batch"]
    assert body["iteration_s"] <= min(each["iteration_s"] for each in body["baselines"]) + 1e-12


def test_what_has_no_bound_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpus", "--speedup", "3", "--overhead", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["gpus"], found["most_speedup"]) == (3, None)


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures"
    plot = tmp_path / "plan.png"
    assert main(["plan", "burst", "transformer", *SMALL, "--plot", str(plot), "--figures", str(figures)]) == 0
    drawn = [plot, *(figures / f"{name}.png" for name in ("scaling", "networks", "layers", "trade_off"))]
    assert all(each.read_bytes().startswith(PNG) for each in drawn)
    assert "idle" in capsys.readouterr().out


BURST = ["burst", "alexnet", "--gpus", "4", "--global-batch", "16", "--curve"]
BATCH = ["batch", "alexnet", "--batches", "16"]


@pytest.mark.parametrize(
    ("asked", "last"),
    [(BURST, "11 of 12 amplification limits planned, now none"), (BATCH, "choosing algorithms for each mini-batch")],
)
def test_the_stages_of_a_long_plan_are_said_on_a_terminal_alone(
    asked: list[str], last: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumux.cli.text.QUIET_S", math.inf)
    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        assert main(["plan", *asked]) == 0
        said = capsys.readouterr().err
        assert ("reading the layers of alexnet" in said) is terminal
        assert (last in said) is terminal


def test_figures_and_the_curve_are_of_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No option is lost, and each picture has a file of its own."""
    asked: dict[str, PlanQuery] = {}
    for name in ("over_sizes", "over_networks", "over_limits", "operating_points", "layer_speedups"):
        real = getattr(plot, name)

        def spy(query: PlanQuery, *rest: Any, name: str = name, real: Any = real) -> Any:
            asked[name] = query
            return real(query, *rest)

        monkeypatch.setattr(plot, name, spy)
    saved: dict[str, str] = {}
    monkeypatch.setattr(plot, "save", lambda figure, path: saved.setdefault(path.name, figure.axes[0].get_title()))
    options = [
        "--overlap",
        "0.5",
        "--counts",
        "1,4",
        "--algorithm",
        "deeppool",
        "--amplification",
        "3",
        "--network",
        "25g",
    ]
    figures = ["--figures", str(tmp_path), "--critical-batch", "64", "--plot", str(tmp_path / "plan.png")]
    assert main(["plan", "burst", "alexnet", *SMALL, *options, *figures, "--curve"]) == 0
    assert set(asked) == {"over_sizes", "over_networks", "over_limits", "operating_points", "layer_speedups"}
    for query in asked.values():
        assert (query.batch, query.gpus, query.counts) == (8, 4, (1, 4))
        assert (query.overlap, query.algorithm, query.limit) == (0.5, "deeppool", 3.0)
        assert query.network.name == "25g"
    titles = {"plan.png": "alexnet, deeppool", "scaling.png": "ways to scale", "networks.png": "4 GPUs over one",
              "layers.png": "computation alone", "trade_off.png": "amplification limits"}  # fmt: skip
    assert set(saved) == set(titles)
    assert all(text in saved[name] for name, text in titles.items())
    assert "IDLE OF 4 GPUS" in capsys.readouterr().out


def test_limits_without_a_plan_are_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "burst", "vgg16", *SMALL, "--counts", "2,4", "--amplification", "none", "--curve"]
    assert main([*asked, "--figures", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\n1      no plan" in out
    assert "no plan over 2, 4 GPUs keeps a limit of 1, 1.1" in out
    assert main([*asked, "--json"]) == 0
    curve = json.loads(capsys.readouterr().out)["curve"]
    assert curve[0] == {"amplification_limit": 1.0, "over_limit": None} | dict.fromkeys(
        ("iteration_s", "speedup", "gpu_s", "busy_gpu_s", "idle_gpu_s")
    )
    assert curve[-1]["amplification_limit"] is None
    assert curve[-1]["iteration_s"] > 0


def test_figures_of_a_profile_of_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "v8.json"
    assert main(["plan", "profile", "alexnet", "--gpu-model", "a100", "--batches", "8", "-o", str(path)]) == 0
    asked = ["plan", "burst", str(path), *SMALL, "--counts", "1", "--figures", str(tmp_path)]
    assert main(asked) == 0
    assert "background jobs of the trade-off run batches of 8: no layer was timed at 2" in capsys.readouterr().out
    assert main(["plan", "burst", str(path), *SMALL]) == EX_CONFIG
    said = capsys.readouterr().err
    assert "8 on 4 GPUs is 2 samples each" in said
    assert (
        "time batches of 2, too (--batches of `plan profile`, one more --profile of a job), give a batch of 32, or"
        " --counts 1" in said
    )


def test_idle_time_is_of_the_whole_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "burst", "vgg16", *SMALL, "--counts", "1,2"]
    assert main([*asked, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    one, two = body["baselines"]
    assert one["idle_gpu_s"] == pytest.approx(3 * one["iteration_s"])
    assert two["idle_gpu_s"] == pytest.approx(2 * two["iteration_s"])
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "IDLE OF 4 GPUS" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("one GPU", "data-parallel"))}
    assert rows["one"][-1] == "75%"
    assert rows["data-parallel"][-1] == "50%"


def test_what_is_used_and_idle_make_up_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "burst", "inception_v3", "--gpus", "8", "--global-batch", "32", "--amplification", "none"]) == 0
    )
    out = capsys.readouterr().out
    assert "on GPUs of their own" in out  # samples move between branches, too
    found = re.search(r"iteration ([\d.]+) ms.*; ([\d.]+) GPU-ms used, ([\d.]+) GPU-ms idle", out)
    assert found is not None
    iteration, used, idle = map(float, found.groups())
    assert used + idle == pytest.approx(8 * iteration, abs=0.01)


def test_modelled_profiles_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert main(["plan", "profile", "alexnet", "--gpu-model", "h200", "-o", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["device"] == "h200"
    assert told["sources"] == {"model": 11}
    assert list(told["seconds"])[:2] == ["1", "2"]
    assert (
        main(["plan", "profile", "alexnet", "--gpu-model", "h200", "-o", str(path), "--json", "--batches", "2,8"]) == 0
    )
    assert list(json.loads(capsys.readouterr().out)["seconds"]) == ["2", "8"]
    assert main(["plan", "profile", str(path), "--profile", str(path), "-o", str(path)]) == EX_CONFIG
    assert "which has times of its own" in capsys.readouterr().err
    assert main(["plan", "profile", "alexnet", "--profile", "x", "--batches", "2", "-o", str(path)]) == EX_CONFIG
    assert "--batches with --profile" in capsys.readouterr().err
    assert main(["plan", "burst", str(path), "--gpus", "4", "--global-batch", "8", "--gpu-model", "h200"]) == 0
    assert "layer times of h200 (model)" in capsys.readouterr().out


def test_batch(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "batch", "alexnet", "--memory", "1GB", "--batches", "16,64,512"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "suggested mini-batch for alexnet" in out
    assert "do not fit: 512" in out
    assert "nothing here was measured" in out
    assert main([*asked, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [each["batch"] for each in body["choices"]] == [16, 64]
    assert main(["plan", "batch", "alexnet", "--algorithms", "strassen,gemm"]) == EX_CONFIG
    assert "strassen" in capsys.readouterr().err
    assert main(["plan", "batch", "transformer"]) == EX_CONFIG


def test_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpus", "--speedup", "3", "--overhead", "0.1"]) == 0
    assert "3 times as fast with R_O 10.0%: 4 GPUs" in capsys.readouterr().out
    assert main(["plan", "gpus", "--gpus", "4", "--efficiency", "0.8"]) == 0
    assert "R_O may be 9.1% at most" in capsys.readouterr().out
    assert main(["plan", "gpus", "--speedup", "30", "--overhead", "0.1", "--gpus", "8", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["gpus"] is None
    assert main(["plan", "gpus", "--speedup", "3", "--efficiency", "0.8"]) == 0
    assert "3 times as fast at efficiency 80%: 4 GPUs; R_O may be 9.1% at most" in capsys.readouterr().out
    assert main(["plan", "gpus", "--speedup", "3", "--efficiency", "0.8", "--overhead", "0.1"]) == 0
    assert "does not keep the efficiency of 80%" in capsys.readouterr().out
    capsys.readouterr()
    assert body["speedup_of_gpus"] == pytest.approx(8.8 / 1.8)
    for wrong in (
        [],
        ["--speedup", "3"],
        ["--gpus", "4"],
        ["--efficiency", "0.8", "--overhead", "0.1"],
        ["--speedup", "3", "--gpus", "4"],
        ["--overhead", "0.1", "--trace", "x"],
        ["--trace", "/absent"],
    ):
        assert main(["plan", "gpus", *wrong]) == EX_CONFIG
    assert "can't read /absent" in capsys.readouterr().err


def test_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "servers", "--workers", "8", "--compute", "0.5"]
    assert main([*asked, "--parameters", "180MB"]) == 0
    out = capsys.readouterr().out
    assert "47 parameter servers  1.440 s a push" in out
    assert "5 parameter servers   0.144 s a push" in out
    assert "not hidden: needs 5.0 Gb/s" in out
    assert main([*asked, "--model", "alexnet", "--bandwidth", "25Gb", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["parameter_bytes"] == pytest.approx(249.5e6, rel=1e-3)
    assert [each["bandwidth"] for each in body["networks"]] == [3.125e9]
    for wrong in ([], ["--model", "alexnet", "--parameters", "1MB"]):
        assert main([*asked, *wrong]) == EX_CONFIG
    for unknown in (["--whole", "Linear"], ["--gpu-model", "a100"], ["--input", "3,8,8"]):
        assert main([*asked, "--model", "alexnet", *unknown]) == EX_USAGE
    capsys.readouterr()
    assert main([*asked, "--model", CNN[0], "--json"]) == 0  # its input need not be given
    told = json.loads(capsys.readouterr().out)["parameter_bytes"]
    profile = tmp_path / "cnn.json"
    assert main(["plan", "profile", *CNN, "--gpu-model", "a100", "-o", str(profile)]) == 0
    capsys.readouterr()
    assert main([*asked, "--model", str(profile), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameter_bytes"] == told > 0


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        (["burst", "nope", *SMALL], EX_CONFIG, "no model is called 'nope'"),
        (["burst", "alexnet", "--gpus", "4", "--global-batch", "6"], EX_CONFIG, "does not divide among 4 GPUs"),
        (["burst", "alexnet", *SMALL, "--counts", "1,8"], EX_CONFIG, "the cluster has 4 GPUs"),
        (
            ["burst", "alexnet", "--gpus", "8", "--global-batch", "32", "--counts", "3,5"],
            EX_CONFIG,
            "multiple of 15, or --counts 1,2,4",
        ),
        (
            ["burst", "alexnet", *SMALL, "--whole", "Block"],
            EX_CONFIG,
            "its classes are Conv2d",
        ),
        (["burst", "alexnet", *SMALL, "--plot", "plan.pdf"], EX_CONFIG, "plan.pdf is no name of a PNG"),
        (["burst", "alexnet", *SMALL, "--plot", "/absent/plan.png"], EX_CONFIG, "/absent is no directory"),
        (["batch", "alexnet", "--memory", "5MB"], EX_CONFIG, "fits into 5 MB"),
        (["burst", "alexnet", *SMALL, "--network", "string"], EX_CONFIG, "no network is called"),
        (["burst", "absent.json", *SMALL], EX_CONFIG, "can't read absent.json"),
        (["burst", "tests.plan.test_trace:Branchy", "--input", "4", *SMALL], EX_FAILED, "can't be traced"),
        (["profile", "alexnet", "-o", "/absent/x.json"], EX_CONFIG, "no directory"),
        (
            ["profile", "alexnet", "-o", "x", "--gpu-model", "a100", "--device", "cpu"],
            EX_CONFIG,
            "--device has no effect with --gpu-model",
        ),
        (
            ["profile", "alexnet", "-o", "x", "--gpu-model", "a100", "--repeats", "5"],
            EX_CONFIG,
            "it belongs to measuring layers here",
        ),
        (
            ["profile", "alexnet", "-o", "x", "--profile", "y", "--threads", "1"],
            EX_CONFIG,
            "--threads has no effect with --profile",
        ),
        (
            ["profile", "alexnet", "-o", "x", "--device", "cuda", "--threads", "1"],
            EX_CONFIG,
            "--threads has no effect with --device cuda",
        ),
        (["profile", "y.json", "-o", "x"], EX_CONFIG, "y.json is a profile already"),
        (["batch", "y.json"], EX_CONFIG, "says nothing of convolutions"),
        (
            ["burst", "alexnet", *SMALL, "--critical-batch", "64"],
            EX_CONFIG,
            "--critical-batch has no effect without --figures or --curve",
        ),
        (
            ["burst", "alexnet", *SMALL, "--network", "25g", "--bandwidth", "1Gb", "--latency", "0"],
            EX_CONFIG,
            "--network has no effect",
        ),
        (["burst", "alexnet", *SMALL, "--whole", "Classifier"], EX_CONFIG, "Classifier is alexnet itself"),
        (
            ["burst", "tests.plan.test_trace:with_example", "--input", "4", *SMALL],
            EX_CONFIG,
            "returns its example arguments",
        ),
        (["burst", "transformer", "--input", "64", *SMALL], EX_FAILED, "takes samples of 128"),
        (["burst", "alexnet", *SMALL, "--amplification", "0.5"], EX_USAGE, "give 1 or more"),
        (["burst", "alexnet", "--gpus", "0", "--global-batch", "8"], EX_USAGE, "whole number from 1 up"),
        (["burst", "alexnet", *SMALL, "--bandwidth", "fast"], EX_USAGE, "no bandwidth above 0"),
        (["burst", "alexnet", *SMALL, "--bandwidth", "25"], EX_USAGE, "'25' has no unit: give 25Kb"),
        (["servers", "--parameters", "180", "--workers", "2", "--compute", "1"], EX_USAGE, "'180' has no unit"),
        (["burst", "alexnet", *SMALL, "--overlap", "2"], EX_USAGE, "no share from 0 to 1"),
        (["burst", "alexnet", *SMALL, "--latency", "-1"], EX_USAGE, "0 or more"),
        (["burst", "alexnet"], EX_USAGE, "required"),
        (["servers", "--workers", "8", "--compute", "nan"], EX_USAGE, "above 0"),
        ([], EX_USAGE, "required"),
    ],
)
def test_bad_input_is_answered(asked: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *asked]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["burst", "profile", "batch", "gpus", "servers"])
def test_every_verb_teaches_by_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"gpumux plan {verb}" in out


def test_cuda_is_refused_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["plan", "profile", "alexnet", "--device", "cuda", "-o", str(tmp_path / "x.json")]) == EX_CONFIG
    assert "no CUDA device" in capsys.readouterr().err


# ---- A measured network.


@pytest.fixture
def here(tmp_path: Path) -> str:
    path = tmp_path / "here.json"
    network.save(measured(ranks=4), path)
    return str(path)


def test_a_plan_takes_a_measured_network(profile: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "burst", profile, *SMALL, "--network", here]) == 0
    out = capsys.readouterr().out
    assert "network here: 0.25 GB/s a GPU, 400 us (measured among 4 ranks by gloo on cpu" in out
    assert "all-reduces as measured among 2, 4 ranks" in out


def test_a_plan_on_a_measured_network_is_drawn(
    profile: str, here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "burst", profile, *SMALL, "--network", here, "--figures", str(tmp_path / "pictures")]) == 0
    assert (tmp_path / "pictures" / "networks.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--gpus", "8", "--global-batch", "8"], EX_CONFIG, "measured among 2, 4 ranks, and this is about 8 GPUs"),
        ([*SMALL, "--latency", "1"], EX_CONFIG, "--latency has no effect beside a measured --network"),
        ([*SMALL, "--network", "absent.json"], EX_CONFIG, "absent.json"),
        ([*SMALL, "--network", "ethernet"], EX_CONFIG, "no network is called 'ethernet'"),
    ],
)
def test_a_measured_network_that_can_not_be_taken_is_refused(
    profile: str, here: str, options: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "burst", profile, "--network", here, *options]) == code
    assert said in capsys.readouterr().err


@pytest.fixture
def instead_of_measuring(monkeypatch: pytest.MonkeyPatch) -> list[ranks.Measurement]:
    """What is to be measured, for which there are known times: those of a busy machine may lie on no line."""
    asked = []

    def measure(measurement: ranks.Measurement, progress: object) -> network.MeasuredNetwork:
        asked.append(measurement)
        return measured(ranks=measurement.ranks)

    monkeypatch.setattr(ranks, "measure_here", measure)
    return asked


def test_a_measured_network_is_described_and_written(
    instead_of_measuring: list[ranks.Measurement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.json"
    options = ["--ranks", "2", "--largest", "1MiB", "--rounds", "3", "-o", str(path)]
    assert main(["plan", "network", *options]) == 0
    assert instead_of_measuring == [ranks.Measurement(2, "cpu", 1 << 20, 3, 60.0)]
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: gloo among 2 ranks on cpu, medians of 5 rounds")
    assert re.search(r"transfer +2 +200 us +0\.5 GB/s +x 1\.00 +x 1\.00 +200 us", out)
    assert re.search(r"all-reduce +2 +400 us +0\.167 GB/s +x 1\.00 +x 1\.00 +400 us", out)
    assert network.load(path) == measured(ranks=2)


def test_a_measured_network_as_json(
    instead_of_measuring: list[ranks.Measurement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "network", "--ranks", "4", "-o", str(tmp_path / "n.json"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [(each["kind"], each["ranks"]) for each in body["lines"]] == [
        ("transfer", 2), ("all-reduce", 2), ("transfer", 4), ("all-reduce", 4)
    ]  # fmt: skip
    assert (body["ranks"], body["file"]) == (4, str(tmp_path / "n.json"))
    assert body["bandwidth"] == pytest.approx(0.25e9, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--ranks", "1", "-o", "n.json"], EX_USAGE, "--ranks"),
        (["--ranks", "2"], EX_CONFIG, "no file for the result"),
        (["--ranks", "2", "-o", "nowhere/n.json"], EX_CONFIG, "nowhere is no directory"),
        (["--ranks", "2", "--rank", "0", "-o", "n.json"], EX_CONFIG, "--rank and --store belong together"),
        (["--ranks", "2", "--rank", "1", "--store", "h:1", "-o", "n.json"], EX_CONFIG, "rank 0 writes the file"),
        (["--ranks", "2", "--largest", "8B", "-o", "n.json"], EX_CONFIG, "a largest size of 8 B"),
    ],
)
def test_a_measurement_that_can_not_be_is_refused(
    options: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "network", *options]) == code
    assert said in capsys.readouterr().err


# ---- Convolution algorithms.


def test_algorithms_are_timed_and_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    path = str(tmp_path / "cnn.json")
    quick = ["--batches", "2,4", "--repeats", "1", "--threads", "1"]
    assert main(["plan", "profile", *CNN, *quick, "--algorithms", "-o", path]) == 0
    out = capsys.readouterr().out
    assert "CONVOLUTION AT 4" in out
    assert f"gpumux plan batch MODEL --times {path} --memory SIZE" in out
    found = layers.load(Path(path)).algorithms
    names = {each.algorithm for each in found}
    assert {"native", "native channels-last"} <= names
    assert {each.convolution for each in found} == {"features.0", "features.3"}

    assert main(["plan", "batch", *CNN, "--times", path, "--memory", "1GB", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [each["batch"] for each in body["choices"]] == [2, 4]
    assert all(set(each["algorithms"].values()) <= names for each in body["choices"])
    assert body["times"].startswith("times were measured on ")
    assert body["times"].endswith("algorithms' workspace was not, and counts as none")
    assert main(["plan", "batch", *CNN, "--times", path, "--memory", "1GB"]) == 0
    assert "times were measured on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "1GB"], "has no times of algorithms"),
        (["--memory", "1GB", "--algorithms", "gemm"], "--algorithms has no effect beside --times"),
        (["--memory", "1GB", "--gpu-model", "a100"], "--gpu-model has no effect beside --times"),
    ],
)
def test_measured_times_that_can_not_be_taken_are_refused(
    profile: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "batch", *CNN, "--times", profile, *options]) == EX_CONFIG
    assert said in capsys.readouterr().err


def test_measured_times_need_a_memory(tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "timed.json"
    timing = layers.AlgorithmTiming(2, 1.0, 1.0, 0)
    timed = replace(layers.load(Path(profile)), algorithms=(layers.AlgorithmTimes("features.0", "native", (timing,)),))
    layers.save(timed, path)
    assert main(["plan", "batch", *CNN, "--times", str(path)]) == EX_CONFIG
    assert "--times without --memory" in capsys.readouterr().err
    assert main(["plan", "batch", *CNN, "--times", str(path), "--memory", "1GB"]) == EX_CONFIG
    assert "without algorithms of features.3 for a mini-batch of 2" in capsys.readouterr().err


def test_algorithms_of_a_model_without_convolutions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["clients.models.transformer:transformer", "--input", "1,8,8", "--batches", "1", "--repeats", "1"]
    assert main(["plan", "profile", *model, "--algorithms", "-o", str(tmp_path / "t.json")]) == EX_CONFIG
    assert "has no 2d convolutions" in capsys.readouterr().err
    assert main(["plan", "profile", *model[:3], "--gpu-model", "a100", "--algorithms", "-o", "t.json"]) == EX_CONFIG
    assert "--algorithms has no effect with --gpu-model" in capsys.readouterr().err
