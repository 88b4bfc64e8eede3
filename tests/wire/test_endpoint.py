from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumux.client.transport import resolve_endpoint
from gpumux.errors import ConfigError, EndpointBusy
from gpumux.wire import endpoint
from gpumux.wire.endpoint import EndpointLock, remove_stale


def test_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint, "SYSTEM_RUNTIME", tmp_path / "run")
    private = f"/tmp/gpumux-{os.getuid()}/gpumux/0/gpumux.sock"
    assert endpoint.resolve(environ={}).text == f"ipc://{private}"
    user = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert endpoint.resolve(gpu=1, environ=user).path == Path("/run/user/7/gpumux/1/gpumux.sock")
    (tmp_path / "run/gpumux/0").mkdir(parents=True)
    assert endpoint.resolve(environ=user).path == tmp_path / "run/gpumux/0/gpumux.sock"
    assert endpoint.resolve(gpu=1, environ=user).path == Path("/run/user/7/gpumux/1/gpumux.sock")
    named = user | {"GPUMUX_ENDPOINT": "tcp://host:5555"}
    assert endpoint.resolve(environ=named) == endpoint.Endpoint("tcp://host:5555", None)
    assert endpoint.resolve("ipc:///x/y", environ=named).path == Path("/x/y")


@pytest.mark.parametrize(
    ("several", "taken"),
    [
        ("ipc:///a.sock, ipc:///b.sock", "ipc:///a.sock"),
        ("tcp://h:1,ipc:///b.sock", "ipc:///b.sock"),
        ("tcp://h:1,tcp://h:2,", "tcp://h:1"),
    ],
)
def test_a_client_takes_one_of_a_daemons_endpoints(several: str, taken: str):
    assert endpoint.resolve(environ={"GPUMUX_ENDPOINT": several}).text == taken


@pytest.mark.parametrize(
    "texts",
    [
        ["ipc:///r/g.sock", "ipc:///r/g.sock"],
        ["ipc:///r/g.sock", "ipc:///r/../r//g.sock"],
        ["tcp://h:1", "tcp://h:1"],
        ["ipc:///r/g.sock", "ipc:///r/g.sock.chan"],
    ],
)
def test_a_daemon_listens_at_different_places(texts: list[str]):
    with pytest.raises(ConfigError, match="every --endpoint once"):
        check_distinct(texts)
    check_distinct(["tcp://*:*", "tcp://*:*"])


def check_distinct(texts: list[str]) -> None:
    endpoints = [endpoint.parse(text) for text in texts]
    endpoint.check_distinct(endpoints, endpoint.channel_path(endpoints, Path("/run")))


def test_the_channels_socket_is_named_after_the_first_socket():
    def name(*texts: str) -> str:
        return str(endpoint.channel_path([endpoint.parse(text) for text in texts], Path("/run")))

    assert name("tcp://h:1", "ipc:///r/a.sock", "ipc:///r/b.sock") == "/r/a.sock.chan"
    assert name("tcp://h:1") == "/run/gpumux.sock.chan"


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://*:*", "tcp://a-b.example:5555", "ipc:///a"]
)
def test_good_endpoints(text: str):
    assert endpoint.parse(text).text == text


@pytest.mark.parametrize(
    "text",
    ["", "/a", "ipc://", "ipc://a", "ipc:///a/", "ipc://@a", "tcp://", "tcp://h", "tcp://h:0", "tcp://h:65536",
     "tcp://h:1/x", "inproc://x", "ipc:///a\0b"],
)  # fmt: skip
def test_bad_endpoints(text: str):
    with pytest.raises(ConfigError):
        endpoint.parse(text)


def test_the_longest_path():
    endpoint.parse("ipc:///" + "x" * 101)
    with pytest.raises(ConfigError, match="103 bytes long, 102"):
        endpoint.parse("ipc:///" + "x" * 102)
    with pytest.raises(ConfigError, match="bytes long"):
        endpoint.parse("ipc:///" + "é" * 54)


def test_the_runtime_directory_is_private_or_as_it_was(tmp_path: Path):
    old = tmp_path / "old"
    old.mkdir(mode=0o755)
    endpoint.ensure_runtime_dir(old)
    assert old.stat().st_mode & 0o777 == 0o755
    endpoint.ensure_runtime_dir(tmp_path / "a/b")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a/b")} == {0o700}
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="runtime directory"):
        endpoint.ensure_runtime_dir(tmp_path / "file/x")


def test_a_default_directory_that_another_user_may_write_to(monkeypatch: pytest.MonkeyPatch):
    name = f"gpumux-test{os.getpid()}"
    top = Path("/tmp") / name
    top.mkdir(mode=0o700)
    try:
        endpoint.check_private(top / "gpumux/0")
        resolve_endpoint(f"ipc://{top}/gpumux/0/gpumux.sock")
        top.chmod(0o770)
        with pytest.raises(ConfigError, match="only this user"):
            endpoint.check_private(top / "gpumux/0")
        with pytest.raises(ConfigError, match="only this user"):
            resolve_endpoint(f"ipc://{top}/gpumux/0/gpumux.sock")
        top.chmod(0o700)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        if top.stat().st_uid != 0:  # root's directories are trusted by all
            with pytest.raises(ConfigError, match="only this user"):
                endpoint.check_private(top)
    finally:
        top.rmdir()
    endpoint.check_private(top)  # it does not exist


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path):
    path = tmp_path / "g.sock"
    code = f"""
import sys
from pathlib import Path
from gpumux.wire.endpoint import EndpointLock
lock = EndpointLock(Path("{path}"))
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(EndpointBusy, match=f"process {holder.pid} "):
            EndpointLock(path)
        holder.kill()
        holder.wait()
        lock = EndpointLock(path)
        lock.close()
        lock.close()


def test_a_lock_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "g.sock.lock")
    with pytest.raises(ConfigError, match="is no regular file") as refused:
        EndpointLock(tmp_path / "g.sock")
    assert f"rm {tmp_path}/g.sock.lock" in refused.value.remedy


def test_a_lock_that_is_another_name_of_a_file_is_refused_and_the_file_not_emptied(tmp_path: Path):
    """Where the kernel allows it (fs.protected_hardlinks is 0), any user can link a file of root's into /tmp."""
    (tmp_path / "precious").write_text("keep")
    os.link(tmp_path / "precious", tmp_path / "g.sock.lock")
    with pytest.raises(ConfigError, match="has another name elsewhere") as refused:
        EndpointLock(tmp_path / "g.sock")
    assert f"rm {tmp_path}/g.sock.lock" in refused.value.remedy
    assert (tmp_path / "precious").read_text() == "keep"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user: run as root")
def test_a_lock_of_another_user_is_refused_unless_the_directory_is_that_users(tmp_path: Path):
    """Another user could keep it locked for ever."""
    planted = tmp_path / "g.sock.lock"
    planted.touch()
    os.chown(planted, 63_021, 63_021)
    with pytest.raises(ConfigError, match="a file of user 63021's"):
        EndpointLock(tmp_path / "g.sock")
    os.chown(tmp_path, 63_021, 63_021)
    EndpointLock(tmp_path / "g.sock").close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path):
    lock = EndpointLock(tmp_path / "g.sock")
    release, told = os.pipe()
    ready, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, b"x")
        os.read(release, 1)
        os._exit(0)
    os.read(ready, 1)
    os.close(lock._fd)  # as the kernel does when the daemon is killed
    lock._fd = -1
    EndpointLock(tmp_path / "g.sock").close()
    os.write(told, b"x")
    os.waitpid(child, 0)
    for fd in (release, told, ready, says):
        os.close(fd)


def test_a_lock_that_can_not_be_made(tmp_path: Path):
    with pytest.raises(ConfigError, match="lock file"):
        EndpointLock(tmp_path / "missing/g.sock")
    (tmp_path / "g.sock.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="lock file"):
        EndpointLock(tmp_path / "g.sock")


def test_only_sockets_are_stale(tmp_path: Path):
    remove_stale(tmp_path / "absent")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no socket"):
        remove_stale(tmp_path / "dangling")


def test_a_silent_tcp_endpoint_may_have_refused_the_keys():
    error = endpoint.unanswered(endpoint.parse("tcp://10.0.0.1:9400"), "start one there")
    assert error.message == "no daemon answers at tcp://10.0.0.1:9400"
    assert error.remedy.startswith("start one there; if one runs there, it refuses the keys")
    assert "GPUMUX_CURVE_KEY" in error.remedy
    assert "GPUMUX_CURVE_SERVER" in error.remedy
    assert "CURVE" not in endpoint.unanswered(endpoint.parse("ipc:///nowhere/gpumux.sock"), "start one").remedy
