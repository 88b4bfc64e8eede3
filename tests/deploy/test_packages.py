"""What tests need and pip doesn't have: where it can't be had, they are skipped with the reason, and what is fetched is
what was meant."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from base64 import b64encode
from hashlib import sha512
from pathlib import Path

import pytest

from . import packages


@pytest.fixture(autouse=True)
def empty_store(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "STORE", tmp_path / "store")


def archive(text: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as packed:
        entry = tarfile.TarInfo("package/a.js")
        entry.size = len(text)
        packed.addfile(entry, io.BytesIO(text))
    return made.getvalue()


def serve(monkeypatch, content: bytes) -> list[list[str]]:
    """Have npm bring that archive; what it was asked for."""
    asked = []

    def pack(command, cwd, limit_s):
        asked.append(command)
        Path(cwd, "a-1.0.0.tgz").write_bytes(content)
        return ""

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(packages, "_run", pack)
    return asked


def test_what_only_root_can_install_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="needs browse of the Debian package browser: only root"):
        packages.install("browse", "browser")


def test_what_apt_says_is_the_reason(monkeypatch):
    said = []
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "_run", lambda command, *_: said.append(command) or "no network")
    with pytest.raises(pytest.skip.Exception, match="apt-get install failed: no network"):
        packages.install("browse", "browser")
    assert ["update" in command for command in said] == [False, True, False], "the lists may have been old"


def test_what_is_there_is_not_installed(monkeypatch):
    monkeypatch.setattr(packages, "_run", lambda *_: pytest.fail("it is there"))
    assert packages.install("sh", "dash") == shutil.which("sh")


def test_an_npm_package_is_fetched_once_and_unpacked(monkeypatch):
    content = archive(b"1;")
    asked = serve(monkeypatch, content)
    integrity = "sha512-" + b64encode(sha512(content).digest()).decode()
    for _ in range(2):
        assert (packages.npm("a", "1.0.0", integrity) / "a.js").read_bytes() == b"1;"
    assert asked == [["npm", "pack", "--silent", "a@1.0.0"]]


def test_an_npm_package_that_is_another_one_is_an_error(monkeypatch):
    serve(monkeypatch, archive(b"2;"))
    with pytest.raises(AssertionError, match="is not what was expected"):
        packages.npm("a", "1.0.0", "sha512-of-another")
    assert not (packages.STORE / "npm-a-1.0.0").exists()


def test_without_npm_the_tests_are_skipped(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match="npm is not on PATH"):
        packages.npm("a", "1.0.0", "")
