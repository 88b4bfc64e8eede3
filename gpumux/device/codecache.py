"""The folder where inductor keeps compiled code: one of the daemon's own. No torch.

Inductor's default folder has a fixed name in /tmp that another user could have taken first, and inductor loads what
lies there as code. An operator who sets TORCHINDUCTOR_CACHE_DIR keeps compiled code from one daemon to the next.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from gpumux.errors import ConfigError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
PREFIX = "gpumux-compiled-"
LOCK = "in-use"  # a file that is locked until the process that loads from the folder ends, in whatever way


class CodeCache:
    """`folder`: made by the constructor and removed by `close`, unless the environment names one. Folders that killed
    processes left are removed first. Raises ConfigError if others may write to the one that is named."""

    def __init__(self) -> None:
        named = os.environ.get(VARIABLE)
        self._lock: int | None = None
        if named is not None:
            make_and_check(named)
            self.folder = named
            return
        clear_abandoned(Path(tempfile.gettempdir()))
        # 0700. `clear_abandoned` skips this name, which has no lock yet.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        if os.geteuid() == 0:
            made.chmod(0o711)  # executors of other users go through it to their own
        self._lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = str(made.rename(made.with_name(made.name[1:])))

    def close(self) -> None:
        """Remove the folder. No code is loaded from it any more. Idempotent."""
        if self._lock is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = None
        if os.environ.get(VARIABLE) == self.folder:
            del os.environ[VARIABLE]


def make_and_check(folder: str) -> None:
    """Make a folder that code is loaded from, if it is not there. Raises ConfigError if others may write to it.
    Inductor would make it by the umask, which lets a group write where the daemon's sockets are a group's, and later:
    another user could have made it until then."""
    try:
        try:
            found = os.stat(folder)
        except FileNotFoundError:
            _make(Path(folder))
            found = os.stat(folder)
    except OSError as error:
        raise ConfigError(f"{VARIABLE}: {folder}: {error.strerror}", "name a folder of the daemon's user") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise ConfigError(
            f"{VARIABLE}: {folder} is no folder that the daemon's user alone may write to (user {found.st_uid}, mode"
            f" {stat.S_IMODE(found.st_mode):04o}), and what lies there is loaded as code",
            f"chmod go-w {folder}, or name another one",
        )


def _make(folder: Path) -> None:
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        folder.chmod(0o711)  # executors of other users go through it to their own


def own_folder(folder: str, user: int, group: int | None) -> str:
    """The folder of one user's processes, in that of the daemon, which is root. Made if it is not there. Raises OSError
    if something else is there, that others could write to."""
    path = os.path.join(folder, f"user-{user}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
            raise
    else:
        os.chown(path, user, -1 if group is None else group)
    return path


def clear_abandoned(folder: Path) -> None:
    """Remove the folders that killed processes of this user left in `folder`: their locks are free."""
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or just being removed by its owner
            if left.is_symlink() or left.stat().st_uid != os.getuid():
                continue
            lock = os.open(left / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
