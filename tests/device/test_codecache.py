"""The folder for compiled code: it goes with its process, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpumux.device import codecache
from gpumux.device.codecache import VARIABLE, CodeCache
from gpumux.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def test_a_folder_is_private_and_goes_on_close(folder: Path) -> None:
    cache = CodeCache()
    made = Path(cache.folder)
    assert made.parent == folder
    # Other users go through root's to their own folder, and list or write nothing.
    assert made.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)
    cache.close()
    cache.close()
    assert not any(folder.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(folder: Path) -> None:
    used = CodeCache()
    code = "import os, signal, gpumux.device.codecache as c; c.CodeCache(); os.kill(os.getpid(), signal.SIGKILL)"
    env = {"TMPDIR": str(folder), "PYTHONPATH": str(Path(codecache.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
    (left,) = set(folder.iterdir()) - {Path(used.folder)}
    assert left.name.startswith(codecache.PREFIX)
    (left / "kernel.so").write_bytes(b"code")
    made = CodeCache()
    assert set(folder.iterdir()) == {Path(used.folder), Path(made.folder)}
    made.close()
    used.close()


def test_neither_a_link_nor_a_folder_without_a_lock_is_touched(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / codecache.LOCK).touch()
    (folder / f"{codecache.PREFIX}link").symlink_to(elsewhere)
    (folder / f"{codecache.PREFIX}other").mkdir()
    CodeCache().close()
    assert (elsewhere / codecache.LOCK).exists()
    assert {p.name for p in folder.iterdir()} == {f"{codecache.PREFIX}link", f"{codecache.PREFIX}other"}


def test_a_folder_that_the_operator_names_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(folder / "kept"))
    (folder / "kept").mkdir()
    cache = CodeCache()
    assert cache.folder == str(folder / "kept")
    cache.close()
    assert (folder / "kept").is_dir()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = folder / "named"
    named.mkdir()
    named.chmod(mode)
    monkeypatch.setenv(VARIABLE, str(named))
    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as refused:
        CodeCache()
    assert refused.value.remedy.startswith(f"chmod go-w {named}")
    named.chmod(0o755)
    CodeCache().close()


def test_a_folder_that_is_none_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv(VARIABLE, str(folder / "file"))
    with pytest.raises(ConfigError, match="no folder"):
        CodeCache()
    monkeypatch.setenv(VARIABLE, str(folder / "file" / "below"))
    with pytest.raises(ConfigError, match="Not a directory"):
        CodeCache()


def test_a_folder_that_is_not_there_yet_is_made_and_nobody_else_may_write_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask is: inductor would make it later, and the daemon's lets a group write."""
    monkeypatch.setenv(VARIABLE, str(folder / "new" / "below"))
    before = os.umask(0)
    try:
        CodeCache().close()
    finally:
        os.umask(before)
    for made in (folder / "new", folder / "new" / "below"):
        assert made.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user: run as root")
def test_each_user_has_a_folder_of_its_own(tmp_path):
    for user in (63_021, 63_022, 63_021):
        made = Path(codecache.own_folder(str(tmp_path), user, 63_110))
        facts = made.stat()
        assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (user, 63_110, 0o700)
    assert len(list(tmp_path.iterdir())) == 2
