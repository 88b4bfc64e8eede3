"""Each channel is opened by the client whose session it is; every other connection is turned away, and soon."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpumux.errors import ConfigError, DaemonGone, ProtocolError, VersionMismatch
from gpumux.types import SessionId
from gpumux.wire import channel as channels
from gpumux.wire import messages as m
from gpumux.wire.channel import MAX_PENDING, MAX_PENDING_PER_USER, PENDING_S, ChannelListener, ClientChannel
from gpumux.wire.codec import decode
from gpumux.wire.router import Closed
from tests.wire.world import LOCAL_HELLO, opening, packet

ME = SessionId("me")
OPENED = packet(m.ChannelOpened())


@pytest.fixture
def listener(runtime_dir: Path) -> Iterator[ChannelListener]:
    made = ChannelListener(runtime_dir / "s")
    yield made
    made.close()


@pytest.fixture
def dial(listener: ChannelListener) -> Iterator[Callable[..., socket.socket]]:
    made: list[socket.socket] = []

    def connect(first: bytes | None = None) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(str(listener.path))
        if first is not None:
            connection.send(first)
        made.append(connection)
        return connection

    yield connect
    for connection in made:
        connection.close()


def turn(listener: ChannelListener, now: float = 0.0) -> list[SessionId]:
    """Process until nothing is ready; the sessions whose channels were opened."""
    opened: list[SessionId] = []
    for _ in range(100):
        if not select.select([listener], [], [], 0)[0]:
            return opened
        for session, connection in listener.process(now):
            opened.append(session)
            connection.close()
    raise AssertionError("the listener never came to rest")


def hung_up(connection: socket.socket) -> bool:
    connection.settimeout(20)
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def refused(connection: socket.socket) -> m.Refusal:
    """With what, before the daemon hung up."""
    connection.settimeout(20)
    refusal = decode((connection.recv(1000),))[0]
    assert isinstance(refusal, m.Refusal)
    assert hung_up(connection)
    return refusal


def test_a_client_that_says_the_nonce_gets_its_channel(listener, dial):
    nonce = listener.expect(ME, os.getuid())
    client = dial(opening(nonce))
    while not (found := listener.process(0.0)):
        pass
    ((session, connection),) = found
    assert session == ME
    assert client.recv(100) == OPENED
    connection.send(b"first")
    assert client.recv(100) == b"first"
    connection.close()
    assert listener.next_deadline() == float("inf")


@pytest.mark.parametrize(
    "first",
    [opening(bytes(32)), b"", bytes(32), packet(m.GetStatus(1)), opening(bytes(300)), b"\xff" * 300],
    ids=["another nonce", "nothing", "no message", "another message", "a long one", "garbage"],
)
def test_whatever_is_no_opening_is_refused(listener, dial, first: bytes):
    nonce = listener.expect(ME, os.getuid())
    stranger = dial(first)
    assert turn(listener) == []
    assert refused(stranger).code == "protocol"
    assert listener.next_deadline() == float("inf")
    dial(opening(nonce))
    assert turn(listener) == [ME], "a stranger takes nothing from it"


def test_a_short_nonce_and_one_that_is_too_long(listener, dial):
    nonce = listener.expect(ME, os.getuid())
    strangers = [dial(opening(nonce[:-1])), dial(opening(nonce + b"x")), dial(opening(b""))]
    assert turn(listener) == []
    assert {refused(stranger).code for stranger in strangers} == {"protocol"}


def test_another_protocol_is_refused_by_name(listener, dial):
    nonce = listener.expect(ME, os.getuid())
    stranger = dial(packet(m.OpenChannel(m.PROTOCOL_VERSION + 1, nonce)))
    assert turn(listener) == []
    refusal = refused(stranger)
    assert refusal.code == VersionMismatch.code
    assert f"the client speaks protocol {m.PROTOCOL_VERSION + 1}" in refusal.message


def test_another_user_with_the_right_nonce(listener, dial, monkeypatch: pytest.MonkeyPatch):
    nonce = listener.expect(ME, os.getuid())
    monkeypatch.setattr(channels, "peer_uid", lambda _: os.getuid() + 1)
    thief = dial(opening(nonce))
    assert turn(listener) == []
    assert refused(thief).code == "protocol"


def test_the_second_connection_of_a_session_is_refused(listener, dial):
    nonce = listener.expect(ME, os.getuid())
    dial(opening(nonce))
    assert turn(listener) == [ME]
    second = dial(opening(nonce))
    assert turn(listener) == []
    assert refused(second).code == "protocol"


def test_a_session_that_ended_has_no_channel(listener, dial):
    nonce = listener.expect(ME, os.getuid())
    listener.forget(ME)
    listener.forget(ME)
    late = dial(opening(nonce))
    assert turn(listener) == []
    assert refused(late).code == "protocol"


def test_silent_connections_time_out(listener, dial):
    silent = dial()
    turn(listener, now=10.0)
    assert listener.next_deadline() == 10.0 + PENDING_S
    listener.expire(10.0 + PENDING_S - 0.1)
    assert listener.next_deadline() == 10.0 + PENDING_S
    listener.expire(10.0 + PENDING_S)
    assert hung_up(silent)


def test_clients_that_come_at_the_same_moment_all_get_in(listener, dial):
    """More than may be silent: each has a session that expects it."""
    many = 3 * MAX_PENDING_PER_USER
    nonces = {SessionId(f"s{n}"): listener.expect(SessionId(f"s{n}"), os.getuid()) for n in range(many)}
    connections = [dial() for _ in nonces]
    turn(listener)
    for connection, nonce in zip(connections, nonces.values(), strict=True):
        connection.send(opening(nonce))
    assert sorted(turn(listener)) == sorted(nonces)
    assert all(connection.recv(100) == OPENED for connection in connections)
    turned_away = [dial() for _ in range(MAX_PENDING_PER_USER + 1)]
    turn(listener)
    assert hung_up(turned_away[-1]), "no session expects these"


def test_a_daemon_that_is_late_closes_no_connection_that_has_spoken(listener, dial):
    client = dial()
    listener.process(10.0)
    client.send(opening(listener.expect(ME, os.getuid())))
    listener.expire(10.0 + 2 * PENDING_S)
    assert turn(listener, 10.0 + 2 * PENDING_S) == [ME]


def test_silent_connections_are_few(listener, dial):
    silent = [dial() for _ in range(MAX_PENDING_PER_USER)]
    turn(listener)
    surplus = dial()
    turn(listener)
    assert hung_up(surplus)
    listener.expire(PENDING_S)
    assert all(hung_up(connection) for connection in silent)
    dial(opening(listener.expect(ME, os.getuid())))
    assert turn(listener) == [ME]


def test_silent_connections_of_many_users_keep_out_no_client_that_a_session_waits_for(
    listener, dial, monkeypatch: pytest.MonkeyPatch
):
    """So with all places taken, a client with a session, root's among them, still opens its channel."""
    uids = iter([1001 + n // MAX_PENDING_PER_USER for n in range(MAX_PENDING)])
    monkeypatch.setattr(channels, "peer_uid", lambda connection: next(uids, 0))
    silent = [dial() for _ in range(MAX_PENDING)]
    turn(listener)
    assert len(listener._pending) == len(silent), "no more find a place"
    refused_one = dial()
    turn(listener)
    assert hung_up(refused_one), "root's, which no session waits for"
    dial(opening(listener.expect(ME, 0)))
    assert turn(listener) == [ME]


def test_out_of_descriptors_the_listener_still_comes_to_rest(listener, dial, monkeypatch: pytest.MonkeyPatch):
    real = listener._listener
    failures = iter([OSError(24, "Too many open files")])

    class Exhausted:
        def fileno(self) -> int:
            return real.fileno()

        def accept(self) -> tuple[socket.socket, object]:
            for error in failures:
                raise error
            return real.accept()

        def close(self) -> None:
            real.close()

    monkeypatch.setattr(listener, "_listener", Exhausted())
    turned_away = dial()
    turn(listener)
    assert hung_up(turned_away)


def test_a_path_that_is_too_long(runtime_dir: Path):
    with pytest.raises(ConfigError, match="too long"):
        ChannelListener(runtime_dir / ("x" * 107))


# ---- how a client opens one


def answering(path: str, packets: list[bytes]) -> threading.Thread:
    """A listener that answers one opening with these packets, and hangs up."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, listener:
            assert connection.recv(1000) == opening(b"n" * 32)
            for each in packets:
                connection.send(each)
        os.unlink(path)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("packets", "error", "says"),
    [
        ([], DaemonGone, "closed the channel"),
        ([packet(m.Refusal(0, "version_mismatch", "another protocol", ""))], VersionMismatch, "another protocol"),
        ([packet(m.Done(1))], ProtocolError, "answered OpenChannel with Done"),
        ([b"\xff"], ProtocolError, "msgpack"),
    ],
    ids=["silence", "refusal", "another message", "garbage"],
)
def test_what_a_client_makes_of_other_answers(runtime_dir: Path, packets, error, says: str):
    path = str(runtime_dir / "liar")
    thread = answering(path, packets)
    with pytest.raises(error, match=says):
        ClientChannel.open(path, b"n" * 32, 20.0)
    thread.join()


def test_a_client_opens_its_channel(runtime_dir: Path):
    path = str(runtime_dir / "s")
    thread = answering(path, [OPENED, b"\x01first"])
    channel = ClientChannel.open(path, b"n" * 32, 20.0)
    thread.join()
    assert channel.receive() == b"\x01first"
    channel.close()


def test_where_nothing_listens(runtime_dir: Path):
    with pytest.raises(DaemonGone, match="can't open the daemon's channel"):
        ClientChannel.open(str(runtime_dir / "nothing"), bytes(32), 20.0)


def test_a_client_waits_for_its_turn_to_connect(runtime_dir: Path):
    """Where the queue of new connections is full: until there is room, or its time is over."""
    path = str(runtime_dir / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        with ThreadPoolExecutor() as pool:
            made = [pool.submit(ClientChannel.open, path, bytes(32), 20.0) for _ in range(4)]
            accepted = [listener.accept()[0] for _ in made]
            for connection in accepted:
                connection.send(OPENED)
            for client in made:
                client.result().close()
            for connection in accepted:
                connection.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(path)
            with pytest.raises(DaemonGone, match="channel"):
                ClientChannel.open(path, bytes(32), 0.01)
    os.unlink(path)


# ---- of a router


def test_a_stranger_on_the_channels_socket_hurts_no_session(world, make_client, join):
    client = make_client(world)
    world.open(client, LOCAL_HELLO)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(20)
        stranger.connect(client.welcome.channel)
        stranger.send(b"garbage")
        while not select.select([stranger], [], [], 0.01)[0]:
            assert world.router.receive(world.now) == []
        assert refused(stranger).code == "protocol"
    join(world).arrives(1)
    assert world.router.session_count == 2


def test_a_session_that_ends_before_its_channel_is_open(world, make_client):
    client = make_client(world)
    opened = world.open(client, LOCAL_HELLO)
    client.send(m.Goodbye())
    assert world.next(Closed).session == opened.session
    late = client.connect_channel()
    while not select.select([late], [], [], 0.01)[0]:
        assert world.router.receive(world.now) == []
    assert refused(late).code == "protocol"
    late.close()
