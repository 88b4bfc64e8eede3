"""`gpumux top`: the running jobs, updated every second.

On a terminal it takes the whole screen and restores it at the end; the view is cut to the window, also when that is
resized. Elsewhere (a pipe, a file, TERM=dumb) tables follow one another.
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
from gpumux.cli.text import counted, duration, emit, emit_json, printable, promise, rank_of, size, table, verdicts

# ---- Rates and shares between two answers to GetStatus, as `gpumux top` shows them.


NAME_CHARS = 32


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A view of the daemon: what `after` says, with rates since `before` (both bodies of GetStatus).

    seconds   between the two, by the daemon's clock
    device    {name, kind, busy: device seconds a second, high and low: the same by class (more than 1 where
              pieces run at once), memory_bytes, free_bytes}
    guard     None, or {bans, bans_total, harvested: device seconds a second of low work beside high jobs, held: part of
    the
              time in which low work was held, held_by_reason}
    jobs      high ones first, then by device share, each {job, short, name, uid, priority, state, paused, steps_s,
              device, promise (as in GetStatus, of a high job), slowdown, max_slowdown, kept, held, held_by, held_for_s,
              bans, queued, running, steps_done, steps_failed, memory_bytes, gang (as in GetStatus), peers:
              part of the time it waited for other ranks}; rates of a job that was not there before are None
    """
    seconds = after["daemon"]["uptime_s"] - before["daemon"]["uptime_s"]
    earlier = {job["short"]: job for job in before["jobs"]}
    jobs = [_job(job, earlier.get(job["short"]), seconds) for job in after["jobs"]]
    jobs.sort(key=lambda job: (job["priority"] != "high", -(job["device"] or 0.0), job["short"]))
    shares = {name: sum(job["device"] or 0.0 for job in jobs if job["priority"] == name) for name in ("high", "low")}
    device, memory = after["device"], after["memory"]
    return {
        "seconds": seconds,
        "daemon": {key: after["daemon"][key] for key in ("version", "pid", "policy", "uptime_s")},
        "device": {
            "kind": device["kind"],
            "name": device["name"],
            "busy": sum(shares.values()),
            **shares,
            "memory_bytes": memory["total_bytes"],
            "free_bytes": memory["free_bytes"],
        },
        "sessions": after["sessions"],
        "guard": _guard(before["guard"], after["guard"], seconds),
        "jobs": jobs,
    }


def _rate(before: float, after: float, seconds: float) -> float:
    return max(0.0, after - before) / seconds if seconds > 0.0 else 0.0


def _guard(before: dict[str, Any] | None, after: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
    if before is None or after is None:
        return None
    held = {name: _rate(before["held_s"].get(name, 0.0), s, seconds) for name, s in after["held_s"].items()}
    return {
        "bans": after["bans"],
        "bans_total": after["bans_total"],
        "harvested": _rate(before["harvested_s"], after["harvested_s"], seconds),
        "held": sum(held.values()),
        "held_by_reason": held,
    }


def _job(job: dict[str, Any], earlier: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    known_promise = job["promise"] or {}
    same = ("job", "short", "name", "uid", "priority", "state", "paused", "max_slowdown", "queued", "running")
    counts = ("steps_done", "steps_failed", "memory_bytes")
    known = earlier is not None and seconds > 0.0
    gang, before = job.get("gang"), earlier.get("gang") if earlier else None
    return {
        **{key: job[key] for key in (*same, *counts)},
        "gang": gang,
        "peers": _rate(before["waited_s"], gang["waited_s"], seconds) if gang and before and known else None,
        "steps_s": _rate(earlier["steps_done"], job["steps_done"], seconds) if earlier and known else None,
        "device": _rate(earlier["device_busy_s"], job["device_busy_s"], seconds) if earlier and known else None,
        "promise": job["promise"] if job["priority"] == "high" else None,
        "slowdown": known_promise.get("slowdown"),
        "kept": known_promise.get("kept"),
        "held": known_promise.get("held", ""),
        "held_by": known_promise.get("held_by", ""),
        "held_for_s": known_promise.get("held_for_s", 0.0),
        "bans": known_promise.get("bans", 0),
    }


# ---- The verb.


HEADER = ("JOB", "NAME", "PRIORITY", "STATE", "STEP/S", "DEVICE", "PROMISE", "HELD", "BANS", "QUEUED", "MEMORY")
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
        except KeyboardInterrupt:  # the usual way to leave
            pass
    return 0


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


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
        f"busy     {_percent(device['busy'])}: high {_percent(device['high'])}, low {_percent(device['low'])}; "
        f"memory {size(used)} of {size(device['memory_bytes'])}",
    ]
    if guard is not None:
        why = sorted(
            ((part, reason) for reason, part in guard["held_by_reason"].items() if part >= 0.005), reverse=True
        )
        reasons = f" ({', '.join(f'{reason} {_percent(part)}' for part, reason in why)})" if why else ""
        lines.append(
            f"guard    {counted(guard['bans'], 'ban')} in force, {guard['bans_total']} ever; low work beside high jobs "
            f"{_percent(guard['harvested'])}, held {_percent(guard['held'])}{reasons}"
        )
    lines = [*verdicts(view["jobs"]), *lines]
    rows = [_row(job) for job in view["jobs"]]
    return "\n".join([*lines, "", table(HEADER, rows) if rows else "no jobs"])


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f}%"


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    state = f"{job['state']}, paused" if job["paused"] and job["state"] != "paused" else job["state"]
    held = f"{job['held']} {_brief(job['held_for_s'])}" if job["held"] else ""
    if held and job["held_by"]:
        held += f" for {job['held_by']}"
    return (
        job["short"],
        printable(job["name"])[:NAME_CHARS] + rank_of(job),
        job["priority"],
        state,
        "-" if job["steps_s"] is None else f"{job['steps_s']:.1f}",
        _percent(job["device"]),
        promise(job),
        held,
        str(job["bans"] or ""),
        str(job["queued"]),
        size(job["memory_bytes"]),
    )


def _brief(seconds: float) -> str:
    """A duration; in milliseconds below a second, since holds are short."""
    return f"{seconds * 1e3:.0f}ms" if seconds < 1 else duration(seconds)
