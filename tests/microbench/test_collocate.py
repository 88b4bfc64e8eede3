"""Collocation: what is measured in which order, what is kept and merged, what the table says; and the processes that
run the jobs, at their tiny sizes on the CPU. How fast anything is means nothing here."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumux.errors import ConfigError
from microbench import (
    ablation,
    ablation_cuda,
    collocate,
    common,
    jobs,
    overhead,
    overhead_cuda,
    pairwise,
    pairwise_cuda,
    predicted,
    ways,
    worker,
)
from microbench.collocate import Book, Item, Where
from microbench.cuda import probe

HERE = Where("cpu", "tiny", "a processor")
PAIR = ("resnet50:train", "vgg16:train")
REQUESTS = ("bert_base:infer", "resnet50:train")


def figures(median: float, rate: float) -> dict[str, Any]:
    return {"median_s": median, "p99_s": 2 * median, "rate": rate, "steps": 10}


def solo(median: float, rate: float, **more: Any) -> dict[str, Any]:
    return {"high": figures(median, rate), "when": "2026-01-01", **more}


# ---- the plan


def test_jobs_alone_come_before_the_first_pair_that_needs_them():
    items = list(collocate.plan(collocate.PAIRS, ways.PAIRED, "cuda"))
    assert len(items) == len(set(items))
    for place, item in enumerate(items):
        for job in filter(None, (item.high, item.low)):
            assert items.index(Item(ways.SOLO, job)) <= place
    assert items[0] == Item(ways.SOLO, "resnet50:train")


def test_what_processes_do_is_measured_for_the_first_pairs_only():
    of = [item for item in collocate.plan(collocate.PAIRS, ways.PAIRED, "cuda") if item.way == ways.SLICES]
    assert [(item.high, item.low) for item in of] == list(collocate.PAIRS[: collocate.PLAIN_PAIRS])


def test_the_cpu_has_no_streams_and_no_mps():
    found = {item.way for item in collocate.plan([PAIR], ways.PAIRED, "cpu")}
    assert found == {ways.SOLO, ways.ALONE, ways.SLICES, *ways.GPUMUX}


def test_mps_is_left_out_where_its_daemon_is_not(monkeypatch: pytest.MonkeyPatch):
    for there in (None, "/usr/bin/it"):
        monkeypatch.setattr(ways.shutil, "which", lambda name: there)
        found = {item.way for item in collocate.plan([PAIR], ways.PAIRED, "cuda")}
        assert (ways.MPS in found) == bool(there)


# ---- the book


def test_a_run_is_kept_and_found_again(tmp_path: Path):
    book, item = Book(HERE), Item(ways.SOLO, PAIR[0])
    book.add(item, solo(0.1, 10.0))
    book.save(tmp_path / "c.json")
    assert Book.load(tmp_path / "c.json").good(item) == [solo(0.1, 10.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_a_success_replaces_a_failure_and_not_the_other_way_round():
    book, item = Book(HERE), Item(ways.SOLO, PAIR[0])
    book.add(item, {"error": "no memory"})
    assert book.error(item) == "no memory"
    book.add(item, solo(0.1, 10.0))
    assert book.error(item) == ""
    book.add(item, {"error": "again"})
    assert book.error(item) == ""
    assert len(book.good(item)) == 1


def test_books_merge_without_repeating_what_both_have():
    first, second = Book(HERE), Book(HERE)
    item, other = Item(ways.SOLO, PAIR[0]), Item(ways.SOLO, PAIR[1])
    first.add(item, solo(0.1, 10.0))
    first.add(other, {"error": "lost"})
    second.add(item, solo(0.1, 10.0))
    second.add(item, solo(0.3, 8.0) | {"when": "2025-01-01"})
    second.add(other, solo(0.2, 5.0))
    for _ in range(2):
        first.merge(second)
    assert [run["high"]["rate"] for run in first.good(item)] == [8.0, 10.0]  # oldest first
    assert first.good(other) == [solo(0.2, 5.0)]


def test_other_devices_figures_do_not_mix():
    with pytest.raises(ConfigError, match="do not go into one table"):
        Book(HERE).merge(Book(Where("cuda", "full", "a GPU")))


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "rtt"}'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no file of this benchmark"):
        Book.load(path)


# ---- measuring, without a device


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Item]:
    """What was asked for; time slicing fails."""
    asked: list[Item] = []

    def measure(book: Book, item: Item, setting: ways.Setting) -> dict[str, Any]:
        asked.append(item)
        if item.way == ways.SLICES:
            raise worker.WorkerFailed("out of memory")
        found = {"high": figures(0.1, 10.0), "low": figures(0.2, 4.0)}
        return found if item.low else solo(0.1, 10.0)

    monkeypatch.setattr(collocate, "measure", measure)
    return asked


def run(*argv: str) -> int:
    return collocate.main(["--device", "cpu", "--pairs", "resnet50:train+vgg16:train", *argv])


def test_a_run_goes_on_where_it_was(measured: list[Item], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = str(tmp_path / "c.json")
    assert run("--out", out) == collocate.FAILED
    first = len(measured)
    assert first == 4 + len(ways.GPUMUX)
    assert "failed: out of memory" in capsys.readouterr().out
    assert run("--out", out) == collocate.FAILED
    assert [item.way for item in measured[first:]] == [ways.SLICES]  # only what failed
    assert run("--out", out, "--repeats", "2", "--ways", "gpumux guarded") == 0
    assert len(measured) == first + 1 + 4
    table = capsys.readouterr().out.split("high median")[-1]
    assert "gpumux guarded" in table


def test_it_begins_nothing_that_would_take_too_long(
    measured: list[Item], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--out", str(tmp_path / "c.json"), "--limit", "1") == collocate.OVER
    assert measured == []
    assert "measurements are left for the next run" in capsys.readouterr().err


def test_showing_measures_nothing_and_writes_the_merged_file(measured: list[Item], tmp_path: Path):
    one, two, both = (tmp_path / f"{name}.json" for name in ("one", "two", "both"))
    for path in (one, two):
        run("--out", str(path), "--ways", "gpumux guarded")
    before = len(measured)
    assert run("--show", "--merge", str(one), str(two), "--out", str(both)) == 0
    assert len(measured) == before
    assert all(1 <= len(runs) <= 2 for runs in json.loads(both.read_text())["runs"].values())


def test_ways_that_there_are_not_are_named_with_the_reason(
    measured: list[Item], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    out, later = tmp_path / "c.json", tmp_path / "later.json"
    monkeypatch.setattr(ways, "unavailable", lambda way, device: "its daemon is not there" if way == ways.MPS else "")
    run("--out", str(out), "--ways", ways.MPS, "gpumux guarded")
    assert f"{ways.MPS}: not measured: its daemon is not there" in capsys.readouterr().out
    assert json.loads(out.read_text())["missing"] == {ways.MPS: "its daemon is not there"}
    run("--show", "--merge", str(out), "--out", str(later))  # it goes with the figures
    assert "not measured" in capsys.readouterr().out
    assert collocate.Book.load(later).unmeasured() == {ways.MPS: "its daemon is not there"}
    book = collocate.Book.load(later)
    book.add(Item(ways.MPS, *PAIR), {"high": figures(0.1, 10.0)})
    assert book.unmeasured() == {}  # another machine had it


def test_bad_pairs_are_refused(capsys: pytest.CaptureFixture[str]):
    assert collocate.main(["--list", "--pairs", "resnet50:train"]) == 78
    assert "is no pair" in capsys.readouterr().err
    assert collocate.main(["--list", "--pairs", "a:train+b:infer"]) == 0
    assert "solo | a:train" in capsys.readouterr().out


def test_requests_come_as_often_as_the_first_solo_run_says():
    book = Book(HERE)
    with pytest.raises(worker.WorkerFailed, match="nobody knows how many requests"):
        collocate._rate(book, REQUESTS[0])
    book.add(Item(ways.SOLO, REQUESTS[0]), solo(0.1, 5.0, asked_per_s=5.0))
    assert collocate._rate(book, REQUESTS[0]) == 5.0
    assert collocate._rate(book, REQUESTS[1]) is None


# ---- the table


def test_rows_are_over_solo_and_targets_over_all_pairs():
    book = Book(Where("cuda", "full", "a GPU"))
    book.add(Item(ways.SOLO, PAIR[0]), solo(0.10, 10.0))
    book.add(Item(ways.SOLO, PAIR[1]), solo(0.20, 5.0))
    book.add(Item("gpumux guarded", *PAIR), {"high": figures(0.12, 9.0), "low": figures(0.4, 2.5)})
    book.add(Item("gpumux paced", *PAIR), {"error": "it crashed"})
    found = {row["way"]: row for row in collocate.rows(book, [PAIR])}
    row = found["gpumux guarded"]
    assert row["high_median"] == pytest.approx(1.2)
    assert row["high_p99"] == pytest.approx(1.2)
    assert (row["high_rate"], row["low_rate"], row["total"]) == pytest.approx((0.9, 0.5, 1.4))
    assert "it crashed" in collocate.show(list(found.values()))
    targets = collocate.targets(list(found.values()))
    assert {name: target["met"] for name, target in targets.items()} == {
        "high median over solo, worst pair": False,
        "high p99 over solo, mean": False,
        "high p99 over solo, worst pair": False,
        "total throughput, mean": False,
    }


def test_a_pair_without_its_solo_says_so():
    book = Book(HERE)
    book.add(Item("gpumux guarded", *PAIR), {"high": figures(0.11, 9.0), "low": figures(0.4, 2.5)})
    (row,) = collocate.rows(book, [PAIR])
    assert row["error"] == "no solo run to compare with"
    assert collocate.targets([row]) == {}


# ---- what runs the jobs


class Clockwork:
    """An engine whose steps end at once; counts them."""

    def __init__(self) -> None:
        self.begun = self.ended = self.most = 0

    def start(self, index: int) -> Any:
        assert index == self.begun
        self.begun += 1
        self.most = max(self.most, self.begun - self.ended)

        def wait() -> None:
            self.ended += 1

        return wait

    def close(self) -> None: ...


def ticking() -> worker.Clock:
    """A clock that advances by a millisecond with each look."""
    looks = itertools.count()
    return worker.Clock(lambda: next(looks) * 1e-3, lambda seconds: None)


def test_a_closed_loop_keeps_two_steps_asked_for_and_waits_for_all():
    engine = Clockwork()
    times = worker.closed(engine, 0.0095, 0.0295, ticking())
    assert times == pytest.approx([1e-3] * 20)  # those that ended in the window
    assert engine.begun == engine.ended == 31
    assert engine.most == worker.INFLIGHT


def test_requests_arrive_at_random_and_alike():
    first, second = Clockwork(), Clockwork()
    times = worker.arriving(first, 0.1, 1.0, 100.0, ticking())
    assert times == worker.arriving(second, 0.1, 1.0, 100.0, ticking())
    assert first.most == 1
    assert 60 < len(times) < first.begun < 140
    assert len(set(times)) > 50
    assert all(each > 0 for each in times)


def test_no_step_in_the_window_is_a_failure():
    with pytest.raises(worker.WorkerFailed, match="no step ended"):
        worker.stats([], 1.0)
    assert worker.stats([0.1, 0.2, 0.3], 2.0) == worker.Stats(0.2, 0.3, 1.5, 3)


def test_an_error_in_one_of_several_jobs_is_told():
    class Broken(Clockwork):
        def start(self, index: int) -> Any:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        worker.run_all([Clockwork(), Broken()], 0.0, 1.0, [None, None], ticking())
    found = worker.run_all([Clockwork(), Clockwork()], 0.0, 1.0, [None, 100.0], ticking())
    assert [each["steps"] > 0 for each in found] == [True, True]


@pytest.mark.parametrize("name", [name for name in jobs.names() if not name.startswith("vgg16-")])
def test_every_job_steps_at_its_tiny_size(name: str):
    built = jobs.build(name, "tiny")
    first, second = (built.step(*built.batch(index)) for index in range(2))
    assert bool((first != second).any())
    assert (built.optimizer is None) == ways.is_request(name)
    assert built.batch(0) is built.batch(jobs.BATCHES)


def test_full_sizes_are_the_published_models():
    with torch.device("meta"):
        for name, millions in (
            ("resnet50", 25.6),
            ("vgg16", 138.4),
            ("inception_v3", 23.8),
            ("wide_resnet101_2", 126.9),
        ):
            model = jobs.RECIPES[name].full()
            assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_an_unknown_job_is_refused():
    for name in ("resnet50", "resnet51:train", "resnet50:dream"):
        with pytest.raises(ConfigError, match="no job is called"):
            jobs.build(name, "tiny")


@pytest.mark.extended
@pytest.mark.slow
def test_a_worker_runs_what_it_is_asked_and_tells_what_it_can_not():
    with worker.Worker([worker.Task("resnet50:train", "eager", "tiny", "cpu")]) as one:
        one.answer()
        found = None
        for seconds in (0.5, 2.0, 8.0):  # a busy machine may take long to begin
            now = time.monotonic()
            one.run(now, now + seconds, [None])
            try:
                (found,) = one.answer()
                break
            except worker.WorkerFailed:
                continue
        assert found is not None
        assert found["steps"] > 0
        one.run(now - 2.0, now - 1.0, [None])
        with pytest.raises(worker.WorkerFailed, match="no step ended"):
            one.answer()
        one.open([worker.Task("resnet51:train", "eager", "tiny", "cpu")])
        with pytest.raises(worker.WorkerFailed, match="no job is called"):
            one.answer()
        one._process.kill()
        with pytest.raises(worker.WorkerFailed, match="ended with status"):
            one.answer()
        one.close()


class InProcess:
    """What a Worker does, done here and now."""

    def __init__(self, tasks: Sequence[worker.Task]) -> None:
        self._engines = [worker.open_engine(task) for task in tasks]
        self._found: Any = None

    def run(self, begin: float, end: float, rates: Sequence[float | None]) -> None:
        self._found = worker.run_all(self._engines, begin, end, rates)

    def answer(self) -> Any:
        return self._found

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        for engine in self._engines:
            engine.close()


@pytest.mark.slow
@pytest.mark.extended
def test_a_plain_loop_and_a_daemon_take_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overhead_cuda, "Worker", InProcess)
    threads = torch.get_num_threads()
    setting = ways.Setting("cpu", "tiny", 1.0, 0.05)
    try:
        measured = overhead_cuda.measure(setting, ["gpt2:infer"], 1, "paced")
    finally:
        torch.set_num_threads(threads)
    (requests,) = measured.values()
    plain, ours = (requests[f"{name}_median_s"].median for name in ("plain", "gpumux"))
    assert requests["added_s"].median == ours - plain
    (target,) = overhead_cuda.targets(measured).values()
    assert target["met"] == (ours - plain <= overhead_cuda.ADDED_S)
    assert "gpt2:infer" in overhead_cuda.show(measured)


def test_a_job_that_can_not_be_measured_is_told_and_the_others_go_on_in_a_daemon_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rates = {
        name: common.figure([value]) for name, value in (("plain_rate", 50.0), ("gpumux_rate", 49.5), ("ratio", 0.99))
    }
    daemons = iter(range(9))
    saved: list[list[str]] = []

    def compare(setting: ways.Setting, job: str, endpoint: str, repeats: int) -> dict[str, Any]:
        if job == "gpt2:train":
            raise worker.WorkerFailed("out of memory")
        return {**rates, "daemon": endpoint}

    monkeypatch.setattr(overhead_cuda, "_compare", compare)
    monkeypatch.setattr(
        overhead_cuda, "running_daemon", lambda **_: nullcontext(SimpleNamespace(endpoint=f"daemon {next(daemons)}"))
    )
    jobs = ["vgg16:train", "gpt2:train", "resnet50:train"]
    found = overhead_cuda.main(1, "guarded", jobs, lambda told: saved.append(list(told["jobs"])))
    assert saved == [jobs[:1], jobs[:2], jobs], "what there is is saved after each"
    assert found["jobs"]["gpt2:train"] == {"error": "out of memory"}
    assert [found["jobs"][job]["daemon"] for job in (jobs[0], jobs[2])] == ["daemon 0", "daemon 1"]
    assert found["targets"]["gpt2:train, measured"]["met"] is False
    assert "failed: out of memory" in capsys.readouterr().out


def test_jobs_of_the_overhead_are_named_by_what_they_do(capsys: pytest.CaptureFixture[str]):
    assert overhead.main(["--device", "cuda", "--jobs", "resnet50"]) == 64
    assert "'resnet50' is no job" in capsys.readouterr().err


def test_short_training_steps_have_no_target():
    def trained(rate: float) -> dict[str, Any]:
        rates = {"plain_rate": rate, "gpumux_rate": 0.97 * rate, "ratio": 0.97}
        return {name: common.figure([value]) for name, value in rates.items()}

    measured = {"long": trained(50.0), "short": trained(500.0)}
    assert overhead_cuda.targets(measured) == {"long, of the plain rate": {"value": 0.97, "target": 0.98, "met": False}}
    assert "20.000" in overhead_cuda.show(measured)


# ---- the ablation, the pairs, and the simulator beside them


def test_the_ablation_counts_the_low_job_in_images():
    alone = {ablation_cuda.HIGH: figures(0.01, 100.0), ablation_cuda.LOW: figures(0.02, 50.0)}
    found = {"high": figures(0.0125, 80.0), "low": figures(0.04, 25.0)}
    large, small = (ablation_cuda.row("a row", found, alone, batch) for batch in (16, 4))
    assert (large.high, large.low) == pytest.approx((0.8, 0.5))
    assert small.low == pytest.approx(0.125)
    assert large.images == pytest.approx(0.8 + 25 * 16 / 400)
    assert large.mean_slowdown == pytest.approx(1.25)
    assert large.p99_slowdown == pytest.approx(2.5)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find", lambda: probe.Found("NVIDIA H200", "2.11.0"))


@pytest.mark.extended
@pytest.mark.usefixtures("h200")
def test_the_ablation_on_a_gpu_stands_beside_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[tuple[str, str]] = []

    def together(setting: ways.Setting, way: str, high: str, low: str, rates: Any, after: Any) -> dict[str, Any]:
        asked.append((way, low))
        if way in ways.GPUMUX:
            after("ipc://nowhere")
        return {"high": figures(0.0125, 80.0), "low": figures(0.04, 25.0)}

    monkeypatch.setattr(ways, "solo", lambda setting, job: solo(0.01, 100.0))
    monkeypatch.setattr(ways, "together", together)
    monkeypatch.setattr(ablation_cuda, "_eager", lambda setting: figures(0.02, 50.0))
    monkeypatch.setattr(ablation_cuda, "_profile", lambda endpoint, name: "")
    out = tmp_path / "ablation.json"
    assert ablation.main(["--device", "cuda", "--steps", "10", "--warmup", "5", "--out", str(out)]) == 0
    assert asked == [(way, low) for _, way, low in ablation_cuda.WAYS]
    report = json.loads(out.read_text())
    assert [row["label"] for row in report["rows"]] == list(ablation.ROWS)
    assert [row["label"] for row in report["compared"]["rows"]] == list(ablation.ROWS)
    assert report["rows"][0]["high"] == 0.5
    assert "the prediction is for h200, from profiles modelled" in capsys.readouterr().out


@pytest.mark.usefixtures("h200")
def test_pairs_on_a_gpu_are_over_alone_and_stand_beside_their_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    kinds = tuple(pairwise.Kind(seconds, "compute") for seconds in (200e-6, 1e-3))
    running: list[tuple[str, int]] = []

    class Held:
        """Ten steps a second for each high job, eight beside the second low one."""

        def __init__(self, tasks: Sequence[worker.Task]) -> None:
            self.priority = tasks[0].priority
            assert [task.job for task in tasks] == ["first", "second"]

        def run(self, begin: float, end: float, rates: Sequence[float | None], which: Sequence[int]) -> None:
            running.append((self.priority, which[0]))

        def answer(self) -> Any:
            rate = 8.0 if ("low", 1) in running[-1:] and len(running) > 6 else 10.0
            return [{"rate": rate}]

        def __enter__(self) -> Held:
            return self

        def __exit__(self, *exc: object) -> None: ...

    monkeypatch.setattr(pairwise, "KINDS", kinds)
    monkeypatch.setattr(pairwise_cuda, "calibrated", lambda device, kinds: ["first", "second"])
    monkeypatch.setattr(pairwise_cuda, "running_daemon", lambda **k: nullcontext(SimpleNamespace(endpoint="")))
    monkeypatch.setattr(pairwise_cuda, "Worker", Held)
    out = tmp_path / "pairwise.json"
    assert pairwise.main(["--device", "cuda", "--steps", "3", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["throughput"] == [[1.0, 0.8], [1.0, 0.8]]
    assert running[6:] == [(who, place) for h in (0, 1) for low in (0, 1) for who, place in (("high", h), ("low", low))]
    assert len(report["compared"]["pairs"]) == 4
    assert "measured less predicted" in capsys.readouterr().out


@pytest.mark.usefixtures("h200")
def test_overhead_on_a_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rates = {
        name: common.figure([value]) for name, value in (("plain_rate", 50.0), ("gpumux_rate", 49.5), ("ratio", 0.99))
    }
    monkeypatch.setattr(overhead_cuda, "measure", lambda *given: {"resnet50:train": rates})
    out = tmp_path / "overhead.json"
    assert overhead.main(["--device", "cuda", "--repeats", "1", "--out", str(out)]) == 0
    (target,) = json.loads(out.read_text())["targets"].values()
    assert target == {"value": 0.99, "target": 0.98, "met": True}


def test_only_rows_that_both_have_are_compared():
    measured = [{"label": "graphs", "high": 1.0, "low": 0.0}, {"label": "ours", "high": 0.9, "low": 0.5}]
    says = [{"label": "ours", "high": 0.95, "low": 0.4}, {"label": "theirs", "high": 0.1, "low": 0.1}]
    compared = predicted.bars(measured, says)
    assert [row["label"] for row in compared["rows"]] == ["ours"]
    assert (compared["mean_off"], compared["largest"]) == pytest.approx((0.025, 0.1))
    assert "ours" in predicted.show_bars(compared)


def test_differences_keep_their_sign_and_the_furthest_are_named():
    compared = predicted.grid(["a", "b"], [[1.0, 0.5], [0.9, 0.9]], [[1.0, 0.9], [0.8, 0.9]])
    assert compared["largest"] == pytest.approx(0.4)
    assert compared["mean_off"] == pytest.approx(-0.075)
    lines = predicted.show_grid(compared).splitlines()
    assert lines[3].split() == ["a", "b", "0.50", "0.90", "-0.40"]


def test_predictions_are_read_from_the_suites_file_and_the_benchmarks_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    compared = predicted.grid(["a"], [[1.0]], [[0.9]])
    own = {"benchmark": "pairwise", "compared": compared}
    whole, single = tmp_path / "gpu-benchmarks.json", tmp_path / "pairwise.json"
    whole.write_text(json.dumps({"programs": {"pairwise": {"result": own}, "overhead": {"result": None}}}))
    single.write_text(json.dumps(own))
    for path in (whole, single):
        assert predicted.main([str(path)]) == 0
        assert "measured less predicted: +0.100" in capsys.readouterr().out
    single.write_text(json.dumps({"benchmark": "pairwise"}))
    assert predicted.main([str(single)]) == 78
    assert "run them with --device cuda" in capsys.readouterr().err


def test_cards_have_a_simulated_twin_or_are_refused():
    assert predicted.model_of("NVIDIA H200") == "h200"
    assert predicted.model_of("NVIDIA A100-SXM4-40GB") == "a100"
    with pytest.raises(ConfigError, match="no device like 'Tesla T4'"):
        predicted.model_of("Tesla T4")


def test_kernels_grow_until_they_are_long_enough():
    assert pairwise_cuda.grown(lambda rows: rows * 1e-6, 1e-3, 10**6) == pytest.approx(1000, rel=0.11)
    assert pairwise_cuda.grown(lambda rows: rows * 1e-9, 1e-3, 5000) == 5000
    assert pairwise_cuda.grown(lambda rows: 1.0, 1e-3, 5000) == 16


def test_kernels_are_jobs_by_name():
    for intensity in ("compute", "memory"):
        built = jobs.build(f"kernels:{intensity}:8:4:3")
        assert built.optimizer is None
        assert float(built.step(*built.batch(0))) == (1.0 if intensity == "compute" else 4.0)
