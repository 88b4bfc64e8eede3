"""CURVE keys for tcp endpoints, in pyzmq's certificate files.

    daemon    NAME.key_secret of its own, and a directory of NAME.key files: the clients it lets in
    client    NAME.key_secret of its own, and the daemon's NAME.key

There is no tcp without keys: a daemon runs whatever Programs its clients send.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import zmq
import zmq.auth
import zmq.utils.z85

from gpumux.errors import ConfigError, DaemonGone
from gpumux.types import Peer

CLIENT_KEY = "GPUMUX_CURVE_KEY"  # environment: the client's NAME.key_secret
SERVER_KEY = "GPUMUX_CURVE_SERVER"  # environment: the daemon's NAME.key


@dataclass(frozen=True, slots=True)
class ServerCurve:
    """The paths of the daemon's keys. `clients` is read for every connection, so a key that is added or removed counts
    from the next connection on."""

    secret_key: Path
    clients: Path


@dataclass(frozen=True, slots=True)
class ClientCurve:
    secret_key: Path
    server_key: Path


def client_curve(environ: Mapping[str, str] | None = None) -> ClientCurve:
    """The client's keys from the environment. Raises ConfigError when they are not named there."""
    env = os.environ if environ is None else environ
    if not env.get(CLIENT_KEY) or not env.get(SERVER_KEY):
        raise ConfigError(
            "a tcp endpoint needs CURVE keys",
            f"set {CLIENT_KEY} to your NAME.key_secret and {SERVER_KEY} to the daemon's NAME.key",
        )
    return ClientCurve(Path(env[CLIENT_KEY]), Path(env[SERVER_KEY]))


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Make NAME.key (public, mode 0644) and NAME.key_secret (mode 0600) in `directory`. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    old = os.umask(0o077)
    try:
        public, secret = zmq.auth.create_certificates(directory, name)
    finally:
        os.umask(old)
    Path(public).chmod(0o644)  # the daemon that reads it may run as another user
    return Path(public), Path(secret)


def secure_server(socket: zmq.Socket[bytes], curve: ServerCurve) -> None:
    """Make a socket a CURVE server, before it is bound. Raises ConfigError for unusable keys."""
    if not curve.clients.is_dir():
        raise ConfigError(f"{curve.clients} is not a directory of client keys", "put the clients' NAME.key files there")
    public, secret = _load_secret(curve.secret_key)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def secure_client(socket: zmq.Socket[bytes], curve: ClientCurve) -> None:
    """Make a socket a CURVE client, before it is connected. Raises ConfigError."""
    public, secret = _load_secret(curve.secret_key)
    socket.setsockopt(zmq.CURVE_SERVERKEY, _load(curve.server_key)[0])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def allowed_keys(clients: Path, unusable: list[ConfigError]) -> dict[str, str]:
    """The public keys (Z85) in a directory of NAME.key files, with their NAMEs. If one key has two names, the first
    counts. A file that holds no key or can't be read is left out, and its error is added to `unusable`."""
    found: dict[str, str] = {}
    try:
        names = sorted(os.listdir(clients))
    except OSError as error:
        unusable.append(
            ConfigError(f"can't look for client keys in {clients}: {error.strerror}", "make it readable for the daemon")
        )
        return found
    for path in (clients / name for name in names if name.endswith(".key")):
        try:
            found.setdefault(_load(path)[0].decode("ascii", "replace"), path.stem)
        except ConfigError as error:
            unusable.append(error)  # one bad file must not lock the other clients out
    return found


def peer_of(public_key: str) -> Peer:
    """The peer that a key stands for. There is no uid over tcp: each key gets a negative number of its own, so that
    the owner of a job is the holder of one key."""
    digest = hashlib.sha256(public_key.encode()).digest()
    return Peer(uid=-2 - int.from_bytes(digest[:6]), gid=-1, pid=-1)


def _load_secret(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} holds no secret key", "name the NAME.key_secret file")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"other users can read the secret key {path}", f"chmod 600 {path}")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"can't read the key file {path}: {error}",
            "check its path and mode, or make a new pair with `gpumux keys`",
        ) from error


# ---- The sender of a frame, as the kernel (ipc) or CURVE (tcp) names it, and shutting down its connection.


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SO_PEERGROUPS = 59  # Linux 4.13; the socket module has no name for it
_MOST_GROUPS = 65_536  # NGROUPS_MAX
_SHORT_BYTES = 1024  # the most that the socket module reads


def peer_name(frame: zmq.Frame, over_ipc: bool) -> str | None:
    """ZeroMQ's name for the peer of a frame's connection: "localhost:UID:GID:PID" over ipc, the client's public key
    over tcp. A client can't choose it, unlike its routing id."""
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

    ZeroMQ offers no way to drop one peer of a ROUTER, but names the descriptor. Another connection may have that number
    by now: only a socket of the same process is shut down.
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
    """Add the supplementary groups that the ipc peer's process had when it connected. Raises DaemonGone if the
    connection is gone already: without the groups the peer's access rule is not known."""
    connection = _connection(frame, peer)
    if connection is None:
        raise DaemonGone("the connection ended before its groups could be read", "connect again")
    with connection:
        return replace(peer, groups=_peer_groups(connection))


def _connection(frame: zmq.Frame, peer: Peer) -> socket.socket | None:
    """Duplicate the ipc connection that `frame` came by. Returns None if the connection is gone."""
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
    """Read the groups of a process in more groups than the socket module has room for."""
    room = ctypes.create_string_buffer(4 * _MOST_GROUPS)
    size = ctypes.c_uint(len(room))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, room, ctypes.byref(size)):
        why = os.strerror(ctypes.get_errno())
        raise DaemonGone(f"the kernel says no groups of the connection: {why}", "connect again")
    return room.raw[: size.value]


# ---- ZeroMQ's authentication questions (ZAP), answered from the daemon's own loop: no extra thread.
#
# Only the tcp socket has a ZAP domain, so ZeroMQ asks about CURVE connections only. Only a handshake waits for the
# answer, in ZeroMQ's own thread.


log = logging.getLogger("gpumux.daemon")
DOMAIN = "gpumux"
_ADDRESS = "inproc://zeromq.zap.01"
_QUESTIONS_PER_POLL = 32


class Gatekeeper:
    """Admits the clients whose public keys lie in a directory."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self._clients = clients
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)
        self.refused = 0
        self._warned: set[str] = set()
        self.names: dict[str, str] = {}  # of the key files, by key, as of the newest connection

    def process(self) -> None:
        """Answer waiting questions, a bounded number at once."""
        for _ in range(_QUESTIONS_PER_POLL):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def _answer(self, frames: list[bytes]) -> None:
        border = frames.index(b"") + 1  # return path, empty frame, question
        version, request = frames[border], frames[border + 1]
        domain, mechanism, credentials = frames[border + 2], frames[border + 5], frames[border + 6 :]
        user = ""
        if version == b"1.0" and domain == DOMAIN.encode() and mechanism == b"CURVE" and len(credentials) == 1:
            key = zmq.utils.z85.encode(credentials[0]).decode()
            self.names = self._allowed()
            if key in self.names:
                user = key
        status, text = (b"200", b"OK") if user else (b"400", b"unknown key")
        self.refused += not user
        self.socket.send_multipart([*frames[:border], b"1.0", request, status, text, user.encode(), b""])

    def _allowed(self) -> dict[str, str]:
        """The keys that are allowed now. A bad key file is logged once: its holder only learns that the key is
        unknown."""
        unusable: list[ConfigError] = []
        found = allowed_keys(self._clients, unusable)
        messages = {str(error) for error in unusable}
        for message in sorted(messages - self._warned):
            log.warning("a client's key lets nobody in: %s", message)
        self._warned = messages
        return found

    def close(self) -> None:
        self.socket.close()
