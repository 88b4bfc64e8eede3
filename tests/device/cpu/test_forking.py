"""The process that forks others: what ends with a child, what a child prints, and what it is not given."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumux.device.workers import fork_server
from gpumux.device.workers.output import BURST_BYTES, LINE_BYTES, RATE_BYTES_S, Output
from tests.forked_scripts import ROOT, ForkedScripts, forked_scripts

LIMIT_S = 60.0
Fork = Callable[..., subprocess.CompletedProcess[str]]

# ---- Children that do what no executor does. A script of its own is the daemon: it forks a child that runs `code`, and
# says how the child ended.

DAEMON = """
import os, select, signal, socket, sys, time
from gpumux.device.workers import channel, fork_server_process
from gpumux.device.workers.channel import EXITED, FORK, KILL, Channel, pack, unpack

def run(settings, fds):
    exec(settings["code"], {{"os": os, "time": time, "signal": signal, "sys": sys, "socket": socket}})

fork_server_process._CHILDREN = {{"executor": run}}
ours, theirs = channel.pair()
if os.fork() == 0:
    ours.close()
    {first}
    try:
        fork_server_process.ForkServerProcess(Channel(theirs)).serve()
    except EOFError:
        pass
    os._exit(0)
theirs.close()
daemon = Channel(ours)
confinement = {{"user": None, "group": None, "calls": False}}
daemon.send(FORK, [1, "executor", {{"code": {code!r}, "nice": 0, "confinement": confinement}}])
{then}
"""
REPORT = """
while True:
    tag, body, _ = daemon.receive()
    if tag == EXITED:
        print("ENDED", unpack(body), flush=True)
        break
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[ForkedScripts]:
    with forked_scripts("gpumux.device.workers.fork_server_process") as found:
        yield found


@pytest.fixture
def fork(scripts: ForkedScripts) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(code: str, then: str = REPORT, first: str = "") -> subprocess.CompletedProcess[str]:
        found = scripts.run(DAEMON.format(code=code, then=then, first=first))
        assert found.returncode == 0, found.stderr
        return found

    return run


def pid_in(folder: Path, name: str) -> int:
    return int((folder / name).read_text())


def gone(pid: int) -> bool:
    """Whether the process has ended, within the test's time. What ends it has been sent."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


FORKS = """
child = os.fork()
if child == 0:
    for fd in range(64):
        try: os.close(fd)
        except OSError: pass
    while True: time.sleep(60)
open({path!r}, "w").write(str(child))
{then}
"""


def test_what_a_child_has_forked_ends_with_it(tmp_path: Path, fork: Fork):
    run = fork(FORKS.format(path=str(tmp_path / "pid"), then=""))
    assert "ENDED [1, 0, '']" in run.stdout
    assert gone(pid_in(tmp_path, "pid"))


def test_what_a_child_has_forked_is_killed_with_it(tmp_path: Path, fork: Fork):
    path = str(tmp_path / "pid")
    then = f"while not os.path.exists({path!r}) or not open({path!r}).read(): time.sleep(0.01)\ndaemon.send(KILL, 1)\n"
    run = fork(FORKS.format(path=path, then="while True: time.sleep(60)"), then + REPORT)
    assert f"ENDED [1, {int(signal.SIGKILL)}, '']" in run.stdout
    assert gone(pid_in(tmp_path, "pid"))


def test_children_and_what_they_forked_end_with_the_daemon(tmp_path: Path, fork: Fork):
    path = str(tmp_path / "pid")
    then = f"while not os.path.exists({path!r}) or not open({path!r}).read(): time.sleep(0.01)\n"
    fork(FORKS.format(path=path, then="while True: time.sleep(60)"), then)
    assert gone(pid_in(tmp_path, "pid"))


def test_a_child_that_closes_its_descriptors_is_still_obeyed_and_reaped(tmp_path: Path, fork: Fork):
    """It was waited for once one of them had ended, and others were not served any more."""
    path = str(tmp_path / "closed")
    closes = f"os.closerange(0, 64)\nopen({path!r}, 'w').close()\nwhile True: time.sleep(60)"
    then = f"while not os.path.exists({path!r}): time.sleep(0.01)\ndaemon.send(KILL, 1)\n"
    run = fork(closes, then + REPORT)
    assert f"ENDED [1, {int(signal.SIGKILL)}, '']" in run.stdout


def test_what_a_child_prints_is_marked_and_cannot_pretend_to_be_a_line_of_the_daemons(fork: Fork):
    code = "print('told')\nos.write(2, b'2026-01-01 gpumux: all is well\\n\\x1b[2Junfinished')"
    said = fork(code).stderr.splitlines()
    marked = [line for line in said if line.startswith("gpumux-executor ")]
    assert [line.partition(": ")[2] for line in marked] == ["told", "2026-01-01 gpumux: all is well", "?[2Junfinished"]
    assert not any(line.startswith("2026") for line in said)


def test_a_traceback_of_a_child_is_seen(fork: Fork):
    run = fork("raise RuntimeError('of a child')")
    assert "ENDED [1, 17920, '']" in run.stdout  # status 70
    assert "RuntimeError: of a child" in run.stderr


def test_a_closed_log_ends_no_child(fork: Fork):
    run = fork("os.write(1, b'told\\n')\nos._exit(3)", first="end, start = os.pipe(); os.close(end); os.dup2(start, 2)")
    assert "ENDED [1, 768, '']" in run.stdout  # status 3


def test_a_child_that_prints_without_end_fills_no_log(fork: Fork):
    run = fork("for _ in range(20_000): os.write(1, b'x' * 999 + b'\\n')")
    assert len(run.stderr) < 2 * BURST_BYTES
    assert "bytes of output were left out" in run.stderr


def test_a_child_has_no_descriptor_of_the_daemons_terminal_or_log(fork: Fork):
    code = "print([os.readlink(f'/proc/self/fd/{fd}').partition(':')[0] for fd in (0, 1, 2)])"
    assert "['/dev/null', 'pipe', 'pipe']" in fork(code).stderr


@pytest.mark.every(2)
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")
@pytest.mark.parametrize("forbidden", [True, False])
def test_processes_of_the_same_user_cannot_look_into_the_fork_server(forbidden: bool, scripts: ForkedScripts):
    """The kernel says so by the owner of its files in /proc."""
    code = f"""
import os
from gpumux.device.workers import channel, fork_server_process
ours, theirs = channel.pair()
pid = os.fork()
if pid == 0:
    ours.close()
    os.setresuid(63021, 63021, 63021)
    fork_server_process.may_be_looked_into(True)  # as after an exec
    if not {forbidden}:
        fork_server_process.may_be_looked_into = lambda allowed: None
    fork_server_process.warm_checker = lambda: None
    fork_server_process.main(theirs.detach(), [])
    os._exit(0)
theirs.close()
tag, body, _ = channel.Channel(ours).receive()
print(os.stat(f"/proc/{{pid}}/environ").st_uid)
"""
    assert scripts.run(code).stdout == ("0\n" if forbidden else "63021\n")


def test_children_have_no_terminal(scripts: ForkedScripts):
    """A session's terminal can be opened by its name, by any user: /dev/tty."""
    code = """
import pty
from gpumux.device.workers.fork_server_process import leave_terminal
def terminal():
    try:
        return bool(os.open("/dev/tty", os.O_RDWR))
    except OSError as error:
        return error.strerror
import os
end, start = os.pipe()
pid, fd = pty.fork()
if pid == 0:
    if os.fork() == 0:  # as the fork server does not lead the session
        before = terminal()
        leave_terminal()
        os.write(start, f"{before}, {terminal()}".encode())
        os._exit(0)
    os.wait()
    os._exit(0)
print(os.read(end, 100).decode())
"""
    run = scripts.run(code)
    assert run.stdout == "True, No such device or address\n", run.stderr


# ---- Output, by itself.


@pytest.fixture
def pipe() -> Iterator[tuple[Output, Callable[[bytes], None]]]:
    end, start = os.pipe()
    os.set_blocking(end, False)
    yield Output(end, "job", 0.0), lambda data: os.write(start, data) and None
    os.close(end)
    os.close(start)


def test_lines_are_passed_on_whole(pipe: tuple[Output, Callable[[bytes], None]]):
    output, write = pipe
    assert output.read(0.0) == ""
    write(b"one\ntwo")
    assert output.read(0.0) == "job: one\n"
    write(b" three\n")
    assert output.read(0.0) == "job: two three\n"
    write(b"\xff\x07rest")
    assert output.read(0.0) == ""
    assert output.end() == "job: \ufffd?rest\n"
    assert output.end() == ""


def test_a_line_without_end_is_broken(pipe: tuple[Output, Callable[[bytes], None]]):
    output, write = pipe
    write(b"x" * (LINE_BYTES + 1))
    assert output.read(0.0) == f"job: {'x' * (LINE_BYTES + 1)}\n"


def test_output_is_bounded_by_time_and_what_is_missing_is_said(pipe: tuple[Output, Callable[[bytes], None]]):
    output, write = pipe
    line = b"x" * 1023 + b"\n"
    passed = ""
    for _ in range(64):
        write(line)
        passed += output.read(0.0) or ""
    assert passed.count("\n") == BURST_BYTES // 1024
    write(line)
    assert output.read(2 * 1024 / RATE_BYTES_S).splitlines()[0] == f"job: {32 * 1024} bytes of output were left out"
    assert output.read(0.0) == ""


# ---- What is passed on of the environment.


def test_secrets_of_the_service_stay_with_the_daemon(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "GPUMUX_CURVE_KEY",
        "NOTIFY_SOCKET",
        "PGPASSWORD",
        "SSH_AUTH_SOCK",
    ):
        monkeypatch.setenv(name, "secret")
    for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "CXX"):
        monkeypatch.setenv(name, "kept")
    found = fork_server._environment()
    assert "secret" not in found.values()
    assert list(found.values()).count("kept") == 5
    assert found["PYTHONPATH"].startswith(str(ROOT))
