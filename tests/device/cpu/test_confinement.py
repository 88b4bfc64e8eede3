"""What processes of jobs are kept from: looked at from outside on a real device, and tried from within."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumux.device.cpu.device import CpuDevice
from gpumux.device.run.device_base import CHECK_BYTES
from gpumux.device.workers import confinement
from gpumux.device.workers.confinement import SPARE_BYTES, SPARE_FACTOR, Confined, Confinement, Measure, identity
from gpumux.errors import ConfigError
from tests.device.cpu.support import children, executors, fork_server
from tests.device.harness import Case, Driver
from tests.program import samples

ROOT = Path(__file__).parents[3]
USER = 63_021  # an id that needs no entry anywhere
FILTERED = not confinement._no_filter()
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives processes to other users: run as root")
filtered = pytest.mark.skipif(not FILTERED, reason=confinement._no_filter())
EVERYTHING = Confined(os.geteuid() == 0, FILTERED, ())
CASE = Case("cpu", wide=lambda: CpuDevice(threads=1, cores=2), narrow=lambda: CpuDevice(threads=1, cores=1))


def status(pid: int) -> dict[str, list[str]]:
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.split() for name, _, value in lines}


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1, cores=2, confined=EVERYTHING)
    device.open()
    yield device
    device.close()


def test_a_jobs_process_has_its_user_no_privileges_few_calls_and_its_share_of_memory(device: CpuDevice):
    driver = Driver(CASE, device)
    try:
        job = driver.open(user=USER)
        program = job.load(samples.add_one())
        job.step(program)
        (pid,) = executors(device)
        found = status(pid)
        assert found["NoNewPrivs"] == ["1"]
        assert int(found["CapEff"][0], 16) == int(found["CapPrm"][0], 16) == 0
        if os.geteuid() == 0:
            assert found["Uid"] == found["Gid"] == [str(USER)] * 4
            assert found["Groups"] == []
            assert Path(f"/proc/{pid}/environ").stat().st_uid == 0, "its own user can't look into it"
        if FILTERED:
            assert found["Seccomp"] == ["2"]
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        assert [line.split()[4:6] for line in limits if line.startswith("Max core file size")] == [["0", "0"]]
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "500\n", "the kernel takes it before the daemon"
        share, most = (int(n) for line in limits if line.startswith("Max data size") for n in line.split()[3:5])
        assert SPARE_BYTES < share < most, "the share of what it has loaded"
        assert device._total + SPARE_BYTES < most < 2 * device._total + SPARE_BYTES
        names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2]
        assert sum(name.startswith("socket:") for name in names) == 1, "its channel to the daemon"
        for name in names:
            assert name.startswith(("socket:", "pipe:", "/memfd:")) or "clear_refs" in name, names
    finally:
        driver.finish()


def test_checkers_are_confined_too(device: CpuDevice):
    driver = Driver(CASE, device)
    try:
        driver.open(user=USER).load(samples.add_one())
        (pid,) = set(children(fork_server(device))) - set(executors(device))  # it waits for another Program
        found = status(pid)
        assert found["NoNewPrivs"] == ["1"]
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (most,) = (line.split()[3] for line in limits if line.startswith("Max data size"))
        assert CHECK_BYTES + SPARE_BYTES < int(most) < 2 * CHECK_BYTES + SPARE_BYTES
        if os.geteuid() == 0:
            assert found["Uid"] == [str(identity(None)[0])] * 4
        if FILTERED:
            assert found["Seccomp"] == ["2"]
    finally:
        driver.finish()


# ---- From within: a process of its own confines itself, then tries what the code says.


def within(given: Confinement, code: str, **values: Any) -> Any:
    """What `answer` holds after `code` has run in a confined process. `attempt(call)` is "" or the error's name."""
    script = f"""
import ctypes, errno, json, os, resource, signal, socket, subprocess, sys, threading
from gpumux.device.workers import confinement
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    try:
        result = call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return errno.errorcode[ctypes.get_errno()] if result == -1 else ""
values = {values!r}
before = confinement.data_bytes()
confinement.confine(confinement.Confinement(**{confinement.asdict(given)!r}))
answer = None
{code}
print(json.dumps(answer), flush=True)
os._exit(0)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@filtered
def test_harm_is_refused_by_the_kernel():
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        answers = within(
            Confinement(None, None, True),
            """
pid = values["victim"]
answer = {
    "signal": attempt(lambda: os.kill(pid, 0)),
    "signal to all": attempt(lambda: os.kill(-1, 0)),
    "signal to a thread": attempt(lambda: libc.syscall(234, pid, pid, 0)),
    "trace": attempt(lambda: libc.ptrace(16, pid, 0, 0)),
    "memory": attempt(lambda: libc.process_vm_readv(pid, 0, 0, 0, 0, 0)),
    "priority": attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)),
    "cores": attempt(lambda: os.sched_setaffinity(pid, {0})),
    "limits": attempt(lambda: libc.prlimit(pid, 7, 0, 0)),
    "socket": attempt(socket.socket),
    "local socket": attempt(lambda: socket.socket(socket.AF_UNIX)),
    "namespace": attempt(lambda: libc.unshare(0x10000000)),
    "namespace by clone": attempt(lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)),
    "mount": attempt(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0)),
    "user": attempt(lambda: libc.syscall(105, 0)),
    "keys": attempt(lambda: libc.syscall(250, 0, 0, 0, 0, 0)),
    "rings": attempt(lambda: libc.syscall(425, 1, 0)),
    "bpf": attempt(lambda: libc.syscall(321, 0, 0, 0)),
    "performance": attempt(lambda: libc.syscall(298, 0, 0, 0, 0, 0)),
    "descriptor of a process": attempt(lambda: os.pidfd_open(pid)),
    "root": attempt(lambda: os.chroot("/tmp")),
    "owner": attempt(lambda: os.chown("/tmp", 0, 0)),
    # Ways around: the kernel signals the owner of a descriptor, or types at a terminal.
    "signal by a descriptor's owner": attempt(lambda: libc.fcntl(0, 8, pid)),
    "by its owner and what follows": attempt(lambda: libc.fcntl(0, 15, ctypes.byref((ctypes.c_int * 2)(1, pid)))),
    "which signal": attempt(lambda: libc.fcntl(0, 10, 9)),
    "with high bits": attempt(lambda: libc.syscall(72, 0, (1 << 32) | 8, pid)),
    "owner by ioctl": attempt(lambda: libc.ioctl(0, 0x8901, ctypes.byref(ctypes.c_int(pid)))),
    "owner of a socket by ioctl": attempt(lambda: libc.ioctl(0, 0x8902, ctypes.byref(ctypes.c_int(pid)))),
    "asynchronous by ioctl": attempt(lambda: libc.ioctl(0, 0x5452, ctypes.byref(ctypes.c_int(1)))),
    "type at the terminal": attempt(lambda: libc.ioctl(0, 0x5412, b"x")),
    "terminal of the session": attempt(lambda: libc.ioctl(0, 0x540E, 0)),
    "local sockets in pairs": attempt(socket.socketpair),
    "a child of the parent's": attempt(lambda: libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0)),
    "outlive the parent": attempt(lambda: libc.prctl(1, 0, 0, 0, 0)),
    "be looked into again": attempt(lambda: libc.prctl(4, 1, 0, 0, 0)),
    "a session of its own": attempt(os.setsid),
    "a group of its own": attempt(lambda: os.setpgid(0, 0)),
}
answer["allowed"] = attempt(lambda: os.close(os.open("/proc/self/status", os.O_RDONLY)))
""",
            victim=victim.pid,
        )
        assert victim.poll() is None
    finally:
        victim.communicate()
    assert answers.pop("allowed") == ""
    assert set(answers.values()) == {"ENOSYS"}, answers


BARRED = """
    kill tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open pidfd_getfd ptrace process_vm_readv
    process_vm_writev process_madvise process_mrelease kcmp setpriority sched_setaffinity sched_setscheduler
    sched_setparam sched_setattr ioprio_set migrate_pages move_pages prlimit64 setns unshare mount umount2 pivot_root
    chroot fsopen fsmount open_tree move_mount mount_setattr name_to_handle_at open_by_handle_at clone3 setsid setpgid
    setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset personality keyctl add_key
    request_key io_uring_setup io_uring_enter io_uring_register bpf perf_event_open userfaultfd fanotify_init
    fanotify_mark inotify_init inotify_init1 seccomp socket socketpair connect bind listen accept accept4 shmget shmat
    shmctl semget semop semctl msgget msgsnd msgrcv mq_open mq_unlink chown fchown lchown fchownat mknod mknodat
    setxattr lsetxattr fsetxattr vhangup swapon swapoff reboot acct syslog quotactl init_module finit_module
    delete_module kexec_load kexec_file_load iopl ioperm modify_ldt settimeofday clock_settime adjtimex clock_adjtime
    sethostname setdomainname lookup_dcookie vmsplice splice tee landlock_create_ruleset memfd_secret execveat
    uselib ustat sysfs _sysctl nfsservctl remap_file_pages mlockall munlockall truncate creat
"""


@filtered
def test_no_call_that_could_harm_others_is_allowed_in_general():
    """prlimit64 is allowed for the process itself, and calls that connect for a rank until it has."""
    names = BARRED.split()
    assert not set(names) & set(confinement.ALLOWED)
    assert not set(names) & set(confinement.USES)
    assert set(confinement.CONNECTING) <= {*names, "getpeername"}
    answers = within(
        Confinement(None, None, True),
        """
library = confinement._seccomp()
answer = {}
for name in values["names"]:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:  # this processor has it
        ctypes.set_errno(0)
        answer[name] = attempt(lambda: libc.syscall(number, -1, -1, -1, -1, -1, -1))
""",
        names=names,
    )
    assert len(answers) > 90
    assert set(answers.values()) == {"ENOSYS"}, answers


@filtered
def test_a_process_without_the_filter_could_do_some_of_it():
    """So the test above can fail."""
    answer = within(
        Confinement(None, None, False), "answer = [attempt(socket.socket), attempt(lambda: os.kill(os.getppid(), 0))]"
    )
    assert answer == ["", ""]


@filtered
def test_threads_and_children_are_confined_with_it():
    answer = within(
        Confinement(None, None, True),
        """
answer = []
thread = threading.Thread(target=lambda: answer.append(attempt(socket.socket)))
thread.start()
thread.join()
child = [sys.executable, "-c", "import socket; socket.socket()"]
answer.append("not implemented" in subprocess.run(child, capture_output=True, text=True).stderr)
""",
    )
    assert answer == ["ENOSYS", True]


@filtered
def test_a_rank_makes_connections_until_it_has_its_peers_and_keeps_them():
    answer = within(
        Confinement(None, None, True, connects=True),
        """
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
ended, seen = threading.Event(), []
thread = threading.Thread(target=lambda: (ended.wait(), seen.append(attempt(socket.socket))))
thread.start()
confinement.end_connecting()
ended.set()
thread.join()
client.sendall(b"bytes")
answer = [peer.recv(5).decode(), seen, attempt(socket.socket), attempt(server.accept)]
""",
    )
    assert answer == ["bytes", ["ENOSYS"], "ENOSYS", "ENOSYS"]


def test_memory_is_taken_up_to_a_share_and_no_further():
    answer = within(
        Confinement(None, None, FILTERED, most_bytes=1 << 30),
        """
import mmap
confinement.SPARE_BYTES, confinement.SPARE_FACTOR = 32 << 20, 2
def takes(nbytes):
    return attempt(lambda: mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE))
confinement.limit_data(before, 32 << 20)
answer = [takes(64 << 20), takes(128 << 20)]
confinement.limit_data(before, 64 << 20)
answer += [takes(128 << 20)]
confinement.limit_data(before, 4 << 30)
answer += [takes(512 << 20), takes(2 << 30)]
try:
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))
except ValueError as error:
    answer += [str(error)]
""",
    )
    assert answer == ["", "ENOMEM", "", "", "ENOMEM", "not allowed to raise maximum limit"]


def test_a_limit_of_the_service_stays():
    answer = within(
        Confinement(None, None, False, most_bytes=1 << 30),
        """
first = resource.getrlimit(resource.RLIMIT_DATA)
confinement.confine(confinement.Confinement(None, None, False, most_bytes=1 << 40))
answer = first == resource.getrlimit(resource.RLIMIT_DATA)
""",
    )
    assert answer


def test_an_operator_that_takes_more_memory_than_was_planned_fails_its_job_alone(device: CpuDevice):
    driver = Driver(CASE, device)
    try:
        other = driver.open(user=USER + 1)
        program = other.load(samples.add_one())
        other.step(program)
        greedy = driver.open(user=USER)
        # Its kernel lays out one column of the image for each position: 30 GB.
        (launch, *_) = greedy.launch(greedy.load(samples.hungry()))
        fault = driver.failed(launch).fault
        assert fault.code == "job_failed"
        assert "memory" in fault.message
        assert "smaller batch" in fault.remedy
        other.step(program)
    finally:
        driver.finish()


@as_root
def test_a_job_whose_user_stops_its_process_is_ended_and_holds_no_place(device: CpuDevice):
    driver = Driver(CASE, device)
    try:
        job, other = driver.open(user=USER), driver.open(user=USER + 1)
        program = job.load(samples.add_one())
        job.step(program)
        (pid,) = (pid for pid in executors(device) if status(pid)["Uid"][0] == str(USER))
        # Its real, saved and effective user is the job's, who may send it a signal.
        code = f"import os, signal; os.setuid({USER}); os.kill({pid}, signal.SIGSTOP)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
        (launch, *_) = job.launch(program)
        fault = driver.failed(launch).fault
        assert fault.code == "executor_crashed"
        assert "stopped by a signal from outside" in fault.message
        other.step(other.load(samples.add_one()))
    finally:
        driver.finish()


@as_root
def test_a_jobs_process_cannot_read_what_is_the_daemons(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("snapshots")
    secret.chmod(0o600)
    tmp_path.chmod(0o755)
    answer = within(
        Confinement(USER, USER, FILTERED),
        """
answer = [attempt(lambda: os.open(values["path"], os.O_RDONLY)), attempt(lambda: os.open("/proc/self/mem", os.O_RDWR))]
answer += [os.getuid(), os.getgroups()]
""",
        path=str(secret),
    )
    assert answer == ["EACCES", "EACCES", USER, []]


# ---- What is chosen.


def test_a_user_of_the_machine_is_itself_and_one_from_the_network_is_nobody():
    assert identity(0) == (0, 0)
    assert identity(USER) == (USER, USER)
    assert identity(None) == identity(-7)
    assert identity(None)[0] not in (0, os.geteuid())


def test_what_is_missing_is_said_or_required(monkeypatch: pytest.MonkeyPatch):
    there = Measure("privileges", "no new privileges")
    absent = Measure("calls", "few calls", "there is no libseccomp.so.2", "install libseccomp.so.2")
    monkeypatch.setattr(confinement, "measures", lambda: [there, absent])
    assert Confined.choose("auto") == Confined(True, False, (there, absent))
    with pytest.raises(ConfigError, match=r"no libseccomp\.so\.2 — install .*, or set confine to auto"):
        Confined.choose("require")
    monkeypatch.setattr(confinement, "measures", lambda: [Measure("user", "own user"), there])
    assert Confined.choose("require").users
    off = Confined.choose("off")
    assert not off.users
    assert off.measures[0].missing == "the daemon's setting confine is off"
    assert off.measures[1].missing == "", "what costs nothing stays"


def test_a_machine_without_the_library_or_root_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confinement, "LIBRARY", "libnone.so.7")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    missing = {measure.name: measure for measure in confinement.measures() if measure.missing}
    assert set(missing) == {"user", "calls"}
    assert "user 1000" in missing["user"].missing
    assert "libnone.so.7" in missing["calls"].missing + missing["calls"].remedy


def test_python_that_others_cannot_read_keeps_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    own = tmp_path / "lib"
    own.mkdir(mode=0o700)
    (own / "os.py").touch()
    monkeypatch.setattr(os, "__file__", str(own / "os.py"))
    assert confinement._closed_to_others().startswith(str(tmp_path.parents[-1]))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(confinement, "_may_change_user", lambda: True)
    user = next(measure for measure in confinement.measures() if measure.name == "user")
    assert "can't read" in user.missing


def test_what_is_said_to_be_in_force_is_compared_with_what_the_kernel_says():
    measures = tuple(Measure(name, name) for name in ("user", "privileges", "memory", "calls"))
    found = {
        "user": 65534, "capabilities": 0, "no_new_privileges": True, "calls": True, "network": False, "data_bytes": 1,
    }  # fmt: skip
    confined = Confined(True, True, measures)
    assert confinement.doubts(confined, found) == []
    for change, doubted in (
        ({"user": 0}, "user"), ({"capabilities": 1}, "privileges"), ({"no_new_privileges": False}, "privileges"),
        ({"data_bytes": -1}, "memory"), ({"calls": False}, "calls"), ({"network": True}, "calls"),
    ):  # fmt: skip
        assert confinement.doubts(confined, found | change) == [doubted]
    lacking = Confined(False, False, (Measure("user", "user", "not root"),))
    assert confinement.doubts(lacking, found | {"user": 0}) == []


def test_a_gang_rank_is_told_to_connect():
    given = EVERYTHING.of(USER, connects=True, most_bytes=5)
    assert given["connects"]
    assert given["most_bytes"] == 5 + SPARE_BYTES
    assert EVERYTHING.of(None)["most_bytes"] == 0
    assert SPARE_FACTOR >= 2
