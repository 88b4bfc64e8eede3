"""Where inductor keeps what it compiles: a folder of the daemon's own.

The one it would choose has a name in /tmp that another user could have taken first, and what lies there is loaded as
code. An operator who names one (TORCHINDUCTOR_CACHE_DIR) keeps what is compiled from one daemon to the next. No torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class CodeCache:
    def __init__(self) -> None:
        named = os.environ.get(VARIABLE)
        self.folder = named or tempfile.mkdtemp(prefix="gpumux-compiled-")  # 0700
        self._ours = named is None

    def close(self) -> None:
        """Nothing is loaded from it any more. Idempotent."""
        if self._ours:
            shutil.rmtree(self.folder, ignore_errors=True)
            if os.environ.get(VARIABLE) == self.folder:
                del os.environ[VARIABLE]
