"""What a daemon refuses as its state directory, with the command that mends it, and that no link is followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from gpumux.config import Config
from gpumux.daemon import main as serve
from gpumux.daemon.snapshots.writer import DirectoryLock
from gpumux.daemon.state.directory import open_log, open_own, open_private, open_state_directory
from gpumux.errors import ConfigError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
OTHER = 65_534


@pytest.fixture
def state(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A state directory and its descriptor."""
    path = tmp_path / "state"
    fd = open_state_directory(path)
    yield path, fd
    os.close(fd)


def test_it_is_made_for_its_user_alone(tmp_path: Path):
    os.close(open_state_directory(tmp_path / "a" / "b"))
    for made in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_one_that_others_may_write_to_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others may write to {path}") as refused:
        open_state_directory(path)
    assert refused.value.remedy == f"chmod go-w {path}"
    os.system(refused.value.remedy)
    os.close(open_state_directory(path))


def test_reading_alone_is_no_reason_to_refuse_it(tmp_path: Path):
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(0o755)
    os.close(open_state_directory(path))


@as_root
def test_another_users_is_refused(tmp_path: Path):
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    os.chown(path, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"belongs to user {OTHER}, and this process runs as user 0") as refused:
        open_state_directory(path)
    assert refused.value.remedy.startswith(f"chown 0 {path}")


@pytest.mark.parametrize("how", ["mode", "group", pytest.param("owner", marks=as_root)])
def test_one_that_others_could_replace_is_refused(tmp_path: Path, how: str):
    above = tmp_path / "above"
    path = above / "state"
    path.mkdir(parents=True, mode=0o700)
    if how == "mode":
        above.chmod(0o777)
    elif how == "group":
        if os.geteuid() != 0:
            pytest.skip("only root can give files to another group")
        os.chown(above, 0, OTHER)
        above.chmod(0o770)
    else:
        os.chown(above, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"{above}, above the state directory"):
        open_state_directory(path)
    above.chmod(0o1777) if how == "mode" else os.chown(above, os.geteuid(), os.getegid())
    os.close(open_state_directory(path))  # nobody renames another's directory in a sticky one


def test_a_link_of_this_user_may_name_it(tmp_path: Path):
    """systemd makes one in /var/lib for a service with DynamicUser."""
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to("private")
    fd = open_state_directory(tmp_path / "state")
    assert os.path.samestat(os.fstat(fd), (tmp_path / "private").stat())
    os.close(fd)


@as_root
def test_a_link_of_another_user_may_not(tmp_path: Path):
    (tmp_path / "private").mkdir(mode=0o700)
    link = tmp_path / "state"
    link.symlink_to("private")
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(ConfigError, match="another user's link"):
        open_state_directory(link)


def test_the_target_of_a_link_is_looked_at_too(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "private").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "state").symlink_to("open/private")
    with pytest.raises(ConfigError, match=f"others may write to {tmp_path / 'open'}"):
        open_state_directory(tmp_path / "state")


@pytest.mark.parametrize("what", ["link", "file", "mode"])
def test_what_stands_in_for_the_snapshots_directory_is_refused(state: tuple[Path, int], what: str):
    path, fd = state
    planted = path / "snapshots"
    if what == "link":
        (path.parent / "elsewhere").mkdir(mode=0o700)  # only that it is behind a link is wrong with it
        planted.symlink_to(path.parent / "elsewhere")
    elif what == "file":
        planted.touch()
    else:
        planted.mkdir()
        planted.chmod(0o755)
    with pytest.raises(ConfigError, match=str(planted)) as refused:
        DirectoryLock(planted, fd)
    assert str(planted) in refused.value.remedy
    if what == "mode":
        assert refused.value.remedy == f"chmod go= {planted}"


def test_a_planted_lock_is_not_followed(state: tuple[Path, int]):
    path, fd = state
    outside = path.parent / "outside"
    os.close(open_private("snapshots", fd, path / "snapshots"))
    (path / "snapshots" / "lock").symlink_to(outside)
    with pytest.raises(ConfigError, match="can't lock"):
        DirectoryLock(path / "snapshots", fd)
    assert not outside.exists()
    (path / "snapshots" / "lock").unlink()
    with closing(DirectoryLock(path / "snapshots", fd)):
        pass


@pytest.mark.parametrize("what", ["link", "hard link", "fifo", pytest.param("owner", marks=as_root)])
def test_a_planted_crash_log_is_not_written_to(state: tuple[Path, int], what: str):
    path, fd = state
    log, outside = path / "crash.log", path.parent / "outside"
    outside.write_text("precious")
    if what == "link":
        log.symlink_to(outside)
    elif what == "hard link":
        os.link(outside, log)
    elif what == "fifo":
        os.mkfifo(log)
    else:
        log.touch()
        os.chown(log, OTHER, OTHER)
    with pytest.raises(ConfigError, match=str(log)) as refused:
        open_log("crash.log", fd, log)
    assert str(log) in refused.value.remedy
    assert outside.read_text() == "precious"


def test_a_log_is_appended_to_and_made_private(state: tuple[Path, int]):
    path, fd = state
    (path / "crash.log").write_text("old\n")
    (path / "crash.log").chmod(0o644)
    log = open_log("crash.log", fd, path / "crash.log")
    os.write(log, b"new\n")
    os.close(log)
    assert (path / "crash.log").read_text() == "old\nnew\n"
    assert stat.S_IMODE((path / "crash.log").stat().st_mode) == 0o600


@as_root
def test_a_directory_of_another_user_is_not_used(state: tuple[Path, int]):
    path, fd = state
    (path / "1000").mkdir()
    os.close(open_own("1000", fd))
    os.chown(path / "1000", OTHER, OTHER)
    with pytest.raises(PermissionError):
        open_own("1000", fd)


def test_a_daemon_does_not_start_on_an_unsafe_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Nothing but the log is touched: no device, no socket."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    config = Config(state_dir=str(state), endpoint=(f"ipc://{tmp_path}/g.sock",), metrics_port=-1)
    assert serve.run(config) == serve.EX_CONFIG
    assert f"chmod go-w {state}" in caplog.text
    assert list(state.iterdir()) == []


def test_descriptors_are_closed_with_the_stack(tmp_path: Path):
    with ExitStack() as stack:
        state = serve.open_state(Config(state_dir=str(tmp_path)), stack)
        assert state is not None
        serve.keep_crashes(Config(state_dir=str(tmp_path)), state, stack)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(state)
