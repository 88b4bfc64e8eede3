"""What the tests on the stand-in for libcuda need: the library itself, compiled, and releases of cuda-bindings, each in
a folder of its own.

`python -m tests.stub.build` installs the releases ahead, so that no test waits for a package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The last of each minor version that pyproject.toml allows and the index still has, and the one that torch 2.11 for
# CUDA 13 asks for.
RELEASES = ("12.8.0", "12.9.10", "13.0.3", "13.1.1", "13.2.0", "13.3.1", "13.4.4", "13.5.0")
PATHFINDER = "1.9.0"  # what finds CUDA's libraries for most of them
INSTALL_S = 100.0
INSIDE = "GPUMUX_TESTS_ON_A_STUB"  # set where the stand-in is the process' libcuda


class Unavailable(Exception):
    """Something outside this project is missing. The message says what."""


def libraries(directory: Path) -> Path:
    """Compile the stand-ins into `directory`. Raises Unavailable without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc) to build a stand-in for libcuda with")
    for source, name in (("libcuda", "libcuda.so.1"), ("libnvrtc", "libnvrtc.so.12"), ("libnvrtc", "libnvrtc.so.13")):
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-Wl,-soname,{name}", "-pthread"]
        subprocess.run([compiler, *flags, "-o", directory / name, HERE / f"{source}.c"], check=True)
    return directory


def release(version: str) -> Path:
    """The folder that has this cuda-bindings, which is installed if it is not there. Raises Unavailable where the index
    can't be reached."""
    kept = Path(sys.prefix) / "cuda-bindings"
    found = kept / version
    if found.exists():
        return found
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as unready:
        flags = [
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-compile",
            "--only-binary=:all:",
            "--retries",
            "1",
        ]
        wanted = [f"cuda-bindings=={version}", f"cuda-pathfinder=={PATHFINDER}"]
        command = [sys.executable, "-m", "pip", "install", *flags, "--target", f"{unready}/all", *wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode and "(from versions: none)" in done.stderr:
            raise Unavailable(f"cuda-bindings {version} can't be installed: {done.stderr.strip().splitlines()[-1]}")
        if done.returncode:
            raise RuntimeError(f"cuda-bindings {version} can't be installed:\n{done.stderr}")
        try:
            Path(unready, "all").rename(found)
        except OSError:  # another process was quicker
            pass
    return found


def environment(directory: Path, bindings: Path | None) -> dict[str, str]:
    """The environment of a process whose libcuda is the stand-in in `directory`. `bindings` None: those installed."""
    paths = [str(ROOT), *([str(bindings)] if bindings else [])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(directory),
        "PYTHONPATH": os.pathsep.join(paths),
        INSIDE: "1",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def main(versions: Sequence[str] = RELEASES) -> int:
    status = 0
    for version in versions:
        try:
            print(release(version))
        except Unavailable as error:
            print(f"{error}; tests on it will be skipped", file=sys.stderr)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
