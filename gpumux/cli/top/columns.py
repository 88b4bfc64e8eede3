"""The table of `gpumux top`: which columns at which width, their cells, the order of rows, and the filter. Pure.

Jobs are those of a view (`compare` in rates.py). Columns leave by importance as the terminal narrows: room is given
away by the list CLAIMS, from its beginning, so that a wider terminal never shows less.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpumux.cli.text import duration, printable, rank_of, size
from gpumux.cli.top.drawing import Styled, cells, clip, sparkline

Job = dict[str, Any]
Trends = Mapping[str, Sequence[float | None]]  # steps a second over time, by the job's short id

GAP = 2  # cells between two columns
WIDE_STATE = 20  # of the column PROMISE, from which on it also says the limit or the reason
NAME_LEAST, NAME_MOST = 5, 40  # its title and an arrow; what a name gets at most
WIDER_STATE = 26  # from which on it also says for which job
_DIGITS = re.compile(r"([0-9]{1,18})")


# ---- Cells.


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f}%"


def brief(seconds: float) -> str:
    """A duration; in milliseconds below a second, since holds are short."""
    return f"{seconds * 1e3:.0f}ms" if seconds < 1 else duration(seconds)


def state(job: Job) -> str:
    """The job's state; both words for a draining job that is paused."""
    return f"{job['state']}, paused" if job["paused"] and job["state"] != "paused" else str(job["state"])


def _name(job: Job, width: int, _: Trends) -> Styled:
    if not job["name"] and not job["mine"]:
        return Styled(clip(f"(of user {job['uid']})", width), "dim")
    return Styled(clip(printable(job["name"]) + rank_of(job), width), "bold" if job["priority"] == "high" else "")


def _priority(job: Job, _: int, __: Trends) -> Styled:
    return Styled(job["priority"], job["priority"])


def _promise(job: Job, width: int, _: Trends) -> Styled:
    """How a high job's promise fares, or how much a low one was held."""
    text, style = _kept(job, width) if job["priority"] == "high" else _held(job, width)
    return Styled(clip(text, width), style)


def _kept(job: Job, width: int) -> tuple[str, str]:
    promise = job["promise"]
    if not promise or promise["slowdown"] is None:
        return "not measured", "unsure"
    mean, limit = promise["slowdown"], promise["promised"]
    of = f" of {limit:.2f}" if width >= WIDE_STATE else ""
    if promise["kept"] is not False:
        return f"{_factor(mean)}{of} kept", "good"
    if mean > limit:
        return f"{_factor(mean)}{of} BROKEN", "bad"
    of = f" of {promise['promised_p99']:.2f}" if width >= WIDER_STATE else ""
    return (f"tail {_factor(promise['slowdown_p99'])}{of} BROKEN" if width >= WIDE_STATE else "tail BROKEN"), "bad"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _held(job: Job, width: int) -> tuple[str, str]:
    shares = job["held_share"] or {}
    share = sum(shares.values())
    if share < 0.005 and not job["held"]:
        return "", ""
    # A hold that is longer than the interval is one and the same: its age says more than 100 %.
    long = bool(job["held"]) and (job["held_share"] is None or share >= 0.995)
    text = f"held {brief(job['held_for_s'])}" if long else f"held {percent(share)}"
    reason = job["held"] if long else max(shares, key=lambda each: shares[each], default=job["held"])
    if width >= WIDER_STATE and job["held_by"]:
        text += f" for {job['held_by']}"
    return f"{text}: {reason}" if width >= WIDE_STATE and reason else text, ""


def _trend(job: Job, width: int, trends: Trends) -> Styled:
    return Styled(sparkline(trends.get(job["short"], ()), width), "trend")


def _rate(job: Job, _: int, __: Trends) -> Styled:
    return Styled("-" if job["steps_s"] is None else f"{job['steps_s']:.1f}")


# ---- Order.


def natural(text: str) -> tuple[str | int, ...]:
    """A key by which job-2 comes before job-10."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(text.casefold())))


def usual(job: Job) -> tuple[Any, ...]:
    """The order until a column is chosen: high jobs first, of them those whose promise is broken, then by name."""
    return (job["priority"] != "high", job["kept"] is not False, natural(job["name"]), natural(job["short"]))


def _promise_key(job: Job) -> tuple[Any, ...]:
    """The slowest high job first, then low jobs by how much they were held."""
    if job["priority"] == "high":
        return (0, job["kept"] is not False, -(job["slowdown"] or 0.0))
    return (1, not job["held"], -sum((job["held_share"] or {}).values()))


# ---- Columns.


class Column(NamedTuple):
    """A column of the table. `cell` takes the job, the width and the trends; `key` sorts, the most interesting first;
    `meaning` is for the help."""

    title: str
    meaning: str
    cell: Callable[[Job, int, Trends], Styled]
    key: Callable[[Job], Any]
    right: bool = False


def _plain(text: Callable[[Job], str]) -> Callable[[Job, int, Trends], Styled]:
    return lambda job, width, _: Styled(clip(text(job), width))


COLUMNS = (
    Column("JOB", "short id, for `gpumux jobs`", _plain(lambda job: job["short"]), lambda job: natural(job["short"])),
    Column("NAME", "what its owner calls it", _name, lambda job: natural(job["name"])),
    Column("PRIO", "high: has a promise; low: fills what is left", _priority, lambda job: job["priority"]),
    Column(
        "PROMISE",
        "high: its newest steps over the same alone, and whether that is within its promise; low: for which part of "
        "the interval it was held back, or for how long by now, for which job and why",
        _promise,
        _promise_key,
    ),
    Column("STEP/S", "steps a second", _rate, lambda job: -(job["steps_s"] or 0.0), right=True),
    Column(
        "DEVICE",
        "device seconds a second, counted as pieces end; above 100% where pieces run at once",
        _plain(lambda job: percent(job["device"])),
        lambda job: -(job["device"] or 0.0),
        right=True,
    ),
    Column("TREND", "steps a second over time, on a scale from 0", _trend, lambda job: -(job["steps_s"] or 0.0)),
    Column("STATE", "open, paused, draining or closing", _plain(state), lambda job: (state(job) == "open", state(job))),
    Column(
        "QUEUED",
        "steps of which no piece was launched yet",
        _plain(lambda job: str(job["queued"])),
        lambda job: -job["queued"],
        right=True,
    ),
    Column(
        "MEMORY",
        "charged to it",
        _plain(lambda job: size(job["memory_bytes"])),
        lambda job: -job["memory_bytes"],
        right=True,
    ),
    Column(
        "BANS",
        "in force for its sake, or against it",
        _plain(lambda job: str(job["bans"] or "")),
        lambda job: -job["bans"],
        right=True,
    ),
    Column("UID", "its owner's user id", _plain(lambda job: str(job["uid"])), lambda job: job["uid"], right=True),
)
BY_TITLE = {column.title: column for column in COLUMNS}

# What gets room first: (column, its width from here on). NAME takes no more than the longest name needs, and what is
# left over.
CLAIMS = (
    ("JOB", 4), ("PROMISE", 12), ("NAME", 8), ("PRIO", 5), ("DEVICE", 7), ("NAME", 16), ("STEP/S", 8), ("STATE", 8),
    ("PROMISE", WIDE_STATE), ("TREND", 10), ("QUEUED", 7), ("NAME", 24), ("MEMORY", 10), ("PROMISE", WIDER_STATE + 2),
    ("STATE", 16), ("BANS", 5), ("UID", 6), ("NAME", NAME_MOST), ("TREND", 20), ("JOB", 6),
)  # fmt: skip


def layout(width: int, jobs: Sequence[Job]) -> list[tuple[Column, int]]:
    """The columns that fit in `width` cells, GAP of them after each column, from left to right, with their widths. The
    first column is there at any width."""
    longest = max((cells(_name(job, NAME_MOST, {}).text) for job in jobs), default=0)
    needed = max(NAME_LEAST, longest)
    widths: dict[str, int] = {}
    for title, wanted in CLAIMS:
        claim = min(wanted, needed) if title == "NAME" else wanted
        grown = widths | {title: max(claim, widths.get(title, 0))}
        if widths and _total(grown) > width:
            break
        widths = grown
    if "NAME" in widths:
        widths["NAME"] += max(0, min(width - _total(widths), needed - widths["NAME"]))
    return [(column, widths[column.title]) for column in COLUMNS if column.title in widths]


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * len(widths)


def heading(column: Column, width: int, sorted_by: str, backwards: bool) -> str:
    """The column's title, with an arrow if the rows are sorted by it."""
    text = column.title + (("▲" if backwards else "▼") if column.title == sorted_by else "")
    return text.rjust(width) if column.right else text


def row(job: Job, columns: Sequence[tuple[Column, int]], trends: Trends) -> list[Styled]:
    """The job's cells, each of its column's width at most."""
    made = []
    for column, width in columns:
        found = column.cell(job, width, trends)
        made.append(Styled(found.text.rjust(width), found.style) if column.right else found)
    return made


# ---- Which rows, in which order.


def arranged(jobs: Sequence[Job], sorted_by: str = "", backwards: bool = False) -> list[Job]:
    """The jobs by the column of that title ("": in the usual order); equal ones in the usual order."""
    found = sorted(jobs, key=usual)
    if sorted_by:
        found.sort(key=BY_TITLE[sorted_by].key, reverse=backwards)
    elif backwards:
        found.reverse()
    return found


def matching(jobs: Sequence[Job], wanted: str) -> list[Job]:
    """The jobs that have each word of `wanted` in what is shown of them: ids, name, priority, state, user, promise."""
    words = wanted.casefold().split()
    return [job for job in jobs if all(word in _shown(job) for word in words)]


def _shown(job: Job) -> str:
    promise = _promise(job, 80, {}).text
    return " ".join(
        (job["short"], printable(job["name"]), job["priority"], state(job), promise, f"uid:{job['uid']}")
    ).casefold()
