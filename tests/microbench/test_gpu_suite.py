"""The GPU suite without a GPU: what it lists, how it keeps to its time, goes on where it was, and tells what happened. The
programs it runs here are a line or two long."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import microbench.cuda as experiments
from microbench import gpu_suite, suite_parts
from microbench.cuda import probe
from microbench.suite_parts import LIMIT, RESULT, TEST, Job

CARD = probe.Found("Fake GPU", "2.11.0", "9.9", 132, 1 << 37)
WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'figure': 7})); print('a table'); print('on its way', file=sys.stderr)"
# Counts its runs in its own file and is done with the second one.
TWICE = """
import json, os, sys
runs = json.load(open(sys.argv[1]))['runs'] if os.path.exists(sys.argv[1]) else 0
json.dump({'runs': runs + 1}, open(sys.argv[1], 'w'))
sys.exit(0 if runs else 75)
"""


def job(name: str, script: str, **more: Any) -> Job:
    return Job(name, f"what {name} does", ("-c", script, RESULT, LIMIT), **{"least_s": 0.0, "most_s": 60.0, **more})


def suite(jobs: list[Job], out: Path | None, resume: Path | None = None, card: probe.Found = CARD) -> gpu_suite.Suite:
    return gpu_suite.Suite("benchmarks", jobs, asdict(card), out, resume or out)


def written(out: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((out / "gpu-benchmarks.json").read_text())
    return body


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find", lambda: probe.Found(why="torch is built without CUDA"))


@pytest.mark.usefixtures("no_device")
def test_without_a_device_it_lists_what_it_would_run_and_says_that_there_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert gpu_suite.main(["--out", str(tmp_path / "new")]) == gpu_suite.NO_DEVICE == 69
    said = capsys.readouterr()
    assert "there is no CUDA device here. torch is built without CUDA." in said.err
    for part in suite_parts.PARTS:
        assert f"{part}: " in said.out
        for each in suite_parts.jobs(part):
            assert each.name in said.out
            assert each.title in said.out
    assert not (tmp_path / "new").exists()


def test_the_list_needs_no_device(capsys: pytest.CaptureFixture[str]):
    assert gpu_suite.main(["--list", "--part", "experiments"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in experiments.NAMES)
    assert "benchmarks" not in said


def test_an_unknown_program_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    assert gpu_suite.main(["--only", "no-such-thing", "--list"]) == gpu_suite.USAGE
    assert "nothing is called no-such-thing" in capsys.readouterr().err


def test_every_program_of_the_suite_is_there():
    for part in suite_parts.PARTS:
        names = [each.name for each in suite_parts.jobs(part)]
        assert len(names) == len(set(names))
        for each in suite_parts.jobs(part):
            command = each.command(Path("FILE"), 100.0)
            assert command[0] == sys.executable
            assert "FILE" in command
            if command[1:3] != ["-m", "pytest"]:
                assert (suite_parts.ROOT / f"{command[2].replace('.', '/')}.py").exists()


def test_the_tests_are_one_program_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    for name in ("test_b.py", "test_a.py", "conftest.py"):
        (tmp_path / "tests" / "gpu" / name).write_text("")
    monkeypatch.setattr(suite_parts, "ROOT", tmp_path)
    assert [(each.name, each.kind) for each in suite_parts.jobs("tests")] == [("a", TEST), ("b", TEST)]


def test_it_runs_all_and_leaves_a_json_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert suite([job("one", WRITE), job("two", WRITE)], tmp_path).run(100.0) == 0
    body = written(tmp_path)
    assert body["device"]["card"] == "Fake GPU"
    assert [ran["result"] for ran in body["programs"].values()] == [{"figure": 7}] * 2
    text = (tmp_path / "gpu-benchmarks.txt").read_text()
    assert "benchmarks on Fake GPU, torch 2.11.0" in text
    assert "== two: what two does\na table\n" in text
    assert "on its way" not in text
    assert text in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-benchmarks.json", "gpu-benchmarks.txt"]


def test_it_goes_on_where_it_was(tmp_path: Path):
    good, bad = job("good", WRITE), job("bad", "import sys; print('so far'); sys.exit('why')")
    assert suite([good, bad], tmp_path).run(100.0) == gpu_suite.BROKEN
    assert written(tmp_path)["programs"]["bad"]["shown"].split() == ["so", "far", "why"]
    assert written(tmp_path)["programs"]["bad"]["exit"] == 1
    # What passed is not run again, however it is written now; what failed is.
    assert suite([job("good", "raise SystemExit(9)"), job("bad", WRITE)], tmp_path).run(100.0) == 0
    assert {ran["status"] for ran in written(tmp_path)["programs"].values()} == {"passed"}


def test_earlier_results_may_lie_elsewhere_and_must_be_of_this_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before, after = tmp_path / "before", tmp_path / "after"
    for each in (before, after):
        each.mkdir()
    assert suite([job("one", WRITE)], before).run(100.0) == 0
    never = job("one", "raise SystemExit(9)")
    assert suite([never], after, before).run(100.0) == 0
    assert written(after)["programs"]["one"]["result"] == {"figure": 7}
    other = probe.Found("Another GPU", "2.11.0")
    assert suite([never], after, before, other).run(100.0) == gpu_suite.BROKEN
    assert "earlier results are of Fake GPU" in capsys.readouterr().out


def test_a_program_that_resumes_finds_its_file(tmp_path: Path):
    twice = job("twice", TWICE, resumes=True)
    assert suite([twice], tmp_path).run(100.0) == gpu_suite.OVER == 75
    assert written(tmp_path)["programs"]["twice"]["status"] == "partly"
    assert suite([twice], tmp_path).run(100.0) == 0
    assert written(tmp_path)["programs"]["twice"]["result"] == {"runs": 2}


def test_what_has_no_time_left_is_left_for_the_next_run(tmp_path: Path):
    jobs = [job("long", WRITE, least_s=500.0), job("short", WRITE)]
    assert suite(jobs, tmp_path).run(100.0) == gpu_suite.OVER
    assert list(written(tmp_path)["programs"]) == ["short"]
    assert "not run yet" in (tmp_path / "gpu-benchmarks.txt").read_text()
    assert suite(jobs, tmp_path).run(1000.0) == 0


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path):
    script = "import subprocess, sys; print('began', flush=True); subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert suite([job("hangs", script, most_s=2.0)], tmp_path).run(100.0) == gpu_suite.BROKEN
    ran = written(tmp_path)["programs"]["hangs"]
    assert ran["exit"] is None
    assert "ended after 2 s, which is all it was given" in ran["shown"]


def test_results_of_tests_are_read(tmp_path: Path):
    path = tmp_path / "result"
    path.write_text(
        '<?xml version="1.0"?><testsuites><testsuite><testcase name="a" time="0.5"><properties>'
        '<property name="beside" value="bit-equal"/></properties></testcase>'
        '<testcase name="b" time="1"><failure message="assert 1 == 2&#10;more">long</failure></testcase>'
        '<testcase name="c"><skipped message="no green contexts"/></testcase></testsuite></testsuites>'
    )
    result = suite_parts.read(path)
    assert result["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    text = suite_parts.tests_text(result)
    assert text.splitlines() == [
        "1 passed, 1 failed, 1 skipped", "a: beside: bit-equal", "failed: b: assert 1 == 2", "skipped: c: no green contexts",
    ]  # fmt: skip
    path.write_text("{half a fi")
    assert suite_parts.read(path) is None


def test_tests_that_were_all_skipped_have_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A file that skips for want of something would else look proven."""

    def writes(cases: str) -> str:
        xml = f'<?xml version="1.0"?><testsuites><testsuite>{cases}</testsuite></testsuites>'
        return f"import sys; open(sys.argv[1], 'w').write({xml!r})"

    skip, passed = '<testcase name="a"><skipped message="no shares"/></testcase>', '<testcase name="b"/>'
    jobs = [job("none", writes(skip)), job("some", writes(skip + passed))]
    assert suite(jobs, tmp_path).run(60.0) == 0
    assert [written(tmp_path)["programs"][name]["status"] for name in ("none", "some")] == ["skipped", "passed"]
    capsys.readouterr()
    assert suite(jobs, tmp_path).run(60.0) == 0
    assert "left] none" not in capsys.readouterr().out, "it would be skipped again"


def test_the_probe_names_a_card_or_says_why_there_is_none():
    found = probe.look()
    assert bool(found.card) != bool(found.why)
