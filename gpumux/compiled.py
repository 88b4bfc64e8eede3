"""Chooses how the scheduler runs: as its Python files, or as the same files compiled to machine code by mypyc
(`gpumux/compile_core.py`).

Compiled modules are in `gpumux/scheduler/__compiled__`, in a directory named after the interpreter and the sources they
were made of. Modules older than the sources therefore have another name and are never used.
`gpumux/scheduler/__init__.py` looks there first when it is imported. GPUMUX_CORE overrides this: `interpreted` ignores
compiled modules, and `compiled` is an error if none fit. Both behave the same;
`tests/scheduler/test_compiled_is_equal.py` checks that.
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
BESIDE = (
    "__init__",
    "access",
    "compile_core",
    "compiled",
    "errors",
    "types",
    "wording",
)  # what its modules are made with
LIBRARY = "gpumux.scheduler.together"  # of all compiled modules; mypyc adds a word
ENVIRONMENT = "GPUMUX_CORE"
COMPILED, INTERPRETED = "compiled", "interpreted"
COMPILE = "python -P -m gpumux.compile_core"  # -P: the installed gpumux, not a checkout in the working directory


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """`directory`: the compiled modules that run. None: the scheduler is interpreted, for the reason `why`, with a
    `remedy` if that is probably not wanted."""

    directory: Path | None
    why: str
    remedy: str = ""

    @property
    def kind(self) -> str:
        return INTERPRETED if self.directory is None else COMPILED

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})"


def sources(package: Path = PACKAGE) -> dict[str, bytes]:
    """All files that a compiled scheduler is made of, by their path within the package."""
    paths = [  # without editors' temporary files
        *(package / f"{name}.py" for name in BESIDE),
        *sorted(path for path in (package / "scheduler").rglob("[!.]*.py") if PLACE.name not in path.parts),
    ]
    return {str(path.relative_to(package)): path.read_bytes() for path in paths}


def name(files: Mapping[str, bytes]) -> str:
    """The directory name for modules compiled from these sources for this interpreter."""
    import hashlib  # not needed if nothing was compiled

    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path} {len(content)}\n".encode())
        digest.update(content)
    return f"{tag()}-{digest.hexdigest()[:20]}"


def tag() -> str:
    return SUFFIX.removesuffix(".so").lstrip(".")


def choose(environ: Mapping[str, str] = os.environ, package: Path = PACKAGE) -> CoreChoice:
    """Whether the scheduler runs compiled. Raises ConfigError if GPUMUX_CORE demands a compiled one and there is none,
    or has an unknown value."""
    asked = environ.get(ENVIRONMENT, "")
    if asked == INTERPRETED:
        return CoreChoice(None, f"{ENVIRONMENT}={INTERPRETED}")
    if asked not in ("", COMPILED):
        raise ConfigError(f"{ENVIRONMENT} is {asked!r}", f"set it to {COMPILED} or {INTERPRETED}, or leave it out")
    found = _find(package)
    if asked == COMPILED and found.directory is None:
        raise ConfigError(
            f"{ENVIRONMENT}={COMPILED}, and the core is not: {found.why}", f"run `{COMPILE}`, or unset {ENVIRONMENT}"
        )
    return found


def load(directory: Path) -> None:
    """Load the compiled modules, all at once. Raises ConfigError if that fails: they are damaged, or of another
    system."""
    try:
        import_module(LIBRARY + "__mypyc")
    except ImportError as error:
        raise ConfigError(
            f"the compiled core in {directory} can't be loaded: {error}",
            f"compile it anew (`{COMPILE} --force`), or set {ENVIRONMENT}={INTERPRETED}",
        ) from error


def _find(package: Path) -> CoreChoice:
    place = package / "scheduler" / PLACE.name
    try:
        there = os.listdir(place)
    except FileNotFoundError:
        return CoreChoice(None, "it was not compiled")
    except OSError as error:
        return CoreChoice(None, f"can't look into {place}: {error.strerror}", "make it readable, or remove it")
    wanted = name(sources(package))
    if wanted in there:
        return CoreChoice(place / wanted, wanted)
    if any(entry.startswith(f"{tag()}-") for entry in there):
        return CoreChoice(None, "what was compiled is of other sources than these", f"compile it anew: `{COMPILE}`")
    if any(not entry.startswith(".") for entry in there):
        return CoreChoice(None, f"it was not compiled for {tag()}", f"compile it for this Python, too: `{COMPILE}`")
    return CoreChoice(None, "it was not compiled")
