"""Control groups for jobs' memory: where they can be made, by trees of files in place of the kernel's, and the kernel's
own where this process may make some."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumux.device.cpu.device import CpuDevice
from gpumux.device.cpu.jobs import ExecutorRecord
from gpumux.device.workers import confinement, memory_groups
from gpumux.device.workers.confinement import Confined, most_memory
from gpumux.device.workers.memory_groups import MemoryGroups, find
from gpumux.types import JobDied, JobId
from tests.device.cpu.support import executors
from tests.device.harness import Case, Driver
from tests.program import samples

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
live = pytest.mark.skipif(bool(find().missing), reason=find().missing)
CASE = Case("cpu", wide=lambda: CpuDevice(threads=1, cores=2), narrow=lambda: CpuDevice(threads=1, cores=1))


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine at `root` with this /proc/self/cgroup and these files below /sys/fs/cgroup."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": groups}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_2(root: Path, path: str = "system.slice/gpumux@0.service", controllers: str = "cpu memory pids") -> Path:
    files = {"cgroup.controllers": controllers, "cgroup.procs": "", "cgroup.subtree_control": ""}
    return tree(root, f"0::/{path}\n", {f"{path}/{name}": text for name, text in files.items()})


# ---- Where they can be made.


def test_the_memory_hierarchy_of_version_1_is_used_where_there_is_one(tmp_path: Path):
    root = tree(
        tmp_path, "4:memory:/daemons/one\n1:name=systemd:/\n0::/\n",
        {"memory/daemons/one/memory.limit_in_bytes": "1", "cgroup.controllers": "hugetlb"},
    )  # fmt: skip
    place = find(root)
    assert (place.path, place.missing) == (root / "sys/fs/cgroup/memory/daemons/one", "")
    assert place.files.limit == "memory.limit_in_bytes"


def test_a_container_that_owns_its_groups_may_make_more(tmp_path: Path):
    place = find(version_2(tmp_path, path=""))
    assert (place.missing, place.files.limit) == ("", "memory.max")


@pytest.mark.parametrize("attribute", ["user.delegate", "trusted.delegate"])
def test_a_service_may_make_some_if_its_manager_gave_it_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str
):
    root = version_2(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert find(root).missing == "the daemon's group was not delegated to it"

    def getxattr(path: Path, name: str) -> bytes:
        assert path == root / "sys/fs/cgroup/system.slice/gpumux@0.service"
        if name == attribute:
            return b"1"
        raise OSError(errno.ENODATA, "no data")

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert find(root).missing == ""


def test_a_user_may_make_some_in_a_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = version_2(tmp_path)
    own = root / "sys/fs/cgroup/system.slice/gpumux@0.service"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert "not delegated" in find(root).missing
    if os.getuid() == 0:
        os.chown(own, 1234, 1234)
        assert find(root).missing == ""


@pytest.mark.parametrize(
    ("groups", "files", "missing"),
    [
        ("", {}, "this kernel has none"),
        ("0::/x\n", {}, "No such file"),
        ("0::/x\n", {"x/cgroup.controllers": "cpu pids"}, "no memory controller"),
        ("0::/x\n", {"x/cgroup.controllers": "memory"}, "may not make groups"),
        ("3:memory:/x\n0::/\n", {}, "may not make groups"),
    ],
)
def test_why_there_are_none_is_said(tmp_path: Path, groups: str, files: dict[str, str], missing: str):
    assert missing in find(tree(tmp_path, groups, files)).missing


# ---- Version 2, on a tree of files.


def test_the_daemon_moves_out_of_the_group_that_has_limited_ones_below(tmp_path: Path):
    place = find(version_2(tmp_path, path=""))
    groups = MemoryGroups(place)
    assert (place.path / "gpumux/cgroup.procs").read_text() == "0"
    assert (place.path / "cgroup.subtree_control").read_text() == "+memory"
    name = groups.make(5 * MIB)
    limit = place.path / name / "memory.max"
    assert limit.read_text() == str(5 * MIB)
    groups.allow(name, 4 * MIB)
    assert limit.read_text() == str(5 * MIB), "a Program that goes gives nothing back"
    groups.allow(name, 6 * MIB)
    assert limit.read_text() == str(6 * MIB)
    assert groups.entrance(name) == str(place.path / name / "cgroup.procs")
    assert groups.exceeded(name) == 0
    (place.path / name / "memory.events").write_text("low 0\noom 3\noom_kill 1\noom_group_kill 0\n")
    assert groups.exceeded(name) == 6 * MIB
    (place.path / name / "memory.events").write_text("low 0\noom 0\noom_kill 1\noom_group_kill 0\n")
    assert groups.exceeded(name) == 0, "the daemon's own group was full"


def test_a_process_that_the_kernel_killed_in_version_1_took_too_much_only_if_its_own_group_was_full(tmp_path: Path):
    root = tree(tmp_path, "4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "1"})
    groups = MemoryGroups(find(root))
    name = groups.make(5 * MIB)
    own = root / "sys/fs/cgroup/memory/x" / name
    (own / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (own / "memory.failcnt").write_text("0\n")
    assert groups.exceeded(name) == 0
    (own / "memory.failcnt").write_text("3\n")
    assert groups.exceeded(name) == 5 * MIB


def test_swap_is_bounded_where_the_kernel_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = find(version_2(tmp_path, path=""))
    groups, make = MemoryGroups(place), Path.mkdir

    def mkdir(path: Path, *args: int, **options: bool) -> None:
        make(path, *args, **options)
        (path / "memory.swap.max").write_text("max")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    name = groups.make(5 * MIB)
    swap = place.path / name / "memory.swap.max"
    assert swap.read_text() == str(5 * MIB)
    groups.allow(name, 6 * MIB)
    assert swap.read_text() == str(6 * MIB)


def test_a_daemon_that_is_not_alone_in_its_group_stays_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = find(version_2(tmp_path, path=""))
    moves: list[tuple[str, str]] = []

    def write(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control":
            raise OSError(errno.EBUSY, "busy")
        moves.append((str(path.parent.relative_to(place.path)), text))
        return 1

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(OSError, match="other processes are in the daemon's control group"):
        MemoryGroups(place)
    assert moves == [("gpumux", "0"), (".", "0")]
    assert not (place.path / "gpumux").exists()


def test_groups_of_daemons_that_were_killed_are_removed(tmp_path: Path):
    place = find(version_2(tmp_path, path=""))
    dead = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    for name in (f"gpumux-{dead}-1", f"gpumux-{os.getpid()}-999", f"gpumux-{os.getppid()}-1"):
        (place.path / name).mkdir()
    MemoryGroups(place)
    kept = {path.name for path in place.path.iterdir() if path.is_dir()}
    assert kept == {"gpumux", f"gpumux-{os.getpid()}-999", f"gpumux-{os.getppid()}-1"}


# ---- The kernel's.


FILLS = """
import os, sys
sys.path.insert(0, sys.argv[2])
from gpumux.device.workers.memory_groups import join
join(sys.argv[1])
file = os.memfd_create("large")
for _ in range(256):
    os.write(file, bytes(1 << 20))
"""


@live
def test_files_in_memory_count_and_what_takes_too_many_is_killed():
    groups = MemoryGroups(find())
    name = groups.make(32 * MIB)
    try:
        assert groups.exceeded(name) == 0
        command = [sys.executable, "-c", FILLS, groups.entrance(name), str(ROOT)]
        assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
        assert groups.exceeded(name) == 32 * MIB
        groups.allow(name, 512 * MIB)
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
    finally:
        path = Path(groups.entrance(name)).parent
        groups.remove(name)
    assert not path.exists()


@live
def test_the_limit_with_swap_is_raised_before_the_other_one():
    groups, place = MemoryGroups(find()), find()
    name = groups.make(32 * MIB)
    try:
        swap = place.path / name / place.files.swap
        if not swap.exists():
            pytest.skip("this kernel does not count swap")
        assert int(swap.read_text()) == 32 * MIB * place.files.swap_factor
        groups.allow(name, 512 * MIB)
        assert int(swap.read_text()) == 512 * MIB * place.files.swap_factor
        assert int((place.path / name / place.files.limit).read_text()) == 512 * MIB
    finally:
        groups.close()


@live
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_a_process_of_another_user_can_neither_leave_its_group_nor_change_it():
    groups = MemoryGroups(find())
    name, other = groups.make(256 * MIB), groups.make(256 * MIB)
    try:
        own, others = Path(groups.entrance(name)).parent, Path(groups.entrance(other)).parent
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            held = 0
            try:
                given = confinement.Confinement(4001, 4001, False, memory_group=groups.entrance(name))
                confinement.confine(given)
                held = sum(map(refused, attempts(own, others)))
            finally:
                os.write(writer, bytes([held]))
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(reader, 1)[0] == len(list(attempts(own, others)))
        os.close(reader)
        os.close(writer)
    finally:
        groups.close()


def attempts(own: Path, other: Path) -> Iterator[tuple[Path, str]]:
    """Files of the kernel's that would undo a limit, and what to write to each."""
    for group in (own.parent, other):
        yield group / "cgroup.procs", "0"
    for group in (own, other):
        yield group / find().files.limit, "-1"
        yield group / find().files.swap, "-1"


def refused(attempt: tuple[Path, str]) -> bool:
    path, text = attempt
    try:
        path.write_text(text)
    except OSError:
        return True
    return False


@live
def test_a_jobs_process_is_in_a_group_with_the_share_of_what_it_has_loaded():
    device = CpuDevice(threads=1, cores=2, confined=Confined(False, False, (), True))
    device.open()
    place = find()
    driver = Driver(CASE, device)
    try:
        job = driver.open()
        job.step(job.load(samples.add_one()))
        (pid,) = executors(device)
        (line,) = (x for x in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if "gpumux-" in x)
        path = place.path / line.rpartition("/")[2]
        small = int((path / place.files.limit).read_text())
        assert most_memory(0) <= small < most_memory(MIB)
        job.load(samples.sgd_linear(rows=1 << 20), [12])  # 12 MB of inputs
        assert int((path / place.files.limit).read_text()) >= most_memory(4 * MIB)
    finally:
        driver.finish()
        device.close()
    assert not path.exists()


def test_a_job_that_took_too_much_is_told_how_much_it_may_have():
    channel, page = SimpleNamespace(), b"\0" * 8
    record = ExecutorRecord(JobId("ab" * 16), channel, page, status=int(signal.SIGKILL))  # type: ignore[arg-type]
    assert "ran out of memory" in record.crash(None).remedy
    record.exceeded = 3 << 30
    assert "took more memory than the 3221225472 bytes it may have" in record.crash(None).message
    record.status = int(signal.SIGSEGV)  # the kernel had killed what the process forked
    assert "died of SIGSEGV" in record.crash(None).message


@live
def test_a_job_whose_group_cant_be_made_is_told_why(monkeypatch: pytest.MonkeyPatch):
    device = CpuDevice(threads=1, cores=2, confined=Confined(False, False, (), True))
    device.open()
    driver = Driver(CASE, device)
    try:

        def make(groups: MemoryGroups, most: int) -> str:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(MemoryGroups, "make", make)
        job = driver.open()
        fault = driver.until(JobDied, job.job).fault
        assert "can't make a control group for its memory: Read-only file system" in fault.message
        assert "restart the daemon" in fault.remedy
    finally:
        driver.finish()
        device.close()


def test_a_missing_group_is_said_and_not_required(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        memory_groups, "find", lambda: memory_groups.OwnGroup(Path("/"), find().files, "no groups here")
    )
    monkeypatch.setattr(confinement, "_no_filter", lambda: "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(confinement, "_may_change_user", lambda: True)
    monkeypatch.setattr(confinement, "_closed_to_others", lambda: "")
    confined = Confined.choose("require")
    assert not confined.groups
    (measure,) = (m for m in confined.measures if m.name == confinement.GROUPS)
    assert "no groups here" in measure.missing
    assert "Delegate=memory" in measure.remedy
