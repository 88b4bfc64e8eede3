"""CURVE keys for tcp endpoints, in pyzmq's certificate files.

    daemon    NAME.key_secret of its own, and a directory of NAME.key files: the clients it lets in
    client    NAME.key_secret of its own, and the daemon's NAME.key

There is no tcp without keys: a daemon runs whatever Programs its clients send.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from gpumux.errors import ConfigError
from gpumux.model import Peer

CLIENT_KEY = "GPUMUX_CURVE_KEY"  # environment: the client's NAME.key_secret
SERVER_KEY = "GPUMUX_CURVE_SERVER"  # environment: the daemon's NAME.key


@dataclass(frozen=True, slots=True)
class ServerCurve:
    """Where the daemon's keys lie. `clients` is read anew for every connection, so a key added or
    removed counts from the next connection on."""

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
    """Make NAME.key (public, mode 0644) and NAME.key_secret (mode 0600) in `directory`; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    old = os.umask(0o077)
    try:
        public, secret = zmq.auth.create_certificates(directory, name)
    finally:
        os.umask(old)
    Path(public).chmod(0o644)  # the daemon that is to let it in runs as another user
    return Path(public), Path(secret)


def secure_server(socket: zmq.Socket[bytes], curve: ServerCurve) -> None:
    """Make a socket that is yet to be bound a CURVE server. Raises ConfigError for unusable keys."""
    if not curve.clients.is_dir():
        raise ConfigError(f"{curve.clients} is not a directory of client keys", "put the clients' NAME.key files there")
    public, secret = _load_secret(curve.secret_key)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def secure_client(socket: zmq.Socket[bytes], curve: ClientCurve) -> None:
    """Make a socket that is yet to be connected a CURVE client. Raises ConfigError."""
    public, secret = _load_secret(curve.secret_key)
    socket.setsockopt(zmq.CURVE_SERVERKEY, _load(curve.server_key)[0])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def allowed_keys(clients: Path, unusable: list[ConfigError]) -> dict[str, str]:
    """The public keys (Z85) in a directory of NAME.key files, with their NAMEs. Of two names for one key the first counts. A
    file that holds none or can't be read is left out and added to `unusable`."""
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
    """Who a key is. There is no uid over tcp: each key gets a negative number of its own, so that
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
            "make it readable for the daemon, or a new one (docs/security.md says how)",
        ) from error
