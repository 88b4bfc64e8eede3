"""The unit is valid, as tight as recorded, fits the daemon, and its modes let in whom it says."""

from __future__ import annotations

import os
import re
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gpumux.cli.main import EX_CONFIG, EX_USAGE, build_parser
from gpumux.client.session import Session
from gpumux.config import Config, from_file, load
from tests.daemon.live import SOON_S, LiveJob, floats, serving
from tests.program import samples
from tests.users import become

from .packages import ROOT, need

SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = SYSTEMD / "gpumux@.service"
LIMIT_S = 60


def settings(path: Path = UNIT) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def only(name: str) -> str:
    (value,) = settings()[name]
    return value


@pytest.fixture
def installed(tmp_path):
    """The unit as it would lie in /etc, with a program in the place it names."""
    program = tmp_path / "gpumux"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/gpumux/bin/gpumux", str(program)))
    return unit


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = need("systemd-analyze", "systemd")
    env = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning", "SYSTEMD_COLORS": "0"}
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=env)


def test_systemd_accepts_the_unit(installed):
    done = analyze("verify", installed)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_would_not_accept_a_misspelt_one(installed):
    installed.write_text(installed.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "ProtectHomes" in analyze("verify", installed).stderr


def test_its_exposure_is_what_the_readme_says(installed):
    done = analyze("security", "--offline=true", "--no-pager", installed)
    assert done.returncode == 0, done.stderr
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)[1]
    recorded = re.search(r"exposure level (\d\.\d)", (SYSTEMD / "README.md").read_text())[1]
    assert float(score) <= float(recorded), "the unit got weaker: mend it, or record the new score and say why"


def test_the_command_is_one_the_program_takes():
    _, *command = only("ExecStart").replace("%i", "1").replace("%S", "/var/lib").split()
    args = build_parser().parse_args(command)
    assert (args.command, args.gpu, args.state_dir) == ("serve", "1", "/var/lib/gpumux/1")


def test_a_unit_for_a_gpu_never_serves_the_cpu_unless_its_configuration_says_so(tmp_path):
    _, *command = only("ExecStart").replace("%i", "0").replace("%S", "/var/lib").split()
    args = build_parser().parse_args(command)
    flags = {"gpu": args.gpu, "device": args.device}
    shipped = SYSTEMD / "gpumux.toml"
    assert load(flags, {}, shipped).device == "cuda"
    (tmp_path / "gpumux.toml").write_text(shipped.read_text().replace('# device = "cpu"', 'device = "cpu"'))
    assert load(flags, {}, tmp_path / "gpumux.toml").device == "cpu"


def test_the_directory_is_where_clients_look(monkeypatch, tmp_path):
    from gpumux.wire import endpoint

    monkeypatch.setattr(endpoint, "SYSTEM_RUNTIME", tmp_path)
    made = tmp_path / only("RuntimeDirectory").replace("%i", "3")
    made.mkdir(parents=True)
    assert endpoint.default_endpoint(3, {}) == f"ipc://{made}/gpumux.sock"


def test_the_manager_waits_longer_than_the_daemon_needs():
    assert int(only("TimeoutStopSec")) > Config().drain_s + 10
    assert float(only("WatchdogSec")) >= 10  # garbage collections and loads are no reason to kill a daemon
    assert only("Type") == "notify"


def test_what_does_not_mend_itself_is_not_tried_again():
    assert set(map(int, only("RestartPreventExitStatus").split())) == {EX_USAGE, EX_CONFIG}


def test_the_devices_are_reached():
    """Settings that would hide the GPU, or forbid what its driver does, are not on."""
    unit = settings()
    assert "char-nvidia* rw" in unit["DeviceAllow"]
    for hiding in ("PrivateDevices", "PrivateUsers", "PrivateNetwork", "MemoryDenyWriteExecute", "ProcSubset"):
        assert hiding not in unit


def test_the_example_configuration_is_one():
    assert from_file(SYSTEMD / "gpumux.toml")["policy"] == "guarded"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes directories that belong to others")
def test_users_and_directories_are_made(tmp_path):
    sysusers, tmpfiles = (need(f"systemd-{tool}", "systemd") for tool in ("sysusers", "tmpfiles"))
    (tmp_path / "etc").mkdir()
    for tool, file in ((sysusers, "gpumux.sysusers.conf"), (tmpfiles, "gpumux.tmpfiles.conf")):
        arguments = ["--create"] if tool == tmpfiles else []
        done = subprocess.run(
            [tool, *arguments, f"--root={tmp_path}", SYSTEMD / file], capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr
    users = dict(line.split(":", 1) for line in (tmp_path / "etc/passwd").read_text().splitlines())
    uid = int(users["gpumux"].split(":")[1])
    assert users["gpumux"].endswith(":/var/lib/gpumux:/usr/sbin/nologin")
    groups = (tmp_path / "etc/group").read_text()
    assert re.search(r"^video:.*\bgpumux$", groups, re.MULTILINE)
    assert re.search(r"^render:.*\bgpumux$", groups, re.MULTILINE)
    assert (tmp_path / "var/lib/gpumux").stat().st_uid == uid
    assert (tmp_path / "run/gpumux").stat().st_mode & 0o777 == 0o755


SERVICE, MEMBER, STRANGER = 63_001, 63_002, 63_003  # user ids that need no entry anywhere
MEMBERS = 63_100


@pytest.fixture
def as_installed(runtime_dir):
    """The endpoint of a daemon with the unit's user, group and modes."""
    if os.geteuid() != 0:
        pytest.skip("takes on other users' ids: run as root")
    home = runtime_dir / "gpumux" / "0"
    home.mkdir(parents=True)
    os.chown(home, SERVICE, MEMBERS)
    home.chmod(int(only("RuntimeDirectoryMode"), 8))
    for above in (runtime_dir, home.parent):
        above.chmod(0o755)
    endpoint = f"ipc://{home}/gpumux.sock"
    serve = [sys.executable, "-m", "gpumux", "serve", "--device", "cpu", "--metrics-port", "off"]
    process = subprocess.Popen(
        [*become(SERVICE, MEMBERS, []), *serve, "--endpoint", endpoint],
        umask=int(only("UMask"), 8), cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said: list[str] = []
    try:
        while not any(" serves " in line for line in said):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        yield endpoint
    finally:
        process.terminate()
        process.communicate(timeout=SOON_S)


def status(endpoint: str, uid: int, groups: list[int], patience_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpumux", "status", "--endpoint", endpoint, "--timeout", str(patience_s)]
    return subprocess.run(
        [*become(uid, uid, groups), *command], cwd=ROOT, capture_output=True, text=True, timeout=SOON_S
    )


def test_members_of_the_group_get_in_and_strangers_do_not(as_installed):
    member = status(as_installed, MEMBER, [MEMBERS], LIMIT_S)
    assert member.returncode == 0, member.stderr
    stranger = status(as_installed, STRANGER, [], 5.0)  # waits in vain, unless it is refused
    assert (stranger.returncode, stranger.stdout) == (1, "")
    home = Path(as_installed.removeprefix("ipc://")).parent
    looked = subprocess.run(
        [*become(STRANGER, STRANGER, [], read_all=False), "ls", home], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "Permission denied" in looked.stderr


# ---- system calls


def expanded(name: str) -> set[str]:
    """The system calls of a group of systemd's, or the one of that name."""
    if not name.startswith("@"):
        return {name}
    tool = need("systemd-analyze", "systemd")
    done = subprocess.run([tool, "syscall-filter", name], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found: set[str] = set()
    for word in (line.strip() for line in done.stdout.splitlines()[1:]):
        found |= expanded(word) if word.startswith("@") else {word}
    return found


def allowed() -> set[str]:
    calls: set[str] = set()
    for entry in settings()["SystemCallFilter"]:
        for name in entry.lstrip("~").split():
            calls = calls - expanded(name) if entry.startswith("~") else calls | expanded(name)
    return calls


def test_groups_are_expanded_and_taken_away():
    assert {"read", "memfd_create", "setpriority", "sched_setaffinity"} <= allowed()
    assert not {"chown", "setuid", "mount", "ptrace", "init_module"} & allowed()


@pytest.mark.slow
def test_the_filter_lets_through_what_a_daemon_calls(runtime_dir, tmp_path):
    """Every system call of a daemon and its executors, from start to stop, with a job of each class and a crash."""
    strace = need("strace", "strace")
    if subprocess.run([strace, "-o", tmp_path / "try", "true"], capture_output=True, timeout=LIMIT_S).returncode:
        pytest.skip("processes can't be traced here")
    trace = tmp_path / "trace"
    endpoint = f"ipc://{runtime_dir}/gpumux.sock"
    command = [strace, "-f", "-qq", "-o", trace, sys.executable, "-m", "gpumux", "serve", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--endpoint", endpoint, "--metrics-port", "0", "--state-dir", tmp_path / "state"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said: list[str] = []
    try:
        while not any(" serves " in line for line in said):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        with Session.connect(endpoint, SOON_S) as session:
            for priority in (0, 1):
                job = LiveJob(session, samples.add_one(), priority=priority)
                for view in job.run(floats(1, 2, 3, 4)):
                    view.release()
                job.close()
            crashing = LiveJob(session, samples.crash_div())
            crashing.wait(crashing.post(struct.pack("4q", -(2**63), 4, 6, 8), struct.pack("4q", -1, 2, 2, 2)))
            crashing.data.release()
    finally:
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)  # strace itself passes nothing on
        process.communicate(timeout=SOON_S)
    called = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.MULTILINE))
    assert {"memfd_create", "sendmsg", "epoll_wait", "setpriority"} <= called, "nothing of interest was traced"
    of_root = {"capset", "setgroups", "setresgid", "setresuid"} if os.geteuid() == 0 else set()
    assert called - allowed() - of_root == set()


@pytest.mark.leaves_runtime_files
def test_what_the_watchdog_sends_leaves_the_stacks_of_the_loop(runtime_dir, tmp_path):
    assert only("LimitCORE") == "0"
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        with serving(runtime_dir, "--state-dir", str(tmp_path / "state")) as daemon:
            Session.connect(daemon.endpoint, SOON_S).close()  # it is ready a moment before the loop turns
            assert daemon.stop(getattr(signal, only("WatchdogSignal"))) == -signal.SIGABRT
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    stacks = (tmp_path / "state" / "crash.log").read_text()
    assert "Fatal Python error: Aborted" in stacks
    assert "daemon/loop.py" in stacks
