"""`gpumux doctor`: checks of this machine and its daemon. Each check returns findings and changes nothing.

`root` stands for "/" so that a test can pass another machine.
"""

from __future__ import annotations

import argparse
import fcntl
import grp
import importlib.metadata
import os
import platform
import pwd
import re
import resource
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import zmq

from gpumux import __version__, compiled, config, hostmemory
from gpumux.cli.control import Control
from gpumux.cli.setup import installation
from gpumux.cli.text import emit, emit_json, size
from gpumux.config import ENV_CONFIG, Config
from gpumux.daemon.state.directory import open_state_directory
from gpumux.device import nvidia, registry
from gpumux.device.workers import confinement
from gpumux.errors import ConfigError, DaemonGone, GpumuxError
from gpumux.wire import endpoint as endpoints
from gpumux.wire.endpoint import check_listening, living_holder, lock_path, recorded_holder
from gpumux.wording import counted

OK, WARN, FAIL = "ok", "warn", "fail"
MIN_TORCH = (2, 11)
MIN_NOFILE = 4096  # a job holds about a dozen descriptors in the daemon
LOW_MEMORY = 512 * config.MIB
LOW_DISK = config.GIB
PATH_BYTES = 107  # sun_path without its terminating zero
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report; `remedy` is empty when all is well."""

    name: str
    level: str
    detail: str
    remedy: str = ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def distribution(path: Iterable[str] | None = None) -> Finding:
    """Whether another project that is called gpumux shares this environment. path: as `installation.other_project`
    takes it."""
    other = installation.other_project(path)
    if other is not None:
        return Finding("distribution", FAIL, f"{other}, is installed in this environment", installation.MEND)
    return Finding("distribution", OK, "no other project called gpumux in this environment")


def gpu(root: Path = Path("/")) -> Finding:
    """The NVIDIA driver and its devices, without loading CUDA."""
    has = nvidia.look(root)
    if not has.driver:
        return Finding(
            "gpu", WARN, "no NVIDIA driver",
            "install the driver if this machine has a GPU; else nothing is wrong",
        )  # fmt: skip
    if not has.gpus:
        return Finding(
            "gpu", FAIL, "an NVIDIA driver but no /dev/nvidiaN",
            "load nvidia-modprobe, or pass the devices into this container",
        )  # fmt: skip
    shut = [name for name in has.gpus if not os.access(root / "dev" / name, os.R_OK | os.W_OK)]
    if shut:
        return Finding("gpu", FAIL, f"no access to /dev/{shut[0]}", "join the group that owns it (often video)")
    return Finding("gpu", OK, f"{counted(len(has.gpus), 'GPU')}, driver {has.driver}")


def device(settings: config.Config, has: nvidia.Nvidia | None = None) -> Finding:
    """The device that `gpumux serve` takes with these settings, and whether it is available."""
    has = has or nvidia.look()
    name, why = registry.choose(settings.device, settings.gpu, has)
    if name != "cuda":
        buildable = settings.device == "auto" and has.driver and has.gpus and not has.hidden
        remedy = "for the GPU install a CUDA build of torch; else nothing is wrong" if buildable else ""
        return Finding("device", WARN if remedy else OK, f"`gpumux serve` takes {why}", remedy)
    if has.missing:
        remedy = "install the NVIDIA driver" if not has.driver else "pass the GPU into this container or process"
        if has.driver and has.gpus and not has.hidden:
            remedy = "install a CUDA build of torch"
        detail = f"`gpumux serve` can't take GPU {settings.gpu}: {has.missing}"
        return Finding("device", FAIL, detail, f"{remedy}, or set device to cpu")
    if settings.gpu >= len(has.gpus):
        detail = f"`gpumux serve` can't take GPU {settings.gpu}: there are {len(has.gpus)}, numbered from 0"
        return Finding("device", FAIL, detail, "set gpu to one of them; nvidia-smi -L lists them")
    if not has.bindings:
        detail = f"`gpumux serve` can't take GPU {settings.gpu}: the package cuda-bindings is missing"
        return Finding("device", FAIL, detail, "pip install cuda-bindings, or set device to cpu")
    return Finding("device", OK, f"`gpumux serve` takes {why}")


def cpu() -> Finding:
    """Number of cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    detail = f"{cores} of {os.cpu_count()} cores usable ({platform.machine()})"
    return Finding("cpu", OK, detail)


def torch() -> Finding:
    """Whether torch is installed and new enough, without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", FAIL, "torch is not installed", "pip install 'torch>=2.11'")
    major, minor = (int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])
    if (major, minor) < MIN_TORCH:
        return Finding("torch", FAIL, f"torch {version} is too old", "pip install -U 'torch>=2.11'")
    return Finding("torch", OK, version)


def core() -> Finding:
    """Whether a daemon started like this command would run a compiled core."""
    try:
        choice = compiled.choose()
        if choice.directory is not None:
            import_module("gpumux.scheduler")  # which loads it
    except ConfigError as error:
        return Finding("core", FAIL, error.message, error.remedy)
    if choice.directory is None and not choice.remedy and not os.environ.get(compiled.ENVIRONMENT):
        return Finding("core", OK, f"{choice}; `{compiled.COMPILE}` makes it about three times as quick")
    return Finding("core", WARN if choice.remedy else OK, str(choice), choice.remedy)


def shared_memory() -> Iterator[Finding]:
    """memfd with seals, which carries batches, and /dev/shm, which torch itself may use."""
    try:
        fd = os.memfd_create("gpumux-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield Finding(
            "memfd", FAIL, f"memfd_create: {error.strerror}", "needs Linux 3.17 and a seccomp profile with it"
        )
    else:
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            yield Finding("memfd", OK, "sealed shared memory works")
        except OSError as error:
            yield Finding("memfd", FAIL, f"sealing: {error.strerror}", "needs a kernel with memfd sealing")
        finally:
            os.close(fd)
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        yield Finding("shm", WARN, "no /dev/shm", "mount a tmpfs there; some libraries expect it")
        return
    free = room.f_bavail * room.f_frsize
    low = free < 64 * config.MIB
    remedy = "give the container more, e.g. docker run --shm-size=1g" if low else ""
    yield Finding("shm", WARN if low else OK, f"{size(free)} free in /dev/shm", remedy)


def runtime_dir(path: Path) -> Iterator[Finding]:
    """The directory of the daemon's socket: it must be this user's, not writable by others, and short."""
    room = PATH_BYTES - len(os.fsencode(str(path / "gpu1023.sock.chan")))
    if room < 0:
        yield Finding("socket path", FAIL, f"{path} is {-room} bytes too long for a socket", "use a shorter directory")
    else:
        yield Finding("socket path", OK, f"{path}, {room} bytes to spare")
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        yield Finding(
            "runtime dir", FAIL, f"can't write {there}", f"make {path} and give it to this user, or set --endpoint"
        )
        return
    if path.exists():
        mode = path.stat()
        if mode.st_mode & stat.S_IWOTH and not mode.st_mode & stat.S_ISVTX:
            yield Finding("runtime dir", FAIL, f"anyone may replace sockets in {path}", f"chmod o-w {path}")
            return
    yield Finding("runtime dir", OK, f"{path} is usable" if path.exists() else f"{path} can be made")


def limits() -> Iterator[Finding]:
    """Open files and locked memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= MIN_NOFILE
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    remedy = "" if enough else f"raise LimitNOFILE or `ulimit -Hn` to {MIN_NOFILE}"
    yield Finding("open files", OK if enough else WARN, f"at most {shown}", remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    detail = "unlimited" if unlimited else size(soft)
    yield Finding("locked memory", OK, f"{detail} (only pinned memory of a GPU daemon needs it)")


def cgroup(root: Path = Path("/")) -> Iterator[Finding]:
    """The CPU limit of this process's control group (version 2)."""
    line = next((ln for ln in _read(root / "proc/self/cgroup").splitlines() if ln.startswith("0::")), "")
    if not line:
        yield Finding("cgroup", OK, "no version 2 control group")
        return
    base = root / "sys/fs/cgroup" / line[3:].lstrip("/")
    quota, _, period = _read(base / "cpu.max").partition(" ")
    if quota and quota != "max":
        cores = int(quota) / int(period or 100_000)
        low = cores < len(os.sched_getaffinity(0))
        remedy = "bursts are throttled and steps stall: raise the quota or give whole cores (cpuset)" if low else ""
        yield Finding("cgroup cpu", WARN if low else OK, f"{cores:.1f} cores", remedy)
    else:
        yield Finding("cgroup cpu", OK, "no limit")


def memory(root: Path = Path("/")) -> Finding:
    """What is left of the tightest memory control group, version 1 or 2, and its page cache."""
    tightest = min(hostmemory.groups(root), key=lambda group: group.free, default=None)
    if tightest is None:
        return Finding("cgroup memory", OK, "no limit")
    cache = f", of which page cache that gives way holds {size(tightest.cache)}" if tightest.cache else ""
    detail = f"{size(tightest.free)} free of {size(tightest.limit)} in {tightest.path}{cache}"
    if tightest.free < LOW_MEMORY:
        return Finding("cgroup memory", WARN, detail, "raise the limit of this control group, or end what fills it")
    return Finding("cgroup memory", OK, detail)


def configuration(path: str | None) -> tuple[Finding, config.Config]:
    """Whether the file and the environment make a valid configuration."""
    try:
        loaded = config.load({}, path=path)
    except ConfigError as error:
        return Finding("configuration", FAIL, error.message, error.remedy), config.Config()
    source = path or os.environ.get(config.ENV_CONFIG)
    return Finding("configuration", OK, f"{source} is valid" if source else "no file; defaults and GPUMUX_*"), loaded


def temp_dir() -> Finding:
    """A writable directory for the temporary files of torch and its workers."""
    try:
        with tempfile.TemporaryFile():
            return Finding("temporary files", OK, tempfile.gettempdir())
    except OSError as error:
        return Finding("temporary files", FAIL, f"{error.strerror}", "set TMPDIR to a directory this user can write")


def state_dir(path: str) -> Finding:
    """The directory of snapshots of jobs' state: it must be this user's alone, writable, and have room."""
    name = "state directory"
    if not path:
        return Finding(name, OK, "none: jobs don't outlive a daemon that is killed (set state_dir)")
    there = Path(path)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, FAIL, f"can't write {there}", f"make {path} and give it to this user, with mode 0700")
    facts = there.stat()
    if there == Path(path):
        if facts.st_uid != os.geteuid():
            owner = "root's" if facts.st_uid == 0 else f"user {facts.st_uid}'s"
            return Finding(name, WARN, f"{path} is {owner}", "run this as the user the daemon runs as")
        try:
            os.close(open_state_directory(there))
        except ConfigError as error:
            return Finding(name, FAIL, error.message, error.remedy)
        if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return Finding(name, WARN, f"others may look into {path}", f"chmod 700 {path}")
    room = os.statvfs(there)
    free = room.f_bavail * room.f_frsize
    detail = f"{path}, {size(free)} free"
    if free < LOW_DISK:
        return Finding(name, WARN, detail, "a job's state is kept three times while it is saved: make room")
    return Finding(name, OK, detail)


def job_processes(setting: str) -> Iterator[Finding]:
    """What the processes of jobs are kept from, tried in a process that confines itself as they do."""
    try:
        confined = confinement.trial(setting)
    except ConfigError as error:
        yield Finding("job processes", FAIL, error.message, error.remedy)
        return
    for measure in confined.measures:
        name = f"jobs: {measure.name}"
        if measure.missing:
            alone = measure.name == "user" and os.geteuid() != 0  # a daemon for one user
            usual = alone or measure.name == confinement.GROUPS
            yield Finding(name, OK if usual else WARN, measure.missing, measure.remedy)
        else:
            yield Finding(name, OK, measure.what)


# ---- Checks around an endpoint: who may connect, which process holds the lock, stale sockets, and whether others may
# write files that a daemon trusts.


NEEDED = {"pyzmq": (26,), "msgpack": (1, 1), "prometheus-client": (0, 20), "numpy": (1, 26)}  # as pyproject.toml says


def sockets(path: Path) -> Iterator[Finding]:
    """The users that may connect to the daemon at `path`, and whether this one is among them."""
    if not path.exists():
        return
    info = path.stat()
    mode = stat.S_IMODE(info.st_mode)
    who = [f"user {_user(info.st_uid)}"]
    who += [f"group {_group(info.st_gid)}"] if mode & stat.S_IWGRP else []
    who += ["everybody"] if mode & stat.S_IWOTH else []
    detail = f"{path}: {', '.join(who)} may connect (mode {mode:04o})"
    if not os.access(path, os.W_OK):
        group = _group(info.st_gid)
        remedy = (
            f"as root: usermod -aG {group} {_user(os.getuid())}, then log in anew"
            if mode & stat.S_IWGRP
            else "ask its owner"
        )
        yield Finding("socket access", FAIL, f"this user may not connect; {detail}", remedy)
        return
    yield Finding("socket access", OK, detail)


def lock(path: Path) -> Finding:
    """The process that holds the endpoint, by the lock file beside it."""
    holder, alive = recorded_holder(path), living_holder(path)
    if holder is None:
        there = lock_path(path).exists()
        return Finding("lock", OK, "a lock file that names nobody" if there else "nobody holds the endpoint")
    if alive is None:
        return Finding("lock", OK, f"process {holder}, which is gone, held it last: free for the next daemon")
    if not path.exists():
        return Finding(
            "lock", WARN, f"process {alive} holds the endpoint, and its socket {path} is gone",
            f"stop it (kill {alive}) and start another: clients can't reach it any more",
        )  # fmt: skip
    return Finding("lock", OK, f"process {alive} holds the endpoint")


def stale(directory: Path) -> Finding:
    """Sockets in the runtime directory without a listener."""
    try:
        found = sorted(path for path in directory.iterdir() if path.is_socket())
    except OSError:
        return Finding("stale sockets", OK, f"nothing to see in {directory}")
    dead = [path for path in found if _refuses(path)]
    if dead:
        names = ", ".join(path.name for path in dead)
        return Finding(
            "stale sockets", WARN, f"nobody listens on {names} in {directory}",
            "a daemon that was killed left them; the next one on that endpoint removes them",
        )  # fmt: skip
    return Finding("stale sockets", OK, f"none in {directory}")


def _refuses(path: Path) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return True
            except OSError:
                continue  # a socket of another kind
            return False
    return False


def trusted_files(config_path: str | None, config: Config) -> Iterator[Finding]:
    """Files that grant rights: others must not be able to write them, or read a secret."""
    written = [("configuration file", config_path), ("client keys", config.curve_client_keys)]
    for name, text in written:
        if text and Path(text).exists():
            yield _shut(name, Path(text), stat.S_IWGRP | stat.S_IWOTH, "write", "go-w")
    if config.curve_secret_key:
        path = Path(config.curve_secret_key)
        if not path.exists():
            yield Finding("secret key", FAIL, f"no {path}", "make one: gpumux keys NAME -o DIR")
        else:
            yield _shut("secret key", path, stat.S_IRWXG | stat.S_IRWXO, "read or write", "go=")


def _shut(name: str, path: Path, bits: int, verb: str, remedy: str) -> Finding:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & bits:
        return Finding(name, FAIL, f"others may {verb} {path} (mode {mode:04o})", f"chmod {remedy} {path}")
    return Finding(name, OK, f"{path} (mode {mode:04o})")


def versions() -> Finding:
    """The libraries that a daemon and its clients need."""
    found, old = [f"libzmq {zmq.zmq_version()}"], []
    for name, least in NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
        wanted = f"{name}>={'.'.join(map(str, least))}"
        found.append(f"{name} {version or 'missing'}")
        if numbers < least:
            old.append(f"'{wanted}'")
    if old:
        return Finding("versions", FAIL, ", ".join(found), f"pip install -U {' '.join(old)}")
    if not zmq.has("curve"):
        return Finding("versions", WARN, ", ".join(found), "this libzmq has no CURVE: tcp endpoints can't be used")
    return Finding("versions", OK, ", ".join(found))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# ---- The verb: what this machine offers, what limits it, what is wrong and how to mend it.


def run(args: argparse.Namespace) -> int:
    findings = examine(args.config, args.endpoint, args.timeout)
    if args.json:
        emit_json([asdict(finding) for finding in findings])
    else:
        emit(describe(findings))
    return 1 if any(finding.level == FAIL for finding in findings) else 0


def examine(path: str | None, endpoint: str | None, timeout: float) -> list[Finding]:
    """All findings, in the order they are shown."""
    valid, config = configuration(path)
    address = endpoint or endpoints.preferred(config.endpoint) or endpoints.default_endpoint(config.gpu)
    findings = [Finding("gpumux", OK, f"{__version__}, Python {platform.python_version()}")]
    findings += [distribution(), valid, *trusted_files(path or os.environ.get(ENV_CONFIG), config)]
    findings += [gpu(), cpu(), torch(), device(config)]
    findings += [core(), versions()]
    findings += [*shared_memory(), temp_dir(), *limits(), *cgroup(), memory()]
    findings += [*job_processes(config.confine), state_dir(config.state_dir)]
    try:
        found = endpoints.parse(address)
    except ConfigError as error:
        return [*findings, Finding("endpoint", FAIL, error.message, error.remedy)]
    if found.path is not None:
        findings += runtime_dir(found.path.parent)
        findings += [lock(found.path), stale(found.path.parent), *sockets(found.path)]
    findings.append(daemon(address, timeout))
    return findings


def daemon(address: str, timeout: float) -> Finding:
    """Whether a daemon answers there, and whether it is of this version."""
    found = endpoints.parse(address)
    if found.path is not None and not found.path.exists():
        return Finding("daemon", OK, f"none at {address} (start one with `gpumux serve`)")
    try:
        check_listening(found, "start one with `gpumux serve`, which clears it away")
    except DaemonGone as error:
        return Finding("daemon", WARN, error.message, error.remedy)
    try:
        with Control(address, timeout) as control:
            body = control.status()
    except DaemonGone as error:  # a process has the socket and does not answer
        return Finding("daemon", FAIL if found.is_ipc else WARN, error.message, error.remedy)
    except GpumuxError as error:
        return Finding("daemon", WARN, error.message, error.remedy or "start it with `gpumux serve`")
    version = body["daemon"]["version"]
    detail = f"gpumux {version} at {address}, device {body['device']['name']}"
    if version != __version__:
        return Finding(
            "daemon", WARN, detail, f"this command is {__version__}: restart the daemon or install {version}"
        )
    memory = charged_and_measured(body.get("jobs", []))
    detail = f"{detail}; {memory}" if memory else detail
    if body["device"]["kind"] == "sim":
        return Finding("daemon", WARN, detail, "it computes nothing: jobs there get zeros; start one with --device cpu")
    return Finding("daemon", OK, detail)


def charged_and_measured(jobs: list[dict[str, Any]]) -> str:
    """The memory charged to each job and measured for it, "" if nothing was measured."""
    shown = [
        f"{job['short']} is charged {size(job['memory_bytes'])} and holds {size(job['measured_bytes'])}"
        for job in jobs
        if job.get("measured_bytes")
    ]
    return "memory: " + ", ".join(shown) if shown else ""


def describe(findings: list[Finding]) -> str:
    """One line a finding, with a remedy below each that isn't ok."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.name.ljust(width)}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.remedy}")
    counts = {level: sum(f.level == level for f in findings) for level in (WARN, FAIL)}
    lines.append(f"{counts[FAIL]} failed, {counted(counts[WARN], 'warning')}")
    return "\n".join(lines)
