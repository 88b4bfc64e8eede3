"""`gpumux plan` from the outside: tables, JSON, pictures, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumux.cli.main import EX_CONFIG, EX_FAILED, EX_USAGE, main
from gpumux.plan import layers

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
    assert body["iteration_s"] <= min(each["iteration_s"] for each in body["baselines"]) + 1e-12


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures"
    plot = tmp_path / "plan.png"
    assert main(["plan", "burst", "transformer", *SMALL, "--plot", str(plot), "--figures", str(figures)]) == 0
    drawn = [plot, *(figures / f"{name}.png" for name in ("scaling", "networks", "layers", "trade_off"))]
    assert all(each.read_bytes().startswith(PNG) for each in drawn)
    assert "idle" in capsys.readouterr().out


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


def test_servers(capsys: pytest.CaptureFixture[str]) -> None:
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
            "its classes are Classifier, Conv2d",
        ),
        (["burst", "alexnet", *SMALL, "--plot", "plan.pdf"], EX_CONFIG, "plan.pdf is no name of a PNG"),
        (["burst", "alexnet", *SMALL, "--plot", "/absent/plan.png"], EX_CONFIG, "/absent is no directory"),
        (["batch", "alexnet", "--memory", "5MB"], EX_CONFIG, "fits into 5 MB"),
        (["burst", "alexnet", *SMALL, "--network", "string"], EX_CONFIG, "no network is called"),
        (["burst", "absent.json", *SMALL], EX_CONFIG, "can't read absent.json"),
        (["burst", "tests.plan.test_trace:Branchy", "--input", "4", *SMALL], EX_FAILED, "can't be traced"),
        (["profile", "alexnet", "-o", "/absent/x.json"], EX_CONFIG, "no directory"),
        (["burst", "alexnet", *SMALL, "--amplification", "0.5"], EX_USAGE, "give 1 or more"),
        (["burst", "alexnet", "--gpus", "0", "--global-batch", "8"], EX_USAGE, "whole number from 1 up"),
        (["burst", "alexnet", *SMALL, "--bandwidth", "fast"], EX_USAGE, "no bandwidth above 0"),
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
