"""The experiments' own logic, against a driver without a device: what they call it calls by the right names, in an
order it accepts; each gives rows of equal keys, an answer and a file. What they find means nothing here."""

from __future__ import annotations

import ctypes
import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import microbench.cuda as experiments
from microbench.cuda import depth, driver, experiment, idle_contexts, rebuild, same_address
from tests.microbench.fake_driver import CYCLES_PER_S, SMS, FakeCompiler, FakeDriver, Status

HERE = ("launch_cost", "boundary_gaps", "priorities", "piece_delay", "completion", "copies", "idle_contexts", "green")
CHANGED = {"boundary_gaps": {"DEPTHS": (1, 2, 4)}, "completion": {"POLLS": 5}}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> driver.Gpu:
    monkeypatch.setattr(driver, "PRIMING_S", 0.0)
    return driver.Gpu(api=FakeDriver(), nvrtc=FakeCompiler())


def test_every_experiment_is_listed_with_its_question_and_needs_no_driver_to_be():
    found = {path.stem for path in Path(experiments.__path__[0]).glob("*.py")} - {
        "__init__",
        "driver",
        "experiment",
        "casts",  # asks a build of torch, and no card
        "operators",  # likewise
        "host_time",  # of Python: no answer of a card's
        "probe",
        "smoke",
        "smoke_driver",
        "smoke_torch",
        "smoke_triton",
    }
    assert found == set(experiments.NAMES)
    for name in experiments.NAMES:
        made = importlib.import_module(f"microbench.cuda.{name}").EXPERIMENT
        assert made.name == name
        assert made.question.endswith("?")
        assert made.method.endswith(".")


def test_a_gpu_is_calibrated(gpu: driver.Gpu):
    assert gpu.cycles_per_s == pytest.approx(CYCLES_PER_S)
    assert (gpu.name, gpu.sms, gpu.wave) == ("Fake GPU", SMS, 2 * SMS)
    stream = gpu.stream()
    assert gpu.timed(stream, lambda: gpu.full(stream, 1e-3, 4)) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", HERE)
def test_it_runs(
    name: str, gpu: driver.Gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    module = importlib.import_module(f"microbench.cuda.{name}")
    for key, value in CHANGED.get(name, {}).items():
        monkeypatch.setattr(module, key, value)
    monkeypatch.setattr(idle_contexts, "_client", lambda doing: nullcontext())
    out = tmp_path / "result.json"
    assert experiment.main(module.EXPERIMENT, ["--repeats", "2", "--out", str(out)], gpu=gpu) == 0
    report = json.loads(out.read_text())
    assert report["rows"]
    assert {tuple(row) for row in report["rows"]} == {tuple(report["rows"][0])}
    assert report["device"]["name"] == "Fake GPU"
    assert report["answer"]
    printed = capsys.readouterr().out
    assert report["question"] in printed
    assert printed.endswith(experiment.show(report["rows"]) + "\n")  # the table comes last


def test_queue_depth_is_measured_in_this_process(gpu: driver.Gpu):
    rows = depth.measure_here(gpu, 2)
    assert {row["low_streams"] for row in rows} == set(depth.STREAMS)
    assert depth.answer([{"connections": each, **row} for each in depth.CONNECTIONS for row in rows])


def test_without_green_contexts_it_says_so(monkeypatch: pytest.MonkeyPatch):
    from microbench.cuda import green

    monkeypatch.setattr(driver, "PRIMING_S", 0.0)
    gpu = driver.Gpu(api=FakeDriver(green=False), nvrtc=FakeCompiler())
    rows = green.measure(gpu, 1)
    confined = [row for row in rows if row["low_share"] < 1.0]
    assert all("CUDA_ERROR_NOT_SUPPORTED" in row["note"] for row in confined)
    assert "not measured" in green.answer(rows)


def test_same_address_tells_what_failed(gpu: driver.Gpu, monkeypatch: pytest.MonkeyPatch):
    class Mapped:
        """Memory that is never where it was asked for."""

        def __init__(self, gpu: driver.Gpu, hint: int, descriptor: int | None = None) -> None:
            self.address = hint + 4096

        def fill(self, word: int) -> None: ...

        def export(self) -> int:
            import os

            return os.open(os.devnull, os.O_RDONLY)

        def holds(self, word: int) -> bool:
            return True

        def release(self) -> None: ...

    monkeypatch.setattr(same_address, "Mapped", Mapped)
    monkeypatch.setattr(same_address, "_child", lambda role, hint, send: ("the client ended early", []))
    rows = same_address.measure(gpu, 1)
    assert len(rows) == 4 * len(same_address.HINTS)
    assert same_address.answer(rows) == "no: at none of the hints did all of it work"
    good = [row | {"ok": "yes"} for row in rows]
    assert same_address.answer(good).startswith(f"yes, at {len(same_address.HINTS)} of")


class Nodes(FakeDriver):
    """A graph of two kernels and a copy, with their arguments in memory, and one that is built from it."""

    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace
    SIZES = (8, 4)

    def __init__(self, *, unknown: bool = False) -> None:
        super().__init__()
        self.kinds = ["KERNEL", "KERNEL", "HOST" if unknown else "MEMCPY"]
        self.arguments = [(b"pointer" + bytes([i]), b"int" + bytes([i])) for i in range(2)]
        self.buffers = [[ctypes.create_string_buffer(each, len(each)) for each in of] for of in self.arguments]
        self.arrays = [(ctypes.c_void_p * 2)(*map(ctypes.addressof, of)) for of in self.buffers]
        self.added: list[Any] = []
        self.edges: list[tuple[int, int]] = []

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> Any:
        return 0, [10, 11, 12][:count], 3

    def cuGraphCreate(self, flags: int) -> Any:
        return 0, 99

    def cuGraphNodeGetType(self, node: int) -> Any:
        return 0, SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{self.kinds[node - 10]}")

    def cuGraphKernelNodeGetParams(self, node: int) -> Any:
        sizes = dict.fromkeys(("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"), 1)
        pointer = ctypes.addressof(self.arrays[node - 10])
        # One kernel is a function of a context, the other belongs to none.
        which = {"func": node, "kern": 0} if node == 10 else {"func": 0, "kern": node}
        return 0, SimpleNamespace(**sizes, sharedMemBytes=0, ctx=1, kernelParams=pointer, extra=0, **which)

    def cuFuncGetParamInfo(self, function: int, index: int) -> Any:
        if index == len(self.SIZES):
            return Status.CUDA_ERROR_INVALID_VALUE, None, None
        return 0, 8 * index, self.SIZES[index]

    cuKernelGetParamInfo = cuFuncGetParamInfo

    def cuGraphAddKernelNode(self, graph: int, after: list[int], count: int, twin: Any) -> Any:
        places = (ctypes.c_void_p * 2).from_address(twin.kernelParams)
        self.added.append(tuple(ctypes.string_at(places[i], size) for i, size in enumerate(self.SIZES)))
        return 0, 20 + len(self.added)

    def cuGraphKernelNodeCopyAttributes(self, to: int, source: int) -> Any:
        assert to == source + 11
        return (0,)

    def cuGraphMemcpyNodeGetParams(self, node: int) -> Any:
        return 0, "from here to there"

    def cuGraphAddMemcpyNode(self, graph: int, after: list[int], count: int, params: str, context: int) -> Any:
        self.added.append(params)
        return 0, 23

    def cuGraphGetEdges(self, graph: int, count: int = 0) -> Any:
        return 0, [10, 11], [11, 12], [None, None], 2

    def cuGraphAddDependencies(self, graph: int, begin: list[int], end: list[int], data: Any, count: int) -> Any:
        assert count == len(data) == 2
        self.edges = list(zip(begin, end, strict=True))
        return (0,)


def test_a_graph_is_rebuilt_with_its_arguments_and_edges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "PRIMING_S", 0.0)
    api = Nodes()
    made = rebuild.rebuild(driver.Gpu(api=api, nvrtc=FakeCompiler()), 5)
    assert api.added == [*api.arguments, "from here to there"]
    assert api.edges == [(21, 22), (22, 23)]
    assert dict(made.done) == {"KERNEL": 2, "MEMCPY": 1}
    assert made.argument_bytes == 2 * sum(api.SIZES)
    assert not made.failed


def test_a_node_that_can_not_be_rebuilt_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "PRIMING_S", 0.0)
    made = rebuild.rebuild(driver.Gpu(api=Nodes(unknown=True), nvrtc=FakeCompiler()), 5)
    assert dict(made.failed) == {"HOST": 1}
    assert "no parameters" in made.why["HOST"]
    assert rebuild.answer([{"model": "m", "equal": "no", "failed": "host: no"}]) == "not for all (m: host: no)"


def test_no_device_is_said_so_and_has_its_own_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from microbench.cuda import launch_cost

    monkeypatch.setattr(driver, "bindings", lambda module="driver": FakeDriver(devices=0))
    assert experiment.main(launch_cost.EXPERIMENT, []) == experiment.NO_DEVICE
    assert "has no device" in capsys.readouterr().err


def test_a_failed_call_names_itself(gpu: driver.Gpu):
    with pytest.raises(driver.DriverError, match="cuStreamCreateWithPriority failed: CUDA_ERROR_INVALID_VALUE"):
        gpu.stream(-9)


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]):
    from microbench.cuda import launch_cost

    with pytest.raises(SystemExit):
        experiment.main(launch_cost.EXPERIMENT, ["--repeats", "0"])
    assert "not a positive whole number" in capsys.readouterr().err
