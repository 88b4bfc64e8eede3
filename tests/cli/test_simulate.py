"""`gpumux simulate` from the outside: its output, pictures, errors and notes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumux import config
from gpumux.cli.main import EX_CONFIG, EX_USAGE, main
from gpumux.cli.text import ProgressLine
from gpumux.device.sim.spec import PRESETS, preset
from gpumux.program.profile import OpProfile, StepProfile, save
from gpumux.program.saved_plan import PlannedLayer, PlanNetwork, PlanRow, SavedPlan
from gpumux.program.saved_plan import save as save_plan
from gpumux.simulate.cluster import ClusterResult, ClusterSimulation
from gpumux.simulate.run import Simulation

FEW = ["--steps", "12", "--warmup", "3"]
PNG = b"\x89PNG"


@pytest.fixture
def measured(tmp_path: Path) -> str:
    """A profile recorded on a CPU, with a file name full of colons."""
    path = tmp_path / "a:b.json"
    ops = tuple(OpProfile("aten.mm.default", ((64, 64),) * 3, 80e-6, 49152, source="measured") for _ in range(6))
    save(StepProfile("mine", "some cpu", ops, {"torch": "2"}, "2026-01-02T03:04:05Z", 8), path)
    return str(path)


def test_a_pair_is_shown_in_a_table_with_what_it_rests_on(measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--high", f"{measured}:think=1ms", "--low", measured, "--policy", "paced", *FEW]) == 0
    out = capsys.readouterr().out
    assert "paced on a simulated a100" in out
    assert [line.split()[:3] for line in out.splitlines()[2:4]] == [
        ["mine", "high", "12"],
        ["mine-2", "low", out.splitlines()[3].split()[2]],
    ]
    assert (
        "mine: 6 operators (6 measured); how 6 of them fill a GPU is guessed; times are of some cpu, taken as they are"
        in out
    )


def test_the_scheduler_explains_itself_if_asked(measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ["--high", "transformer-b2:think=200us", "--low", measured, "--policy", "guarded", *FEW]
    assert main(["simulate", *jobs]) == 0
    assert "Job 'mine'" not in capsys.readouterr().out
    assert main(["simulate", *jobs, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "Job 'transformer-b2' (high)" in out
    assert "Job 'mine' (low)" in out


def test_all_policies_are_compared_and_drawn(measured: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.png"
    jobs = ["--high", "transformer-b2:rate=200", "--low", f"{measured}:weight=2,start=1ms"]
    assert main(["simulate", *jobs, "--policy", "all", *FEW, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.split("POLICY")[1].splitlines()[1 : 1 + len(config.POLICIES)]] == [
        *config.POLICIES
    ]
    assert picture.read_bytes().startswith(PNG)


def test_json_has_the_same_figures(measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", "--high", measured, "--max-slowdown", "1.05", "--seconds", "0.05", "--warmup", "0", "--json"])
        == 0
    )
    body = json.loads(capsys.readouterr().out)
    (result,) = body["results"]
    (job,) = result["jobs"]
    assert result["simulated_s"] == pytest.approx(0.05)
    assert job["mean_slowdown"] == pytest.approx(1.0, rel=0.01)
    assert job["steps"] > 50
    assert len(body["notes"]) == 2


def test_an_interrupted_run_prints_what_is_known(
    measured: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_window = Simulation._begin_window

    def interrupted(self: Simulation) -> None:
        begin_window(self)
        self.at(self.now + 3e-3, _interrupt)

    monkeypatch.setattr(Simulation, "_begin_window", interrupted)
    assert main(["simulate", "--high", measured, "--policy", "all", "--steps", "500", "--warmup", "3"]) == 130
    out = capsys.readouterr().out
    assert "interrupted: this is what is known" in out
    assert "streams on a simulated" not in out


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_progress_of_a_long_run_is_shown_on_stderr(
    measured: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumux.cli.text.QUIET_S", 0.0)
    assert main(["simulate", "--high", measured, "--steps", "300", "--warmup", "0", "--policy", "fifo"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told
    assert all(line.startswith("gpumux: fifo: ") and line.endswith(" of 300 steps") for line in told)


def test_a_line_of_progress_is_overwritten_on_a_terminal_and_rare_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("gpumux.cli.text.time.monotonic", lambda: clock[0])
    for terminal, said in ((False, "gpumux: 20\ngpumux: 40\n"), (True, "\rgpumux: 1\x1b[K\rgpumux: 2\x1b[K")):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        line = ProgressLine()
        for number in range(1, 51):
            clock[0] += 0.5
            line.say(f"{number}")
        found = capsys.readouterr().err
        assert found.startswith(said)
        assert terminal or found == said
        line.end()
        assert capsys.readouterr().err == ("\n" if terminal else "")
        line.begin("what takes long")
        assert capsys.readouterr().err == ("\rgpumux: what takes long\x1b[K" if terminal else "")


@pytest.mark.parametrize("model", config.SIMULATED_GPUS)
def test_every_constant_of_a_device_is_shown_with_its_source(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--show-device", "--gpu-model", model]) == 0
    out = capsys.readouterr().out
    spec = preset(model)
    for name, _, bounds, source in spec.constants():
        assert f"\n{name} " in out
        assert source in out
        assert source.startswith("guess") == (bounds is not None)
    gap = "1.3e-06" if model.startswith("h") else "5e-07  (5e-07 to 1.3e-06)"
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert f"node_gap_s {' '.join(gap.split())}" in shown
    assert f"launch_queue {'shared' if '+' in model else 'stream'}" in shown
    assert main(["simulate", "--show-device", "--gpu-model", model, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sms"] == {"value": spec.sms, "range": None, "source": spec.sources["sms"]}
    assert said["completion_s"]["range"] == [1e-6, 20e-6]


def test_shipped_profiles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--profiles"]) == 0
    assert "vgg16-b4-ddp" in capsys.readouterr().out
    assert main(["simulate", "--profiles", "--json"]) == 0
    assert {"name", "seconds", "operators", "note"} == set(json.loads(capsys.readouterr().out)[0])


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([], "no jobs to simulate"),
        (["--high", "nobody"], "neither a file nor a shipped profile"),
        (["--high", "transformer-b2:colour=1"], "unknown option 'colour'"),
        (["--high", "transformer-b2:think=soon"], "no number"),
        (["--high", "transformer-b2:rate=-1"], "steps a second"),
        (["--high", "transformer-b2:rate=1e12"], "submits 1e+12 steps a second"),
        (["--high", "transformer-b2:rate=1e-9"], "steps a second"),
        (["--high", "transformer-b2:start=1e9"], "from 1e+09 s on"),
        (["--high", "transformer-b2:think=inf"], "thinks for inf s"),
        (["--high", "transformer-b2:start=nan"], "from nan s on"),
        (["--high", "transformer-b2:weight=0"], "weight is 0.0"),
        (["--low", "transformer-b2:weight=nan"], "weight is nan"),
        (["--high", __file__], "not JSON"),
    ],
)
def test_what_can_not_be_simulated_is_refused_with_a_remedy(
    jobs: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *jobs, *FEW]) == EX_CONFIG
    first, remedy = capsys.readouterr().err.splitlines()
    assert says in first
    assert remedy.strip()


def test_no_steps_are_none_to_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--high", "transformer-b2", "--steps", "0"]) != 0
    assert "0 is not a positive whole number" in capsys.readouterr().err


def test_a_profile_with_figures_beyond_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    op = OpProfile("aten.mm.default", ((8, 8),) * 3, 1e-3, 0, source="measured")
    save(StepProfile("n" * 300, "a100", (op,)), path)
    assert main(["simulate", "--high", str(path), *FEW]) == EX_CONFIG
    assert "300 characters" in capsys.readouterr().err
    save(StepProfile("long", "a100", (op,)), path)
    path.write_text(path.read_text().replace('"seconds": 0.001', '"seconds": 1e300'))
    assert main(["simulate", "--high", str(path), *FEW]) == EX_CONFIG
    assert "1e+300 seconds" in capsys.readouterr().err


def test_names_from_files_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    op = OpProfile("aten.mm\x1b[31m.default", ((8, 8),) * 3, 1e-3, 0, source="measured")
    save(StepProfile("red\x1b[31m\n", "cpu\x1b[0m", (op,)), path)
    assert main(["simulate", "--high", str(path), "--explain", *FEW]) == 0
    out = capsys.readouterr().out
    assert "red?[31m?" in out
    assert "\x1b" not in out


def test_figures_without_a_window_are_said_to_be_missing(measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--high", measured, "--seconds", "0.001"]) == 0
    assert "it ended within the warm-up" in capsys.readouterr().out
    assert main(["simulate", "--high", measured, *FEW]) == 0
    assert "it ended within" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag", [["--policy", "x"], ["--steps", "-1"], ["--max-slowdown", "0.5"], ["--gpu-model", "z"]]
)
def test_wrong_flags_are_wrong_usage(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flag]) == EX_USAGE
    assert "error:" in capsys.readouterr().err


def test_a_picture_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\nfrom gpumux.cli.main import main\nsys.exit(main(['simulate',"
        f" '--high', 'transformer-b2', '--steps', '2', '--plot', {str(tmp_path / 'x.png')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == EX_CONFIG
    assert "pip install matplotlib" in done.stderr


def test_a_picture_that_can_not_be_written_is_an_error(
    measured: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object, **kwargs: object) -> None:
        raise AssertionError("it is found before anything runs")

    monkeypatch.setattr(Simulation, "run", run)
    for path in (tmp_path / "no" / "x.png", tmp_path):
        assert main(["simulate", "--high", measured, *FEW, "--plot", str(path)]) == EX_CONFIG
        assert f"can't write {path}: " in capsys.readouterr().err


def test_nothing_is_drawn_or_loaded_that_was_not_asked_for(measured: str) -> None:
    code = (
        "import sys\n"
        "from gpumux.cli.main import main\n"
        f"code = main(['simulate', '--high', {measured!r}, '--steps', '3', '--warmup', '0', '--json'])\n"
        "assert code == 0 and not {'torch', 'matplotlib', 'numpy', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=120)


def test_the_gpu_models_the_command_line_knows_are_the_real_ones() -> None:
    assert set(config.GPU_MODELS) == set(PRESETS)
    assert {preset(name).name for name in config.SIMULATED_GPUS} == set(config.SIMULATED_GPUS)


# ---- a plan


@pytest.fixture
def planned(tmp_path: Path) -> str:
    """Two layers on two GPUs, the second on one of them."""
    layers = (PlannedLayer("a\x1b", "Linear", 1 << 20, 1 << 20, 0.5), PlannedLayer("b", "Linear", 8, 0, 0.25))
    both = PlanRow(0, 0.0, 0.0, 1e-3, 0.5e-3, 0, 2)
    rows = (both, PlanRow(1, 1.5e-3, 0.5e-3, 1.5e-3, 0.0, 0, 1, after=(0,)))
    wide = (both, PlanRow(1, 1.5e-3, 0.0, 2e-3, 0.0, 0, 2, after=(0,)))
    made = SavedPlan(
        "net", "a100", "optimal", 2, 4, 2.0, PlanNetwork("n", 1e9, 1e-5), 3.5e-3, 4e-3, layers, rows, (wide,)
    )
    save_plan(made, tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_a_plan_is_compared_drawn_and_traced(
    planned: str, measured: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, traced = tmp_path / "gpus.png", tmp_path / "gpus.json"
    jobs = ["--plan", planned, "--low", f"{measured}:weight=2", "--low", measured, "--policy", "all"]
    assert main(["simulate", *jobs, *FEW, "--plot", str(picture), "--trace", str(traced)]) == 0
    out = capsys.readouterr().out
    assert "net on 2 GPUs, global batch 4, planned at 3.500 ms an iteration (optimal)" in out
    cases = [line.split("  ")[0] for line in out.splitlines()[2:9]]
    assert cases == ["data parallel", "plan", *(f"plan, {policy}" for policy in config.POLICIES), "2 of 2 GPUs"]
    assert picture.read_bytes().startswith(PNG)
    trace = json.loads(traced.read_text())
    groups = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert groups == [f"plan, {policy}: GPU {gpu}" for policy in config.POLICIES for gpu in (0, 1)]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"comp", "sync", "comm", "low"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {named[event["pid"], event["tid"]] for event in spans} == {"plan (high)", "mine (low)", "mine-2 (low)"}


def test_a_compared_plan_as_json(planned: str, measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--plan", planned, "--low", measured, "--policy", "paced", "--explain", "--json", *FEW]
    assert main(["simulate", *asked]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["planned_s"] == 3.5e-3
    cases = {case["case"]: case for case in told["results"]}
    assert cases["plan"]["slowdown"] == 1.0
    assert cases["plan, paced"]["iterations"] == 12
    assert len(cases["plan, paced"]["low"]) == 2
    assert cases["plan, paced"]["samples_per_s"] > cases["plan"]["samples_per_s"]
    assert set(told["explanations"]["plan, paced"]) == {f"GPU {g}, {job}" for g in (0, 1) for job in ("plan", "mine")}


def test_a_plan_alone_is_simulated_without_low_work(planned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--plan", planned]) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()[2:4]] == ["data parallel", "plan"]
    assert "name some with --low" not in out
    assert main(["simulate", "--plan", planned, "--policy", "all"]) == 0
    assert "name some with --low" in capsys.readouterr().out


@pytest.mark.parametrize(("when", "shown"), [(1e-3, "-"), (0.04, "ms")])
def test_an_interrupted_comparison_prints_what_is_known(
    when: float, shown: str, planned: str, measured: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    run = ClusterSimulation.run

    def interrupted(self: ClusterSimulation, *args: Any, **rest: Any) -> ClusterResult:
        if self.low[0]:
            self.daemons[0].push(when, lambda _: _interrupt(), None)
        return run(self, *args, **rest)

    monkeypatch.setattr(ClusterSimulation, "run", interrupted)
    asked = ["simulate", "--plan", planned, "--low", measured, "--policy", "all", "--steps", "500", "--warmup", "3"]
    assert main(asked) == 130
    out = capsys.readouterr().out
    assert "interrupted: this is what is known" in out
    assert shown in out.split("plan, fifo")[1].splitlines()[0].split()
    assert "plan, streams" not in out


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--plan", "PLAN", "--high", "vgg16-b4"], "--high with --plan"),
        (["--plan", "PLAN", "--plot", "x.png"], "a picture of a plan alone"),
        (["--plan", "nowhere.json"], "can't read nowhere.json"),
        (["--high", "vgg16-b4", "--trace", "x.json"], "--trace without --plan"),
        (["--plan", "PLAN", "--low", "vgg16-b4", "--trace", "nowhere/x.json"], "can't write nowhere/x.json"),
    ],
)
def test_plans_that_can_not_be_simulated_are_refused(
    asked: list[str], says: str, planned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *(planned if each == "PLAN" else each for each in asked)]) != 0
    assert says in capsys.readouterr().err
