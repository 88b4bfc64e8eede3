"""Grants: parts of the device for programs that hold a token, made by what schedules the machine (a device plugin of
Kubernetes, a prolog of Slurm).

A grant is a file NAME.json in a directory that only root and the daemon's user may write to. It holds the SHA-256 of
the token's secret, never the secret. The token is "NAME.SECRET". A daemon reads the file when a client says it, and
looks again while the session lasts: a grant that is removed ends its sessions, and so its jobs. So grants outlive a
restart of the daemon without a word to it, and what makes them needs no session.

Programs with a grant come by a socket of their own, where nothing else is let in: root in a container is root for the
kernel's credentials, and would be an operator at the daemon's other sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumux.errors import AccessDenied, ConfigError
from gpumux.types import PRIORITIES, Grant, Peer, Priority

if TYPE_CHECKING:  # `gpumux grants`, and so every --help, works without msgpack
    from gpumux.wire.messages import Hello

TOKEN = "GPUMUX_GRANT"  # environment: the client's token
MOST_SHARES = 1000  # of a device: a job's weight can't be less than a thousandth
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MOST_BYTES = 65_536  # of a file
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def with_token(hello: Hello, environ: Mapping[str, str] | None = None) -> Hello:
    """The greeting of a client, with the token of its environment. Over tcp (inline) its key says what it may, and no
    token is sent."""
    token = (os.environ if environ is None else environ).get(TOKEN, "")
    if not token or hello.inline:
        return hello
    from gpumux.wire.messages import GrantedHello

    return GrantedHello(
        hello.protocol, hello.gpumux_version, hello.role, hello.pid, hello.torch_version, hello.inline, token[:256]
    )


@dataclass(frozen=True, slots=True)
class GrantRecord:
    """A grant's file: `shares` of the `of` that the device has. `devices`: what its maker calls them, which means
    nothing to the daemon."""

    name: str
    digest: str
    shares: int
    of: int
    max_priority: Priority
    devices: tuple[str, ...] = ()


class GrantDirectory:
    """The grants of one daemon. Every method reads or writes the directory; nothing is kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- the daemon

    def grant_of(self, token: str, memory_bytes: int) -> Grant:
        """The grant whose token this is, of a device of `memory_bytes`. Raises AccessDenied if there is none, or if
        others than root and this user could have written it."""
        name, _, secret = token.partition(".")
        record = self.read(name)
        if record is None or not hmac.compare_digest(record.digest, _digest(secret)):
            raise AccessDenied(
                "this daemon knows no such grant: it was never made, or was released",
                f"start from a pod or job that asks for a share, which sets {TOKEN}",
            )
        max_bytes = max(1, memory_bytes * record.shares // record.of)  # 0 would mean no limit
        return Grant(record.name, record.shares, record.of, max_bytes, record.max_priority)

    def holds(self, name: str) -> bool:
        """Whether the grant is there."""
        return bool(_NAME.fullmatch(name)) and (self.path / f"{name}.json").is_file()

    # ---- makers of grants

    def make(self, name: str, shares: int, of: int, *, max_priority: Priority, devices: Sequence[str] = ()) -> str:
        """Make a grant, or replace the one of that name. Returns the token, which is nowhere else. Raises ConfigError
        for wrong numbers or names, and if the directory can't be written to."""
        check_name(name)
        if not 1 <= of <= MOST_SHARES or not 1 <= shares <= of:
            raise ConfigError(
                f"{shares} of {of} shares",
                f"a device has 1 to {MOST_SHARES} shares; grant at least one and at most all",
            )
        secret = secrets.token_hex(24)
        body = {
            "token_sha256": _digest(secret), "shares": shares, "of": of, "max_priority": max_priority.name.lower(),
            "devices": list(devices),
        }  # fmt: skip
        target = self.path / f"{name}.json"
        scratch = self.path / f".{name}.{secrets.token_hex(4)}"
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(fd, "w") as file:
                os.fchmod(fd, 0o644)  # the daemon that reads it may run as another user
                json.dump(body, file)
                file.flush()
                os.fsync(fd)
            scratch.replace(target)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink()
            raise ConfigError(
                f"can't write the grant {target}: {error.strerror}", "run it as root, or as the daemon's user"
            ) from error
        return f"{name}.{secret}"

    def release(self, name: str) -> bool:
        """Remove a grant; whether there was one. The daemon ends what its holder has running. Raises ConfigError if
        the directory can't be written to."""
        check_name(name)
        try:
            (self.path / f"{name}.json").unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(
                f"can't remove {self.path / name}.json: {error.strerror}", "run it as root, or as the daemon's user"
            ) from error
        return True

    def records(self) -> list[GrantRecord]:
        """All grants, by name. Raises what `read` does, and ConfigError if the directory can't be read."""
        try:
            names = sorted(name.removesuffix(".json") for name in os.listdir(self.path) if name.endswith(".json"))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"can't read {self.path}: {error.strerror}", "run it as root") from error
        return [record for name in names if (record := self.read(name)) is not None]

    def read(self, name: str) -> GrantRecord | None:
        """One grant, None if there is no such file. Raises AccessDenied for a file or a directory that others than root
        and this user may write to, and for a file that is no grant."""
        if not _NAME.fullmatch(name):
            return None
        try:
            _check_owner(self.path, os.stat(self.path), stat.S_ISDIR)
            fd = os.open(self.path / f"{name}.json", _READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AccessDenied(f"the grant can't be read: {error.strerror}", "ask the operator") from error
        try:
            _check_owner(self.path / f"{name}.json", os.fstat(fd), stat.S_ISREG)
            data = os.read(fd, _MOST_BYTES)
        finally:
            os.close(fd)
        try:
            return _parsed(name, json.loads(data))
        except (ValueError, KeyError, TypeError) as error:
            raise AccessDenied("the grant's file can't be understood", "ask the operator to make it anew") from error


def check_name(name: str) -> None:
    """Raise ConfigError for what can't be a grant's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:80]!r} is no name for a grant",
            "use up to 64 letters, digits, dashes and underscores, and begin with a letter or a digit",
        )


def holder(peer: Peer, grant: Grant) -> Peer:
    """The peer that a grant stands for. Each grant is a user of its own, with a negative number, as each key is over
    tcp: its jobs are apart from those of other grants and of the user that the process runs as."""
    digest = hashlib.sha256(f"grant {grant.name}".encode()).digest()
    return replace(peer, uid=-2 - int.from_bytes(digest[:6]), gid=-1, groups=(), grant=grant)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _check_owner(path: Path, info: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(info.st_mode) or info.st_uid not in {0, os.geteuid()} or info.st_mode & 0o022:
        raise AccessDenied(
            "this daemon trusts no grants: others may write to where they lie",
            f"ask the operator: {path.name} must belong to root or to the daemon's user, and be closed to others",
        )


def _parsed(name: str, body: Any) -> GrantRecord:
    shares, of, digest = body["shares"], body["of"], body["token_sha256"]
    devices = tuple(body["devices"])
    if type(shares) is not int or type(of) is not int or not 1 <= shares <= of <= MOST_SHARES:
        raise ValueError("numbers of shares")
    if type(digest) is not str or not _DIGEST.fullmatch(digest) or not all(type(each) is str for each in devices):
        raise ValueError("no digest, or no names")
    return GrantRecord(name, digest, shares, of, PRIORITIES[body["max_priority"]], devices)
