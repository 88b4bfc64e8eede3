"""The store: what is written is there whole or not at all, and what was changed is never read."""

from __future__ import annotations

import errno
import os
import resource
import stat
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumux.daemon.snapshots import store as stores
from gpumux.daemon.snapshots.store import GENERATIONS, GENERATOR, NOTES, SnapshotOwner, Store, buffer_name
from gpumux.errors import SnapshotFailed, UnknownJob

JOB, OTHER = "ab" * 16, "cd" * 16
MINE = SnapshotOwner(1000, JOB)
NOBODY: frozenset[SnapshotOwner] = frozenset()


class OpenedStore(Store):
    """A store whose directory's descriptor is closed when nothing refers to it."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, exist_ok=True)
        at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, at)
        super().__init__(root, at)


def tensors(seed: int, *sizes: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    made = {buffer_name(i): draw.integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(sizes)}
    return {**made, GENERATOR: draw.integers(0, 256, 16, dtype=np.uint8), NOTES: np.frombuffer(b"notes", np.uint8)}


def save(
    store: Store, number: int, owner: SnapshotOwner = MINE, name: str = "sweep", sizes: tuple[int, ...] = (300, 0, 7)
) -> int:
    return store.save(owner, number, tensors(number, *sizes), {"name": name})


def files(store: Store, owner: SnapshotOwner = MINE) -> list[Path]:
    return sorted((store.root / str(owner.uid) / owner.job).iterdir())


def number_read(store: Store, *numbers: int, owner: SnapshotOwner = MINE) -> tuple[int | None, list[int]]:
    found, bad = store.read(owner, numbers)
    return (None if found is None else found.number), bad


def test_what_is_saved_is_read(tmp_path: Path):
    store = OpenedStore(tmp_path)
    save(store, 1)
    found, bad = store.read(MINE, [1])
    assert bad == []
    wanted = tensors(1, 300, 0, 7)
    assert [b.tobytes() for b in found.buffers] == [wanted[buffer_name(i)].tobytes() for i in range(3)]
    assert found.generator.tobytes() == wanted[GENERATOR].tobytes()
    assert found.notes.tobytes() == b"notes"


def test_two_generations_are_kept(tmp_path: Path):
    store = OpenedStore(tmp_path)
    for number in range(1, 6):
        save(store, number)
    (kept,) = store.kept()
    assert kept.numbers == (5, 4)
    assert len(files(store)) == GENERATIONS
    assert number_read(store, 3, 4) == (4, [])  # 3 is not there, which is no damage


def test_only_the_owner_may_read(tmp_path: Path):
    store = OpenedStore(tmp_path / "snapshots")
    save(store, 1)
    for path in (store.root, store.root / "1000", store.root / "1000" / JOB):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (file,) = files(store)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path, bytes]:
    """A store with snapshots 1 and 2, the file of the second, and what is in it."""
    store = OpenedStore(tmp_path_factory.mktemp("store"))
    save(store, 1)
    save(store, 2)
    path = files(store)[-1]
    return store, path, path.read_bytes()


@given(place=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_any_flipped_bit_is_noticed(two: tuple[Store, Path, bytes], place: int):
    store, path, whole = two
    data = bytearray(whole)
    bit = place % (8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    assert number_read(store, 2, 1) == (1, [2])
    path.write_bytes(whole)
    assert number_read(store, 2, 1) == (2, [])


@given(keep=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_any_torn_file_is_noticed(two: tuple[Store, Path, bytes], keep: int):
    store, path, whole = two
    path.write_bytes(whole[: keep % len(whole)])
    assert number_read(store, 2, 1) == (1, [2])


def test_a_file_under_another_name_is_not_read(tmp_path: Path):
    store = OpenedStore(tmp_path)
    save(store, 1)
    (file,) = files(store)
    file.rename(file.with_name(file.name.replace("00000001", "00000009")))
    assert number_read(store, 1) == (None, [])
    file.with_name("00000009-" + file.name.split("-")[1]).rename(
        file.with_name("00000001-" + "0" * 64 + ".safetensors")
    )
    assert number_read(store, 1) == (None, [1])


class Broken(OpenedStore):
    """A disk on which one step of writing fails."""

    def __init__(self, root: Path, at: str, number: int = errno.ENOSPC) -> None:
        super().__init__(root)
        self.at, self.number = at, number

    def _fail(self, at: str) -> None:
        if at == self.at:
            raise OSError(self.number, os.strerror(self.number))

    def _sync(self, fd: int) -> None:
        self._fail("sync")
        super()._sync(fd)

    def _rename(self, home: int, source: str, target: str) -> None:
        self._fail("rename")
        super()._rename(home, source, target)


@pytest.mark.parametrize("at", ["sync", "rename"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "make room"), (errno.EIO, "the kernel's log"), (errno.EROFS, "mount it writable")],
)
def test_a_snapshot_that_fails_leaves_the_former_ones_and_nothing_else(
    tmp_path: Path, at: str, number: int, remedy: str
):
    store = Broken(tmp_path, "")
    save(store, 1)
    save(store, 2)
    before = files(store)
    store.at, store.number = at, number
    with pytest.raises(SnapshotFailed, match=os.strerror(number)) as failed:
        save(store, 3)
    assert remedy in failed.value.remedy
    assert files(store) == before
    assert number_read(store, 3, 2) == (2, [])


class Forced(OpenedStore):
    """A store that keeps the names of the directories that were forced to the disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.names: list[str] = []

    def _sync_directory(self, at: int) -> None:
        self.names.append(os.path.basename(os.readlink(f"/proc/self/fd/{at}")))
        super()._sync_directory(at)


def test_each_directory_on_the_way_is_forced_to_the_disk(tmp_path: Path):
    """Also one that is there: the writer that made it may have died before it came so far."""
    store = Forced(tmp_path / "snapshots")
    for number in (1, 2):
        save(store, number)
        assert store.names == ["snapshots", "1000", JOB] * number


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path):
    """The library writes, so the fault is the kernel's: a limit on the size of files, as a full disk would be."""
    store = OpenedStore(tmp_path)
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(SnapshotFailed, match="could not be written"):
            save(store, 2, sizes=(3 << 20,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name[:8] for path in files(store)] == ["00000001"]


def test_a_killed_writers_leavings_go(tmp_path: Path):
    store = OpenedStore(tmp_path)
    save(store, 1)
    for name in ("00000002.part", ".tmpAbC123"):
        (store.root / "1000" / JOB / name).write_bytes(b"half")
    (store.root / "2000" / OTHER).mkdir(parents=True)
    store.tidy()
    assert len(files(store)) == 1
    assert not (store.root / "2000").exists()


def planted(tmp_path: Path) -> tuple[OpenedStore, Path]:
    """A store with a snapshot of another job, and a directory outside with files that must stay."""
    store, outside = OpenedStore(tmp_path / "snapshots"), tmp_path / "outside"
    save(store, 1, SnapshotOwner(1000, OTHER))
    outside.mkdir()
    for name in ("precious", "00000003.part", "00000001-" + "0" * 64 + ".safetensors"):
        (outside / name).write_text("keep")
    return store, outside


@pytest.mark.parametrize("what", ["job", "user"])
def test_a_planted_link_to_a_directory_is_never_followed(tmp_path: Path, what: str):
    store, outside = planted(tmp_path)
    (outside / JOB).mkdir()
    (outside / JOB / "precious").write_text("keep")
    if what == "job":
        (store.root / "1000" / JOB).symlink_to(outside)
    else:
        (store.root / "2000").symlink_to(outside)
    owner = MINE if what == "job" else SnapshotOwner(2000, JOB)
    before = sorted((path.relative_to(outside), path.is_dir()) for path in outside.rglob("*"))
    store.tidy()
    store.forget(owner)
    store.expire(1e12, frozenset({SnapshotOwner(1000, OTHER)}))
    assert store.read(owner, [1]) == (None, [])
    with pytest.raises(SnapshotFailed):
        save(store, 2, owner)
    assert [kept.owner for kept in store.kept()] == [SnapshotOwner(1000, OTHER)]
    assert sorted((path.relative_to(outside), path.is_dir()) for path in outside.rglob("*")) == before


def test_a_planted_link_in_the_place_of_a_file_is_never_followed(tmp_path: Path):
    store, outside = planted(tmp_path)
    save(store, 1)
    (file,) = files(store)
    link = file.with_name("00000002-" + file.name.split("-")[1])
    link.symlink_to(file)  # whole, by its digest
    assert number_read(store, 2, 1) == (1, [2])
    (file.parent / "left.part").symlink_to(outside / "precious")
    store.tidy()
    assert not (file.parent / "left.part").is_symlink()
    assert (outside / "precious").read_text() == "keep"


def test_another_history_under_the_same_numbers_goes(tmp_path: Path):
    """A job came back from snapshot 2: what it saved as 3 and 4 before is of a past that is not its own."""
    store = OpenedStore(tmp_path)
    for number in (2, 3):
        save(store, number)
    store.save(MINE, 3, tensors(99, 300, 0, 7), {"name": "sweep"})
    found, _ = store.read(MINE, [3])
    assert found.buffers[0].tobytes() == tensors(99, 300, 0, 7)[buffer_name(0)].tobytes()
    assert len(files(store)) == 2


def test_a_job_that_is_not_found_may_be_one_that_can_not_be_read(tmp_path: Path):
    store = OpenedStore(tmp_path)
    save(store, 1)
    save(store, 1, SnapshotOwner(1000, OTHER), name="")
    for path in files(store):
        path.write_bytes(path.read_bytes()[:8])
    with pytest.raises(
        UnknownJob, match="'sweep' of yours was kept, but what was kept of 1 of your jobs can't be read"
    ):
        store.find(1000, "sweep")
    with pytest.raises(UnknownJob, match="'sweep' of yours was kept — submit"):
        store.find(2000, "sweep")


def test_finding_by_name(tmp_path: Path):
    store = OpenedStore(tmp_path)
    save(store, 1, name="../../etc/passwd")
    save(store, 4, SnapshotOwner(1000, OTHER), name="sweep")
    save(store, 9, SnapshotOwner(2000, JOB), name="theirs")
    assert store.find(1000, "../../etc/passwd").owner == MINE
    assert store.find(1000, "sweep").numbers == (4,)
    with pytest.raises(UnknownJob, match="theirs") as unknown:
        store.find(1000, "theirs")
    assert "'sweep'" in unknown.value.remedy  # one's own are listed, others' are not
    assert [k.owner for k in store.kept(2000)] == [SnapshotOwner(2000, JOB)]


def test_only_ids_become_names(tmp_path: Path):
    store = OpenedStore(tmp_path)
    for job in ("../" + "a" * 29, "A" * 32, "ab", ""):
        with pytest.raises(ValueError, match="no job id"):
            save(store, 1, SnapshotOwner(1000, job))
        with pytest.raises(ValueError, match="no job id"):
            store.read(SnapshotOwner(1000, job), [1])


def test_old_jobs_expire_and_open_ones_stay(tmp_path: Path):
    store = OpenedStore(tmp_path)
    save(store, 1)
    save(store, 1, SnapshotOwner(1000, OTHER))
    for kept in store.kept():
        for path in files(store, kept.owner):
            os.utime(path, (1000.0, 1000.0))
    assert store.expire(1000.0, NOBODY) == []
    assert store.expire(1001.0, frozenset({MINE})) == [SnapshotOwner(1000, OTHER)]
    assert [kept.owner for kept in store.kept()] == [MINE]
    store.forget(MINE)
    assert list(store.kept()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_user_has_the_newest_jobs_kept_and_those_that_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However small they are: each takes its time when a job is looked for by its name."""
    monkeypatch.setattr(stores, "MOST_KEPT", 3)
    store = OpenedStore(tmp_path)
    jobs = [SnapshotOwner(1000, f"{number:032x}") for number in range(5)]
    theirs = SnapshotOwner(2000, JOB)
    for age, owner in enumerate((theirs, *jobs)):
        save(store, 1, owner)
        for file in files(store, owner):
            os.utime(file, (age, age))
    store.make_room(jobs[4], 1, 1 << 40, frozenset({jobs[0]}))
    assert [kept.owner for kept in store.kept()] == [jobs[0], jobs[3], jobs[4], theirs]
    store.make_room(MINE, 1, 1 << 40, frozenset({jobs[0]}))
    assert [kept.owner for kept in store.kept()] == [jobs[0], jobs[4], theirs], "with the new one there are three"


def test_a_users_limit(tmp_path: Path):
    store = OpenedStore(tmp_path)
    one = save(store, 1)
    save(store, 1, SnapshotOwner(1000, OTHER))
    theirs = SnapshotOwner(2000, JOB)
    save(store, 1, theirs)
    store.make_room(MINE, one, 3 * one, NOBODY)
    assert len(list(store.kept(1000))) == 2
    with pytest.raises(SnapshotFailed, match="are allowed"):
        store.make_room(MINE, one, 2 * one, frozenset({SnapshotOwner(1000, OTHER)}))  # both are open
    store.make_room(MINE, one, 2 * one, NOBODY)  # the other one is only kept, and gives way
    assert [kept.owner for kept in store.kept()] == [MINE, theirs]
