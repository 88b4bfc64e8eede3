"""`gpumux top`: the running jobs, updated every second.

On a terminal, with Textual, it is the screen of `app.py`. Without Textual, and with --plain, a terminal shows a table
that is drawn anew at each interval, cut to the window. Elsewhere (a pipe, a file, TERM=dumb) tables follow one another.
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
from importlib.util import find_spec
from typing import Any

from gpumux.cli.control import Control
from gpumux.cli.text import duration, emit, emit_json, printable, promise, rank_of, size, table, verdicts
from gpumux.cli.top.columns import brief, percent, state
from gpumux.cli.top.feed import Feed
from gpumux.cli.top.panels import reasons
from gpumux.cli.top.rates import compare
from gpumux.wording import counted

NAME_CHARS = 32
HEADER = ("JOB", "NAME", "PRIORITY", "STATE", "STEP/S", "DEVICE", "PROMISE", "HELD", "BANS", "QUEUED", "MEMORY")
INSTALL = "history, sorting, filter, explanations and keys: pip install 'textual>=8'"
STREAMS = "history, sorting, filter, explanations and keys: where stdin and stderr are the terminal, too"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_BOLD, _ALARM, _PLAIN = "\x1b[7m", "\x1b[31;1m", "\x1b[0m"


def run(args: argparse.Namespace) -> int:
    hint = _hint(args)
    if hint is None and not (args.once or args.json) and _is_screen():
        return _show(args)
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
                _draw(control, args.interval, hint or "")
            else:
                if sys.stderr.isatty():
                    sys.stderr.write("gpumux top: the output is no terminal, so tables follow one another\n")
                for view in _views(control, args.interval):
                    emit(describe(view) + "\n")
                    sys.stdout.flush()
        except KeyboardInterrupt:  # the usual way to leave
            pass
    return 0


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _hint(args: argparse.Namespace) -> str | None:
    """What the last line of the table says on a terminal; None if the screen with Textual can be had instead."""
    if args.plain:
        return ""
    if find_spec("textual") is None:
        return INSTALL
    # Textual reads keys from stdin, and writes to stderr.
    return None if all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)) else STREAMS


def _show(args: argparse.Namespace) -> int:
    """The screen with Textual, until the user ends it."""
    with Control(args.endpoint, args.timeout) as control:  # a daemon that is not there is an error, as everywhere
        endpoint = control.endpoint
    from gpumux.cli.top.app import TopApp  # an extra, which takes time to import

    feed = Feed(lambda: Control(args.endpoint, args.timeout), args.interval)
    app = TopApp(feed, args.interval, endpoint, given=args.endpoint)
    app.run()
    if app.broke is not None:
        raise app.broke
    return app.return_code or 0


def _first(control: Control, interval: float) -> dict[str, Any]:
    return next(_views(control, interval))


def _views(control: Control, interval: float, keys: int | None = None) -> Iterator[dict[str, Any]]:
    """A view of each interval; ends when `q` is typed on the descriptor `keys`."""
    before = control.status()
    while not (control.wait(interval, keys) and _quits(keys)):
        after = control.status()
        yield compare(before, after)
        before = after


def _quits(keys: int | None) -> bool:
    """Whether a quit key was typed; other keys just redraw."""
    return keys is not None and os.read(keys, 64) in (b"q", b"Q", b"\x03", b"\x1b", b"")


def _draw(control: Control, interval: float, hint: str) -> None:
    """hint: stands in the last line."""
    with _screen() as keys:
        _put(["gpumux top: measuring ..."])
        for view in _views(control, interval, keys):
            columns, lines = shutil.get_terminal_size()
            shown = fit(describe(view), columns, lines - bool(hint), colours="NO_COLOR" not in os.environ)
            _put([*shown, *([hint[:columns]] if hint else [])])


def _put(lines: list[str]) -> None:
    sys.stdout.write(_HOME + (_TO_LINE_END + "\r\n").join(lines) + _TO_LINE_END + _TO_SCREEN_END)
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[int | None]:
    """An alternate screen, and unbuffered keys if there is a keyboard (its descriptor)."""
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
    """The view's lines, cut to a window; lines that don't fit below are counted."""
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
    """A view (see `compare`) as lines of text."""
    daemon, device, guard = view["daemon"], view["device"], view["guard"]
    used = device["memory_bytes"] - device["free_bytes"]
    lines = [
        f"gpumux {daemon['version']}, up {duration(daemon['uptime_s'])}, policy {daemon['policy']}, "
        f"{counted(view['sessions'], 'client')}; over the last {view['seconds']:.1f}s",
        f"device   {device['kind']}: {printable(device['name'])}",
        f"busy     {percent(device['busy'])}: high {percent(device['high'])}, low {percent(device['low'])}; "
        f"memory {size(used)} of {size(device['memory_bytes'])}",
    ]
    if guard is not None:
        lines.append(
            f"guard    {counted(guard['bans'], 'ban')} in force, {guard['bans_total']} ever; low work beside high jobs "
            f"{percent(guard['harvested'])}, held {percent(guard['held'])}{reasons(guard)}"
        )
    lines = [*verdicts(view["jobs"]), *lines]
    rows = [_row(job) for job in view["jobs"]]
    return "\n".join([*lines, "", table(HEADER, rows) if rows else "no jobs"])


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    held = f"{job['held']} {brief(job['held_for_s'])}" if job["held"] else ""
    if held and job["held_by"]:
        held += f" for {job['held_by']}"
    return (
        job["short"],
        printable(job["name"])[:NAME_CHARS] + rank_of(job),
        job["priority"],
        state(job),
        "-" if job["steps_s"] is None else f"{job['steps_s']:.1f}",
        percent(job["device"]),
        promise(job),
        held,
        str(job["bans"] or ""),
        str(job["queued"]),
        size(job["memory_bytes"]),
    )
