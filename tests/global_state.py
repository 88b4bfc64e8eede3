"""Settings of the whole process that a test may leave changed, so that a later test in the same process depends on it.

`settings()` reads them, `changed(before)` says what differs and puts it back. It costs about a tenth of a millisecond.
What differs from test to test on its own is left out: random generators, variables that libraries set when they are
loaded, handlers of signals (pytest's own limits of time set them), and torch's threads, which benchmarks set.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any


def settings() -> dict[str, Any]:
    found: dict[str, Any] = {
        "the working directory": os.getcwd(),
        "the umask": _umask(),
        # setuptools adds a folder of its own when it is loaded, as torch's compiler does.
        "sys.path": [path for path in sys.path if not path.endswith(os.path.join("setuptools", "_vendor"))],
        "whether garbage is collected": gc.isenabled(),
        "variables GPUMUX_*": {name: value for name, value in os.environ.items() if name.startswith("GPUMUX_")},
    }
    torch = sys.modules.get("torch")
    if hasattr(torch, "set_deterministic_debug_mode"):  # loaded to its end
        found["torch's default type"] = torch.get_default_dtype()
        found["torch's deterministic mode"] = torch.get_deterministic_debug_mode()
        found["whether torch takes gradients"] = torch.is_grad_enabled()
    return found


def changed(before: dict[str, Any]) -> list[str]:
    """One line for each setting that is not as it was; it is then."""
    now = settings()
    names = [name for name in now if name in before and now[name] != before[name]]
    for name in names:
        _set(name, before[name])
    return [f"{name} is {now[name]!r} and was {before[name]!r}" for name in names]


def _set(name: str, value: Any) -> None:
    import torch  # seconds, where it is not loaded; this is a test that fails

    match name:
        case "the working directory":
            os.chdir(value)
        case "the umask":
            os.umask(value)
        case "sys.path":
            sys.path[:] = value
        case "whether garbage is collected":
            (gc.enable if value else gc.disable)()
        case "variables GPUMUX_*":
            for key in [key for key in os.environ if key.startswith("GPUMUX_")]:
                del os.environ[key]
            os.environ.update(value)
        case "torch's default type":
            torch.set_default_dtype(value)
        case "torch's deterministic mode":
            torch.set_deterministic_debug_mode(value)
        case "whether torch takes gradients":
            torch.set_grad_enabled(value)


def _umask() -> int:
    """Read without a moment in which it is another, which os.umask() would need."""
    line = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert line is not None
    return int(line[1], 8)
