"""The driver wrapper, `smoke` and the experiments on a stand-in for libcuda, through the real cuda-bindings, in
processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.stub import build
from tests.stub.running import NEWEST, RUN_S, TORCHS, bindings, run


def passed(output: str) -> int:
    """How many tests passed, when none was skipped."""
    (found,) = re.findall(r"^=* ?(\d+) passed(?!.*skipped)", output, re.MULTILINE)
    return int(found)


def test_every_release_is_one_that_the_package_allows():
    extras = tomllib.loads((build.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bound,) = (each for each in extras["cuda"] if each.startswith("cuda-bindings"))
    least = tuple(map(int, bound.removeprefix("cuda-bindings>=").split(".")))
    assert all(tuple(map(int, each.split(".")))[:2] >= least for each in build.RELEASES)
    assert TORCHS in build.RELEASES


@pytest.mark.slow
@pytest.mark.extended
def test_the_driver_wrapper_keeps_its_rules_on_every_release(libraries: Path):
    """With torch's and the newest the experiments run as well."""
    releases = [f"{version}={bindings(version)}" for version in build.RELEASES]
    environment = build.environment(libraries, None)
    done = run(["-m", "tests.stub.runner", *releases, "--", "-q", "tests/stub/inside/test_driver.py"], environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(build.RELEASES, 0)
    for part in done.stdout.split("== cuda-bindings ")[1:]:
        assert passed(part) >= 40


@pytest.mark.extended
@pytest.mark.slow
def test_the_experiments_run_to_their_ends(libraries: Path):
    done = run(
        ["-m", "pytest", "-q", "tests/stub/inside/test_experiments.py"], build.environment(libraries, bindings(NEWEST))
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert passed(done.stdout) >= 11


def holds(out: Path, version: str) -> None:
    """What `smoke` wrote: all that needs no torch was asked, and holds."""
    result = json.loads(out.read_text())
    assert result["counts"]["FAIL"] == 0, result["found"]
    assert result["counts"]["PASS"] >= 19
    assert result["device"]["bindings"] == version
    assert all("torch" in row["said"] for row in result["found"] if row["verdict"] == "SKIP")


def test_what_is_taken_for_granted_holds_on_the_stand_in(libraries: Path, tmp_path: Path):
    out = tmp_path / "smoke.json"
    done = run(["-m", "microbench.cuda.smoke", "--out", str(out)], build.environment(libraries, bindings(TORCHS)))
    holds(out, TORCHS)
    result = json.loads(out.read_text())
    assert done.returncode == (3 if result["counts"]["SKIP"] else 0)
    assert len(done.stdout.splitlines()) == len(result["found"]) + 2  # a line each, between the card and the sum


@pytest.mark.slow
def test_the_gpu_tests_of_the_driver_leave_nothing_that_the_leak_check_takes_for_theirs(libraries: Path):
    """The stand-in opens a socket and an eventfd with its first context, as the real library does, and keeps them."""
    environment = build.environment(libraries, bindings(NEWEST))
    environment.pop(build.INSIDE)
    arguments = ["-m", "pytest", "-q", "tests/gpu/test_driver.py", "-k", "not kernel_ended"]  # that one needs torch
    done = run(arguments, environment)
    assert done.returncode == 0, done.stdout[-6000:]
    assert passed(done.stdout) >= 9


def test_without_a_driver_it_is_a_matter_of_configuration(tmp_path: Path):
    environment = build.environment(tmp_path, bindings(NEWEST))
    script = "from gpumux.device.cuda.driver import CudaDriver; CudaDriver().open(0)"
    done = run(["-c", script], environment)
    assert "ConfigError: there is no NVIDIA driver on this machine" in done.stderr
    done = run(["-m", "microbench.cuda.smoke"], environment)
    assert done.returncode == 69
    assert "nothing was asked: " in done.stderr


def test_host_time_is_measured(libraries: Path, tmp_path: Path):
    out = tmp_path / "host.json"
    script = (
        "from microbench.cuda import host_time; import sys; host_time.PIECES = host_time.CALLS = 20;"
        " sys.exit(host_time.main())"
    )
    done = run(["-c", script, "--repeats", "1", "--out", str(out)], build.environment(libraries, bindings(NEWEST)))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(result["piece_s"]) == {"a piece", "a piece behind another"}
    assert all(each["ratio"]["median"] > 0 for each in result["piece_s"].values())
    assert set(result["calls_s"]) == {"record", "reached", "elapsed", "wait", "write_value"}


def first_contact(part: str, environment: dict[str, str], out: Path, **more: str) -> subprocess.CompletedProcess[str]:
    given = {"OUT": str(out), "WORK": str(out / "work"), "PYTHON": sys.executable, **more}
    return subprocess.run(
        ["sh", "tools/first_contact.sh", part],
        env=environment | given,
        cwd=build.ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )


def test_a_first_contact_is_rehearsed(libraries: Path, tmp_path: Path):
    """The script on the stand-in: short steps are run, long ones listed; what fails stops no other, and all of it is
    packed."""
    environment = build.environment(libraries, bindings(NEWEST))
    python = tmp_path / "python"  # importing everything takes long, and has a test of its own
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *--check*) echo MISSING all; exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = first_contact("1", environment, tmp_path, DRY="1", PYTHON=str(python))
    said = (tmp_path / "first-contact-1.txt").read_text()
    assert done.stdout.strip().splitlines()[-1].endswith("first-contact-1.tgz")
    steps = [line.partition(":")[0] for line in said.splitlines()]
    assert steps == ["card", "check", "smoke", "driver", "design", "doctor", "packages", "first-figure"]
    assert "design: ok" in said
    assert "first-figure: would run for at most 90 s" in said
    assert "check: status 1" in said
    assert done.returncode == 1, "a step failed"
    holds(tmp_path / "work" / "part-1" / "smoke.json", NEWEST)
    with tarfile.open(tmp_path / "first-contact-1.tgz") as archive:
        names = archive.getnames()
    assert {f"part-1/{name}" for name in ("smoke.json", "smoke.log", "check.log", "design.log")} <= set(names)


@pytest.mark.parametrize(("part", "steps"), [("2", 5), ("3", 2)])
def test_the_other_parts_are_rehearsed(part: str, steps: int, tmp_path: Path):
    done = first_contact(part, dict(os.environ), tmp_path, DRY="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / f"first-contact-{part}.txt").read_text().splitlines()) == steps


def test_a_step_that_hangs_is_ended_and_packed(tmp_path: Path):
    """`python` sleeps; the time is up soon."""
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\necho began\nexec sleep 600\n")
    hangs.chmod(0o755)
    done = first_contact("2", dict(os.environ), tmp_path, DRY="1", PYTHON=str(hangs), LIMIT_S="3", LEAST_S="2")
    said = (tmp_path / "first-contact-2.txt").read_text().splitlines()
    assert "contract: ended after its" in said[0]
    assert said[1:] == [f"{name}: not run, the time was up" for name in ("models", "operators", "details", "compiled")]
    assert done.returncode == 1
    with tarfile.open(tmp_path / "first-contact-2.tgz") as archive:
        assert archive.extractfile("part-2/contract.log").read() == b"began\n"


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_first_contact_that_is_interrupted_ends_its_step_and_packs_what_there_is(
    asked: signal.Signals, tmp_path: Path
):
    """The step says when it has begun, and what it does last."""
    fifo, python = tmp_path / "begun", tmp_path / "python"
    os.mkfifo(fifo)
    python.write_text(
        f"#!/bin/sh\ntrap 'echo ended in order; kill $!; exit 1' INT\nsleep 600 &\necho $$ >{fifo}\nwait\n"
    )
    python.chmod(0o755)
    given = {"OUT": str(tmp_path), "WORK": str(tmp_path / "work"), "PYTHON": str(python), "DRY": "1"}
    script = subprocess.Popen(
        ["sh", "tools/first_contact.sh", "2"], env=os.environ | given, cwd=build.ROOT, stdout=subprocess.PIPE, text=True
    )
    begun = int(fifo.read_text())
    script.send_signal(asked)
    script.communicate(timeout=RUN_S)
    assert script.returncode == 130
    assert (tmp_path / "first-contact-2.txt").read_text() == "contract: interrupted\n"
    with tarfile.open(tmp_path / "first-contact-2.tgz") as archive:
        assert archive.extractfile("part-2/contract.log").read() == b"ended in order\n"
    with pytest.raises(ProcessLookupError):
        os.kill(begun, 0)


def test_results_that_cant_be_packed_are_said_to_be(tmp_path: Path):
    (tmp_path / "work" / "packing").mkdir(parents=True)  # where the archive is written: as if the disk were full
    done = first_contact("3", dict(os.environ), tmp_path, DRY="1")
    assert done.returncode == 1
    assert "the results can't be packed" in done.stderr
    assert len((tmp_path / "first-contact-3.txt").read_text().splitlines()) == 2


def test_an_unknown_part_is_wrong_usage(tmp_path: Path):
    done = first_contact("4", dict(os.environ), tmp_path)
    assert done.returncode == 64
    assert "first_contact.sh 3" in done.stderr
