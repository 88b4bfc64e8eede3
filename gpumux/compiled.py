"""Which core runs: its Python files as they are, or the same compiled to machine code by mypyc
(`gpumux/compile_core.py`).

What was compiled lies in `gpumux/scheduler/__compiled__`, in a directory named after the interpreter it is for and the
sources it was made of. So what is older than the sources has another name and is never used.
`gpumux/scheduler/__init__.py` looks there first when it is imported. GPUMUX_CORE says otherwise: `interpreted` leaves
what was compiled alone, `compiled` is an error where nothing fits. Both do the same; `tests/scheduler/test_both.py`
holds them to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from gpumux.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent
PLACE = PACKAGE / "scheduler" / "__compiled__"
SUFFIX = EXTENSION_SUFFIXES[0]  # ".cpython-311-x86_64-linux-gnu.so": interpreter, processor and system
BESIDE = ("__init__", "access", "compile_core", "compiled", "errors", "types")  # what the core's modules are made with
LIBRARY = "gpumux.scheduler.together"  # of all compiled modules; mypyc adds a word
ENVIRONMENT = "GPUMUX_CORE"
COMPILED, INTERPRETED = "compiled", "interpreted"
COMPILE = "python -P -m gpumux.compile_core"  # -P: of the gpumux that is installed, not of a checkout one is in


@dataclass(frozen=True, slots=True)
class Choice:
    """`directory` has the compiled modules that run; None: the core is interpreted, `why`, and what to do about it
    where that is likely not what is wanted (`remedy`)."""

    directory: Path | None
    why: str
    remedy: str = ""

    @property
    def kind(self) -> str:
        return INTERPRETED if self.directory is None else COMPILED

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})"


def sources(package: Path = PACKAGE) -> dict[str, bytes]:
    """All that a compiled core is made of: files by their path within the package."""
    paths = [
        *(package / f"{name}.py" for name in BESIDE),
        *sorted(path for path in (package / "scheduler").rglob("[!.]*.py") if PLACE.name not in path.parts),
    ]  # not what an editor puts beside them
    return {str(path.relative_to(package)): path.read_bytes() for path in paths}


def name(files: Mapping[str, bytes]) -> str:
    """The directory for what is compiled of these sources for this interpreter."""
    import hashlib  # where nothing was compiled, nobody needs it

    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path} {len(content)}\n".encode())
        digest.update(content)
    return f"{tag()}-{digest.hexdigest()[:20]}"


def tag() -> str:
    return SUFFIX.removesuffix(".so").lstrip(".")


def choose(environ: Mapping[str, str] = os.environ, package: Path = PACKAGE) -> Choice:
    """Which core is to run. Raises ConfigError when GPUMUX_CORE demands a compiled one and there is none, or means
    nothing."""
    asked = environ.get(ENVIRONMENT, "")
    if asked == INTERPRETED:
        return Choice(None, f"{ENVIRONMENT}={INTERPRETED}")
    if asked not in ("", COMPILED):
        raise ConfigError(f"{ENVIRONMENT} is {asked!r}", f"set it to {COMPILED} or {INTERPRETED}, or leave it out")
    found = _find(package)
    if asked == COMPILED and found.directory is None:
        raise ConfigError(
            f"{ENVIRONMENT}={COMPILED}, and the core is not: {found.why}", f"run `{COMPILE}`, or unset {ENVIRONMENT}"
        )
    return found


def load(directory: Path) -> None:
    """Have what was compiled loaded, all of it at once. Raises ConfigError where it can't be: it is damaged, or this
    system is another one."""
    try:
        import_module(LIBRARY + "__mypyc")
    except ImportError as error:
        raise ConfigError(
            f"the compiled core in {directory} can't be loaded: {error}",
            f"compile it anew (`{COMPILE} --force`), or set {ENVIRONMENT}={INTERPRETED}",
        ) from error


def _find(package: Path) -> Choice:
    place = package / "scheduler" / PLACE.name
    try:
        there = os.listdir(place)
    except FileNotFoundError:
        return Choice(None, "it was not compiled")
    except OSError as error:
        return Choice(None, f"can't look into {place}: {error.strerror}", "make it readable, or remove it")
    wanted = name(sources(package))
    if wanted in there:
        return Choice(place / wanted, wanted)
    if any(entry.startswith(f"{tag()}-") for entry in there):
        return Choice(None, "what was compiled is of other sources than these", f"compile it anew: `{COMPILE}`")
    if any(not entry.startswith(".") for entry in there):
        return Choice(None, f"it was not compiled for {tag()}", f"compile it for this Python, too: `{COMPILE}`")
    return Choice(None, "it was not compiled")
