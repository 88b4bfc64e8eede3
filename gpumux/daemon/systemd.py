"""Messages to a service manager, by the protocol of sd_notify(3): datagrams to NOTIFY_SOCKET.

READY=1 once the daemon serves, WATCHDOG=1 twice per WATCHDOG_USEC, STOPPING=1 when it begins to leave, and a
STATUS line with each of the first and the last, which `systemctl status` shows. Without NOTIFY_SOCKET nothing
is sent. A manager that can't be reached costs a warning and never the daemon's time: what the loop sends, it sends
without waiting.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from math import inf

from gpumux.daemon.loop import Loop

PATIENCE_S = 1.0  # to send READY=1, which comes before the loop runs and which the manager waits for

log = logging.getLogger("gpumux.daemon")


class ServiceManager:
    """The service manager of this process, if it has one. `environ` and `pid` are the process's own by default."""

    def __init__(self, environ: Mapping[str, str] | None = None, pid: int | None = None) -> None:
        env = os.environ if environ is None else environ
        self._address = env.get("NOTIFY_SOCKET", "")
        if self._address and self._address[0] not in "/@":
            log.warning("NOTIFY_SOCKET %r is no socket of this machine: nothing is sent", self._address)
            self._address = ""
        self.watchdog_s = _watchdog_s(env, os.getpid() if pid is None else pid) if self._address else inf

    def ready(self, status: str) -> None:
        """Report that the daemon serves."""
        self._tell(f"READY=1\nSTATUS={_line(status)}", PATIENCE_S)

    def alive(self) -> None:
        """Report that the daemon is alive."""
        self._tell("WATCHDOG=1", 0.0)

    def stopping(self, reason: str) -> None:
        """Report that the daemon has begun to leave, so that the manager stops its watchdog."""
        self._tell(f"STOPPING=1\nSTATUS=leaving: {_line(reason)}", 0.0)

    def watch(self, loop: Loop) -> None:
        """Notify the watchdog from the loop itself, so that it notices a stuck loop, and report when the loop
        leaves."""
        loop.call_when_leaving(self.stopping)
        if self.watchdog_s < inf:
            loop.call_every(self.watchdog_s / 2, self.alive)

    def _tell(self, state: str, patience_s: float) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(patience_s)
            try:
                sock.sendto(state.encode(), address)
            except OSError as error:
                log.warning("can't tell NOTIFY_SOCKET %s %s: %s", self._address, state.split("\n")[0], error)


def _watchdog_s(env: Mapping[str, str], pid: int) -> float:
    """Seconds between the notifications that the manager expects of this process; infinity: it expects none.
    WATCHDOG_PID names another process if a wrapper was meant, which passed its environment on."""
    micros, meant = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not (micros.isascii() and micros.isdigit() and int(micros) > 0) or (meant and meant != str(pid)):
        return inf
    return int(micros) / 1e6


def _line(text: str) -> str:
    """Put `text` on one line: a line break would begin another assignment."""
    return "".join(c if c.isprintable() else "?" for c in text)
