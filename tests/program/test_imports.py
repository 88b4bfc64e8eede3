"""The daemon's main process reads and plans Programs without torch."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TORCH = ("allowed_ops", "codec", "cut", "ir", "memory", "operators", "validate")


def test_none_of_them_imports_torch():
    imports = ", ".join(f"gpumux.program.{module}" for module in WITHOUT_TORCH)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
