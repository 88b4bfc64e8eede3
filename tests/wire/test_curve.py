"""tcp needs keys: with a good one a client works, without one or with another it is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from gpumux.errors import ConfigError
from gpumux.wire import messages as m
from gpumux.wire.peers import (
    ClientCurve,
    ServerCurve,
    allowed_keys,
    client_curve,
    make_keys,
    peer_of,
    secure_client,
    secure_server,
)
from gpumux.wire.router import Incoming, Opened
from tests.wire.world import JOB, LOCAL_HELLO, World

INLINE = m.Hello(m.PROTOCOL_VERSION, "test", "client", 0, "", True)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    """Certificates of a daemon, two clients it knows and one it doesn't."""
    made = {name: make_keys(tmp_path / name, name) for name in ("daemon", "alice", "bob", "mallory")}
    clients = tmp_path / "clients"
    clients.mkdir()
    for name in ("alice", "bob"):
        (clients / f"{name}.key").write_text(made[name][0].read_text())
    (clients / "broken.key").write_text("nonsense")
    return made


@pytest.fixture
def world(keys, tmp_path: Path, make_world) -> World:
    return make_world(["tcp://127.0.0.1:*"], curve=ServerCurve(keys["daemon"][1], tmp_path / "clients"))


def as_client(keys, name: str, server: str = "daemon"):
    return lambda sock: secure_client(sock, ClientCurve(keys[name][1], keys[server][0]))


def test_a_known_key_works_inline_only(world, make_client, keys):
    alice = make_client(world, configure=as_client(keys, "alice"))
    alice.send(LOCAL_HELLO)
    world.until(lambda _: world.router.counters["stranger_protocol"] == 1)
    assert "inline" in alice.refusal().remedy
    alice.send(INLINE)
    opened = world.next(Opened)
    assert opened.inline
    assert alice.receive(m.Welcome).channel == ""
    alice.send(m.Step(JOB, 1, 1, 0, [], 1), (b"batch",))
    assert world.next(Incoming).frames == [b"batch"]
    world.router.send(opened.session, m.StepDone(JOB, 1, 0.0, 0.0, 0.0, 1), [b"result"])
    assert alice.receive(m.StepDone).step == 1


def test_every_key_is_another_user(world, make_client, keys):
    peers = []
    for name in ("alice", "bob", "alice"):
        client = make_client(world, configure=as_client(keys, name))
        client.send(INLINE)
        peers.append(world.next(Opened).peer)
    assert peers[0] == peers[2] != peers[1]
    assert all(peer.uid < -1 for peer in peers)


@pytest.mark.parametrize("kind", ["no key", "unknown key", "wrong server key"])
def test_no_other_key_gets_in(world, make_client, keys, kind):
    configure = {
        "no key": None,
        "unknown key": as_client(keys, "mallory"),
        "wrong server key": as_client(keys, "alice", server="bob"),
    }[kind]
    monitors = []
    stranger = make_client(world, configure=lambda sock: monitors.append(watch(sock, configure)))
    with contextlib.suppress(zmq.Again):  # refused before it could say anything
        stranger.send(INLINE, flags=zmq.NOBLOCK)
    monitor = monitors[0]
    while not monitor.poll(10):
        assert world.router.receive(world.now) == []
    stranger.socket.disable_monitor()
    monitor.close()
    alice = make_client(world, configure=as_client(keys, "alice"))
    alice.send(INLINE)
    assert isinstance(world.next(Opened), Opened)
    assert world.router.session_count == 1


def watch(sock: zmq.Socket, configure) -> zmq.Socket:
    """A monitor of a socket that is yet to connect, so that it misses nothing."""
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    if configure is not None:
        configure(sock)
    return sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)


def test_a_key_added_later_counts(world, make_client, keys, tmp_path: Path):
    (tmp_path / "clients/mallory.key").write_text(keys["mallory"][0].read_text())
    client = make_client(world, configure=as_client(keys, "mallory"))
    client.send(INLINE)
    assert world.next(Opened).peer == replace(peer_of(read(keys["mallory"][0])[0]), key="mallory")


def read(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line.split('"')[1] for line in lines if line.strip().startswith("public-key")]


def test_both_endpoints_at_once(make_world, make_client, keys, tmp_path: Path, runtime_dir: Path):
    curve = ServerCurve(keys["daemon"][1], tmp_path / "clients")
    world = make_world([f"ipc://{runtime_dir}/g.sock", "tcp://127.0.0.1:*"], curve=curve)
    local = make_client(world)
    remote = make_client(world, endpoint=world.router.addresses[1], configure=as_client(keys, "alice"))
    session = world.open(local).session
    remote.send(INLINE)
    assert world.next(Opened).peer.uid < -1
    world.serves(local, session, 1)


def test_keys_that_can_not_be_used(keys, tmp_path: Path):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        for curve, says in (
            (ServerCurve(keys["daemon"][1], tmp_path / "absent"), "not a directory"),
            (ServerCurve(keys["daemon"][0], tmp_path / "clients"), "no secret key"),
            (ServerCurve(tmp_path / "absent", tmp_path / "clients"), "can't read"),
            (ServerCurve(tmp_path / "clients/broken.key", tmp_path / "clients"), "can't read"),
        ):
            with pytest.raises(ConfigError, match=says):
                secure_server(sock, curve)
        keys["daemon"][1].chmod(0o640)
        with pytest.raises(ConfigError, match="other users"):
            secure_server(sock, ServerCurve(keys["daemon"][1], tmp_path / "clients"))


def test_a_broken_file_locks_no_client_out(keys, tmp_path: Path):
    unusable: list[ConfigError] = []
    assert len(allowed_keys(tmp_path / "clients", unusable)) == 2
    assert [error for error in unusable if "broken.key" in error.message] == unusable != []


def test_a_directory_that_can_not_be_looked_into_is_said(tmp_path: Path):
    unusable: list[ConfigError] = []
    assert allowed_keys(tmp_path / "absent", unusable) == {}
    assert "can't look for client keys" in unusable[0].message


def test_what_keeps_a_known_client_out_is_logged_once(world, make_client, keys, tmp_path: Path, caplog):
    """Its holder only learns that the key is unknown, whatever is wrong with the file."""
    for _ in range(2):
        client = make_client(world, configure=as_client(keys, "alice"))
        client.send(INLINE)
        world.next(Opened)
    assert [text for text in caplog.messages if "lets nobody in" in text and "broken.key" in text] == caplog.messages
    assert len(caplog.messages) == 1


def test_only_their_user_may_read_secret_keys_that_were_made(tmp_path: Path):
    public, secret = make_keys(tmp_path, "laptop")
    assert (public.stat().st_mode & 0o777, secret.stat().st_mode & 0o777) == (0o644, 0o600)


def test_the_client_finds_its_keys_in_the_environment():
    with pytest.raises(ConfigError, match="CURVE"):
        client_curve({"GPUMUX_CURVE_KEY": "/a"})
    found = client_curve({"GPUMUX_CURVE_KEY": "/a", "GPUMUX_CURVE_SERVER": "/b"})
    assert found == ClientCurve(Path("/a"), Path("/b"))
