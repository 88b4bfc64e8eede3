"""Directories that the daemon trusts: its state directory and those below. Opened by descriptor; no link is followed.

A state directory that another user may write to is no place for snapshots: a link planted there would have the daemon
delete or write files elsewhere. So the daemon refuses it at its start and says which command mends it (as PostgreSQL
does with its data directory). Below it, only directories and files of the daemon's own user are used.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from gpumux.errors import ConfigError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
DISK_FAULTS = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)  # faults of the disk, not of what lies on it
WRITABLE = "make the disk writable, with room on it, or choose another state_dir"


def open_state_directory(path: Path) -> int:
    """Open the state directory, which is made with mode 0700 if there is none. The configured path itself may be, or
    pass, a link of root's or of this user's (systemd makes one with DynamicUser). Returns a descriptor, which the
    caller owns. Raises ConfigError if others may write to it, or could put another in its place."""
    asked = Path(os.path.abspath(path))
    try:
        _make(asked)
        real = Path(os.path.realpath(asked, strict=True))
        for directory in {*asked.parents, *real.parents}:
            _check_ancestor(directory)
        for link in [each for each in (asked, *asked.parents) if each.is_symlink()]:
            if link.lstat().st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{link}, on the way to the state directory, is another user's link", f"rm {link}")
        fd = os.open(real, _DIRECTORY)
    except OSError as error:
        raise ConfigError(f"can't use the state directory {path}: {error.strerror}", "choose another") from error
    try:
        _check_own(fd, real, stat.S_IWGRP | stat.S_IWOTH, "go-w")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_private(name: str, at: int, shown: Path) -> int:
    """Open the directory `name` in the directory of descriptor `at`; it is made if there is none. `shown`: its path,
    for errors. Returns a descriptor, which the caller owns. Raises ConfigError if it is a link or no directory, or if
    others may read it, write to it or own it."""
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=at)
        except FileExistsError:
            pass
        fd = os.open(name, _DIRECTORY, dir_fd=at)
    except OSError as error:
        why = "it is a link, or no directory" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror
        remedy = WRITABLE if error.errno in DISK_FAULTS else f"see what it is (ls -ld {shown}), and remove it"
        raise ConfigError(f"can't use {shown}: {why}", remedy) from error
    try:
        _check_own(fd, shown, stat.S_IRWXG | stat.S_IRWXO, "go=")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own(name: str, at: int) -> int:
    """Open an existing directory of the daemon's own user. Returns a descriptor, which the caller owns. Raises OSError
    if there is none, or if it is a link or another user's."""
    fd = os.open(name, _DIRECTORY, dir_fd=at)
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "it is another user's", name)
    return fd


def open_log(name: str, at: int, shown: Path) -> int:
    """Open a file to append to, in the directory of descriptor `at`; it is made with mode 0600 if there is none.
    Returns a descriptor, which the caller owns. Raises ConfigError if it is a link, no plain file, has another name
    elsewhere, or is another user's."""
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags, 0o600, dir_fd=at)
    except OSError as error:
        remedy = WRITABLE if error.errno in DISK_FAULTS else f"see what it is (ls -l {shown}), and remove it"
        raise ConfigError(f"can't write to {shown}: {error.strerror}", remedy) from error
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1 or facts.st_uid != os.geteuid():
        os.close(fd)
        raise ConfigError(f"{shown} is no plain file of this daemon's", f"rm {shown}")
    os.fchmod(fd, 0o600)
    return fd


def _make(path: Path) -> None:
    if path.is_dir():
        return
    _make(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def _check_ancestor(path: Path) -> None:
    """Raise ConfigError if a user other than root and this one could rename what lies in the directory."""
    facts = path.stat()
    if facts.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}, above the state directory, belongs to user {facts.st_uid}, who could put another in its place",
            "choose a state_dir below directories of root's or this user's",
        )
    others = facts.st_mode & stat.S_IWOTH or (facts.st_mode & stat.S_IWGRP and facts.st_gid not in (0, os.getegid()))
    if others and not facts.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"others may write to {path}, above the state directory (mode {stat.S_IMODE(facts.st_mode):04o})",
            f"chmod go-w {path}, or choose another state_dir",
        )


def _check_own(fd: int, shown: Path, forbidden: int, change: str) -> None:
    facts = os.fstat(fd)
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            f"{shown} belongs to user {facts.st_uid}, and this process runs as user {os.geteuid()}",
            f"chown {os.geteuid()} {shown}, or choose another state_dir",
        )
    if mode & forbidden:
        verb = "write to" if forbidden == stat.S_IWGRP | stat.S_IWOTH else "read or write"
        raise ConfigError(f"others may {verb} {shown} (mode {mode:04o})", f"chmod {change} {shown}")
