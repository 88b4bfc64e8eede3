"""The GPU suite without a GPU: what it lists, how it keeps to its time, goes on where it was, and tells what happened.
The programs it runs here are a line or two long."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import microbench.cuda as experiments
from microbench import gpu_suite, suite_check, suite_parts
from microbench.cuda import probe
from microbench.suite_parts import LIMIT, RESULT, TEST, Job

CARD = probe.Found("Fake GPU", "2.11.0", "9.9", 132, 1 << 37)
WRITE = (
    "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'figure': 7})); print('a table'); print('on its way',"
    " file=sys.stderr)"
)
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
    monkeypatch.setattr(probe, "find", lambda by_driver: probe.Found(why="torch is built without CUDA"))


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
    assert gpu_suite.main(["--list", "--part", "design", "--part", "details"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in experiments.NAMES)
    assert "overhead" not in said


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


def test_every_file_of_gpu_tests_is_in_a_part_and_a_hang_costs_one_test():
    programs = [each for part in suite_parts.PARTS for each in suite_parts.jobs(part) if each.kind == TEST]
    run = {each.command(Path("FILE"), 100.0)[-1] for each in programs}
    assert run == {
        str(path.relative_to(suite_parts.ROOT)) for path in (suite_parts.ROOT / "tests/gpu").glob("test_*.py")
    }
    for each in programs:
        command = " ".join(each.command(Path("FILE"), 100.0))
        (hangs,) = (int(word.removeprefix("timeout=")) for word in command.split() if word.startswith("timeout="))
        assert hangs <= each.most_s / 3, "pytest gets to tell of a test that hangs, and of the next"
        assert "filterwarnings=default" in command, "versions that were never run together may warn"
        assert "--maxfail 4" in command


def test_the_shortest_answers_come_first_and_no_part_needs_more_than_half_of_its_time():
    assert suite_parts.PARTS[:3] == ("smoke", "driver", "design")
    assert [each.name for each in suite_parts.jobs("design")][:2] == ["same_address", "rebuild"]
    for part in suite_parts.PARTS:
        assert sum(each.expected_s for each in suite_parts.jobs(part)) <= gpu_suite.LIMIT_S / 2, part
        for each in suite_parts.jobs(part):
            assert each.expected_s < each.most_s


def test_no_part_of_the_first_contact_needs_more_than_half_of_its_time():
    """Of the time that it has in tools/first_contact.sh, of which the suite keeps 14 s for writing its files."""
    script = (suite_parts.ROOT / "tools" / "first_contact.sh").read_text()
    found = re.findall(r"^  suite (\w+) (\d+)(?: --only (.*))?$", script, re.MULTILINE)
    assert len(found) >= 7
    for part, seconds, only in found:
        names = only.split() or [each.name for each in suite_parts.jobs(part)]
        needed = sum(each.expected_s for each in suite_parts.jobs(part) if each.name in names)
        assert 2 * needed <= int(seconds) - 14, part


def test_what_is_missing_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        suite_check, "PACKAGES", (("json", "pytest", "all"), ("no_such_module", "pyzmq", "every daemon"))
    )
    monkeypatch.setattr(suite_check, "OURS", ())
    monkeypatch.setattr(
        suite_check, "_tests", lambda: suite_check.Finding("tests/gpu", "the tests", "9 collected", False)
    )
    monkeypatch.setattr(suite_check, "_card", lambda: suite_check.Finding("a GPU", "all of it", "one", False))
    assert gpu_suite.main(["--check"]) == gpu_suite.BROKEN
    said = capsys.readouterr()
    assert "ok      json" in said.out
    assert "MISSING no_such_module" in said.out
    assert "no_such_module is missing: ModuleNotFoundError" in said.err
    assert "pip install pyzmq; without a network, from a folder of wheels" in said.err


def test_the_preflight_imports_all_that_the_package_says_it_needs():
    """Run-time dependencies by pyproject.toml, by their distributions' names."""
    text = (suite_parts.ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    assert {re.split(r"[><=]", each)[0] for each in wanted} <= {package for _, package, _ in suite_check.PACKAGES}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")
@pytest.mark.parametrize("has_all", [True, False], ids=["has all", "lacks something"])
def test_make_takes_the_python_that_is_there_if_it_has_all_that_is_needed(has_all: bool, tmp_path: Path):
    """And makes an environment of its own otherwise, for which there is no Python here."""
    python = tmp_path / "python"
    status = 0 if has_all else 1
    python.write_text(f'#!/bin/sh\necho "ran: $*"\ncase "$*" in *--check*) exit {status};; esac\n')
    python.chmod(0o755)
    given = [f"VENV={tmp_path}/venv", f"GPU_PYTHON={python}", "PYTHON=false", "GPU_OUT=there"]
    done = subprocess.run(["make", "gpu", *given], cwd=suite_parts.ROOT, capture_output=True, text=True, timeout=60)
    ran = [line.removeprefix("ran: ") for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert ran[0] == "-m microbench.gpu_suite --check"
    assert ran[1:] == (["-m microbench.gpu_suite --out there"] if has_all else [])
    assert (done.returncode == 0) == has_all
    if not has_all:
        assert "What is missing above can't be installed" in done.stderr


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
    names = [f"gpu-benchmarks{end}" for end in ("-logs.tgz", ".json", ".txt")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def logs(out: Path) -> dict[str, str]:
    with tarfile.open(out / "gpu-benchmarks-logs.tgz") as archive:
        return {each.name: archive.extractfile(each).read().decode() for each in archive}  # type: ignore[union-attr]


def test_the_whole_output_of_every_program_is_packed(tmp_path: Path):
    talks = (
        "import sys; print('first', 'words'); print('x' * 9000); print('last', 'words', file=sys.stderr); sys.exit(1)"
    )
    assert suite([job("one", WRITE), job("talks a lot", talks)], tmp_path).run(100.0) == gpu_suite.BROKEN
    found = logs(tmp_path)
    assert "on its way" in found["one.log"]
    assert "first words" in found["talks_a_lot.log"]
    assert "last words" in found["talks_a_lot.log"]
    assert "exit 1 after" in found["talks_a_lot.log"]
    assert "first words" not in written(tmp_path)["programs"]["talks a lot"]["shown"]
    assert suite([job("one", WRITE), job("talks a lot", WRITE)], tmp_path).run(100.0) == 0
    assert "on its way" in logs(tmp_path)["one.log"], "what did not run again keeps its log"


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
    script = (
        "import subprocess, sys; print('began', flush=True); subprocess.run([sys.executable, '-c', 'import time;"
        " time.sleep(600)'])"
    )
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
        "1 passed, 1 failed, 1 skipped", "a: beside: bit-equal", "failed: b: assert 1 == 2",
        "skipped: c: no green contexts",
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
