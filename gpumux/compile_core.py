"""`python -m gpumux.compile_core`: compile the scheduler's hot modules with mypyc, for this interpreter, in this
package's directory.

The daemon uses the result from its next start on (`gpumux/compiled.py`). It behaves the same, and is faster. Compiling
takes mypy, a C compiler and Python's headers; unchanged sources are not compiled again. The modules are compiled
together, into one library, so that calls between them are calls of C.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpumux import compiled
from gpumux.errors import BuildFailed, GpumuxError

# The modules that run for every event. Others run seldom, hold data that the daemon makes, too, or produce sentences.
MODULES = (
    "jobs", "policy", "scheduler", "state", "windows", "guard.bans", "guard.budget", "guard.costs",
    "guard.collectives", "guard.decisions", "guard.device_view", "guard.guard", "guard.high_job", "guard.learning",
    "guard.timing",
)  # fmt: skip
# To compute as the interpreter does: floats are rounded after each operation (a fused one differs in the last bit), and
# integers wrap.
FLAGS = (
    "-fPIC", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing", "-DNDEBUG", "-w",
    "-fvisibility=hidden", "-fno-plt",  # direct calls, which are faster
)  # fmt: skip
OPTIMIZE = "2"
LEAST_MYPY = 2
INSTALL = f"pip install 'mypy>={LEAST_MYPY}' setuptools"
SHOWN_LINES = 20  # lines of what a tool says that fails


class Missing(BuildFailed):
    """A tool that compiling needs is missing."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=compiled.COMPILE,
        description="Compile gpumux's scheduler core for this Python. Daemons use it from their next start on.",
        epilog=(
            f"{compiled.ENVIRONMENT}=interpreted has a daemon leave it alone, {compiled.ENVIRONMENT}=compiled insist"
            " on it."
        ),
    )
    parser.add_argument("--force", action="store_true", help="also when what is there is of these very sources")
    parser.add_argument(
        "--optional",
        action="store_true",
        help="where a tool is missing, say so in a line and end well: it stays interpreted",
    )
    args = parser.parse_args(argv)
    try:
        made, directory = build(compiled.PACKAGE, force=args.force)
    except Missing as error:
        print(f"the core stays interpreted: {error}", file=sys.stderr)
        return 0 if args.optional else 1
    except GpumuxError as error:
        print(f"{compiled.COMPILE}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(
            f"{compiled.COMPILE}: {where}{error.strerror}. It needs 20 MB in {tempfile.gettempdir()} and where gpumux"
            " is installed",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"the core {'is compiled' if made else 'was compiled already'}: {directory}")
    return 0


def build(package: Path, *, force: bool = False) -> tuple[bool, Path]:
    """Compile; returns (whether that was necessary, the directory of the result). Raises Missing if a tool is missing,
    BuildFailed if one fails or the package's directory can't be written."""
    place = package / "scheduler" / compiled.PLACE.name
    with _alone(place):
        files = compiled.sources(package)
        directory = place / compiled.name(files)
        if directory.exists() and not force:
            return False, directory
        compiler, headers = _tools()
        with tempfile.TemporaryDirectory(prefix=".new-", dir=place) as scratch:
            made = Path(scratch) / "made"
            _translate_and_compile(files, Path(scratch) / "work", made, compiler, headers)
            for old in place.glob(f"{compiled.tag()}-*"):
                old.rename(Path(scratch) / old.name)  # atomically: a daemon may be about to load it
            made.rename(directory)
        return True, directory


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """A block for one build at a time. Removes what a killed build left."""
    try:
        if not place.exists():
            place.mkdir()
            place.chmod(0o755)  # daemons may run as another user
        lock = (place / ".lock").open("w")
    except OSError as error:
        raise BuildFailed(
            f"can't write {place}: {error.strerror}", "run this as the user gpumux was installed by"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in place.glob(".new-*"):
            shutil.rmtree(left)
        yield


def _tools() -> tuple[list[str], list[str]]:
    """The compiler's command and the directories of Python's headers. Raises Missing."""
    for module in ("mypyc", "setuptools"):
        if find_spec(module) is None:
            raise Missing(f"{module} is not installed", INSTALL)
    if int(version("mypy").partition(".")[0]) < LEAST_MYPY:
        raise Missing(f"mypy {version('mypy')} is too old", INSTALL)
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]  # the compiler that Python was built with may not be installed
    if shutil.which(compiler[0]) is None:
        raise Missing("there is no C compiler", "install one (on Debian: gcc)")
    headers = list(dict.fromkeys(sysconfig.get_path(path) for path in ("include", "platinclude")))
    if not (Path(headers[0]) / "Python.h").exists():
        raise Missing(f"there is no Python.h in {headers[0]}", "install Python's headers (on Debian: python3-dev)")
    with tempfile.TemporaryDirectory() as scratch:
        trial = Path(scratch) / "trial.c"
        trial.write_text("#include <Python.h>\n")
        try:
            _run([*compiler, "-fPIC", "-shared", *[f"-I{path}" for path in headers], str(trial), "-o", f"{trial}.so"])
        except BuildFailed as error:
            raise Missing(
                f"{shlex.join(compiler)} can't make the smallest of extensions: {error.message.splitlines()[-1]}",
                "install what it misses (on Debian: gcc, libc6-dev and python3-dev)",
            ) from error
    return compiler, headers


def _translate_and_compile(
    files: dict[str, bytes], work: Path, made: Path, compiler: list[str], headers: list[str]
) -> None:
    for path, content in files.items():  # the content that was hashed, even if files are edited meanwhile
        (work / "gpumux" / path).parent.mkdir(parents=True, exist_ok=True)
        (work / "gpumux" / path).write_bytes(content)
    target = made / f"{compiled.LIBRARY.rpartition('.')[2]}__mypyc{compiled.SUFFIX}"
    made.mkdir()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        library, *shims = _translate(work)
        include = [f"-I{path}" for path in (*library.include_dirs, work / "c" / "gpumux" / "scheduler", *headers)]
        command = [*compiler, *FLAGS, f"-O{OPTIMIZE}", *include]
        objects = [work / f"{number}.o" for number in range(len(library.sources))]
        jobs = [
            [*command, "-c", str(work / source), "-o", str(to)]
            for source, to in zip(library.sources, objects, strict=True)
        ]
        for shim in shims:
            *folders, name = shim.name.split(".")[2:]
            made.joinpath(*folders).mkdir(exist_ok=True)
            to = made.joinpath(*folders, f"{name}{compiled.SUFFIX}")
            jobs.append([*command, "-shared", str(work / shim.sources[0]), "-o", str(to)])
        list(pool.map(_run, jobs))
    _run([*compiler, "-shared", *[str(path) for path in objects], "-o", str(target)])
    for file in (made, *made.rglob("*")):
        file.chmod(0o755)  # daemons may run as another user


def _translate(work: Path) -> list[Any]:
    """Python to C: the modules that mypyc made, the library first."""
    said = io.StringIO()
    # The sources are all that the core needs. What else they name is left alone: to read torch, which gpumux's own
    # __init__.py leads to, took a minute and a half, and changed no line of the C.
    options = ["--config-file=", "--follow-imports=silent", "--cache-dir=/dev/null"]
    options += ["--no-site-packages", "--ignore-missing-imports"]
    with contextlib.chdir(work), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        from mypyc.build import mypycify  # takes a second to import

        try:
            return list(
                mypycify(
                    [*options, *[f"gpumux/scheduler/{module.replace('.', '/')}.py" for module in MODULES]],
                    multi_file=True,
                    group_name=compiled.LIBRARY,
                    target_dir="c",
                )
            )
        except SystemExit as error:
            raise BuildFailed(
                f"mypyc can't compile the core:\n{_end(said.getvalue())}", "mend what it names"
            ) from error


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise BuildFailed(
            f"{shlex.join(command)} failed ({done.returncode}):\n{_end(done.stdout)}", "see what the compiler says"
        )


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])


if __name__ == "__main__":
    sys.exit(main())
