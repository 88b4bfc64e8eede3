"""Who sent a frame, as the kernel (ipc) or CURVE (tcp) says, and how to be rid of a connection."""

from __future__ import annotations

import os
import socket
import struct

import zmq

from gpumux.model import Peer
from gpumux.wire.curve import peer_of

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


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
    if peer.pid <= 0:
        return False
    try:
        fd = os.dup(int(frame.get(zmq.SRCFD)))
    except (OSError, ValueError, zmq.ZMQError):
        return False
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return False
    with connection:
        if connection.family != socket.AF_UNIX:
            return False
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _gid = _CREDENTIALS.unpack(raw)
            if (pid, uid) != (peer.pid, peer.uid):
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
