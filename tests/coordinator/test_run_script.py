"""`gpumux cluster run` without Ray: devices are held, the script is followed, its end is the job's."""

from __future__ import annotations

import io
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumux.cli.main import main
from gpumux.coordinator import run_script
from gpumux.coordinator import script as scripts
from gpumux.coordinator.ray.plan import RayNode, node_and_number
from gpumux.coordinator.run_script import Interrupts, environment_of, follow
from gpumux.coordinator.script import STDERR, STDOUT, ScriptCommand, ScriptOutput, ScriptProcess
from gpumux.errors import ConfigError
from gpumux.wire import messages as msg
from tests.client.placed.coordinator import FakeCoordinator, coordinating


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gm-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def coordinator(place: Path) -> Iterator[FakeCoordinator]:
    with coordinating(place) as made:
        yield made


class Played:
    """A RunningScript that says what it is told to."""

    def __init__(self, *outputs: ScriptOutput) -> None:
        self._outputs = iter(outputs)

    def read(self) -> ScriptOutput:
        return next(self._outputs)


def test_output_is_copied_as_it_comes_until_the_script_has_ended():
    out, err, seen = io.BytesIO(), io.BytesIO(), []
    played = Played(
        ScriptOutput([(STDOUT, b"a "), (STDERR, b"wrong "), (STDOUT, b"b")], None, False),
        ScriptOutput([], None, True),
        ScriptOutput([(STDERR, b"end")], -15, True),
    )
    ended = follow(played, lambda: seen.append((out.getvalue(), err.getvalue())), out, err)  # type: ignore[arg-type]
    assert ended == (-15, True)
    assert seen == [(b"a b", b"wrong "), (b"a b", b"wrong ")]
    assert err.getvalue() == b"wrong end"


def test_a_second_ctrl_c_ends_the_script_and_a_third_one_at_once():
    interrupts = Interrupts()
    asked = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGINT]
    passed = [interrupts.passed_on(number) for number in asked]
    assert passed == [
        signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL
    ]  # fmt: skip


def test_variables_are_read():
    assert environment_of(["A=b=c", "D="]) == {"A": "b=c", "D": ""}
    for wrong in ("A", "=b", ""):
        with pytest.raises(ConfigError, match="--env"):
            environment_of([wrong])


def test_a_node_of_the_coordinator_is_found_among_rays():
    nodes = [RayNode("a" * 56, "box-1", "10.0.0.1", 2), RayNode("b" * 56, "box-1", "10.0.0.1", 2)]
    assert node_and_number("box-1:bbbbbbbb-12", nodes) == (nodes[1], 12)
    for gone in ("box-1:cccccccc-0", "box-2:aaaaaaaa-0", "box-1:aaaaaaaa-x", "box-1:aaaaaaaa"):
        assert node_and_number(gone, nodes) is None


def test_output_that_is_not_read_has_the_script_wait_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The script has ended before its last output is read; what it left running does not keep it from ending."""
    monkeypatch.setattr(scripts, "MOST_PENDING", 1000)
    monkeypatch.setattr(scripts, "LAST_S", 0.05)
    os.mkfifo(tmp_path / "held")
    (tmp_path / "big.py").write_text(
        "import os, subprocess, sys\n"
        "print(os.environ['X'], sys.argv[1:], flush=True)\n"
        "subprocess.Popen(['cat', 'held'])\n"
        "os.write(2, b'e' * 50_000)\n"
    )
    command = ScriptCommand(script="big.py", arguments=("-v", "--"), directory=str(tmp_path), environment={"X": "y"})
    script = ScriptProcess(command)
    out, err = io.BytesIO(), io.BytesIO()
    try:
        assert follow(script, lambda: None, out, err) == (0, False)
    finally:
        script.close()  # what the script started is its own
        open(tmp_path / "held", "wb").close()
    assert out.getvalue() == b"y ['-v', '--']\n"
    assert err.getvalue() == b"e" * 50_000


def test_what_can_not_be_started_is_named(tmp_path: Path):
    (tmp_path / "x.py").write_text("")
    here = str(tmp_path)
    for command, says in (
        (ScriptCommand(script="x.py", directory=here + "/none"), "no directory"),
        (ScriptCommand(script="y.py", directory=here), "no file y.py"),
        (ScriptCommand(script="x.py", directory=here, python="nopython"), "no interpreter nopython"),
        (ScriptCommand(script="x.py", directory=here, uid=os.getuid() + 1), f"would run as user {os.getuid()}"),
    ):
        with pytest.raises(ConfigError, match=says) as refused:
            ScriptProcess(command)
        assert refused.value.remedy


# ---- The command, with a coordinator that the test plays.


def run(coordinator: FakeCoordinator, directory: Path, *words: str) -> int:
    return main(["cluster", "run", "--cluster", coordinator.endpoint, "--cwd", str(directory), *words])


def heard(coordinator: FakeCoordinator, name: str) -> list[Any]:
    return [message for message in coordinator.heard if type(message).__name__ == name]


def test_a_script_has_its_coordinator_and_daemon_and_its_exit_code_is_returned(
    coordinator: FakeCoordinator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "held = json.load(open(os.environ['GPUMUX_CLUSTER_JOB']))\n"
        "print(os.environ['GPUMUX_CLUSTER'], os.environ['GPUMUX_ENDPOINT'], held['job'], held['devices'])\n"
        "sys.exit(7)\n"
    )
    coordinator.places = ["ipc:///run/x/gpumux.sock"]
    assert run(coordinator, tmp_path, "--memory", "2GiB", "--priority", "high", "train.py") == 7
    (asked, again) = heard(coordinator, "PlaceJob")
    assert (asked.name, asked.priority, asked.devices, asked.nbytes) == ("train", 1, 1, 2**31)
    assert (asked.movable, asked.attempt, again.attempt) == (False, 0, 1)
    assert capfd.readouterr().out.split() == [coordinator.endpoint, "ipc:///run/x/gpumux.sock", asked.job, "1"]
    assert [ended.fault for ended in heard(coordinator, "PlacedJobEnded")] == ["the script ended with status 7"]


def test_what_keeps_a_script_from_running_ends_its_job(
    coordinator: FakeCoordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text("")
    coordinator.places = ["tcp://192.0.2.1:7777", "ipc:///x/gpumux.sock", "ipc:///x/gpumux.sock"]
    for words, says in (
        (("train.py",), "may be another machine"),
        (("--ship", "train.py"), "leave out --ship"),
        (("none.py",), "no file none.py"),
    ):
        assert run(coordinator, tmp_path, *words) == 78
        assert says in capsys.readouterr().err
    assert [ended.fault for ended in heard(coordinator, "PlacedJobEnded")] == ["the script was not started"] * 3
    coordinator.refuse("AccessDenied", "no low jobs for you")
    assert run(coordinator, tmp_path, "train.py") == 1
    assert "no low jobs for you" in capsys.readouterr().err


def test_why_there_are_no_devices_yet_is_said_before_long(
    coordinator: FakeCoordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_script, "FIRST_S", 0.01)
    (tmp_path / "train.py").write_text("")

    def places() -> None:
        coordinator.hear(msg.ExplainJob)
        coordinator.place("ipc:///run/x/gpumux.sock")

    thread = threading.Thread(target=places)
    thread.start()
    assert run(coordinator, tmp_path, "train.py") == 0
    thread.join()
    assert capsys.readouterr().err.count("waits for devices: Its turn has come") == 1


def test_a_job_that_gets_no_devices_is_not_waited_for(
    coordinator: FakeCoordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text("")

    def answers() -> None:
        coordinator.answer("refused", "it could never fit")

    thread = threading.Thread(target=answers)
    thread.start()
    assert run(coordinator, tmp_path, "train.py") == 1
    thread.join()
    said = capsys.readouterr().err
    assert "it could never fit" in said
    assert "--gpus or --memory" in said
