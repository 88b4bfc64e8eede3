"""Where inductor keeps what it compiles: a folder of the daemon's own.

The one it would choose has a name in /tmp that another user could have taken first, and what lies there is loaded as
code. An operator who names one (TORCHINDUCTOR_CACHE_DIR) keeps what is compiled from one daemon to the next. No torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
PREFIX = "gpumux-compiled-"
LOCK = "in-use"  # locked as long as a process that loads from the folder lives, however that ends


class CodeCache:
    """`folder`: made here and removed on close, unless the environment names one. What processes that were killed left
    behind is removed first."""

    def __init__(self) -> None:
        named = os.environ.get(VARIABLE)
        self._lock: int | None = None
        if named is not None:
            self.folder = named
            return
        clear_abandoned(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))  # 0700; a name that nobody clears while it has no lock
        self._lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = str(made.rename(made.with_name(made.name[1:])))

    def close(self) -> None:
        """Nothing is loaded from it any more. Idempotent."""
        if self._lock is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = None
        if os.environ.get(VARIABLE) == self.folder:
            del os.environ[VARIABLE]


def clear_abandoned(folder: Path) -> None:
    """Removes what killed processes of this user left in `folder`: theirs alone have a lock that nobody holds."""
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
