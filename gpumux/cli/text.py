"""Tables and quantities as text for people. Scripts use --json."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

from gpumux.errors import GpumuxError
from gpumux.wording import counted

MOST_VERDICTS = 4
REWRITE_S, QUIET_S = 0.1, 10.0


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, two spaces apart, no rules."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def size(nbytes: int) -> str:
    """Bytes with a binary unit: 1536 -> "1.5 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds in units for people: 90 -> "1m30s"."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def printable(text: str) -> str:
    """Text of other users without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def emit(text: str) -> None:
    """Print lines. Raises GpumuxError if they can't be written (to a file on a full disk), and BrokenPipeError."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is in its buffer is not tried again
        raise GpumuxError(f"can't write the output: {error.strerror}", "make room, or send it elsewhere") from error


def emit_json(body: Any) -> None:
    """Print JSON; infinite values become null, since JSON has none."""
    emit(json.dumps(_finite(body), indent=2, sort_keys=True, default=str, allow_nan=False))


class ProgressLine:
    """Says on stderr how far long work is: in a line that is overwritten on a terminal, elsewhere in a line every
    QUIET_S at most. `end` it, so that what follows begins on a line of its own."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic()
        self._open = False

    def begin(self, text: str) -> None:
        """Say at once, on a terminal, what now begins; elsewhere as `say`."""
        if self._terminal:
            self._said = -inf
        self.say(text)

    def say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said < (REWRITE_S if self._terminal else QUIET_S):
            return
        self._said, self._open = now, self._terminal
        sys.stderr.write(f"\rgpumux: {text}\x1b[K" if self._terminal else f"gpumux: {text}\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._open:
            self._open = False
            sys.stderr.write("\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def verdicts(jobs: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each high job that says whether its promise is kept: all that are broken, then others until there are
    MOST_VERDICTS lines, then the number of those left out. jobs: as GetStatus has them."""
    high = [job for job in jobs if job["priority"] == "high" and job["promise"]]
    high.sort(key=lambda job: job["promise"]["kept"] is not False)
    broken = sum(job["promise"]["kept"] is False for job in high)
    shown = high[: max(broken, MOST_VERDICTS)]
    lines = [
        f"promise  {job['short']} {printable(job['name'])[:32]}".rstrip() + f": {job['promise']['verdict']}"
        for job in shown
    ]
    more = len(high) - len(shown)
    return [*lines, f"promise  {counted(more, 'more high job')}, none broken"] if more else lines


def promise(job: dict[str, Any]) -> str:
    """A table's cell: a high job's slowdown and whether its promise is kept ("" if it has none yet)."""
    found = job["promise"]
    if job["priority"] != "high" or not found:
        return ""
    if found["slowdown"] is None:
        return "?"
    return f"{found['slowdown']:.2f} {'BROKEN' if found['kept'] is False else 'kept'}"


def rank_of(job: dict[str, Any]) -> str:
    """Which rank of a gang the job is, from 0 on, and what part of its time it waited for the others, where that is
    known; "" if it is in no gang."""
    gang = job.get("gang")
    if not gang:
        return ""
    waits = f", waits {100 * job['peers']:.0f}%" if job.get("peers") is not None else ""
    return f" (rank {gang['rank']} of {gang['ranks']}{waits})"
