"""Programs that tests need and that pip doesn't have: from PATH, else from their Debian package.

The package is unpacked under .debs/ and not installed: that needs no rights, and starts no service of its own. One that
works only where it is installed is installed, which takes root. Where a program can't be had, the test is skipped and
says why.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORE = ROOT / ".debs"
LIMIT_S = 120  # for each command of apt
INSTALL_S = 600  # for one that also fetches and unpacks a hundred packages


class Unavailable(Exception):
    """The program is not here and can't be fetched; the message says why."""


def need(program: str, package: str, *others: str) -> str:
    """The path of `program`, or skip the test. `others`: packages it does not work without, unpacked to the same
    place."""
    try:
        return _find(program, package, *others)
    except Unavailable as error:
        pytest.skip(f"needs {program} of the Debian package {package}: {error}")


def install(program: str, package: str) -> str:
    """The path of `program`, installed with its Debian package where it is missing, or skip the test. For programs that
    don't work from another place, such as a browser."""
    found = shutil.which(program)
    if found is not None:
        return found
    try:
        _install(program, package)
    except Unavailable as error:
        pytest.skip(f"needs {program} of the Debian package {package}: {error}")
    return shutil.which(program) or pytest.fail(f"the Debian package {package} has no {program}")


def npm(package: str, version: str, integrity: str) -> Path:
    """The folder of an npm package below .debs/, fetched unless it is there, or skip the test. Nothing of it is run.
    `integrity`: "sha512-" and the hash of the archive, as npm gives it."""
    home = STORE / f"npm-{package}-{version}"
    _kept(home, f"npm package {package}", lambda: _fetch_npm(f"{package}@{version}", integrity, home))
    return home


def wheel(package: str, version: str, sha256: str) -> Path:
    """The folder of a package of the Python index below .debs/, unpacked unless it is there, or skip the test. For
    those of which tests need a part, and that are too large to be installed with every environment."""
    home = STORE / f"wheel-{package}-{version}"
    _kept(home, f"Python package {package}", lambda: _fetch_wheel(f"{package}=={version}", sha256, home))
    return home


def _kept(home: Path, what: str, fetch: Callable[[], None]) -> None:
    """Have the folder be there, or skip the test. Two test runs at once fetch once."""
    STORE.mkdir(exist_ok=True)
    with (STORE / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.is_dir():
            try:
                fetch()
            except Unavailable as error:
                pytest.skip(f"needs the {what}: {error}")


def libraries(program: str) -> dict[str, str]:
    """What the environment of an unpacked program needs, to find libraries that were unpacked with it."""
    home = Path(program).parents[1]
    return (
        {"LD_LIBRARY_PATH": ":".join(map(str, sorted(home.glob("lib/*-linux-gnu"))))} if STORE in home.parents else {}
    )


@cache
def _find(program: str, package: str, *others: str) -> str:
    on_path = shutil.which(program)
    return on_path or str(_unpacked(program, package, *others))


def _unpacked(program: str, package: str, *others: str) -> Path:
    """`program` below .debs/, fetched unless it is there. Two test runs at once fetch once."""
    STORE.mkdir(exist_ok=True)
    with (STORE / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        home = STORE / package
        if not home.is_dir():
            _fetch((package, *others), home)
        for place in ("usr/bin", "usr/sbin", "bin"):
            if (home / place / program).exists():
                return home / place / program
    raise Unavailable(f"the package has no {program}")


def _install(program: str, package: str) -> None:
    """Install `package` unless another test run has done so meanwhile."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise Unavailable(f"only root of a Debian can install it here; install {package} by hand")
    STORE.mkdir(exist_ok=True)
    with (STORE / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shutil.which(program) is not None:
            return
        command = ["-o", f"DPkg::Lock::Timeout={LIMIT_S}", "install", "--yes", "--no-install-recommends", package]
        said = _apt(command, str(STORE), INSTALL_S)
        if said:
            _apt(["update"], str(STORE))  # a fresh container has no lists, an old one has names of files that are gone
            said = _apt(command, str(STORE), INSTALL_S)
        if said:
            raise Unavailable(f"apt-get install failed: {said}")


def _fetch(packages: tuple[str, ...], home: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Unavailable("this is no Debian, or apt-get and dpkg-deb are missing; install it by hand")
    with tempfile.TemporaryDirectory(dir=STORE) as scratch:
        # apt gives up root for downloads, and could not write here.
        options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
        said = _apt([*options, "download", *packages], scratch)
        if said and os.geteuid() == 0:
            _apt(["update"], scratch)  # a fresh container has no lists
            said = _apt([*options, "download", *packages], scratch)
        if said:
            raise Unavailable(f"apt-get download failed: {said}")
        for deb in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, f"{scratch}/tree"], check=True, timeout=LIMIT_S)
        Path(scratch, "tree").rename(home)


def _fetch_npm(package: str, integrity: str, home: Path) -> None:
    if shutil.which("npm") is None:
        raise Unavailable("npm is not on PATH; install it by hand")
    with tempfile.TemporaryDirectory(dir=STORE) as scratch:
        said = _run(["npm", "pack", "--silent", package], scratch, LIMIT_S)
        if said:
            raise Unavailable(f"npm pack failed: {said}")
        (archive,) = Path(scratch).glob("*.tgz")
        found = "sha512-" + b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        assert found == integrity, f"{package} is not what was expected: {found}"
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        Path(scratch, "package").rename(home)


def _fetch_wheel(requirement: str, sha256: str, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=STORE) as scratch:
        said = _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement], scratch, INSTALL_S)
        found = list(Path(scratch).glob("*.whl"))
        if said or not found:
            raise Unavailable(f"pip download failed: {said or 'no wheel came'}")
        digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
        assert digest == sha256, f"{requirement} is not what was expected: {digest}"
        with zipfile.ZipFile(found[0]) as packed:
            packed.extractall(Path(scratch, "tree"))
        Path(scratch, "tree").rename(home)


def _apt(arguments: list[str], cwd: str, limit_s: float = LIMIT_S) -> str:
    """Run apt-get; what it complained of, empty when it did as asked."""
    return _run(["apt-get", "-q", *arguments], cwd, limit_s)


def _run(command: list[str], cwd: str, limit_s: float) -> str:
    """Run a command; what it complained of, empty when it did as asked."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {limit_s:.0f} s"
    return (done.stderr.strip().splitlines() or ["it does not say why"])[-1] if done.returncode else ""
