"""What `gpumux doctor` looks at around an endpoint: who may connect, who holds the lock, what was left behind, and
whether others may write what a daemon trusts. Each check returns findings and changes nothing."""

from __future__ import annotations

import grp
import importlib.metadata
import os
import pwd
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import zmq

from gpumux.cli.checks import FAIL, OK, WARN, Finding
from gpumux.config import Config
from gpumux.wire.lock import lock_path, recorded_holder
from gpumux.wire.probe import living_holder

NEEDED = {"pyzmq": (26,), "msgpack": (1, 1), "prometheus-client": (0, 20), "numpy": (1, 26)}  # as pyproject.toml says


def sockets(path: Path) -> Iterator[Finding]:
    """Who may connect to the daemon at `path`, and whether this user is among them."""
    if not path.exists():
        return
    info = path.stat()
    mode = stat.S_IMODE(info.st_mode)
    who = [f"user {_user(info.st_uid)}"]
    who += [f"group {_group(info.st_gid)}"] if mode & stat.S_IWGRP else []
    who += ["everybody"] if mode & stat.S_IWOTH else []
    detail = f"{path}: {', '.join(who)} may connect (mode {mode:04o})"
    if not os.access(path, os.W_OK):
        group = _group(info.st_gid)
        remedy = (
            f"as root: usermod -aG {group} {_user(os.getuid())}, then log in anew"
            if mode & stat.S_IWGRP
            else "ask its owner"
        )
        yield Finding("socket access", FAIL, f"this user may not connect; {detail}", remedy)
        return
    yield Finding("socket access", OK, detail)


def lock(path: Path) -> Finding:
    """Who holds the endpoint, going by the lock file beside it."""
    holder, alive = recorded_holder(path), living_holder(path)
    if holder is None:
        there = lock_path(path).exists()
        return Finding("lock", OK, "a lock file that names nobody" if there else "nobody holds the endpoint")
    if alive is None:
        return Finding("lock", OK, f"process {holder}, which is gone, held it last: free for the next daemon")
    if not path.exists():
        return Finding(
            "lock", WARN, f"process {alive} holds the endpoint, and its socket {path} is gone",
            f"stop it (kill {alive}) and start another: clients can't reach it any more",
        )  # fmt: skip
    return Finding("lock", OK, f"process {alive} holds the endpoint")


def stale(directory: Path) -> Finding:
    """Sockets in the runtime directory that nobody listens on."""
    try:
        found = sorted(path for path in directory.iterdir() if path.is_socket())
    except OSError:
        return Finding("stale sockets", OK, f"nothing to see in {directory}")
    dead = [path for path in found if _refuses(path)]
    if dead:
        names = ", ".join(path.name for path in dead)
        return Finding(
            "stale sockets", WARN, f"nobody listens on {names} in {directory}",
            "a daemon that was killed left them; the next one on that endpoint removes them",
        )  # fmt: skip
    return Finding("stale sockets", OK, f"none in {directory}")


def _refuses(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return True
            except OSError:
                continue  # of another kind, or nothing of ours
            return False
    return False


def trusted_files(config_path: str | None, config: Config) -> Iterator[Finding]:
    """Files that decide who may do what: nobody else may write them, or read a secret."""
    written = [("configuration file", config_path), ("client keys", config.curve_client_keys)]
    for name, text in written:
        if text and Path(text).exists():
            yield _shut(name, Path(text), stat.S_IWGRP | stat.S_IWOTH, "write", "go-w")
    if config.curve_secret_key:
        path = Path(config.curve_secret_key)
        if not path.exists():
            yield Finding("secret key", FAIL, f"no {path}", "make one: docs/security.md says how")
        else:
            yield _shut("secret key", path, stat.S_IRWXG | stat.S_IRWXO, "read or write", "go=")


def _shut(name: str, path: Path, bits: int, verb: str, remedy: str) -> Finding:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & bits:
        return Finding(name, FAIL, f"others may {verb} {path} (mode {mode:04o})", f"chmod {remedy} {path}")
    return Finding(name, OK, f"{path} (mode {mode:04o})")


def versions() -> Finding:
    """The libraries a daemon and its clients stand on."""
    found, old = [f"libzmq {zmq.zmq_version()}"], []
    for name, least in NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
        wanted = f"{name}>={'.'.join(map(str, least))}"
        found.append(f"{name} {version or 'missing'}")
        if numbers < least:
            old.append(f"'{wanted}'")
    if old:
        return Finding("versions", FAIL, ", ".join(found), f"pip install -U {' '.join(old)}")
    if not zmq.has("curve"):
        return Finding("versions", WARN, ", ".join(found), "this libzmq has no CURVE: tcp endpoints can't be used")
    return Finding("versions", OK, ", ".join(found))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
