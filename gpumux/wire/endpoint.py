"""The endpoint of a daemon, by one rule for daemons and clients:

    the explicit argument, else GPUMUX_ENDPOINT (which may name several, with commas: a daemon listens on all, a client
    takes the first ipc one, or else the first), else ipc://RUNTIME/gpumux/GPU/gpumux.sock, where RUNTIME is /run if
    /run/gpumux/GPU exists (a system service made it), else $XDG_RUNTIME_DIR, else /tmp/gpumux-UID.

A directory under /tmp is trusted only if it belongs to this user and no other user may write to it, because any user
can create a name there first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumux.errors import ConfigError, DaemonGone, EndpointBusy

MAX_PATH_BYTES = 107  # sockaddr_un.sun_path less its closing zero
SOCKET_NAME = "gpumux.sock"
CHANNEL_SUFFIX = ".chan"  # of the socket for local channels
SYSTEM_RUNTIME = Path("/run")
ENVIRONMENT = "GPUMUX_ENDPOINT"
CLUSTER_ENVIRONMENT = "GPUMUX_CLUSTER"
COORDINATOR = "cluster"  # in the place of a GPU's number

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._*-]+):([0-9]{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked endpoint. `path` is the socket file of an ipc endpoint, None for tcp."""

    text: str
    path: Path | None

    @property
    def is_ipc(self) -> bool:
        return self.path is not None


def parse(text: str) -> Endpoint:
    """Check an endpoint's form. Raises ConfigError that says what is wrong with it."""
    if isinstance(text, str) and text.startswith("ipc://"):
        return Endpoint(text, _ipc_path(text))
    match = _TCP.fullmatch(text) if isinstance(text, str) else None
    if match and (match[2] == "*" or 0 < int(match[2]) < 65536):
        return Endpoint(text, None)
    raise ConfigError(
        f"{text!r} is not an endpoint",
        "write ipc:///absolute/path/to/gpumux.sock or tcp://address:port",
    )


def _ipc_path(text: str) -> Path:
    name = text.removeprefix("ipc://")
    if not name.startswith("/") or name.endswith("/") or "\0" in name:
        raise ConfigError(
            f"{text!r} names no socket file",
            "write ipc:// and an absolute path; abstract sockets (ipc://@name) can't be protected by file modes",
        )
    size, most = len(os.fsencode(name)), MAX_PATH_BYTES - len(CHANNEL_SUFFIX)
    if size > most:
        raise ConfigError(
            f"the socket path {name!r} is {size} bytes long, {most} at most are possible (its local channel adds "
            f"{CHANNEL_SUFFIX!r}, and the system ends at {MAX_PATH_BYTES})",
            "choose a shorter directory with --endpoint or GPUMUX_ENDPOINT",
        )
    return Path(name)


def channel_path(endpoints: Sequence[Endpoint], runtime_dir: Path) -> Path:
    """The socket of a daemon's local channels. It is named after the daemon's first ipc endpoint, or, if it has none,
    after the default one in `runtime_dir`, so that several daemons can share a directory."""
    first = next((e.path for e in endpoints if e.path is not None), runtime_dir / SOCKET_NAME)
    return first.with_name(first.name + CHANNEL_SUFFIX)


def runtime_dir(gpu: int | str = 0, environ: Mapping[str, str] | None = None) -> Path:
    """The directory of the daemon of `gpu` on this machine, or of the COORDINATOR, by that rule. Need not exist."""
    env = os.environ if environ is None else environ
    system = SYSTEM_RUNTIME / "gpumux" / str(gpu)
    if system.is_dir():
        return system
    base = env.get("XDG_RUNTIME_DIR") or f"/tmp/gpumux-{os.getuid()}"
    return Path(base) / "gpumux" / str(gpu)


def default_endpoint(gpu: int | str = 0, environ: Mapping[str, str] | None = None) -> str:
    return f"ipc://{runtime_dir(gpu, environ) / SOCKET_NAME}"


def resolve(explicit: str | None = None, gpu: int = 0, environ: Mapping[str, str] | None = None) -> Endpoint:
    """The endpoint to use. Raises ConfigError if the given one is malformed."""
    env = os.environ if environ is None else environ
    named = [part.strip() for part in env.get(ENVIRONMENT, "").split(",") if part.strip()]
    return parse(explicit or preferred(named) or default_endpoint(gpu, env))


def resolve_coordinator(explicit: str = "auto", environ: Mapping[str, str] | None = None) -> Endpoint:
    """The endpoint of a cluster's coordinator: the explicit one; for "auto" GPUMUX_CLUSTER, else the place of one on
    this machine. Raises ConfigError if it is malformed."""
    env = os.environ if environ is None else environ
    named = "" if explicit == "auto" else explicit
    return parse(named or env.get(CLUSTER_ENVIRONMENT, "").strip() or default_endpoint(COORDINATOR, env))


def preferred(texts: Sequence[str]) -> str:
    """Choose the endpoint for a client on the daemon's machine: ipc needs no keys and copies the least."""
    return next((text for text in texts if text.startswith("ipc://")), texts[0] if texts else "")


def check_distinct(endpoints: Sequence[Endpoint], channel: Path) -> None:
    """Raises ConfigError if a daemon would listen twice at one address."""
    seen = {os.path.normpath(channel): "the place of the daemon's local channels"}
    for endpoint in endpoints:
        place = os.path.normpath(endpoint.path) if endpoint.path is not None else endpoint.text
        if place in seen and not place.endswith(":*"):
            raise ConfigError(f"{endpoint.text} is {seen[place]}", "give every --endpoint once, under another name")
        seen[place] = "given twice"


def ensure_runtime_dir(path: Path) -> None:
    """Make `path` with mode 0700 (parents too), or keep an existing one as it is. Raises ConfigError if it can't be
    made, is no directory, or is the default one under /tmp and could be another user's."""
    try:
        _make_private(path)
    except OSError as error:
        raise ConfigError(
            f"can't make the runtime directory {path}: {error.strerror}", "choose another with --endpoint"
        ) from error
    check_private(path)


def _make_private(path: Path) -> None:
    if path.is_dir():
        return
    _make_private(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def check_private(path: Path) -> None:
    """Raise ConfigError for the default directory under /tmp if another user made it or may write to it. The daemon
    checks before it binds, the client before it sends data. Other directories under /tmp were chosen explicitly."""
    tmp = Path("/tmp")
    if tmp not in path.parents:
        return
    top = tmp / path.relative_to(tmp).parts[0]
    if not top.name.startswith("gpumux-"):
        return
    try:
        info = top.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"can't look at {top}: {error.strerror}", "choose another directory") from error
    mine = info.st_uid in (os.getuid(), 0)
    if not stat.S_ISDIR(info.st_mode) or not mine or info.st_mode & 0o022:
        raise ConfigError(
            f"{top} is not a directory that only this user may write to",
            "remove it, or set XDG_RUNTIME_DIR or GPUMUX_ENDPOINT to a private directory",
        )


# ---- A lock file beside the socket: one daemon for each endpoint.
#
# ZeroMQ binds over an existing ipc path without an error, so the path protects nothing. The lock (flock) lasts as long
# as its holder's descriptor, so the file that a killed daemon left is not locked. The file is never removed: two
# daemons could then lock two different files of the same name.


def lock_path(socket_path: Path) -> Path:
    return socket_path.with_name(socket_path.name + ".lock")


def recorded_holder(socket_path: Path) -> int | None:
    """The process that took the endpoint's lock last, which may have ended. None if that is unknown."""
    try:
        text = lock_path(socket_path).read_text("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class EndpointLock:
    """The lock of an endpoint, held from construction to `close`. Raises EndpointBusy, which names the holder's pid, if
    another daemon has it, and ConfigError if the file can't be opened, is another user's, which could keep it locked,
    or has another name: that may be a file of this user's that another one has linked here, and it would be emptied."""

    def __init__(self, socket_path: Path) -> None:
        self.path = lock_path(socket_path)
        self._fd = -1
        try:
            fd = os.open(self.path, _LOCK_FLAGS, 0o600)
        except OSError as error:
            raise ConfigError(
                f"can't open the lock file {self.path}: {error.strerror}",
                "run the daemon as the directory's owner, or choose another --endpoint",
            ) from error
        found = os.fstat(fd)
        trusted = {0, os.geteuid(), self.path.parent.stat().st_uid}
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in trusted or found.st_nlink != 1:
            os.close(fd)
            what = "is no regular file"
            if stat.S_ISREG(found.st_mode):
                linked = found.st_uid in trusted
                what = "has another name elsewhere" if linked else f"is a file of user {found.st_uid}'s"
            raise ConfigError(f"{self.path} {what}, and no lock of this daemon's", f"look at it, then: rm {self.path}")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_pid(fd)
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(f"can't lock {self.path}: {error.strerror}", "use a local file system") from error
            raise EndpointBusy(
                f"process {holder} already serves {socket_path}",
                "stop that daemon, or choose another --endpoint",
            ) from None
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        _held.add(self)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _read_pid(fd: int) -> str:
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdecimal() else "unknown"


def remove_stale(socket_path: Path) -> None:
    """Remove a socket file that a killed daemon left. To be called under the endpoint's lock only. Raises ConfigError
    if something other than a socket has the name."""
    try:
        if not socket_path.exists() and not socket_path.is_symlink():
            return
        if not socket_path.is_socket():
            raise ConfigError(f"{socket_path} exists and is no socket", "choose another --endpoint")
        socket_path.unlink()
    except OSError as error:
        raise ConfigError(f"can't remove the stale socket {socket_path}: {error.strerror}", "remove it") from error


# flock belongs to the open file, which a forked child shares: without this a child that outlives a killed daemon would
# keep the endpoint locked.
_held: weakref.WeakSet[EndpointLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)


# ---- Whether a process listens at an ipc endpoint.
#
# ZeroMQ connects in the background, and tries again without end and without an error if there is no daemon. A plain
# connection fails at once. Nothing is sent on it, and a daemon drops it silently.


def check_listening(endpoint: Endpoint, remedy: str, what: str = "daemon") -> None:
    """Raises DaemonGone, with `remedy`, if no process listens at an ipc endpoint. Tcp endpoints are not checked. `what`
    is sought there, for messages."""
    if endpoint.path is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(os.fspath(endpoint.path))
        except FileNotFoundError:
            raise DaemonGone(f"no {what} at {endpoint.text}", remedy) from None
        except ConnectionRefusedError:
            raise DaemonGone(
                f"no {what} at {endpoint.text}: one that was killed left its socket behind", remedy
            ) from None
        except PermissionError:
            raise DaemonGone(
                f"this user may not connect to {endpoint.text}", "ask for write permission on the socket"
            ) from None
        except OSError:
            return  # a process listens, but is busy; or ZeroMQ will report the error


# CURVE tells a client nothing: a connection that is refused looks like one that nothing listens to.
REFUSED_KEYS = (
    "; if one runs there, it refuses the keys: the public half of GPUMUX_CURVE_KEY belongs into its curve_client_keys, "
    "and GPUMUX_CURVE_SERVER has to be the public half of its curve_secret_key"
)


def unanswered(endpoint: Endpoint, remedy: str, what: str = "daemon") -> DaemonGone:
    """The error for a daemon that did not answer in time; it may be running and stuck. `what`: in its place."""
    holder = None if endpoint.path is None else living_holder(endpoint.path)
    if endpoint.path is None:
        return DaemonGone(f"no {what} answers at {endpoint.text}", f"{remedy}{REFUSED_KEYS}")
    if holder is None:
        return DaemonGone(f"no {what} answers at {endpoint.text}", remedy)
    return DaemonGone(
        f"process {holder} holds {endpoint.text} but does not answer",
        f"it may still be starting: wait a moment; if that does not help, look whether it is stopped or stuck (ps -o "
        f"stat,wchan {holder}), and wait for it, or kill it and start another",
    )


def living_holder(path: Path) -> int | None:
    """The process that the endpoint's lock names, if it is running."""
    pid = recorded_holder(path)
    if pid is None:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it is running, and belongs to another user
    return pid
