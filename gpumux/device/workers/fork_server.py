"""The daemon's side of the fork server: requests for processes, and reports of how they ended. No torch."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import gpumux
from gpumux.device.codecache import VARIABLE, CodeCache
from gpumux.device.workers import channel
from gpumux.device.workers.channel import EXITED, FORK, KILL, READY, RENICE, WARMED, Channel, packets, unpack
from gpumux.errors import GpumuxError

_CLOSE_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before another fork server, after one that died before it was ready
_log = logging.getLogger("gpumux.daemon")
TUNABLES = "GLIBC_TUNABLES"


class ForkServer:
    """One fork server process, started by the constructor. Call `receive` when its descriptor is readable, and `flush`
    when it is writable and `wants_write` is true. Tokens name its children. `operators`: names that it looks up; those
    that torch lacks are its fact "unknown"."""

    # No token is given twice: processes of a server that died may be looked after while another one runs.
    _tokens = count(1)

    def __init__(self, operators: Sequence[str] = ()) -> None:
        self._code = CodeCache()
        try:
            ours, theirs = channel.pair()
        except OSError:
            self._code.close()
            raise
        with theirs:
            # -P: no module is imported from the daemon's working directory.
            arguments = [sys.executable, "-P", "-m", "gpumux.device.workers.fork_server_process", str(theirs.fileno())]
            arguments += operators
            try:
                self._process = subprocess.Popen(
                    arguments,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    process_group=0,  # no session of its own: see fork_server_process.settle
                    env={**_environment(), VARIABLE: self._code.folder, TUNABLES: _heap()},
                )
            except OSError:
                ours.close()
                self._code.close()
                raise
        ours.setblocking(False)
        self.channel = Channel(ours, daemons=True)
        self.facts: dict[str, Any] | None = None  # once it is ready
        self._warmed = False  # whether it has sent WARMED; it forks nothing before
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def fork(self, kind: str, settings: dict[str, Any], fds: Sequence[int]) -> int:
        """Ask for a process. Returns its token. Closes the descriptors once they are sent."""
        token = next(self._tokens)
        self._post(FORK, [token, kind, settings], fds)
        return token

    def kill(self, token: int) -> None:
        self._post(KILL, token)

    def renice(self, token: int, nice: int) -> None:
        """Set the niceness of a child and all its threads."""
        self._post(RENICE, [token, nice])

    def flush(self) -> None:
        """Send what can be sent without waiting."""
        while self._outbox:
            packet, fds = self._outbox[0]
            try:
                self.channel.send_packet(packet, fds)
            except BlockingIOError:
                return
            except OSError:
                pass  # it is gone; `receive` raises EOFError then
            self._outbox.popleft()
            _close(fds)

    def receive(self) -> list[tuple[int, int | str]]:
        """Children that ended: token, and a wait status or the reason why there was no process. Raises EOFError when
        the fork server itself is gone."""
        ended: list[tuple[int, int | str]] = []
        while True:
            try:
                tag, body, _ = self.channel.receive()
            except BlockingIOError:
                return ended
            except EOFError:
                if ended:
                    return ended  # the next call raises EOFError
                raise
            if tag == READY:
                self.facts = unpack(body)
            elif tag == WARMED:
                self._warmed = True
            elif tag == EXITED:
                token, status, reason = unpack(body)
                ended.append((token, reason if status is None else status))

    @property
    def has_children(self) -> bool:
        """Whether it may have forked anything by now."""
        return self._warmed

    def close(self) -> str:
        """End it and wait for it. Returns how it ended, in words. The kernel kills its children."""
        if not self._warmed:
            self._process.kill()  # it has no children, and would not read its channel for a second or two
        self.channel.close()
        for _, fds in self._outbox:
            _close(fds)
        self._outbox.clear()
        try:
            code = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._code.close()
        return f"died of signal {-code}" if code < 0 else f"exited with status {code}"

    def _post(self, tag: int, body: object, fds: Sequence[int] = ()) -> None:
        self._outbox.extend(packets(tag, body, fds))
        self.flush()


def _heap() -> str:
    """GLIBC_TUNABLES of the fork server and its children: how glibc manages their memory (mallopt(3)). Settings of the
    environment override these.

    Tensors are aligned to 64 bytes, which leaves a small gap before and after each. If such a gap lies in a cache of
    free blocks (tcache, fast bins), or is given to a small object that stays, the tensor's freed block can't be merged
    with it, nor reused for an equal tensor in the next step, and the heap grows. Large blocks come from the heap,
    because glibc would otherwise map them anew in each step, page by page. Executors return free memory to the kernel
    if the heap has grown beyond what was planned."""
    usual = ("tcache_count=0", "mxfast=0", "mmap_max=0", f"trim_threshold={1 << 30}")
    own = ":".join(f"glibc.malloc.{setting}" for setting in usual)
    said = os.environ.get(TUNABLES)
    return f"{own}:{said}" if said else own


# What the daemon's environment passes on to processes of jobs: how Python, torch, its libraries and compilers are set,
# and no secret of the service's.
PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP",
    "XDG_CACHE_HOME", "CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "CFLAGS",
    "CXXFLAGS", "LDFLAGS", "VIRTUAL_ENV", "GPUMUX_CORE",
)  # fmt: skip
PASSED_ON_IF_BEGINS = (
    "LC_", "LD_", "PYTHON", "CONDA_PREFIX", "TORCH", "PYTORCH_", "ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_",
    "BLIS_", "DNNL_", "ONEDNN_", "NUMEXPR_", "GLIBC_TUNABLES", "MALLOC_", "GLOO_", "NCCL_", "CUDA_", "CUBLAS_",
    "CUDNN_", "NVIDIA_", "TRITON_", "COVERAGE",
)  # fmt: skip


def _environment() -> dict[str, str]:
    """What of the daemon's environment is passed on, with its own gpumux first in PYTHONPATH."""
    source = str(Path(gpumux.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    passed = {
        name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith(PASSED_ON_IF_BEGINS)
    }
    return {**passed, "PYTHONPATH": f"{source}{os.pathsep}{inherited}" if inherited else source}


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def ending(status: int | str | None) -> str:
    """A wait status in words: "died of SIGSEGV"."""
    if not isinstance(status, int):
        return status or "ended, and nobody could say how"
    number = status & 0x7F
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"died of {name}" + (", as when the machine runs out of memory" if number == signal.SIGKILL else "")
    return f"exited with status {status >> 8}"


# ---- Keeping a fork server running.


class Owner(Protocol):
    """Callbacks for the reports of the fork server."""

    def child_exited(self, token: int, status: int | str) -> None: ...

    def can_fork(self, server: ForkServer) -> None:
        """The fork server is ready, and accepts requests."""

    def fork_server_lost(self, how: str) -> None:
        """The fork server died, and the kernel killed its children with it. Another one can fork later."""


class ForkServerSupervisor:
    """Starts the fork server, handles its messages, and starts another if it dies: at once, but after a pause if it was
    not ready or can't be started. Memory or descriptors may be short for a moment, and a daemon without a fork server
    runs no job. `server` is None before `start`, after `close`, and in such a pause; of the first, which has to start
    for the daemon to, there is no other before it was ready. `due`: when `start_due` has to be called."""

    def __init__(self, epoll: select.epoll, owner: Owner, operators: Sequence[str] = ()) -> None:
        self.server: ForkServer | None = None
        self.due = inf
        self._epoll = epoll
        self._owner = owner
        self._operators = operators
        self._writes = False
        self._pause_s = 0.0  # the next one; 0 until one was ready

    def start(self) -> None:
        self.server = ForkServer(self._operators)
        self._writes = False
        self._epoll.register(self.server.channel.fileno(), select.EPOLLIN)

    def watch(self) -> None:
        """Watch for room to send, if requests are queued. Call it after requests."""
        if self.server is not None and self.server.wants_write != self._writes:
            self._writes = self.server.wants_write
            mask = select.EPOLLIN | (select.EPOLLOUT if self._writes else 0)
            self._epoll.modify(self.server.channel.fileno(), mask)

    def hear(self) -> None:
        """Send queued requests, and pass the fork server's reports to the owner."""
        if self.server is None:
            return
        self.server.flush()
        try:
            for token, status in self.server.receive():
                self._owner.child_exited(token, status)
            if self.server.facts is not None:
                self._pause_s = FIRST_PAUSE_S
                self._owner.can_fork(self.server)
        except EOFError:
            self._lose(self.server)

    def kill(self, token: int) -> None:
        if self.server is not None:
            self.server.kill(token)
            self.watch()

    def renice(self, token: int, nice: int) -> None:
        if self.server is not None:
            self.server.renice(token, nice)
            self.watch()

    def start_due(self) -> None:
        """Start another fork server, if it is time to."""
        if monotonic() < self.due:
            return
        self.due = inf
        try:
            self.start()
        except (OSError, GpumuxError) as error:  # no descriptors, processes or memory, or a full disk
            self._put_off(f"can't be started: {error}")

    def close(self) -> None:
        self.due = inf
        if self.server is not None:
            self.server.close()
            self.server = None

    def _lose(self, server: ForkServer) -> None:
        how = server.close()
        self.server = None
        if server.facts is not None:
            _log.error("the process that starts those of jobs %s, and they end with it; another one is started", how)
            self.due = monotonic()
            self.start_due()
        elif self._pause_s:
            self._put_off(f"{how} before it was ready")
        self._owner.fork_server_lost(f"ended with the process that started it, which {how}")

    def _put_off(self, why: str) -> None:
        """Wait before another one is started."""
        _log.error(
            "the process that starts those of jobs %s; it is tried again in %g s, and what it would start waits: see"
            " whether memory, processes, descriptors or the disk of temporary files are short", why, self._pause_s,
        )  # fmt: skip
        self.due = monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
