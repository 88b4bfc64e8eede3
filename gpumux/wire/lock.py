"""One daemon an endpoint: a lock file beside the socket.

ZeroMQ binds over an existing ipc path without a word, so the path alone protects nobody. The lock
(flock) lives as long as its holder's descriptor; a file left by a killed daemon is therefore free.
The file itself stays: removing it would let two daemons lock two different files of one name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from gpumux.errors import ConfigError, EndpointBusy


def lock_path(socket_path: Path) -> Path:
    return socket_path.with_name(socket_path.name + ".lock")


def recorded_holder(socket_path: Path) -> int | None:
    """The process that took the endpoint's lock last; it may be gone. None when nothing says."""
    try:
        text = lock_path(socket_path).read_text("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


class EndpointLock:
    """Held from construction to `close`. Raises EndpointBusy, naming the holder's pid, when another
    daemon has it, and ConfigError when the file can't be opened."""

    def __init__(self, socket_path: Path) -> None:
        self.path = lock_path(socket_path)
        self._fd = -1
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"can't open the lock file {self.path}: {error.strerror}",
                "run the daemon as the directory's owner, or choose another --endpoint",
            ) from error
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
        """Let the next daemon have the endpoint. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _read_pid(fd: int) -> str:
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdecimal() else "unknown"


def remove_stale(socket_path: Path) -> None:
    """Remove a socket file that a killed daemon left. Call it only under the endpoint's lock.
    Raises ConfigError when something other than a socket has the name."""
    try:
        if not socket_path.exists() and not socket_path.is_symlink():
            return
        if not socket_path.is_socket():
            raise ConfigError(f"{socket_path} exists and is no socket", "choose another --endpoint")
        socket_path.unlink()
    except OSError as error:
        raise ConfigError(f"can't remove the stale socket {socket_path}: {error.strerror}", "remove it") from error


# flock belongs to the open file, which a forked child shares: without this an executor that
# outlives a killed daemon would keep the endpoint locked.
_held: weakref.WeakSet[EndpointLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)
