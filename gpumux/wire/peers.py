"""Who sent a frame, as the kernel (ipc) or CURVE (tcp) says, and how to be rid of a connection."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from dataclasses import replace

import zmq

from gpumux.errors import DaemonGone
from gpumux.model import Peer
from gpumux.wire.curve import peer_of

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SO_PEERGROUPS = 59  # Linux 4.13; the socket module has no name for it
_MOST_GROUPS = 65_536  # NGROUPS_MAX
_SHORT_BYTES = 1024  # what the socket module reads at most


def peer_name(frame: zmq.Frame, over_ipc: bool) -> str | None:
    """What ZeroMQ knows about the connection a frame came by: "localhost:UID:GID:PID" over ipc, the
    client's public key over tcp. A client can't choose it, unlike its routing id."""
    try:
        name = frame.get("Peer-Address" if over_ipc else "User-Id")
    except zmq.ZMQError:
        return None
    return name if isinstance(name, str) else None


def identify(name: str, over_ipc: bool) -> Peer | None:
    """The peer behind a `peer_name`; None when it can't be read."""
    if not over_ipc:
        return peer_of(name) if name else None
    fields = name.split(":")
    try:
        uid, gid, pid = (int(part) for part in fields[-3:])
    except ValueError:
        return None
    return Peer(uid, gid, pid) if len(fields) == 4 else None


def cut(frame: zmq.Frame, peer: Peer) -> bool:
    """Shut down the ipc connection `frame` came by, so that a flooder costs nothing more.

    ZeroMQ offers no way to drop one peer of a ROUTER, but names the descriptor. By the time we look
    that number may be another connection's: only a socket of the same process is shut down.
    """
    connection = _connection(frame, peer)
    if connection is None:
        return False
    with connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def with_groups(frame: zmq.Frame, peer: Peer) -> Peer:
    """The ipc peer with the supplementary groups its process had when it connected. Raises DaemonGone where the
    connection is gone already: without its groups nobody can say which access rule is the peer's."""
    connection = _connection(frame, peer)
    if connection is None:
        raise DaemonGone("the connection ended before its groups could be read", "connect again")
    with connection:
        return replace(peer, groups=_peer_groups(connection))


def _connection(frame: zmq.Frame, peer: Peer) -> socket.socket | None:
    """A copy of the ipc connection `frame` came by, None if that one is gone."""
    if peer.pid <= 0:
        return None
    try:
        fd = os.dup(int(frame.get(zmq.SRCFD)))
    except (OSError, ValueError, zmq.ZMQError):
        return None
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _gid = _CREDENTIALS.unpack(raw)
        if connection.family == socket.AF_UNIX and (pid, uid) == (peer.pid, peer.uid):
            return connection
    except (OSError, struct.error):
        pass
    connection.close()
    return None


def _peer_groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _SHORT_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise DaemonGone(
                f"the kernel says no groups of the connection: {error.strerror}", "connect again"
            ) from error
        raw = _many_groups(connection)
    return tuple(gid for (gid,) in struct.iter_unpack("I", raw))


def _many_groups(connection: socket.socket) -> bytes:
    """The same for a process in more groups than the socket module has room for."""
    room = ctypes.create_string_buffer(4 * _MOST_GROUPS)
    size = ctypes.c_uint(len(room))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, room, ctypes.byref(size)):
        why = os.strerror(ctypes.get_errno())
        raise DaemonGone(f"the kernel says no groups of the connection: {why}", "connect again")
    return room.raw[: size.value]
