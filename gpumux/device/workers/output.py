"""What processes of jobs print, on its way to the daemon's log. No torch.

A child's standard output and error are a pipe that the fork server reads, not the daemon's: that may be a terminal, or
a file that the child could empty. Each line says whose it is, has no control characters, and a process that prints
without end fills no disk.
"""

from __future__ import annotations

import os

BURST_BYTES = 32 << 10  # of output that a process may have written at once: a traceback, torch's warnings
RATE_BYTES_S = 1 << 10  # and in the long run, each second
LINE_BYTES = 4 << 10  # longer lines are broken
_READ = 16 << 10  # a pipe holds 64 KiB


class Output:
    """The output of one process, read from the pipe `fd`, which does not block. `name`: in front of each line."""

    def __init__(self, fd: int, name: str, now: float) -> None:
        self.fd = fd
        self._name = name
        self._rest = b""  # of a line that has begun
        self._allowance = float(BURST_BYTES)
        self._at = now
        self._left_out = 0  # bytes since the last line that was passed on

    def read(self, now: float) -> str | None:
        """What to print of what the process has written; None if it writes no more."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return ""
        if not data:
            return None
        self._allowance = min(BURST_BYTES, self._allowance + (now - self._at) * RATE_BYTES_S)
        self._at = now
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return "".join(map(self._line, lines))

    def end(self) -> str:
        """What is left to print when the process has ended."""
        rest, self._rest = self._rest, b""
        return (self._line(rest) if rest else "") + self._missing()

    def _line(self, line: bytes) -> str:
        if len(line) > self._allowance:
            self._left_out += len(line) + 1
            return ""
        self._allowance -= len(line) + 1
        text = "".join(c if c.isprintable() or c == "\t" else "?" for c in line.decode(errors="replace"))
        return f"{self._missing()}{self._name}: {text}\n"

    def _missing(self) -> str:
        left_out, self._left_out = self._left_out, 0
        return f"{self._name}: {left_out} bytes of output were left out\n" if left_out else ""
