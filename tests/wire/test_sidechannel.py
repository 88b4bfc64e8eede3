"""Descriptors reach the client they are for; everybody else is turned away, and not for long."""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpumux.errors import ConfigError, DaemonGone, ProtocolError
from gpumux.types import SessionId
from gpumux.wire import shared_memory as sidechannel
from gpumux.wire.lane import LANE_ID
from gpumux.wire.sessions import Closed
from gpumux.wire.shared_memory import (
    HEADER,
    MAX_PENDING_PER_USER,
    MAX_QUEUED,
    PENDING_S,
    DescriptorInbox,
    Segment,
    SideChannel,
)

ME = SessionId("me")


@pytest.fixture
def side(runtime_dir: Path) -> Iterator[SideChannel]:
    channel = SideChannel(runtime_dir / "s")
    yield channel
    channel.close()


@pytest.fixture
def dial(side: SideChannel) -> Iterator[Callable[..., socket.socket]]:
    made: list[socket.socket] = []

    def connect(nonce: bytes | None = None) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(str(side.path))
        if nonce is not None:
            connection.send(nonce)
        made.append(connection)
        return connection

    yield connect
    for connection in made:
        connection.close()


def turn(side: SideChannel, now: float = 0.0) -> list[SessionId]:
    """Process until nothing is ready."""
    gone: list[SessionId] = []
    for _ in range(100):
        if not select.select([side], [], [], 0)[0]:
            return gone
        gone += side.process(now)
    raise AssertionError("the side channel never came to rest")


def hung_up(connection: socket.socket) -> bool:
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_segment_arrives_whenever_it_was_sent(side, dial):
    nonce = side.expect(ME, os.getuid())
    with Segment.create(8192) as early, Segment.create(4096) as late:
        early.view()[0] = 1
        late.view()[0] = 2
        assert side.send(ME, 11, 8192, early.fd)  # before the client connects
        inbox = DescriptorInbox(str(side.path), nonce, 20)
        assert turn(side) == []
        assert side.send(ME, 2**64 - 1, 4096, late.fd)
        with inbox.take(2**64 - 1, 4096, 20) as second, inbox.take(11, 8192, 20) as first:
            assert (first.view()[0], second.view()[0]) == (1, 2)
        inbox.close()
        assert turn(side) == [ME]


def test_descriptors_nobody_took_are_closed(side):
    inbox = DescriptorInbox(str(side.path), side.expect(ME, os.getuid()), 20)
    with Segment.create(4096) as segment:
        for number in (1, 2, 2):
            side.send(ME, number, 4096, segment.fd)
    turn(side)
    inbox.take(1, 4096, 20).close()
    with pytest.raises(ProtocolError, match="announced"):
        inbox.take(2, 5000, 20)
    inbox.close()


def test_a_wrong_nonce_a_short_one_and_none(side, dial):
    nonce = side.expect(ME, os.getuid())
    liars = [dial(bytes(32)), dial(nonce[:-1]), dial(nonce + b"x"), dial(b"")]
    turn(side)
    assert all(hung_up(liar) for liar in liars)
    assert side.next_deadline() == float("inf")


def test_another_user_with_the_right_nonce(side, dial, monkeypatch: pytest.MonkeyPatch):
    nonce = side.expect(ME, os.getuid())
    monkeypatch.setattr(sidechannel, "peer_uid", lambda _: os.getuid() + 1)
    thief = dial(nonce)
    turn(side)
    assert hung_up(thief)


def test_the_second_connection_of_a_session_is_refused(side, dial):
    nonce = side.expect(ME, os.getuid())
    first = dial(nonce)
    turn(side)
    second = dial(nonce)
    turn(side)
    assert hung_up(second)
    with Segment.create(4096) as segment:
        side.send(ME, 1, 4096, segment.fd)
    assert first.recv(100) == HEADER.pack(1, 4096)


def test_silent_connections_time_out(side, dial):
    silent = dial()
    turn(side, now=10.0)
    assert side.next_deadline() == 10.0 + PENDING_S
    side.expire(10.0 + PENDING_S - 0.1)
    assert side.next_deadline() == 10.0 + PENDING_S
    side.expire(10.0 + PENDING_S)
    assert hung_up(silent)


def test_clients_that_come_at_the_same_moment_all_get_in(side, dial):
    """More than may be silent: each has a session that waits for it."""
    many = 3 * MAX_PENDING_PER_USER
    nonces = [side.expect(SessionId(f"s{n}"), os.getuid()) for n in range(many)]
    lines = [dial() for _ in nonces]
    turn(side)
    for line, nonce in zip(lines, nonces, strict=True):
        line.send(nonce)
    assert turn(side) == []
    with Segment.create(4096) as segment:
        for n, line in enumerate(lines):
            assert side.send(SessionId(f"s{n}"), 1, 4096, segment.fd)
            assert line.recv(100)
    turned_away = [dial() for _ in range(MAX_PENDING_PER_USER + 1)]
    turn(side)
    assert hung_up(turned_away[-1]), "nobody waits for these"


def test_a_client_waits_in_line(runtime_dir: Path):
    """Where the line before the daemon is full, until there is room or its time is over."""
    path = str(runtime_dir / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        with ThreadPoolExecutor() as pool:
            made = [pool.submit(DescriptorInbox, path, bytes(32), 20.0) for _ in range(4)]
            accepted = [listener.accept()[0] for _ in made]
            for inbox in made:
                inbox.result().close()
            for connection in accepted:
                connection.close()
        held = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1)]
        for connection in held:
            connection.connect(path)
        with pytest.raises(DaemonGone, match="side channel"):
            DescriptorInbox(path, bytes(32), 0.01)
        for connection in held:
            connection.close()
    os.unlink(path)


def test_one_that_has_spoken_is_heard_however_late(side, dial):
    """A daemon that was held up for long blames nobody for it."""
    inbox = dial()
    side.process(10.0)
    inbox.send(side.expect(ME, os.getuid()))
    side.expire(10.0 + 2 * PENDING_S)
    assert turn(side, 10.0 + 2 * PENDING_S) == []
    with Segment.create(4096) as segment:
        assert side.send(ME, 1, 4096, segment.fd)
    assert inbox.recv(100)


def test_silent_connections_are_few(side, dial):
    silent = [dial() for _ in range(MAX_PENDING_PER_USER)]
    turn(side)
    surplus = dial()
    turn(side)
    assert hung_up(surplus)
    side.expire(PENDING_S)
    inbox = dial(side.expect(ME, os.getuid()))
    turn(side)
    with Segment.create(4096) as segment:
        assert side.send(ME, 1, 4096, segment.fd)
    assert inbox.recv(100)
    assert len(silent) == MAX_PENDING_PER_USER


def test_a_bound_client_that_talks_or_leaves_is_gone(side, dial):
    talker, leaver = SessionId("talker"), SessionId("leaver")
    talking, leaving = dial(side.expect(talker, os.getuid())), dial(side.expect(leaver, os.getuid()))
    turn(side)
    talking.send(b"hello?")
    leaving.close()
    assert sorted(turn(side)) == [leaver, talker]


def test_what_waits_for_a_client_is_bounded(side):
    side.expect(ME, os.getuid())
    with Segment.create(4096) as segment:
        results = [side.send(ME, n, 4096, segment.fd) for n in range(MAX_QUEUED + 1)]
        assert results == [True] * MAX_QUEUED + [False]
        assert not side.send(SessionId("nobody"), 1, 4096, segment.fd)
    side.forget(ME)
    side.forget(ME)


def test_the_client_checks_what_it_gets(side):
    class Liar:
        def __init__(self, path: Path) -> None:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.listener.bind(str(path))
            self.listener.listen()

    liar = Liar(side.path.with_name("liar"))
    inbox = DescriptorInbox(str(side.path.with_name("liar")), b"n", 20)
    connection, _ = liar.listener.accept()
    assert connection.recv(10) == b"n"
    with Segment.create(4096) as segment:
        for data, fds in (
            (HEADER.pack(1, 4096), []),
            (HEADER.pack(1, 4096), [segment.fd, segment.fd]),
            (HEADER.pack(1, 4097), [segment.fd]),
            (b"short", [segment.fd]),
            (HEADER.pack(1, 4096) + b"x", [segment.fd]),
        ):
            connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
            with pytest.raises(ProtocolError):
                inbox.take(1, 4096, 20)
    connection.close()
    with pytest.raises(DaemonGone, match="closed"):
        inbox.take(1, 4096, 20)
    inbox.close()
    liar.listener.close()
    side.path.with_name("liar").unlink()
    with pytest.raises(DaemonGone, match="side channel"):
        DescriptorInbox(str(side.path.with_name("liar")), b"n", 20)


def test_nothing_came_in_time(side):
    inbox = DescriptorInbox(str(side.path), side.expect(ME, os.getuid()), 20)
    turn(side)
    with pytest.raises(DaemonGone, match="did not arrive"):
        inbox.take(1, 4096, 0.0)
    inbox.close()


def test_out_of_descriptors_the_listener_still_comes_to_rest(side, dial, monkeypatch: pytest.MonkeyPatch):
    real = side._listener
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

    monkeypatch.setattr(side, "_listener", Exhausted())
    turned_away = dial()
    turn(side)
    assert hung_up(turned_away)


def test_a_path_that_is_too_long(runtime_dir: Path):
    with pytest.raises(ConfigError, match="too long"):
        SideChannel(runtime_dir / ("x" * 107))


def test_the_router_ends_a_session_whose_client_died(world, make_client):
    client = make_client(world)
    opened = world.open(client)
    connection = client.side_channel()
    with Segment.create(4096) as segment:
        assert world.router.send_segment(opened.session, 5, segment.fd, segment.nbytes)
        while not select.select([connection], [], [], 0.01)[0]:
            world.router.receive(world.now)
        assert connection.recv(100) == HEADER.pack(5, 4096)
        assert connection.recv(100) == HEADER.pack(LANE_ID, 0)
        connection.close()
        assert world.next(Closed).reason == "the client is gone"
        assert not world.router.send_segment(opened.session, 6, segment.fd, segment.nbytes)


def test_the_router_drops_a_client_that_takes_no_descriptors(world, make_client):
    opened = world.open(make_client(world))
    with Segment.create(4096) as segment:
        while world.router.send_segment(opened.session, 5, segment.fd, segment.nbytes):
            pass
    assert world.next(Closed).session == opened.session
