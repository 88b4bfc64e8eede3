"""The zygote seen from the daemon: ask it for processes, hear how they ended. No torch."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import gpumux
from gpumux.device.codecache import VARIABLE, CodeCache
from gpumux.device.workers import channel
from gpumux.device.workers.channel import EXITED, FORK, KILL, READY, WARMED, Channel, packets, unpack

_CLOSE_S = 10.0
TUNABLES = "GLIBC_TUNABLES"


class WarmProcess:
    """`start` it, then `fork` and `kill`; call `receive` when its descriptor is readable and `flush` when
    it is writable and `wants_write` says so. Tokens name its children.
    `operators`: names it looks up; those torch lacks are its fact "unknown"."""

    def __init__(self, operators: Sequence[str] = ()) -> None:
        ours, theirs = channel.pair()
        self._code = CodeCache()
        with theirs:
            # -P: modules lying in the daemon's working directory are nobody's to import.
            arguments = [sys.executable, "-P", "-m", "gpumux.device.workers.zygote", str(theirs.fileno())]
            arguments += operators
            self._process = subprocess.Popen(
                arguments,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,  # no session of its own: see process.settle
                env={**_environment(), VARIABLE: self._code.folder, TUNABLES: _heap()},
            )
        ours.setblocking(False)
        self.channel = Channel(ours)
        self.facts: dict[str, Any] | None = None  # once it is ready
        self._warmed = False  # it forks nothing before that
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()
        self._token = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def fork(self, kind: str, settings: dict[str, Any], fds: Sequence[int]) -> int:
        """Ask for a process; its token. The descriptors are taken over and closed once sent."""
        self._token += 1
        self._post(FORK, [self._token, kind, settings], fds)
        return self._token

    def kill(self, token: int) -> None:
        self._post(KILL, token)

    def flush(self) -> None:
        """Send what can be sent without waiting."""
        while self._outbox:
            packet, fds = self._outbox[0]
            try:
                self.channel.send_packet(packet, fds)
            except BlockingIOError:
                return
            except OSError:
                pass  # it is gone; `receive` will say so
            self._outbox.popleft()
            _close(fds)

    def receive(self) -> list[tuple[int, int | str]]:
        """Children that ended: token, and a wait status or the reason there never was a process.
        Raises EOFError when the warm process itself is gone."""
        ended: list[tuple[int, int | str]] = []
        while True:
            try:
                tag, body, _ = self.channel.receive()
            except BlockingIOError:
                return ended
            except EOFError:
                if ended:
                    return ended  # said first; the end is still there at the next call
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
        """End it, wait for it; how it ended, in words. Its children are killed by the kernel."""
        if not self._warmed:
            self._process.kill()  # nothing to lose, and it would not look at its channel for a second or two
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
    """How glibc is to manage the memory of this process and of those it forks (mallopt(3)); other libraries look at
    nothing of it.

    Tensors are allocated on 64 bytes, which leaves a small gap before and after each. A gap that lies in a cache of
    free blocks (tcache, fast bins), or is given to something small that stays, keeps the place of the tensor from being
    joined again and from being used for an equal one in the next step: the heap grew to twice what a step holds. And
    large blocks come from the heap, as they would otherwise be mapped anew in each step, page by page (a fifth of a
    step of GPT-2). peak.py gives back what is free where the heap has grown beyond what was planned. What the
    environment says counts more."""
    usual = ("tcache_count=0", "mxfast=0", "mmap_max=0", f"trim_threshold={1 << 30}")
    own = ":".join(f"glibc.malloc.{setting}" for setting in usual)
    said = os.environ.get(TUNABLES)
    return f"{own}:{said}" if said else own


def _environment() -> dict[str, str]:
    """Ours, with the gpumux that runs here found first."""
    source = str(Path(gpumux.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{inherited}" if inherited else source}


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- Keeps a warm process running and listens to it, whatever becomes of it. No torch.


class Owner(Protocol):
    """Who is told what the warm process has to say."""

    def child_exited(self, token: int, status: int | str) -> None: ...

    def can_fork(self, warm: WarmProcess) -> None:
        """It is there and has room for requests."""

    def warm_lost(self, how: str) -> None:
        """It died, and the kernel killed its children with it."""


class Keeper:
    """`warm` is None before `start`, after `close`, and when a new one would not become ready either."""

    def __init__(self, epoll: select.epoll, owner: Owner, operators: Sequence[str] = ()) -> None:
        self.warm: WarmProcess | None = None
        self._epoll = epoll
        self._owner = owner
        self._operators = operators
        self._writes = False

    def start(self) -> None:
        self.warm = WarmProcess(self._operators)
        self._writes = False
        self._epoll.register(self.warm.channel.fileno(), select.EPOLLIN)

    def watch(self) -> None:
        """After requests: listen for room to send what did not go yet."""
        if self.warm is not None and self.warm.wants_write != self._writes:
            self._writes = self.warm.wants_write
            mask = select.EPOLLIN | (select.EPOLLOUT if self._writes else 0)
            self._epoll.modify(self.warm.channel.fileno(), mask)

    def hear(self) -> None:
        """Send what waits, and pass on what it says."""
        if self.warm is None:
            return
        self.warm.flush()
        try:
            for token, status in self.warm.receive():
                self._owner.child_exited(token, status)
            self._owner.can_fork(self.warm)
        except EOFError:
            self._lose(self.warm)

    def kill(self, token: int) -> None:
        if self.warm is not None:
            self.warm.kill(token)
            self.watch()

    def close(self) -> None:
        if self.warm is not None:
            self.warm.close()
            self.warm = None

    def _lose(self, warm: WarmProcess) -> None:
        how = f"ended with the process that started it, which {warm.close()}"
        self.warm = None
        # One that never got as far as being ready would not the next time either.
        if warm.facts is not None:
            self.start()
        self._owner.warm_lost(how)
