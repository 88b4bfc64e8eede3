"""What a process that runs or checks the Programs of one job may do. No torch.

A Program is data, but kernels that run it have faults, and a process that one of them has taken over should hurt no
other job. Right after its fork such a process gives up:

- Its user. Where the daemon is root, an executor runs as its job's user, and a checker as `nobody`. A daemon that is
  not root can't change users: all its jobs run as its own.
- Capabilities, which a job of root would still have, new privileges (PR_SET_NO_NEW_PRIVS), and being looked into by
  processes of the same user (PR_SET_DUMPABLE).
- Memory beyond its share: private memory by RLIMIT_DATA (`limit_data`), all of it by a control group, where the daemon
  can make one (memory_groups.py).
- System calls that it does not need, by a filter of libseccomp. Among them are those that make a socket, so it has no
  network; a rank of a gang loses them once it is connected to its peers (`end_connecting`). It can signal no other
  process, nor trace or read one.

libseccomp is called through ctypes, four functions of it: it has no Python package of its own that pip installs.
`python -m gpumux.device.workers.confinement` confines itself, and prints what it then finds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import json
import os
import pwd
import resource
import signal
import socket
import stat
import subprocess
import sys
import termios
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpumux.device.workers import memory_groups
from gpumux.errors import ConfigError

LIBRARY = "libseccomp.so.2"
SPARE_BYTES = 2 << 30  # a process may take beyond what is planned for it: heaps have holes, kernels scratch memory
SPARE_FACTOR = 3  # and this many times the plan
TRIAL_S = 60  # for a Python process to start and end
_NOBODY = 65534
_CAP_SETGID, _CAP_SETUID = 6, 7
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_GET_NAME = 1, 3, 4, 15, 16
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_CAPBSET_READ, _PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 21, 22, 23, 29, 30
_PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS, _PR_SET_VMA = 38, 39, 0x53564D41
_TCGETS2 = 0x802C542A
_WHOLE = 0xFFFFFFFF  # the kernel reads 32 bits of these arguments
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Confinement:
    """What one process gives up. `user`, `group`: whom it becomes, None to stay. `calls`: whether system calls are
    filtered. `connects`: it may make connections until `end_connecting`. `most_bytes`: of private memory that it may
    ever take beside what its fork began with, 0 for no limit. `memory_group`: the entrance of its control group, ""
    for none."""

    user: int | None
    group: int | None
    calls: bool
    connects: bool = False
    most_bytes: int = 0
    memory_group: str = ""


class Measure(NamedTuple):
    """One thing that processes of jobs are kept from. `missing`: why it is not in force, "" if it is."""

    name: str
    what: str
    missing: str = ""
    remedy: str = ""


# ---- What this machine and this user allow.


def measures() -> list[Measure]:
    """What confines processes that are started by this one."""
    user, why, shut = "", _no_filter(), _closed_to_others()
    ungrouped = memory_groups.find().missing
    if os.geteuid() != 0:
        user = f"the daemon is not root: all jobs run as its user {os.geteuid()}"
    elif not _may_change_user():
        user = "this root has no CAP_SETUID and CAP_SETGID: all jobs run as root"
    elif shut:
        user = f"other users can't read {shut}, where Python or torch is: all jobs run as root"
    return [
        Measure(
            "user", "each runs as its job's user", user,
            "run the daemon as root, from a Python that all users can read, if its users don't trust each other"
            if user else "",
        ),
        Measure("privileges", "no capabilities, no new privileges, and closed to other processes of the same user"),
        Measure("memory", "private memory is bounded by what was planned"),
        Measure(
            GROUPS,
            "all memory is, with files in memory and what they fork, by a control group each"
            + (", which one that is taken over could leave, as the daemon's user" if user else ""),
            f"memory is bounded for private memory alone, by no control group: {ungrouped}" if ungrouped else "",
            "in a systemd unit set Delegate=memory and ProtectControlGroups=no" if ungrouped else "",
        ),
        Measure(
            "calls", "no system call that they don't need, no network but a gang's connections", why,
            f"install {LIBRARY} (Debian: libseccomp2)" if LIBRARY in why else "",
        ),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Confined:
    """What the processes of a device are kept from. `users`: each takes its job's user. `calls`: system calls are
    filtered. `groups`: each has a control group for its memory."""

    users: bool
    calls: bool
    measures: tuple[Measure, ...]
    groups: bool = False

    @classmethod
    def choose(cls, setting: str) -> Confined:
        """By the daemon's setting `confine`: auto does what is possible, require raises ConfigError if something is
        not, off leaves out what can be left out."""
        found = measures()
        missing = [measure for measure in found if measure.missing and measure.name != GROUPS]
        if setting == "require" and missing:
            remedy = f"{missing[0].remedy or 'mend it'}, or set confine to auto"
            raise ConfigError(f"confine is require, but {missing[0].missing}", remedy)
        if setting == "off":
            why = "the daemon's setting confine is off"
            found = [m._replace(missing=why) if m.name in _OPTIONAL and not m.missing else m for m in found]
        absent = {measure.name for measure in found if measure.missing}
        grouped = any(measure.name == GROUPS and not measure.missing for measure in found)
        return cls("user" not in absent, "calls" not in absent, tuple(found), grouped)

    def of(
        self, user: int | None, *, connects: bool = False, most_bytes: int = 0, memory_group: str = ""
    ) -> dict[str, Any]:
        """The fields of the Confinement of a process for a job of this user (None: not known, or it does not matter),
        which may make connections, and takes at most `most_bytes` and SPARE_BYTES of memory (0: no limit).
        `memory_group`: the entrance of its control group."""
        own, group = identity(user) if self.users else (None, None)
        most = most_bytes + SPARE_BYTES if most_bytes else 0
        return asdict(Confinement(own, group, self.calls, connects, most, memory_group))


GROUPS = "memory group"
_OPTIONAL = ("user", "calls", GROUPS)


def identity(uid: int | None) -> tuple[int, int]:
    """The user and group for a job of this user. One of which nothing is known, as one that comes over the network,
    is `nobody`."""
    if uid is None or uid < 0:
        try:
            entry = pwd.getpwnam("nobody")
        except KeyError:
            return _NOBODY, _NOBODY
        return entry.pw_uid, entry.pw_gid
    try:
        return uid, pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid, uid  # a container's user need not be in its /etc/passwd


def _may_change_user() -> bool:
    capable = _capabilities()
    return bool(capable >> _CAP_SETUID & 1 and capable >> _CAP_SETGID & 1)


def _capabilities() -> int:
    """The capabilities that this process may use, a bit each."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapPrm:"):
            return int(line.split()[1], 16)
    return 0


def _closed_to_others() -> str:
    """A directory or file of this Python, of torch or gpumux that not every user can read, or ""."""
    torch = importlib.util.find_spec("torch")
    for file in (os.__file__, torch.origin if torch is not None else None, __file__):
        if file is None:
            continue
        for path in {Path(file), Path(file).resolve()}:
            for folder in reversed(path.parents):
                if not folder.stat().st_mode & stat.S_IXOTH:
                    return str(folder)
            if not path.stat().st_mode & stat.S_IROTH:
                return str(path)
    return ""


def _no_filter() -> str:
    """Why system calls can't be filtered, or ""."""
    try:
        _seccomp()
    except OSError:
        return f"no {LIBRARY} is installed: system calls are not filtered"
    if _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0 and ctypes.get_errno() == errno.EINVAL:
        return "this kernel was built without seccomp: system calls are not filtered"
    return ""


# ---- Giving it up.


def confine(given: Confinement) -> None:
    """Confine this process, which has one thread. Raises OSError if any of it fails: it must not run then. A signal set
    for the parent's death is lost where the user changes."""
    if given.memory_group:
        memory_groups.join(given.memory_group)
    if given.most_bytes:
        most, hard = data_bytes() + given.most_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)  # the service may have one
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    if given.user and os.geteuid() == 0:
        os.setgroups([])
        group = given.user if given.group is None else given.group
        os.setresgid(group, group, group)
        os.setresuid(given.user, given.user, given.user)
    _drop_capabilities()
    may_be_looked_into(False)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if given.calls:
        _filter(CONNECTING if given.connects else ())


def may_be_looked_into(allowed: bool) -> None:
    """Whether processes of the same user may read and write this one's memory. The daemon's own processes forbid it:
    where jobs run as the daemon's user, a job's process could else do as the daemon."""
    _prctl(_PR_SET_DUMPABLE, int(allowed))


def end_connecting() -> None:
    """Forbid all threads of this process to make connections from now on; open ones stay. Raises OSError."""
    _filter((), every_thread=True)


def limit_data(before: int, planned: int) -> None:
    """Set what private memory this process may take, in bytes: SPARE_FACTOR times `planned` and SPARE_BYTES more than
    `before`, the `data_bytes` that its fork began with. Never above the limit set by `confine`; none if that set none.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (min(most, before + planned * SPARE_FACTOR + SPARE_BYTES), most))


def most_memory(planned: int) -> int:
    """Bytes of memory for the control group of a process for which `planned` bytes are planned."""
    return planned * SPARE_FACTOR + SPARE_BYTES


def data_bytes() -> int:
    """Private memory that RLIMIT_DATA counts, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _drop_capabilities() -> None:
    if _capabilities() == 0:
        return  # systemd forbids the call to services
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


# ---- The filter of system calls. All others answer ENOSYS, for which the C library has another way.


CONNECTING = (
    "socket", "connect", "bind", "listen", "accept", "accept4", "getpeername", "sched_setscheduler", "seccomp",
)  # fmt: skip
ALLOWED = (
    # memory
    "brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "mincore", "msync", "mlock", "munlock", "mbind",
    "get_mempolicy", "memfd_create",
    # threads, time and waiting
    "futex", "set_robust_list", "get_robust_list", "rseq", "membarrier", "set_tid_address", "gettid", "sched_yield",
    "sched_getaffinity", "sched_getparam", "sched_getscheduler", "sched_get_priority_max", "sched_get_priority_min",
    "getcpu", "exit", "exit_group", "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday",
    "time", "times", "restart_syscall", "alarm", "setitimer", "getitimer", "timer_create", "timer_settime",
    "timer_delete", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait", "sigaltstack",
    "poll", "ppoll", "select", "pselect6", "pause",
    "epoll_create", "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait", "eventfd", "eventfd2",
    # itself
    "getpid", "getppid", "getpgrp", "getpgid", "getsid", "getuid", "geteuid", "getgid", "getegid", "getresuid",
    "getresgid", "getgroups", "getrlimit", "setrlimit", "getrusage", "getpriority", "uname", "sysinfo",
    "getrandom", "arch_prctl", "umask", "capget",
    # files, and sockets that it was given
    "open", "openat", "close", "close_range", "read", "readv", "pread64", "write", "writev", "pwrite64", "lseek",
    "stat", "fstat", "lstat", "newfstatat", "statx", "statfs", "fstatfs", "access", "faccessat", "faccessat2",
    "readlink", "readlinkat", "getdents64", "getcwd", "chdir", "flock", "dup", "dup2", "dup3", "pipe", "pipe2",
    "fsync", "fdatasync", "ftruncate", "fallocate", "fadvise64", "sendfile", "copy_file_range",
    "recvmsg", "recvfrom", "sendmsg", "sendto", "getsockopt", "setsockopt", "getsockname", "shutdown",
    # the compiler, for Programs that are compiled: it runs as a child, and writes where this process may
    "execve", "wait4", "waitid", "vfork", "fork", "rename", "renameat", "renameat2", "mkdir", "mkdirat", "rmdir",
    "unlink", "unlinkat", "link", "linkat", "symlink", "symlinkat", "chmod", "fchmod", "fchmodat", "utimensat",
)  # fmt: skip
# Calls of which some uses are allowed: by the number of the argument that says which, and its values. fcntl and ioctl
# could else have the kernel send any signal to any process (F_SETOWN, FIOSETOWN), and type at a terminal (TIOCSTI).
# prctl could undo what is set here.
USES = {
    "fcntl": (1, (
        fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_GETLK,
        fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW, fcntl.F_GETPIPE_SZ,
        fcntl.F_SETPIPE_SZ, fcntl.F_ADD_SEALS, fcntl.F_GET_SEALS,
    )),
    "ioctl": (1, (
        termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX, termios.TCGETS, termios.TIOCGWINSZ,
        _TCGETS2,
    )),
    "prctl": (0, (
        _PR_GET_DUMPABLE, _PR_SET_NAME, _PR_GET_NAME, _PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_CAPBSET_READ,
        _PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK, _PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS, _PR_SET_VMA,
    )),
}  # fmt: skip
# Not among clone's flags: those that make namespaces (CLONE_NEW*), and CLONE_PARENT, whose child would be none of this
# process. clone3 hides its flags, and is not allowed.
_BARRED_FLAGS = 0x7E020000 | 0x8000
_PRLIMIT_CALL = "prlimit64"

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NNP, _TSYNC, _SSB, _OPTIMIZE = 3, 4, 7, 8  # attributes of a filter (seccomp_attr_set(3))
_EQUAL, _MASKED = 4, 7


class _Condition(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def _seccomp() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    library.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Condition),
    ]  # fmt: skip
    return library


def _filter(also: Iterable[str], every_thread: bool = False) -> None:
    library = _seccomp()
    made = library.seccomp_init(_ERRNO | errno.ENOSYS)
    if not made:
        raise OSError(errno.ENOMEM, "seccomp_init")
    try:
        # Without _SSB older kernels slow a filtered process, to keep it from reading its own memory by speculation.
        for attribute, value in ((_NNP, 1), (_TSYNC, int(every_thread)), (_SSB, 1), (_OPTIMIZE, 2)):
            code = library.seccomp_attr_set(made, attribute, value)
            if code and attribute in (_NNP, _TSYNC):  # older libraries don't know the others
                raise OSError(-code, f"seccomp_attr_set({attribute})")
        for name in (*ALLOWED, *also):
            _allow(library, made, name)
        for name, (argument, uses) in USES.items():
            for use in uses:
                _allow(library, made, name, _Condition(argument, _MASKED, _WHOLE, use))
        dies = _Condition(0, _EQUAL, _PR_SET_PDEATHSIG, 0), _Condition(1, _EQUAL, signal.SIGKILL, 0)
        _allow(library, made, "prctl", *dies)  # with its parent; it can't take that back
        _allow(library, made, "clone", _Condition(0, _MASKED, _BARRED_FLAGS, 0))
        own = os.getpid()
        _allow(library, made, "tgkill", _Condition(0, _EQUAL, own, 0))
        for process in (0, own):
            _allow(library, made, _PRLIMIT_CALL, _Condition(0, _EQUAL, process, 0))
        code = library.seccomp_load(made)
        if code:
            raise OSError(-code, "seccomp_load")
    finally:
        library.seccomp_release(made)


def _allow(library: ctypes.CDLL, made: int, name: str, *conditions: _Condition) -> None:
    """Allow a call, where all conditions hold for its arguments."""
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number == -1:
        return  # newer than the library, or of another processor: whatever asks for it is told ENOSYS
    given = (_Condition * len(conditions))(*conditions)
    code = library.seccomp_rule_add_array(made, _ALLOW, number, len(conditions), given)
    if code:
        raise OSError(-code, f"seccomp_rule_add_array({name})")


# ---- What a confined process finds.


def look() -> dict[str, Any]:
    """What this process is kept from, as the kernel says."""
    status = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        status[name] = value.split()
    try:
        socket.socket().close()
        network = True
    except OSError:
        network = False
    return {
        "user": int(status["Uid"][1]),
        "groups": [int(group) for group in status.get("Groups", [])],
        "capabilities": int(status["CapEff"][0], 16),
        "no_new_privileges": status.get("NoNewPrivs") == ["1"],
        "calls": status.get("Seccomp") == ["2"],
        "network": network,
        "data_bytes": resource.getrlimit(resource.RLIMIT_DATA)[0],
    }


def doubts(confined: Confined, found: dict[str, Any]) -> list[str]:
    """Names of measures that are said to be in force, where `look` found otherwise."""
    holds = {
        "user": found["user"] not in (0, None),
        "privileges": found["no_new_privileges"] and not found["capabilities"],
        "memory": found["data_bytes"] != resource.RLIM_INFINITY,
        "calls": found["calls"] and not found["network"],
    }
    return [measure.name for measure in confined.measures if not measure.missing and not holds.get(measure.name, True)]


def trial(setting: str) -> Confined:
    """Choose by the daemon's setting `confine`, and have a process of its own try that. Raises ConfigError if something
    is required and missing, or is not in force though nothing seemed missing."""
    confined = Confined.choose(setting)
    command = [sys.executable, "-P", "-m", "gpumux.device.workers.confinement", setting]
    try:
        run = subprocess.run(command, capture_output=True, timeout=TRIAL_S, check=False)
        said = json.loads(run.stdout) if run.stdout else {"error": run.stderr.decode(errors="replace")[-300:].strip()}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    remedy = "set confine to off to go without, and report it"
    if "error" in said:
        raise ConfigError(f"processes of jobs can't be confined: {said['error']}", remedy)
    if said["doubts"]:
        what = "; ".join(measure.what for measure in confined.measures if measure.name in said["doubts"])
        raise ConfigError(f"what should hold for processes of jobs does not: {what}", remedy)
    return confined


def main(setting: str) -> int:
    confined = Confined.choose(setting)
    try:
        confine(Confinement(**confined.of(None, most_bytes=SPARE_BYTES)))
    except OSError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    found = look()
    print(json.dumps({"found": found, "doubts": doubts(confined, found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "auto"))
