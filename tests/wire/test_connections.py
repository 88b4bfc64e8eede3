"""Connections, which libzmq accepts without asking, are bounded: one user's, and all."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading

import pytest

from gpumux.wire import listen as connections
from gpumux.wire.limits import Limits
from gpumux.wire.listen import AcceptGate, Connections
from gpumux.wire.router import Opened
from tests.wire.world import HELLO, WAIT_MS

FEW = Limits(max_sessions=4, max_sessions_per_user=2)
OWN = FEW.max_sessions_per_user + connections.SLACK


def connect(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    while made.connect_ex(path) == errno.EAGAIN:
        pass  # more come at once than wait in line
    return made


def closed(held: list[socket.socket], count: int) -> int:
    """How many of the connections the other end has closed; waits until it is `count`."""
    poller, left = select.poll(), {}
    for made in held:
        poller.register(made, select.POLLIN)
        left[made.fileno()] = made
    ended = 0
    while ended < count:
        ready = poller.poll(WAIT_MS)
        assert ready, f"only {ended} of {count} were closed"
        for fd, _ in ready:
            try:
                data = left[fd].recv(64)
            except ConnectionResetError:
                data = b""
            if not data:
                poller.unregister(fd)
                ended += 1
    return ended


def test_a_user_with_too_many_connections_loses_the_newest(make_world, make_client, runtime_dir):
    world = make_world(max_sessions=4, max_sessions_per_user=2)
    honest = make_client(world)
    session = world.open(honest).session
    held = [connect(f"{runtime_dir}/g.sock") for _ in range(OWN + 20)]
    try:
        assert closed(held, 21) == 21, "one connection is the honest client's"
        assert world.router.sockets.refused_connections == 21
        world.now += 1.0
        world.router.expire(world.now)
        assert world.router.counters["connections"] == 21
        world.serves(honest, session, 1)
    finally:
        for made in held:
            made.close()
    # They are gone and counted no more: another client finds room.
    again = make_client(world)
    again.send(HELLO)
    assert world.next(Opened)


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
        held._owners[9999] = (4321, 1)  # what libzmq let go of without a word is forgotten
        held._by_uid[4321] = 1
        for _ in range(2):  # the first may have begun before
            swept.clear()
            assert swept.wait(WAIT_MS / 1000)
        assert 4321 not in held._by_uid
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


def test_bounds_fit_what_the_process_may_open(monkeypatch):
    assert connections.most(FEW) == (FEW.max_sessions + 2 * connections.SLACK, OWN)
    monkeypatch.setattr(connections, "file_limit", lambda: 64)
    assert connections.most(FEW) == (32, 32)


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
