"""Files that commands write for a user. One that can't be written is a ConfigError, so every command exits alike."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpumux.errors import ConfigError

REMEDY = "choose a file in a directory you may write"


def not_written(path: Path, why: str | None, remedy: str = REMEDY) -> ConfigError:
    """The error for a file that can't be written, for a reason of the operating system or another one."""
    return ConfigError(f"can't write {path}: {why}", remedy)


def check_writable(path: Path) -> None:
    """Check, before long work, that its result can be written to `path`. Raises ConfigError."""
    if path.is_dir():
        raise not_written(path, "it is a directory")
    if not path.parent.is_dir():
        raise not_written(path, f"there is no directory {path.parent}")
    if not os.access(path if _is_special(path) else path.parent, os.W_OK):
        raise not_written(path, "no permission")


def write_text(path: Path, text: str) -> None:
    """Write a file, atomically if it is a plain one: a reader sees the old content until all of the new is there.
    Raises ConfigError if that fails."""
    try:
        if _is_special(path):
            path.write_text(text)
            return
        target = path.resolve()  # a symbolic link stays one
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as out:
            try:
                out.write(text)
                out.flush()
                os.chmod(out.name, 0o666 & ~_umask())
                os.replace(out.name, target)
            except BaseException:
                os.unlink(out.name)
                raise
    except OSError as error:
        raise not_written(path, error.strerror) from error


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, such as /dev/stdout, which can't be replaced."""
    return path.exists() and not path.is_file()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
