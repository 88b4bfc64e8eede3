"""What the CUDA device needs and this machine has, found without importing torch or loading the driver's library.

`--device auto` decides by it, and `gpumux doctor` shows it. The device checks again when it is opened, through the
driver.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ASSIGNED = r"^{name}\s*(?::[^=]*)?=\s*(.+)$"


@dataclass(frozen=True, slots=True)
class Nvidia:
    """What a machine has. `driver`: its version, empty if there is none. `gpus`: names of device nodes in /dev.
    `hidden`: the environment hides every GPU. `torch`, `torch_cuda`: torch's version and that of the CUDA it was built
    for, each empty if there is none. `bindings`: cuda-bindings is installed."""

    driver: str
    gpus: tuple[str, ...]
    hidden: bool
    torch: str
    torch_cuda: str
    bindings: bool

    @property
    def missing(self) -> str:
        """Why `--device auto` takes the CPU; empty where it takes the GPU."""
        if not self.driver:
            return "there is no NVIDIA driver on this machine"
        if not self.gpus:
            return "there is an NVIDIA driver, but no GPU in /dev (/dev/nvidiaN)"
        if self.hidden:
            return "CUDA_VISIBLE_DEVICES hides every GPU"
        if not self.torch_cuda:
            return f"there is an NVIDIA driver, but torch {self.torch} is built without CUDA"
        return ""


def look(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Nvidia:
    """What this machine has. Tests pass another `root`, in place of "/", and another `environ`."""
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    torch, torch_cuda = _torch()
    return Nvidia(
        driver=_driver(root / "proc/driver/nvidia/version"),
        gpus=tuple(sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))),
        hidden=visible is not None and visible.split(",")[0].strip() in ("", "-1"),
        torch=torch,
        torch_cuda=torch_cuda,
        bindings=_has_bindings(),
    )


def _driver(version: Path) -> str:
    try:
        lines = version.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    words = lines[0].split("  ") if lines else []
    return words[1].strip() if len(words) > 1 else (lines[0] if lines else "")


def _torch() -> tuple[str, str]:
    """torch's version and its CUDA's, from a file: importing torch takes seconds, and the daemon does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "", ""
    return _value(text, "__version__"), _value(text, "cuda")


def _value(text: str, name: str) -> str:
    found = re.search(_ASSIGNED.format(name=name), text, re.MULTILINE)
    try:
        value = ast.literal_eval(found[1].strip()) if found else None
    except (ValueError, SyntaxError):
        return ""
    return value if isinstance(value, str) else ""


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ImportError:
        return False
