"""The daemon's listening sockets, and limits on connections of a user and on open descriptors.

libzmq accepts every connection, and ends the whole process if it runs out of descriptors (an assertion in its
listener). So it accepts through an `AcceptGate`, one connection at a time: its monitor reports the connection, the
kernel names its user, and a connection over the limit (connections.py), or without a Hello in time, is shut down, which
makes libzmq close it. While descriptors are short, or too many connections are being shut down, none is accepted: new
ones wait in the kernel's queue. A session needs one connection, so an honest user stays far below the limit.

Before the daemon opens any other descriptor for a client, `check_descriptors` keeps a part of the process's limit free
for work under way; the gate needs the smaller half of that part.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import re
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import zmq

from gpumux.errors import AccessDenied, AdmissionRefused, ConfigError, EndpointBusy
from gpumux.types import Peer
from gpumux.wire.channel import ChannelListener
from gpumux.wire.connections import SLACK, Bounds, Connection, ConnectionTable, Owner, bounds
from gpumux.wire.endpoint import (
    Endpoint,
    EndpointLock,
    channel_path,
    check_distinct,
    ensure_runtime_dir,
    parse,
    remove_stale,
)
from gpumux.wire.limits import Limits
from gpumux.wire.peers import DOMAIN, Gatekeeper, ServerCurve, secure_server

# ---- A gate in front of a listening socket of libzmq: one connection at a time.
#
# libzmq's I/O thread accepts as fast as clients connect, and aborts the process if `accept` finds no free descriptor
# (an assertion in the listener of ipc sockets). Its monitor reports connections too late to prevent that. But the
# thread learns of a waiting connection from its epoll set, where a socket can be registered to be reported once
# (EPOLLONESHOT, epoll(7)) and then not again until it is registered anew. So between two connections libzmq sleeps, and
# connections made meanwhile wait in the kernel's queue.
#
# /proc/self/fdinfo (proc(5)) tells which epoll set that is, and which data libzmq has registered for the socket.


_TARGET = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)", re.MULTILINE)
_MODIFY = 3  # EPOLL_CTL_MOD: Python's own `modify` would replace libzmq's data by the descriptor's number
_ONCE = int(select.EPOLLIN | select.EPOLLONESHOT)
_LOOK_S = 0.0002  # between two looks for a registration that the I/O thread is about to make
_libc = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):
    """struct epoll_event, which has no padding on x86-64."""

    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))
    if platform.machine() == "x86_64":
        _pack_ = 1
        _layout_ = "ms"


class AcceptGate:
    """Admits connections to the listening socket `fd` one at a time. `fd` is registered in the epoll set `epoll` with
    `data`."""

    def __init__(self, fd: int, epoll: int, data: int) -> None:
        self._fd = fd
        self._epoll = epoll
        self._event = _Event(_ONCE, data)

    @classmethod
    def of(cls, fd: int, timeout: float) -> AcceptGate | None:
        """Make a gate that admits one connection. Returns None if no epoll set waits for `fd` within `timeout` seconds:
        another libzmq, or no /proc."""
        end = time.monotonic() + timeout
        while (found := _registration(fd)) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(_LOOK_S)
        gate = cls(fd, *found)
        gate.next()
        return gate

    def next(self) -> None:
        """Admit one more connection, now or when it comes."""
        if _libc.epoll_ctl(self._epoll, _MODIFY, self._fd, ctypes.byref(self._event)) == -1:
            error = ctypes.get_errno()
            if error not in (errno.ENOENT, errno.EBADF):  # the socket is being closed
                raise OSError(error, os.strerror(error))


def _registration(fd: int) -> tuple[int, int] | None:
    """Find the epoll set that waits for `fd` to be readable, and the data that it reports for `fd`."""
    try:
        sets = [int(name) for name in os.listdir("/proc/self/fd") if _is_epoll(name)]
    except OSError:
        return None
    for epoll in sets:
        try:
            with open(f"/proc/self/fdinfo/{epoll}") as info:
                targets = _TARGET.findall(info.read())
        except OSError:
            continue  # closed meanwhile
        for target, events, data in targets:
            if int(target) == fd and int(events, 16) & select.EPOLLIN:
                return epoll, int(data, 16)
    return None


def _is_epoll(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]"
    except OSError:
        return False


# ---- Limiting the connections of each user.


log = logging.getLogger("gpumux.daemon")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_WATCHED = int(
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)
_EVENT = struct.Struct("=HI")  # event, descriptor
_FOUND_S = 10.0  # longest wait for libzmq's I/O thread to listen
_FULL_MS = 100  # between two checks for room
_LOOK_MS = 500  # between two looks for connections that should have said Hello
_numbers = count()
TRUSTED = frozenset({0, os.geteuid()})  # users who find a place when all others' are taken


class Connections:
    """Limits the connections to a ROUTER socket that is not bound yet (connections.py), in a thread of its own: libzmq
    accepts no faster than this thread lets it, and the loop must not wait for that. `refused` counts connections that
    were shut down. The loop keeps `named`, the connections that have a session, and `reads`: how often it has read all
    messages that had arrived."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listening: zmq.Socket[bytes], limits: Limits) -> None:
        address = f"inproc://gpumux-connections-{next(_numbers)}"
        self.limits = limits
        self.refused = 0
        self.named: set[Connection] = set()
        self.reads = 0
        self._listening = listening
        self._gate: AcceptGate | None = None
        self._ready = threading.Event()  # the gate is in place, or there can be none
        self._open = False  # whether the gate admits a connection that no event has reported yet
        self._table = ConnectionTable(TRUSTED)
        listening.monitor(address, _WATCHED)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)  # otherwise libzmq's own thread would wait for this one
        self._events.connect(address)
        self._thread = threading.Thread(target=self._watch, name="gpumux-connections", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """Wait until the gate accepts every connection. Call it after the socket was bound."""
        self._ready.wait(2 * _FOUND_S)

    def close(self) -> None:
        """Stop watching. Call it before the watched socket is closed. Idempotent."""
        if self._thread.is_alive():
            self._listening.disable_monitor()
            self._thread.join()
        self._events.close()

    def _watch(self) -> None:
        while True:
            full = not self._has_room()
            if self._gate is not None and not self._open and not full:
                self._gate.next()
                self._open = True
            if not self._events.poll(_FULL_MS if full else _LOOK_MS):
                self._sweep()
                continue
            what, fd = _EVENT.unpack(self._events.recv())
            self._events.recv()  # the endpoint
            if what == zmq.EVENT_MONITOR_STOPPED:
                return
            if what == zmq.EVENT_LISTENING:
                self._gate = AcceptGate.of(fd, _FOUND_S)
                self._open = True
                if self._gate is None:
                    log.warning("libzmq can't be held back here: a flood of connections could end this daemon")
                self._ready.set()
                continue
            if what != zmq.EVENT_DISCONNECTED:
                self._open = False
            if what == zmq.EVENT_ACCEPT_FAILED:
                continue  # `fd` is the number of an error
            self._table.remove(fd)  # a descriptor that was reported before is another connection now
            if what == zmq.EVENT_ACCEPTED:
                self._accepted(fd)
            self._cut_overdue()

    def _has_room(self) -> bool:
        """Whether one more connection may be accepted, even if only to be shut down."""
        most = self._bounds()
        room = most.in_all + 2 * most.reserved + SLACK
        return len(self._table) < room and _lowest_free() < file_limit() - _reserve() // 2

    def _bounds(self) -> Bounds:
        return bounds(self.limits.max_sessions, self.limits.max_sessions_per_user, file_limit())

    def _accepted(self, fd: int) -> None:
        connection = _copy(fd)
        if connection is None:
            return  # it is gone already
        with connection:
            try:
                owner = _owner(connection)
                inode = os.fstat(connection.fileno()).st_ino
            except OSError:
                return
            if not self._table.add((fd, inode), owner, time.monotonic(), self.named, self._bounds()):
                self._shut_down(connection)

    def _shut_down(self, connection: socket.socket) -> None:
        self.refused += 1
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it hung up by itself

    def _cut_overdue(self) -> None:
        """Shut down connections that have not said Hello in time."""
        for fd, inode in self._table.overdue(time.monotonic(), set(self.named), self.reads):
            self._table.remove(fd)
            connection = _copy(fd)
            if connection is not None:
                with connection:
                    if os.fstat(connection.fileno()).st_ino == inode:
                        self._shut_down(connection)

    def _sweep(self) -> None:
        """Forget connections that libzmq has closed without an event, so that they take no places."""
        for fd, inode in self._table.connections():
            try:
                gone = os.fstat(fd).st_ino != inode
            except OSError:
                gone = True
            if gone:
                self._table.remove(fd)
        self._cut_overdue()


def _copy(fd: int) -> socket.socket | None:
    """Duplicate a descriptor of libzmq as a socket. Returns None if it is no socket any more: libzmq may have closed
    it, and the number may have been reused."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _owner(connection: socket.socket) -> Owner:
    if connection.family != socket.AF_UNIX:
        return str(connection.getpeername()[0])
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


RESERVE = 256  # descriptors kept free, or a quarter of the limit if that is less


def file_limit() -> int:
    """The number of descriptors that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _reserve() -> int:
    return min(RESERVE, file_limit() // 4)


def _lowest_free() -> int:
    """The number of the next descriptor. The kernel assigns the lowest free one, so all below are in use."""
    try:
        lowest = os.dup(2)
    except OSError:
        return file_limit()
    os.close(lowest)
    return lowest


def check_descriptors() -> None:
    """Raise AdmissionRefused if the daemon should open no more descriptors for clients: the lowest free number lies
    within the reserve. No client's work begins then, so the numbers above stay free."""
    limit = file_limit()
    if _lowest_free() >= limit - _reserve():
        raise AdmissionRefused(
            f"the daemon has nearly all of the {limit} descriptors open that it may have",
            "close jobs or clients, or raise the daemon's limit (LimitNOFILE, `ulimit -Hn`)",
        )


# ---- Binding the daemon's sockets: one ROUTER an endpoint, its lock, its options.


_HANDSHAKE_MS = 5_000  # a connection that has not finished ZeroMQ's handshake by then is closed
_NOBLOCK_MORE = zmq.NOBLOCK | zmq.SNDMORE
FULL = "the client does not read its messages"
_LINGER_MS = 500  # longest wait of a closing daemon for its last messages to leave


class Listening:
    """A bound ROUTER socket. The mode of an ipc socket follows the process's umask."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        limits: Limits,
        curve: ServerCurve | None,
    ) -> None:
        self.endpoint = endpoint
        self.lock: EndpointLock | None = None
        self.connections: Connections | None = None
        if endpoint.path is None and curve is None:
            raise ConfigError(
                f"{endpoint.text} needs CURVE keys: anyone who reaches it could run work here",
                "give the daemon a secret key and a directory of client keys, or use an ipc:// endpoint",
            )
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        try:
            self._set_options(limits)
            if endpoint.path is not None:
                ensure_runtime_dir(endpoint.path.parent)
                self.lock = EndpointLock(endpoint.path)
                remove_stale(endpoint.path)
            elif curve is not None:
                self.socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
                self.socket.setsockopt(zmq.IPV6, "[" in endpoint.text)
                secure_server(self.socket, curve)
            self.connections = Connections(context, self.socket, limits)
            self._bind()
            self.connections.watch()
        except BaseException:
            self.close()
            self.release()
            raise

    @property
    def address(self) -> str:
        """The endpoint as bound: a tcp port given as `*` is filled in."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _set_options(self, limits: Limits) -> None:
        options = {
            zmq.LINGER: _LINGER_MS,
            zmq.ROUTER_MANDATORY: 1,  # a peer that is gone or full is an error we see, not a silent drop
            zmq.MAXMSGSIZE: limits.max_message_bytes,
            zmq.SNDHWM: limits.send_queue,
            zmq.RCVHWM: limits.receive_queue,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)

    def _bind(self) -> None:
        try:
            self.socket.bind(self.endpoint.text)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise EndpointBusy(f"{self.endpoint.text} is in use", "choose another --endpoint") from error
            raise ConfigError(f"can't listen on {self.endpoint.text}: {error}", "choose another --endpoint") from error

    def send(self, identity: bytes, parts: Sequence[bytes | memoryview]) -> str:
        """Hand a message to ZeroMQ without waiting. What failed, "" when nothing did."""
        try:
            self.socket.send(identity, _NOBLOCK_MORE)  # whether the message can go is decided here
            for part in parts[:-1]:
                self.socket.send(part, _NOBLOCK_MORE)
            self.socket.send(parts[-1], zmq.NOBLOCK)
        except zmq.Again:
            return FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "the client's connection is gone"
        return ""

    def close(self) -> None:
        """Close the socket; `release` follows when the context has ended."""
        if self.connections is not None:
            self.connections.close()
        self.socket.close()

    def release(self) -> None:
        """Remove the socket file, then let the next daemon have the endpoint."""
        lock, path = self.lock, self.endpoint.path
        if lock is not None and path is not None:
            remove_stale(path)
            lock.close()
            self.lock = None


# ---- All sockets of a daemon's router, opened together and closed in the right order.


Route = tuple[int, bytes]  # which listening socket, routing id
_POLLIN = int(zmq.POLLIN)


class Sockets:
    """ZeroMQ's sockets, and the listener for local channels. Raises the errors that Router names.

    `epoll` watches the open channels. The loop may have it watch other descriptors, too. `first_for_all`: processes of
    any user that its directory lets in may connect to the first endpoint, and to the channels' socket beside it.
    """

    channels: ChannelListener

    def __init__(
        self,
        endpoints: Sequence[str],
        runtime_dir: Path,
        limits: Limits,
        curve: ServerCurve | None,
        *,
        first_for_all: bool = False,
    ) -> None:
        self.listening: list[Listening] = []
        self.gatekeeper: Gatekeeper | None = None
        self.touched = True  # a ZeroMQ socket was used since `unread` said no
        self._channel_lock: EndpointLock | None = None
        parsed = [parse(text) for text in endpoints]
        path = channel_path(parsed, runtime_dir)
        check_distinct(parsed, path)
        self.epoll = select.epoll()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            if curve is not None:
                self.gatekeeper = Gatekeeper(self._context, curve.clients)
            for endpoint in parsed:
                self.listening.append(Listening(self._context, endpoint, limits, curve))
            ensure_runtime_dir(path.parent)
            self._channel_lock = EndpointLock(path)
            remove_stale(path)
            self.channels = ChannelListener(path)
            if first_for_all:
                for open_to_all in (parsed[0].path, path):
                    if open_to_all is not None:
                        open_to_all.chmod(0o666)  # connecting takes write permission
        except BaseException:
            self._close_rest()
            raise
        self._zmq = [listening.socket for listening in self.listening]
        if self.gatekeeper is not None:
            self._zmq.append(self.gatekeeper.socket)

    def fds(self) -> list[zmq.Socket[bytes] | int]:
        """See Router.fds."""
        return [*self._zmq, self.channels.fileno(), self.epoll.fileno()]

    def descriptors(self) -> list[int]:
        """The same as bare descriptors, without `epoll`: the loop uses `epoll` as its own, and passes its reports about
        descriptors that it did not register to Router.receive_channels."""
        return [*(int(sock.getsockopt(zmq.FD)) for sock in self._zmq), self.channels.fileno()]

    def named(self, peer: Peer, key: str) -> Peer:
        """Add the name of the file of `key` to the tcp peer that holds it. Raises AccessDenied if the file was removed
        since the peer connected."""
        found = self.gatekeeper.names.get(key) if self.gatekeeper is not None else None
        if found is None:
            raise AccessDenied("your key is no longer among those this daemon lets in", "ask its operator")
        return replace(peer, key=found)

    def unread(self) -> bool:
        """Whether a ZeroMQ socket has messages. A loop that sleeps on ZeroMQ's bare descriptors, which signal changes
        and not levels, asks before each sleep. The call is cheap while no socket was used."""
        if not self.touched:
            return False
        self.touched = any(int(sock.getsockopt(zmq.EVENTS)) & _POLLIN for sock in self._zmq)
        return self.touched

    def named_by(self, route: Route, frame: zmq.Frame) -> Connection | None:
        """The connection that `frame` came by has a session from now on. Returns it, None if it is gone."""
        connections = self.listening[route[0]].connections
        try:
            fd = int(frame.get(zmq.SRCFD))
            named = fd, os.fstat(fd).st_ino
        except (OSError, ValueError, zmq.ZMQError):
            return None
        if connections is not None:
            connections.named.add(named)
        return named

    def all_read(self) -> None:
        """All messages that had arrived have been read."""
        for listening in self.listening:
            if listening.connections is not None:
                listening.connections.reads += 1

    def left(self, route: Route, connection: Connection | None) -> None:
        """The session of this connection has ended. Idempotent."""
        connections = self.listening[route[0]].connections
        if connections is not None and connection is not None:
            connections.named.discard(connection)

    @property
    def refused_connections(self) -> int:
        """The number of connections that were shut down: too many, or without a Hello."""
        return sum(at.connections.refused for at in self.listening if at.connections is not None)

    def limit(self, limits: Limits) -> None:
        """Apply these limits to connections from now on."""
        for listening in self.listening:
            if listening.connections is not None:
                listening.connections.limits = limits

    def send(self, route: Route, parts: Sequence[bytes | memoryview]) -> str:
        """Pass a message to ZeroMQ. Returns the failure, "" on success."""
        self.touched = True
        return self.listening[route[0]].send(route[1], parts)

    def close(self) -> None:
        """Close all sockets. Waits at most half a second for unsent messages. Idempotent."""
        if self._zmq:
            self._zmq = []
            self.channels.close()
            self._close_rest()

    def _close_rest(self) -> None:
        self.epoll.close()
        if self.gatekeeper is not None:
            self.gatekeeper.close()
        for listening in self.listening:
            listening.close()
        self._context.term()  # the sockets are closed when this returns, so their files may go
        for listening in self.listening:
            listening.release()
        if self._channel_lock is not None:
            self._channel_lock.close()
