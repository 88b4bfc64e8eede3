"""The benchmarks on the simulator: they repeat exactly, so their figures can be held to something."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.gpu import Finished, Gpu
from gpumux.device.sim.spec import A100
from gpumux.errors import ConfigError
from gpumux.simulate.run import Simulation, solo
from gpumux.simulate.workload import Workload, cut_workload
from gpumux.types import Priority
from microbench import ablation, arrivals, deeppool, oracle, overhead, pairwise, sweep
from microbench.cuda import probe
from microbench.planned import Plan, Planned

PNG = b"\x89PNG"
HIGH = Workload("high", Priority.HIGH, (Kernel("h", 216, 100e-6, 1, 0),) * 8, think_s=800e-6, max_slowdown=1.05)
LOW = Workload("low", Priority.LOW, (Kernel("l", 432, 50e-6, 1, 0),) * 10)

LAYERS = """
 conv2d{"in_channels":3,"kernel_size":3,"out_channels":64,"padding":1,"stride":1}[BATCH][3,32,32]  0.5 500 1
 ReLU2d{"inplace":true,"kernel_size":1,"padding":0,"stride":1}[BATCH][64,32,32]  1.5 100 1400
 maxPool2d{"kernel_size":2,"padding":0,"stride":2}[BATCH][64,32,32]  0.3 100 200
 flatten{"kernel_size":1}[BATCH][64,16,16]  0.01 5 5
 linear{"bias":true,"in_features":16384,"out_features":64}[BATCH]16384  0.1 100 1
 ReLU1d{"inplace":true,"kernel_size":1,"padding":0,"stride":1}[BATCH]64  0.3 8 290
sum: 2.7
"""


@pytest.fixture
def layer_times(tmp_path: Path) -> Path:
    """A file in DeepPool's form, with numbers of our own."""
    path = tmp_path / "vgg.prof"
    path.write_text("".join(LAYERS.replace("BATCH", str(batch)) for batch in (32, 16, 4)))
    return path


# ---- ablation


def test_the_ablation_reports_each_technique(
    layer_times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "a.json", tmp_path / "a.png"
    arguments = ["--profile", str(layer_times), "--steps", "12", "--warmup", "6", "--gpu-model", "a100+shared-queue"]
    assert ablation.main([*arguments, "--out", str(out), "--png", str(picture)]) == 0
    report = json.loads(out.read_text())
    rows = {row["label"]: row for row in report["rows"]}
    assert list(rows) == [*ablation.ROWS, ablation.PACED_SMALL]
    assert rows["graphs"]["high"] == 1.0
    assert rows["single launches"]["high"] <= 1.0
    assert rows["naive second job"]["high"] < rows["+ launch pacing"]["high"] <= 1.01
    assert rows["naive second job"]["low"] > 0
    for row in rows.values():
        assert row["total"] == row["high"] + row["low"]
    gains = [gain["gain"] for gain in report["graphs_gain"]]
    assert gains == sorted(gains)
    assert report["targets"]["graphs over single launches"]["value"] == pytest.approx(
        1 / rows["single launches"]["high"]
    )
    assert "DeepPool's layer times" in capsys.readouterr().out
    assert picture.read_bytes().startswith(PNG)


def test_the_ablations_jobs_are_the_shipped_ones_unless_others_are_named() -> None:
    jobs = ablation.make_jobs(A100, 1.05, None, None)
    assert "modelled" in jobs.source
    assert jobs.high.think_s > 1e-3
    assert any(kernel.sensitivity == 2.2 for kernel in jobs.high.kernels)
    other = ablation.make_jobs(A100, 1.05, None, "vgg16-b4-ddp")
    assert other.high.think_s == 0.0


def test_layer_times_become_operators(layer_times: Path) -> None:
    by_batch = deeppool.read(layer_times)
    assert sorted(by_batch) == [4, 16, 32]
    assert len(by_batch[4]) == 6
    assert deeppool.dense_seconds(by_batch[4]) == pytest.approx(399e-6)
    whole = deeppool.vgg16(by_batch[4])
    measured = sum(op.seconds for op in whole.ops if op.source == "measured")
    everything = sum(layer.forward_s + layer.backward_s for layer in by_batch[4] if layer.kind != "flatten")
    rectifiers = sum(
        op.seconds for op in whole.ops if op.target == "aten.threshold_backward.default" and op.source == "model"
    )
    assert measured + rectifiers == pytest.approx(everything, rel=0.02)
    burst = deeppool.vgg16(by_batch[4], gpus=8, dense=False)
    assert [op.target for op in burst.ops if op.target.startswith("nccl")] == ["nccl.all_reduce"]
    assert burst.ops[0].target.endswith("backward.default")
    assert not [op for op in burst.ops if "addmm" in op.target]


def test_files_that_are_no_layer_times_are_refused(
    tmp_path: Path, layer_times: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.prof"
    empty.write_text("sum: 1\n")
    for path, says in ((empty, "no layer times"), (tmp_path / "none", "can't read")):
        assert ablation.main(["--profile", str(path)]) == 78
        assert says in capsys.readouterr().err
    text = layer_times.read_text()
    layer_times.write_text(text.replace("ReLU1d", "Sigmoid"))
    with pytest.raises(ConfigError, match="Sigmoid"):
        deeppool.vgg16(deeppool.read(layer_times)[4])
    layer_times.write_text(LAYERS.replace("BATCH", "4"))
    assert ablation.main(["--profile", str(layer_times)]) == 78
    assert "batches of [16, 32]" in capsys.readouterr().err


@pytest.mark.parametrize("program", [ablation, overhead, pairwise, sweep])
def test_without_a_cuda_device_it_says_so(
    program: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "find", lambda: probe.Found(why="torch is built without CUDA"))
    assert program.main(["--device", "cuda"]) == 78  # type: ignore[attr-defined]
    assert "cuda" in capsys.readouterr().err.lower()


# ---- pairwise


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (pairwise, ["--waves", "0"], "0 is not a positive whole number"),
        (pairwise, ["--half", "--device", "cpu"], "--half chooses simulated kernels"),
        (ablation, ["--steps", "none"], "none is not a positive whole number"),
        (sweep, ["--pairs", "0"], "0 is not a positive whole number"),
        (sweep, ["--steps", "100"], "--steps (100) has to be more than --learning (200)"),
        (pairwise, ["--out", "/nowhere/a.json"], "there is no directory /nowhere"),
        (sweep, ["--out", "/"], "/ is a directory: name a file"),
    ],
)
def test_what_could_only_fail_at_the_end_is_refused_at_once(
    program: ModuleType, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.main(arguments)
    assert said in capsys.readouterr().err


def test_short_high_kernels_suffer_next_to_long_low_ones_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (pairwise.Kind(50e-6, "compute"), pairwise.Kind(2e-3, "memory"))
    monkeypatch.setattr(pairwise, "KINDS", kinds)
    out, picture = tmp_path / "p.json", tmp_path / "p.png"
    assert pairwise.main(["--steps", "4", "--out", str(out), "--png", str(picture)]) == 0
    report = json.loads(out.read_text())
    (short_short, short_long), (long_short, long_long) = report["throughput"]
    assert short_long < 0.5 < pairwise.SHAPE < long_short
    assert short_long < short_short <= long_short
    assert long_long > 0.8
    assert {"high": "50 us compute", "low": "2 ms memory", "value": short_long, "high_is_shorter": True} in report[
        "below"
    ]
    assert picture.read_bytes().startswith(PNG)


def test_intensity_matters_between_kernels_that_leave_half_of_the_room_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairwise, "KINDS", (pairwise.Kind(50e-6, "compute"), pairwise.Kind(2e-3, "memory")))
    out = tmp_path / "p.json"
    assert pairwise.main(["--half", "--steps", "4", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["half"]
    (both_compute, beside_memory), (beside_compute, both_memory) = report["throughput"]
    assert 0.45 < both_compute < 0.6, "they share one pipe"
    assert both_compute < both_memory < 0.65, "they share the bandwidth"
    assert both_memory < min(beside_memory, beside_compute) < 0.75


# ---- steps that come at random


@pytest.mark.extended
def test_what_random_arrivals_leave_of_the_promise_and_of_low_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    few = ["--kernels", "10", "--rates", "150", "--steps", "300", "--out", str(out)]
    assert arrivals.main(few) == 0
    report = json.loads(out.read_text())
    random, regular, paced = report["rows"]
    assert [(row["policy"], row["random"]) for row in report["rows"]] == [
        ("guarded", True),
        ("guarded", False),
        ("paced", True),
    ]
    assert random["mean_slowdown"] <= report["promise"]["mean"] < paced["mean_slowdown"]
    assert random["low"] < regular["low"] < 1 - 0.9 * 150 * random["step_s"]
    assert random["p99_slowdown"] <= 1.12, "of 300 steps the 99th percentile is the third longest"
    broken = sum(row["p99_slowdown"] > 1.10 for row in (random, regular))
    assert f"guarded breaks it in {broken} of these" in capsys.readouterr().out
    assert arrivals.main([*few, "--rates", "1e9"]) == 78
    assert "steps a second" in capsys.readouterr().err


# ---- the plan, the oracle and the sweep


def planned(plan: Plan, steps: int = 30) -> tuple[float, float, list[tuple[str, int, float, float]]]:
    """(mean slowdown, harvest, rows) of a plan for the two jobs above."""
    pieces = cut_workload(HIGH, A100), cut_workload(LOW, A100)
    core = Planned(plan, A100, *pieces, oracle.gap_seconds(replace(HIGH, name="alone"), A100))
    result = Simulation([HIGH, LOW], A100, scheduler=core, timeline=True).run(steps=steps, warmup_steps=5)
    rows = [(row.job, row.piece, row.started, row.ended) for row in result.timeline]
    return result.job("high").mean_slowdown, result.harvest, rows


ANYWHERE = {(j, p): 1.0 for j in range(20) for p in range(-1, 20)}


def test_a_plan_that_forbids_everything_uses_the_gaps_alone() -> None:
    slowdown, harvest, rows = planned(Plan({}))
    assert slowdown == pytest.approx(1.0, abs=0.01)
    gap = HIGH.think_s / (HIGH.think_s + solo(HIGH, A100).step_s)
    assert 0.3 * gap < harvest <= gap
    high = [row for row in rows if row[0] == "high"][10:]
    for _, _, started, ended in (row for row in rows[40:] if row[0] == "low"):
        overlap = sum(max(0.0, min(ended, e) - max(started, s)) for _, _, s, e in high)
        assert overlap < 0.05 * (ended - started) + 10e-6


def test_a_plan_that_allows_everything_harvests_more_and_costs_more() -> None:
    nothing, everything = planned(Plan({})), planned(Plan(ANYWHERE))
    assert everything[0] > nothing[0]
    assert everything[1] > nothing[1]


def test_launches_are_paid_from_the_credit_and_bounded_in_each_step() -> None:
    costs = {(j, p, 1.0): (100e-6, 0.0) for j, p in ANYWHERE}
    rich, poor = planned(Plan(ANYWHERE, costs)), planned(Plan(ANYWHERE, costs, credit=40e-6))
    assert poor[0] < rich[0]
    assert poor[1] < rich[1]
    bounded = planned(Plan(ANYWHERE, costs, step_limit=50e-6))
    assert bounded[1] == pytest.approx(planned(Plan({}))[1], rel=0.01)


@pytest.mark.extended
def test_the_oracle_keeps_the_promise_and_beats_the_gaps() -> None:
    found = oracle.Search(HIGH, LOW, A100).run()
    assert found.best.keeps
    assert oracle.keeps_promise(found.best.mean, found.best.p99, HIGH.max_slowdown)
    assert found.best.harvest >= planned(Plan({}), oracle.STEPS)[1] * 0.99
    everything = oracle.Search(HIGH, LOW, A100, shortcuts=False).run()
    assert (everything.best, everything.tried) == (found.best, found.tried)
    assert everything.simulated == everything.tried > found.simulated


@pytest.mark.extended
def test_more_slowdown_allowed_is_never_less_harvest() -> None:
    strict, loose = (oracle.Search(replace(HIGH, max_slowdown=x), LOW, A100).run().best for x in (1.02, 1.5))
    assert loose.harvest > strict.harvest


def test_the_promise_bounds_mean_and_tail() -> None:
    assert oracle.keeps_promise(1.05, 1.10, 1.05)
    assert not oracle.keeps_promise(1.051, 1.0, 1.05)
    assert not oracle.keeps_promise(1.0, 1.11, 1.05)


@pytest.mark.extended
def test_the_sweep_writes_a_list_that_repeats_however_many_processes_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--pairs", "2", "--steps", "30", "--learning", "10", "--seed", "3"]

    def written(name: str) -> list[dict[str, object]]:
        pairs: list[dict[str, object]] = json.loads((tmp_path / name).read_text())
        return [{k: v for k, v in pair.items() if k != "seconds"} for pair in pairs]

    alone = [*few, "--processes", "1", "--out", str(tmp_path / "a"), "--png", str(tmp_path / "s.png")]
    assert sweep.main(alone) == 0
    assert "while learning: mean slowdown" in capsys.readouterr().out
    # Worker processes bring a resource tracker that outlives the pool, which this process is not to keep.
    command = [sys.executable, "-m", "microbench.sweep", *few, "--processes", "2", "--out", str(tmp_path / "b")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=200, cwd=Path(__file__).parents[2])
    first = written("a")
    assert first == written("b")
    for pair in first:
        assert {"mean_slowdown", "p99_slowdown", "harvest_share", "learning_mean_slowdown"} <= pair.keys()
        assert pair["steps"] == 20
        assert pair["feasible"] == (pair["harvest_share"] is not None)
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)

    # What the oracle found is taken from an earlier run, if it was of the same pairs.
    monkeypatch.delattr(oracle.Search, "run")
    known = [*few, "--processes", "1", "--oracle", str(tmp_path / "a")]
    assert sweep.main([*known, "--out", str(tmp_path / "c")]) == 0
    assert first == written("c")
    for other in (["--seed", "4"], ["--max-slowdown", "1.1"], ["--gpu-model", "h200"]):
        with pytest.raises(ConfigError, match="is another one"):
            sweep.main([*known, *other])
    (tmp_path / "d").write_text('[{"pair": 0}]')
    with pytest.raises(ConfigError, match="is no result of a sweep"):
        sweep.main([*known, "--oracle", str(tmp_path / "d")])


def test_a_run_goes_on_until_enough_is_seen() -> None:
    simulation = Simulation([HIGH, LOW], A100)
    result = simulation.run(steps=50, warmup_steps=5, enough=lambda s: len(s.clients[0].step_seconds) >= 12)
    assert result.job("high").steps == 7


def test_a_sweep_tells_how_long_it_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    progress = sweep.Progress({3: 1.0, 4: 3.0, 5: 2.0})
    assert progress.longest_first == [4, 5, 3]
    progress.done(4)
    assert progress.left_s(30.0) == pytest.approx(30.0)
    progress.done(5)
    assert progress.left_s(50.0) == pytest.approx(10.0)
    progress.done(3)
    assert capsys.readouterr().err == "3 of 3 pairs\n"
    settings = (0, "a100", "guarded", 1.05, 30, 10)
    assert sweep.expected_work(10, settings) > sweep.expected_work(44, settings)  # 4 times the launches


def test_an_interrupted_sweep_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_pair(pair: int, *rest: object) -> dict[str, object]:
        if pair != first:
            raise KeyboardInterrupt
        return {"pair": pair, "feasible": False, "mean_slowdown": 1.0, "p99_slowdown": 1.0,
                "learning_mean_slowdown": 1.0, "seconds": {"policy": 1.0, "oracle": 2.0}}  # fmt: skip

    few = ["--pairs", "3", "--processes", "1", "--out", str(tmp_path / "out")]
    settings = (0, "a100", "guarded", 1.05, 2000, 200)
    first = sweep.Progress({pair: sweep.expected_work(pair, settings) for pair in range(3)}).longest_first[0]
    monkeypatch.setattr(sweep, "measure_pair", measure_pair)
    assert sweep.main(few) == 130
    assert [pair["pair"] for pair in json.loads((tmp_path / "out").read_text())] == [first]
    told = capsys.readouterr()
    assert "interrupted after 1 of 3 pairs" in told.err
    assert "1 s under the policy, 2 s for the oracle" in told.out


@pytest.mark.parametrize("calls", [100, 2000])  # in the policy's run, in the oracle's
def test_no_figures_come_of_an_interrupted_pair(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    advance, left = Gpu.advance_to_finish, calls

    def interrupted(gpu: Gpu, until: float) -> list[Finished]:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return advance(gpu, until)

    monkeypatch.setattr(Gpu, "advance_to_finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.measure_pair(44, (0, "a100", "guarded", 1.05, 30, 10))


def test_pairs_differ_and_follow_from_the_seed() -> None:
    assert sweep.random_pair(0, 1, A100, 1.05) == sweep.random_pair(0, 1, A100, 1.05)
    assert sweep.random_pair(0, 1, A100, 1.05) != sweep.random_pair(0, 2, A100, 1.05)
    assert sweep.random_pair(1, 1, A100, 1.05) != sweep.random_pair(0, 1, A100, 1.05)
    pairs = [sweep.random_pair(0, n, A100, 1.05) for n in range(60)]
    assert 10 < sum(high.think_s > 0 for high, _ in pairs) < 40
    assert 8 < sum(any(k.sensitivity > 1 for k in high.kernels) for high, _ in pairs) < 35
    assert all(10 <= len(job.kernels) <= 42 for pair in pairs for job in pair)


def test_the_summary_names_what_missed() -> None:
    pair = {"pair": 7, "feasible": True, "mean_slowdown": 1.06, "p99_slowdown": 1.2, "harvest_share": 0.5,
            "harvest": 0.1, "oracle_harvest": 0.2, "learning_mean_slowdown": 1.1}  # fmt: skip
    told = sweep.summary(
        [pair, {**pair, "pair": 8, "feasible": False, "harvest_share": None, "mean_slowdown": 1.0}], 1.05
    )
    assert "over it in 1 pairs (7)" in told
    assert "below it in 1 pairs (7)" in told
    assert "finds nothing in 1 pairs (8)" in told
