"""How many connections a user may have, whatever is said on them, and how many descriptors are left.

libzmq accepts whoever connects, and ends the whole process when it runs out of descriptors (an assertion in its
listener). So it accepts through a turnstile (turnstile.py): one connection, of which its monitor tells us; the kernel says whose it is;
one too many is shut down at once, which makes libzmq let go of it; then the next. While descriptors are short, or more
connections are being shut down than fit, nobody is accepted: who comes waits in the kernel's line. A session needs one
connection, so an honest user stays far below the bound.

Everything else the daemon opens for a client is asked for beforehand: `check_descriptors` keeps a part of the process's
limit free, for what is under way; the turnstile needs the smaller half of that part.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
import threading
from collections import Counter
from itertools import count

import zmq

from gpumux.errors import AdmissionRefused
from gpumux.wire.limits import Limits
from gpumux.wire.turnstile import Turnstile

log = logging.getLogger("gpumux.daemon")
SLACK = 32  # connections of a user beyond its sessions: commands that come and go, clients that reconnect
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_WATCHED = int(
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)
_TCP = -1  # stands for everybody who comes by tcp: who that is nobody knows yet
_EVENT = struct.Struct("=HI")  # what happened, and to which descriptor
_FOUND_S = 10.0  # how long libzmq's I/O thread may take to listen; it takes less than a millisecond
_FULL_MS = 100  # between two looks whether there is room again
_numbers = count()


class Connections:
    """Watches a ROUTER socket that is yet to be bound, from a thread of its own: libzmq accepts no faster than it looks, and
    the dispatch loop has other things to do. `refused` counts those that were shut down."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listening: zmq.Socket[bytes], limits: Limits) -> None:
        address = f"inproc://gpumux-connections-{next(_numbers)}"
        self.limits = limits
        self.refused = 0
        self._listening = listening
        self._turnstile: Turnstile | None = None
        self._ready = threading.Event()  # it stands, or there can be none
        self._open = False  # whether it lets one more through that we have not heard of
        self._owners: dict[int, tuple[int, int]] = {}  # uid and the socket's inode, by descriptor
        self._by_uid: Counter[int] = Counter()
        listening.monitor(address, _WATCHED)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)  # or libzmq's own thread would wait for us
        self._events.connect(address)
        self._thread = threading.Thread(target=self._watch, name="gpumux-connections", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """Wait until nobody is accepted unseen: after the socket was bound."""
        self._ready.wait(2 * _FOUND_S)

    def close(self) -> None:
        """Before the socket that is watched closes. Idempotent."""
        if self._thread.is_alive():
            self._listening.disable_monitor()
            self._thread.join()
        self._events.close()

    def _watch(self) -> None:
        while True:
            full = not self._has_room()
            if self._turnstile is not None and not self._open and not full:
                self._turnstile.next()
                self._open = True
            if not self._events.poll(_FULL_MS if full else None):
                self._sweep()
                continue
            what, fd = _EVENT.unpack(self._events.recv())
            self._events.recv()  # the endpoint
            if what == zmq.EVENT_MONITOR_STOPPED:
                return
            if what == zmq.EVENT_LISTENING:
                self._turnstile = Turnstile.of(fd, _FOUND_S)
                self._open = True
                if self._turnstile is None:
                    log.warning("libzmq can't be held back here: a flood of connections could end this daemon")
                self._ready.set()
                continue
            if what != zmq.EVENT_DISCONNECTED:
                self._open = False
            if what == zmq.EVENT_ACCEPT_FAILED:
                continue  # its number is an error's
            self._forget(fd)  # a number that comes again is another connection
            if what == zmq.EVENT_ACCEPTED:
                self._accepted(fd)

    def _has_room(self) -> bool:
        """Whether one more may be accepted, be it to be shut down."""
        return len(self._owners) < most(self.limits)[0] + SLACK and _lowest_free() < file_limit() - _reserve() // 2

    def _accepted(self, fd: int) -> None:
        connection = _copy(fd)
        if connection is None:
            return  # it is gone already
        with connection:
            try:
                uid = _owner(connection)
                inode = os.fstat(connection.fileno()).st_ino
            except OSError:
                return
            self._owners[fd] = uid, inode
            self._by_uid[uid] += 1
            in_all, own = most(self.limits)
            if len(self._owners) > in_all or (uid != _TCP and self._by_uid[uid] > own):
                self.refused += 1
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it hung up by itself

    def _forget(self, fd: int) -> None:
        owner = self._owners.pop(fd, None)
        if owner is not None:
            uid, _ = owner
            self._by_uid[uid] -= 1
            if not self._by_uid[uid]:
                del self._by_uid[uid]

    def _sweep(self) -> None:
        """Forget what libzmq let go of without a word: nobody shall be kept waiting for it."""
        for fd, (_, inode) in list(self._owners.items()):
            try:
                gone = os.fstat(fd).st_ino != inode
            except OSError:
                gone = True
            if gone:
                self._forget(fd)


def _copy(fd: int) -> socket.socket | None:
    """A socket of our own for a descriptor of libzmq's; None if it is no socket any more: its number may be anything's."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def most(limits: Limits) -> tuple[int, int]:
    """Connections in all, and of one user: what the sessions may need, within half of what the process may open."""
    half = file_limit() // 2
    return min(limits.max_sessions + 2 * SLACK, half), min(limits.max_sessions_per_user + SLACK, half)


def _owner(connection: socket.socket) -> int:
    if connection.family != socket.AF_UNIX:
        return _TCP
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


RESERVE = 256  # descriptors kept free, or a quarter of the limit where that is less


def file_limit() -> int:
    """Descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _reserve() -> int:
    return min(RESERVE, file_limit() // 4)


def _lowest_free() -> int:
    """The number the next descriptor will have. The kernel gives out the lowest that is free, so all below are in use."""
    try:
        lowest = os.dup(2)
    except OSError:
        return file_limit()
    os.close(lowest)
    return lowest


def check_descriptors() -> None:
    """Raises AdmissionRefused when the daemon should open nothing more for anybody: the lowest free number lies within the
    reserve. As nothing begins then, the numbers above stay free."""
    limit = file_limit()
    if _lowest_free() >= limit - _reserve():
        raise AdmissionRefused(
            f"the daemon has nearly all of the {limit} descriptors open that it may have",
            "close jobs or clients, or raise the daemon's limit (LimitNOFILE, `ulimit -Hn`)",
        )
