"""`gpumux doctor` around an endpoint: access, lock, stale sockets, files a daemon trusts, versions."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpumux.cli import doctor
from gpumux.cli.doctor import FAIL, OK, WARN
from gpumux.config import Config
from gpumux.wire.endpoint import EndpointLock, lock_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bound(runtime_dir):
    """A socket with a listener."""
    path = runtime_dir / "gpumux.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path
    for left in runtime_dir.glob("*.sock*"):
        if left.suffix != ".lock":
            left.unlink()


def leave_behind(path: Path, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(socket.AF_UNIX, kind) as gone:
        gone.bind(str(path))


def test_users_that_may_connect_are_named(bound):
    bound.chmod(0o660)
    (found,) = doctor.sockets(bound)
    assert found.level == OK
    assert "user " in found.detail
    assert "group " in found.detail
    assert "everybody" not in found.detail
    bound.chmod(0o777)
    (found,) = doctor.sockets(bound)
    assert "everybody" in found.detail
    assert list(doctor.sockets(bound.with_name("absent"))) == []


@pytest.mark.parametrize(("mode", "remedy"), [(0o660, "usermod -aG"), (0o600, "ask its owner")])
def test_a_user_that_may_not_connect_learns_how_to(bound, monkeypatch, mode, remedy):
    bound.chmod(mode)
    monkeypatch.setattr(doctor.os, "access", lambda path, what: False)
    (found,) = doctor.sockets(bound)
    assert (found.level, remedy in found.remedy) == (FAIL, True)


def test_the_lock_names_the_process_that_holds_the_endpoint(bound):
    assert doctor.lock(bound).detail == "nobody holds the endpoint"
    held = EndpointLock(bound)
    found = doctor.lock(bound)
    assert (found.level, found.detail) == (OK, f"process {os.getpid()} holds the endpoint")
    bound.unlink()
    found = doctor.lock(bound)
    assert (found.level, f"kill {os.getpid()}" in found.remedy) == (WARN, True)
    held.close()
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    lock_path(bound).write_text(child.stdout)
    assert "which is gone" in doctor.lock(bound).detail


def test_sockets_that_no_process_listens_on_are_named(bound):
    assert doctor.stale(bound.parent).level == OK
    leave_behind(bound.with_name("old.sock"))
    leave_behind(bound.with_name("old.sock.chan"), socket.SOCK_SEQPACKET)
    found = doctor.stale(bound.parent)
    assert found.level == WARN
    assert "old.sock, old.sock.chan in" in found.detail
    assert doctor.stale(bound.parent / "absent").level == OK


def test_files_that_a_daemon_trusts(tmp_path):
    config, keys, secret = tmp_path / "gpumux.toml", tmp_path / "clients", tmp_path / "daemon.key_secret"
    config.write_text("")
    keys.mkdir()
    secret.write_text("")
    for path, mode in ((config, 0o644), (keys, 0o755), (secret, 0o600)):
        path.chmod(mode)
    settings = Config(curve_client_keys=str(keys), curve_secret_key=str(secret))
    assert [f.level for f in doctor.trusted_files(str(config), settings)] == [OK, OK, OK]
    for path, mode in ((config, 0o666), (keys, 0o775), (secret, 0o640)):
        path.chmod(mode)
    found = list(doctor.trusted_files(str(config), settings))
    assert [f.level for f in found] == [FAIL, FAIL, FAIL]
    assert [f.remedy.split()[1] for f in found] == ["go-w", "go-w", "go="]
    secret.unlink()
    assert [f.level for f in doctor.trusted_files(None, settings)] == [FAIL, FAIL]
    assert list(doctor.trusted_files(None, Config())) == []


def test_versions_are_those_of_the_package(monkeypatch):
    text = (ROOT / "pyproject.toml").read_text()
    wanted = dict(re.findall(r'"([a-z-]+)>=([\d.]+)"', text.split("dependencies = [")[1].split("]")[0]))
    assert {name: tuple(map(int, wanted[name].split("."))) for name in doctor.NEEDED} == doctor.NEEDED
    assert doctor.versions().level == OK
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "25.1" if name == "pyzmq" else "99.0")
    found = doctor.versions()
    assert (found.level, found.remedy) == (FAIL, "pip install -U 'pyzmq>=26'")


def test_the_whole_says_all_of_it(bound):
    leave_behind(bound.with_name("old.sock"))
    names = {finding.name: finding for finding in doctor.examine(None, f"ipc://{bound}", 0.2)}
    assert {"lock", "stale sockets", "socket access", "versions", "gpu", "configuration"} <= set(names)
    assert names["stale sockets"].level == WARN
