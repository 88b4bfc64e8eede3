"""Connections, which libzmq accepts without asking, are bounded: one user's, and all."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading

import pytest

from gpumux.wire import connections as bounds
from gpumux.wire import listen as connections
from gpumux.wire.connections import Bounds, ConnectionTable
from gpumux.wire.listen import AcceptGate, Connections
from gpumux.wire.messages import Goodbye
from gpumux.wire.router import Closed, Opened
from tests.wire.world import HELLO, WAIT_MS


def connect(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    while made.connect_ex(path) == errno.EAGAIN:
        pass  # more come at once than wait in line
    return made


def is_closed(held: socket.socket, wait_ms: int) -> bool:
    """Whether the other end closes this connection within the time."""
    poller = select.poll()
    poller.register(held, select.POLLIN)
    while poller.poll(wait_ms):
        try:
            if not held.recv(64):
                return True
        except ConnectionResetError:
            return True
    return False


@pytest.mark.parametrize(
    ("max_sessions_per_user", "most"),
    [(2, 2 + bounds.SLACK - 1), (128, bounds.STRANGERS_PER_USER)],
    ids=["all connections of a user", "connections without a session"],
)
def test_a_user_with_too_many_connections_loses_the_newest(
    make_world, make_client, runtime_dir, monkeypatch, max_sessions_per_user, most
):
    """`most`: beside one of an honest client, which has a session."""
    monkeypatch.setattr(bounds, "HELLO_S", 600.0)  # on a busy machine the usual five seconds end others meanwhile
    world = make_world(max_sessions=256, max_sessions_per_user=max_sessions_per_user)
    honest = make_client(world)
    session = world.open(honest).session
    held = [connect(f"{runtime_dir}/g.sock") for _ in range(most + 20)]
    try:
        # They are accepted in order: once the last was closed, each has been accepted or refused.
        assert is_closed(held[-1], WAIT_MS)
        assert [is_closed(made, WAIT_MS if number >= most else 0) for number, made in enumerate(held)] == [
            number >= most for number in range(most + 20)
        ]
        assert world.router.sockets.refused_connections == 20
        world.now += 1.0
        world.router.expire(world.now)
        assert world.router.counters["connections"] == 20
        world.serves(honest, session, 1)
    finally:
        for made in held:
            made.close()
    # They are gone and counted no more: another client finds room.
    again = make_client(world)
    again.send(HELLO)
    assert world.next(Opened)


def test_connections_that_say_no_hello_are_cut_in_time(make_world, make_client, runtime_dir, monkeypatch):
    """And not before the router has read what had arrived when the time was over."""
    monkeypatch.setattr(bounds, "HELLO_S", 0.0)
    world = make_world()
    honest = make_client(world)
    session = world.open(honest).session
    held = [connect(f"{runtime_dir}/g.sock") for _ in range(3)]
    try:
        poller = select.poll()
        for made in held:
            poller.register(made, select.POLLHUP)
        before = world.router.sockets.refused_connections
        for number in range(1, 4):
            world.serves(honest, session, number)
        assert world.router.sockets.refused_connections == before, "`expire` was not called: messages may wait"
        while world.router.sockets.refused_connections < before + 3:
            world.router.receive(world.now)
            world.router.expire(world.now)
        assert len(poller.poll(WAIT_MS)) == 3
        world.serves(honest, session, 4)
    finally:
        for made in held:
            made.close()


def test_a_connection_whose_session_ended_is_cut_in_time(make_world, make_client, monkeypatch):
    monkeypatch.setattr(bounds, "HELLO_S", 0.0)
    world = make_world()
    client, other = make_client(world), make_client(world)
    opened, beside = world.open(client), world.open(other)
    client.send(Goodbye(), ())
    assert world.next(Closed).session == opened.session
    while not world.router.sockets.refused_connections:
        world.router.receive(world.now)
        world.router.expire(world.now)
    world.serves(other, beside.session, 1)


def accepted(path: str) -> int:
    """How many connections to `path` this process has at its end."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        end = connections._copy(int(name))
        if end is not None:
            with end:
                found += end.getsockname() == path and not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return found


@pytest.fixture
def crowd(runtime_dir):
    """Makes connections and keeps them; at most as many as wait in line."""
    held: list[socket.socket] = []

    def come(count: int) -> None:
        held.extend(connect(f"{runtime_dir}/g.sock") for _ in range(count))

    yield come
    for made in held:
        made.close()


def test_libzmq_accepts_no_connection_while_one_is_checked(make_world, make_client, runtime_dir, crowd, monkeypatch):
    monkeypatch.setattr(bounds, "STRANGERS_PER_USER", 100)
    seen, looking, looked = threading.Event(), threading.Event(), threading.Event()
    accept = Connections._accepted

    def dawdle(self: Connections, fd: int) -> None:
        if seen.is_set():  # the honest client's
            looking.set()
            assert looked.wait(WAIT_MS / 1000)
        accept(self, fd)
        seen.set()

    monkeypatch.setattr(Connections, "_accepted", dawdle)
    world = make_world()
    honest = make_client(world)
    session = world.open(honest).session
    assert seen.wait(WAIT_MS / 1000)
    before = accepted(f"{runtime_dir}/g.sock")
    try:
        crowd(40)
        assert looking.wait(WAIT_MS / 1000)
        for number in range(1, 11):
            world.serves(honest, session, number)  # libzmq's thread turns meanwhile
        assert accepted(f"{runtime_dir}/g.sock") == before + 1
    finally:
        looked.set()
    another = make_client(world)  # behind all of them in the line
    another.send(HELLO)
    assert world.next(Opened)
    assert accepted(f"{runtime_dir}/g.sock") > before + 1


def test_no_connection_is_accepted_while_descriptors_are_short(
    make_world, make_client, runtime_dir, crowd, monkeypatch
):
    monkeypatch.setattr(bounds, "STRANGERS_PER_USER", 100)
    world = make_world()
    honest = make_client(world)
    session = world.open(honest).session
    before = accepted(f"{runtime_dir}/g.sock")
    swept, sweep = threading.Event(), Connections._sweep

    def sweep_and_tell(self: Connections) -> None:
        sweep(self)
        swept.set()

    with monkeypatch.context() as patched:
        patched.setattr(connections, "file_limit", lambda: 8)
        patched.setattr(Connections, "_sweep", sweep_and_tell)
        crowd(40)
        for number in range(1, 11):
            world.serves(honest, session, number)
        assert accepted(f"{runtime_dir}/g.sock") <= before + 1, "one may have come before the limit"
        held = world.router.sockets.listening[0].connections
        held._table.add((9999, 1), 4321, 0.0, (), MANY)  # what libzmq let go of without a word is forgotten
        for _ in range(2):  # the first may have begun before
            swept.clear()
            assert swept.wait(WAIT_MS / 1000)
        assert 4321 not in held._table.owners()
    another = make_client(world)
    another.send(HELLO)
    assert world.next(Opened), "there is room again"


def test_there_is_no_daemon_before_connections_are_looked_at(make_world, monkeypatch):
    early, made = [], threading.Event()
    find = AcceptGate.of

    def dawdle(fd: int, timeout: float) -> AcceptGate | None:
        early.append(made.wait(0.2))
        return find(fd, timeout)

    monkeypatch.setattr(AcceptGate, "of", dawdle)
    make_world()
    made.set()
    assert early == [False]


def test_a_socket_that_no_epoll_set_waits_for_has_no_gate():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as alone:
        assert AcceptGate.of(alone.fileno(), 0.0) is None


def test_bounds_fit_what_the_process_may_open():
    assert bounds.bounds(256, 128, 4096) == Bounds(256 + 2 * bounds.SLACK, 128 + bounds.SLACK, bounds.RESERVED)
    assert bounds.bounds(256, 128, 64) == Bounds(24, 32, 4)


# ---- The table, on a clock of the tests' own. Users 0 and 500 have a reserve.

MANY = Bounds(in_all=320, own=160, reserved=32)


class Crowd:
    """A table, and connections that come, say Hello and go."""

    def __init__(self) -> None:
        self.table, self.named, self.now = ConnectionTable({0, 500}), set(), 0.0
        self.count = 0

    def comes(self, owner: int | str, hello: bool = False) -> bool:
        self.count += 1
        connection = (self.count, 1000 + self.count)
        taken = self.table.add(connection, owner, self.now, self.named, MANY)
        if not taken:
            self.table.remove(self.count)
        elif hello:
            self.named.add(connection)
        return taken


def test_two_users_that_say_nothing_keep_nobody_out():
    crowd = Crowd()
    taken = [crowd.comes(uid) for _ in range(165) for uid in (1001, 1002)]
    assert sum(taken) == 2 * bounds.STRANGERS_PER_USER
    assert crowd.comes(0, hello=True)
    assert crowd.comes(1003, hello=True)


def test_many_users_that_say_nothing_keep_root_and_the_daemons_user_in():
    crowd = Crowd()
    taken = [crowd.comes(uid) for uid in range(1000, 1100) for _ in range(20)]
    assert sum(taken) == bounds.STRANGERS
    assert not crowd.comes(2000)
    assert all(crowd.comes(uid, hello=True) for uid in (0, 500) for _ in range(bounds.RESERVED))
    crowd.now += bounds.HELLO_S
    assert crowd.table.overdue(crowd.now, crowd.named, 7) == [], "nothing was read since"
    late = crowd.table.overdue(crowd.now, crowd.named, 9)
    assert len(late) == bounds.STRANGERS
    for fd, _ in late:
        crowd.table.remove(fd)
    assert crowd.comes(2000)


def test_users_with_all_their_sessions_keep_root_and_the_daemons_user_in():
    crowd = Crowd()
    taken = [crowd.comes(uid, hello=True) for uid in (1001, 1002, 1003) for _ in range(170)]
    assert sum(taken) == MANY.in_all
    assert not crowd.comes(1004)
    assert [sum(crowd.comes(uid, hello=True) for _ in range(MANY.reserved + 5)) for uid in (0, 500)] == [32, 32]


def test_the_reserve_is_root_s_beside_its_share_of_what_all_have():
    crowd = Crowd()
    assert sum(crowd.comes(0, hello=True) for _ in range(200)) == MANY.own
    assert sum(crowd.comes(uid, hello=True) for uid in (1001, 1002, 1003) for _ in range(160)) == 320 - (160 - 32)


def test_one_address_is_one_user():
    crowd = Crowd()
    assert sum(crowd.comes("10.0.0.1") for _ in range(90)) == bounds.STRANGERS_PER_USER
    assert crowd.comes("10.0.0.2", hello=True)


def test_time_for_hello_begins_anew_when_a_session_ends():
    crowd = Crowd()
    crowd.comes(1001, hello=True)
    crowd.now += 100.0
    assert crowd.table.overdue(crowd.now, crowd.named, 1) == []
    crowd.named.clear()
    for later, reads, found in (
        (0.0, 2, 0),
        (bounds.HELLO_S - 0.1, 3, 0),
        (bounds.HELLO_S, 4, 0),
        (bounds.HELLO_S, 6, 1),
    ):
        assert len(crowd.table.overdue(100.0 + later, crowd.named, reads)) == found
    assert crowd.comes(1001)


def test_the_lowest_free_number_tells_that_little_is_left(monkeypatch):
    lowest = os.dup(2)
    os.close(lowest)
    monkeypatch.setattr(connections, "file_limit", lambda: 4 * (lowest + 2))
    connections.check_descriptors()
    monkeypatch.setattr(connections, "file_limit", lambda: lowest + 1)
    with pytest.raises(connections.AdmissionRefused):
        connections.check_descriptors()


def test_a_number_that_is_something_else_by_now_is_left_alone():
    before = sorted(os.listdir("/proc/self/fd"))
    bell = os.eventfd(0)
    assert connections._copy(bell) is None, "libzmq let go of the connection, and the number was taken"
    os.close(bell)
    assert connections._copy(bell) is None
    assert sorted(os.listdir("/proc/self/fd")) == before
