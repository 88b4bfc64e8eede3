"""`gpumux top`: the jobs as they run, drawn anew every second.

On a terminal the screen is used like any full-screen program's and given back at the end; the picture fits
the window, however it is resized. Anywhere else (a pipe, a file, TERM=dumb) tables follow one another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpumux.cli.control import Control
from gpumux.cli.rates import NAME_CHARS, compare
from gpumux.cli.text import duration, emit, emit_json, printable, size, table

HEADER = ("JOB", "NAME", "PRIORITY", "STATE", "STEP/S", "DEVICE", "SLOWDOWN", "HELD", "BANS", "QUEUED", "MEMORY")
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _ALARM, _PLAIN = "\x1b[7m", "\x1b[31;1m", "\x1b[0m"


def run(args: argparse.Namespace) -> int:
    with Control(args.endpoint, args.timeout) as control:
        try:
            if args.once:
                view = _first(control, args.interval)
                if args.json:
                    emit_json(view)
                else:
                    emit(describe(view))
            elif args.json:
                for view in _views(control, args.interval):
                    emit(json.dumps(view, sort_keys=True))
                    sys.stdout.flush()
            elif _is_screen():
                _draw(control, args.interval)
            else:
                for view in _views(control, args.interval):
                    emit(describe(view) + "\n")
                    sys.stdout.flush()
        except KeyboardInterrupt:  # how one leaves it
            pass
    return 0


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _first(control: Control, interval: float) -> dict[str, Any]:
    return next(_views(control, interval))


def _views(control: Control, interval: float, keys: int | None = None) -> Iterator[dict[str, Any]]:
    """What happened in each interval; ends when `q` is typed on the descriptor `keys`."""
    before = control.status()
    while not (control.rest(interval, keys) and _quits(keys)):
        after = control.status()
        yield compare(before, after)
        before = after


def _quits(keys: int | None) -> bool:
    """Any other key, or the end of what is typed, just draws."""
    return keys is not None and os.read(keys, 64) in (b"q", b"Q", b"\x03", b"\x1b", b"")


def _draw(control: Control, interval: float) -> None:
    with _screen() as keys:
        _put(["gpumux top: measuring ..."])
        for view in _views(control, interval, keys):
            columns, lines = shutil.get_terminal_size()
            _put(fit(describe(view), columns, lines, colours="NO_COLOR" not in os.environ))


def _put(lines: list[str]) -> None:
    sys.stdout.write(_HOME + (_TO_LINE_END + "\r\n").join(lines) + _TO_LINE_END + _TO_SCREEN_END)
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[int | None]:
    """A screen of our own, and keys as they are typed where there is a keyboard (its descriptor)."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = termios.tcgetattr(keys) if keys is not None else None
    try:
        if keys is not None:
            tty.setcbreak(keys)
        sys.stdout.write(_ENTER)
        yield keys
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


def fit(text: str, columns: int, lines: int, *, colours: bool = False) -> list[str]:
    """The picture's lines, cut to a window; what does not fit below is counted."""
    rows = text.splitlines()
    if len(rows) > lines:
        kept = rows[: max(1, lines - 1)]
        rows = [*kept, f"... {len(rows) - len(kept)} more"][:lines]
    rows = [row[:columns] for row in rows]
    if not colours:
        return rows
    return [_colour(row) for row in rows]


def _colour(row: str) -> str:
    if row.startswith("JOB "):
        return f"{_BOLD}{row}{_PLAIN}"
    return row.replace("BROKEN", f"{_ALARM}BROKEN{_PLAIN}")


def describe(view: dict[str, Any]) -> str:
    """A view (cli/rates.py) as lines of text."""
    daemon, device, guard = view["daemon"], view["device"], view["guard"]
    used = device["memory_bytes"] - device["free_bytes"]
    lines = [
        f"gpumux {daemon['version']}, up {duration(daemon['uptime_s'])}, policy {daemon['policy']}, "
        f"{view['sessions']} clients; over the last {view['seconds']:.1f}s",
        f"device   {device['kind']}: {printable(device['name'])}",
        f"busy     {_percent(device['busy'])}: high {_percent(device['high'])}, low {_percent(device['low'])}; "
        f"memory {size(used)} of {size(device['memory_bytes'])}",
    ]
    if guard is not None:
        why = sorted(
            ((part, reason) for reason, part in guard["held_by_reason"].items() if part >= 0.005), reverse=True
        )
        reasons = f" ({', '.join(f'{reason} {_percent(part)}' for part, reason in why)})" if why else ""
        lines.append(
            f"guard    {guard['bans']} bans in force, {guard['bans_total']} ever; low work beside high jobs "
            f"{_percent(guard['harvested'])}, held {_percent(guard['held'])}{reasons}"
        )
    rows = [_row(job) for job in view["jobs"]]
    return "\n".join([*lines, "", table(HEADER, rows) if rows else "no jobs"])


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f}%"


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    state = f"{job['state']}, paused" if job["paused"] and job["state"] != "paused" else job["state"]
    slowdown = ""
    if job["priority"] == "high":
        now = "?" if job["slowdown"] is None else f"{job['slowdown']:.2f}"
        slowdown = f"{now} of {job['max_slowdown']:.2f}" + (" BROKEN" if job["kept"] is False else "")
    held = f"{job['held']} {_brief(job['held_for_s'])}" if job["held"] else ""
    if held and job["held_by"]:
        held += f" for {job['held_by']}"
    return (
        job["short"],
        printable(job["name"])[:NAME_CHARS],
        job["priority"],
        state,
        "-" if job["steps_s"] is None else f"{job['steps_s']:.1f}",
        _percent(job["device"]),
        slowdown,
        held,
        str(job["bans"] or ""),
        str(job["queued"]),
        size(job["memory_bytes"]),
    )


def _brief(seconds: float) -> str:
    """Holds are short: milliseconds below a second."""
    return f"{seconds * 1e3:.0f}ms" if seconds < 1 else duration(seconds)
