"""How many connections a user may have, whatever is said on them, and how many descriptors are left.

libzmq accepts whoever connects, and ends the whole process when it runs out of descriptors (an assertion in its
listener). So its monitor tells us of each connection as it is accepted; the kernel says whose it is; and one too many is shut
down at once, which makes libzmq let go of it. A session needs one connection, so an honest user stays far below the bound.

Everything else the daemon opens for a client is asked for beforehand: `check_descriptors` keeps a part of the process's
limit free, for what is under way and for connections that are about to be shut down.
"""

from __future__ import annotations

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

SLACK = 32  # connections of a user beyond its sessions: commands that come and go, clients that reconnect
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_WATCHED = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
_TCP = -1  # stands for everybody who comes by tcp: who that is nobody knows yet
_EVENT = struct.Struct("=HI")  # what happened, and to which descriptor
_numbers = count()


class Connections:
    """Watches a ROUTER socket that is yet to be bound, from a thread of its own: a flood has to be cut as fast as libzmq
    accepts it, and the dispatch loop has other things to do. `refused` counts those that were shut down."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listening: zmq.Socket[bytes], limits: Limits) -> None:
        address = f"inproc://gpumux-connections-{next(_numbers)}"
        self.limits = limits
        self.refused = 0
        self._listening = listening
        self._owners: dict[int, int] = {}  # uid, by descriptor
        self._by_uid: Counter[int] = Counter()
        listening.monitor(address, _WATCHED)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)  # or libzmq's own thread would wait for us
        self._events.connect(address)
        self._thread = threading.Thread(target=self._watch, name="gpumux-connections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before the socket that is watched closes. Idempotent."""
        if self._thread.is_alive():
            self._listening.disable_monitor()
            self._thread.join()
        self._events.close()

    def _watch(self) -> None:
        while True:
            what, fd = _EVENT.unpack(self._events.recv())
            self._events.recv()  # the endpoint
            if what == zmq.EVENT_MONITOR_STOPPED:
                return
            self._forget(fd)  # a number that comes again is another connection
            if what == zmq.EVENT_ACCEPTED:
                self._accepted(fd)

    def _accepted(self, fd: int) -> None:
        connection = _copy(fd)
        if connection is None:
            return  # it is gone already
        with connection:
            try:
                uid = _owner(connection)
            except OSError:
                return
            self._owners[fd] = uid
            self._by_uid[uid] += 1
            in_all, own = most(self.limits)
            if len(self._owners) > in_all or (uid != _TCP and self._by_uid[uid] > own):
                self.refused += 1
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it hung up by itself

    def _forget(self, fd: int) -> None:
        uid = self._owners.pop(fd, None)
        if uid is not None:
            self._by_uid[uid] -= 1
            if not self._by_uid[uid]:
                del self._by_uid[uid]


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


def check_descriptors() -> None:
    """Raises AdmissionRefused when the daemon should open nothing more for anybody.

    The kernel gives out the lowest free number. One that lies within the reserve says that all below are in use; and as
    nothing begins then, those above stay free.
    """
    limit = file_limit()
    try:
        lowest = os.dup(2)
        os.close(lowest)
    except OSError:
        lowest = limit
    if lowest >= limit - min(RESERVE, limit // 4):
        raise AdmissionRefused(
            f"the daemon has nearly all of the {limit} descriptors open that it may have",
            "close jobs or clients, or raise the daemon's limit (LimitNOFILE, `ulimit -Hn`)",
        )
