"""What stands above the table of `gpumux top`: whether promises are kept, the device's use, and how both were. Pure.

First comes one line that says whether the important jobs are fine, then each one's verdict in the words of `status` and
`jobs`; meters and charts get what room is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpumux.cli.text import duration, printable, size
from gpumux.cli.top.columns import natural, percent
from gpumux.cli.top.drawing import HIGH, LOW, Line, Styled, bar, cells, chart, clip, cut, wrap
from gpumux.cli.top.history import History
from gpumux.cli.top.state import TopState
from gpumux.errors import GpumuxError
from gpumux.wording import counted

View = dict[str, Any]
_STEPS = re.compile(r" in [0-9,]+ steps?(?=: )")
GOOD, BAD, UNSURE = "✓", "✗", "?"
MOST_VERDICT_LINES, MOST_CHART_LINES = 8, 7
NAME_CELLS = 32
BAR_CELLS = 40
MARK_CELLS = 5  # of a scale, so that charts show the same time
NARROW = 60  # cells; below, meters say less
CHART_CELLS = 34  # a chart has at least as many; the terminal is divided among as many charts as fit


# ---- How much room each part has.


@dataclass(frozen=True, slots=True)
class Room:
    """Lines for each part above the table; `charts` of them beside each other, `chart_lines` high without the title."""

    verdict_lines: int
    meters: int
    charts: int
    chart_lines: int


def room(width: int, height: int, jobs: int = 0) -> Room:
    """Divide a terminal, so that half of it is the table's, or as much as so many jobs need."""
    verdict_lines, meters = max(1, min(MOST_VERDICT_LINES, height // 6)), 0 if height < 14 else 2 if height < 22 else 3
    left = height - min(height // 2, jobs + 3) - verdict_lines - meters - 6
    return Room(
        verdict_lines=verdict_lines,
        meters=meters,
        charts=0 if height < 22 else max(1, min(3, width // CHART_CELLS)),
        chart_lines=max(2, min(MOST_CHART_LINES, left)),
    )


# ---- The line that says it all.


def headline(view: View | None, silent_s: float | None, width: int) -> Styled:
    """Whether the important jobs are fine, as a line of the whole width. silent_s: for how long the daemon has not
    answered, None if it does."""
    sign, text, style = _headline(view) if silent_s is None else (BAD, f"NO ANSWER for {duration(silent_s)}", "bad")
    if silent_s is not None and view is not None:
        text += ": what stands below was so before"
    found = clip(f" {sign} {text}", width)
    return Styled(found + " " * (width - cells(found)), f"{style} banner".strip())


def _headline(view: View | None) -> tuple[str, str, str]:
    """Sign, text and style."""
    if view is None:
        return UNSURE, "no answer yet", ""
    high = [job for job in view["jobs"] if job["priority"] == "high"]
    if not high:
        return " ", "NO HIGH JOB: low jobs share the device" if view["jobs"] else "NO JOBS", ""
    if view["guard"] is None:
        return UNSURE, f"NO PROMISES under policy {view['daemon']['policy']}: nothing is measured", ""
    broken = [job for job in high if job["kept"] is False]
    unknown = sum(_unmeasured(job) for job in high)
    if broken:
        count = "" if len(high) == 1 else f", {len(broken)} of {len(high)}"
        return BAD, f"PROMISE BROKEN{count}: {', '.join(map(_called, _by_name(broken)))}", "bad"
    if unknown == len(high):
        return UNSURE, f"NOT MEASURED YET: {counted(unknown, 'high job')}", ""
    more = f", {unknown} not measured yet" if unknown else ""
    if len(high) == 1:
        return GOOD, f"PROMISE KEPT: {_called(high[0])}", "good"
    return GOOD, f"{'PROMISES' if unknown else 'ALL PROMISES'} KEPT: {counted(len(high), 'high job')}{more}", "good"


def _unmeasured(job: dict[str, Any]) -> bool:
    return not job["promise"] or job["promise"]["slowdown"] is None


def _called(job: dict[str, Any]) -> str:
    return f"{job['short']} {clip(printable(job['name']), NAME_CELLS)}".rstrip()


def _by_name(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(jobs, key=lambda job: (natural(job["name"]), natural(job["short"])))


def verdicts(view: View, width: int, lines: int) -> list[Line]:
    """Each high job's verdict, broken ones first, in at most so many lines; the last one counts those that are left
    out (of a first one that takes all lines, `headline` has the number)."""
    high = _by_name([job for job in view["jobs"] if job["priority"] == "high" and job["promise"]])
    high.sort(key=lambda job: job["kept"] is not False)
    made: list[Line] = []
    for index, job in enumerate(high):
        sign, style = _sign(job)
        texts = _in_few_lines(f"{_called(job)}: {job['promise']['verdict']}", width - 3)
        block: list[Line] = [(Styled(f" {sign if i == 0 else ' '} {text}", style),) for i, text in enumerate(texts)]
        if len(made) + len(block) > lines - (index < len(high) - 1):  # the last line may have to count the others
            made = [*made, _left_out(high[index:])] if made else block[:lines]
            break
        made += block
    return [cut(line, width) for line in made]


def _sign(job: dict[str, Any]) -> tuple[str, str]:
    """The sign of a high job's verdict, and its style."""
    if _unmeasured(job):
        return UNSURE, "unsure"
    return (BAD, "bad") if job["kept"] is False else (GOOD, "good")


def _in_few_lines(verdict: str, width: int) -> list[str]:
    """The verdict in lines of that width, without the number of steps where that saves one."""
    whole, brief = wrap(verdict, width, indent=""), wrap(_STEPS.sub("", verdict), width, indent="")
    return brief if len(brief) < len(whole) else whole


def _left_out(high: Sequence[dict[str, Any]]) -> Line:
    broken = sum(job["kept"] is False for job in high)
    return (Styled(f"   {counted(len(high), 'more high job')}, {broken or 'none'} broken", "bad" if broken else "dim"),)


def about(view: View, endpoint: str, width: int) -> Line:
    """Which daemon this is, on which device."""
    daemon, device = view["daemon"], view["device"]
    parts = (
        f" {device['kind']}: {printable(device['name'])}",
        f"{counted(len(view['jobs']), 'job')}, {counted(view['sessions'], 'client')}",
        f"policy {daemon['policy']}",
        f"up {duration(daemon['uptime_s'])}",
        f"gpumux {daemon['version']}",
        printable(endpoint),
    )
    text = parts[0]
    for part in parts[1:]:
        if cells(f"{text}, {part}") > width:
            break
        text += f", {part}"
    return (Styled(clip(text, width), "dim"),)


# ---- Meters.


def meters(view: View, width: int, lines: int) -> list[Line]:
    """The device's use, its memory, and what the guard does, each in a line."""
    device = view["device"]
    used = device["memory_bytes"] - device["free_bytes"]
    fraction = used / device["memory_bytes"] if device["memory_bytes"] else 0.0
    length = width // 4 if width < NARROW else min(BAR_CELLS, width // 3)
    high, low = device["high"], device["low"]
    scale = max(1.0, high + low)
    names = ("", "") if width < NARROW else ("high ", "low ")
    busy = f"{percent(device['busy'])}: {HIGH} {names[0]}{percent(high)}, {LOW} {names[1]}{percent(low)}"
    memory = f"{size(used)} of {size(device['memory_bytes'])}"
    made = [
        (
            Styled(" device "),
            *bar([(high / scale, HIGH, "high"), (low / scale, LOW, "low")], length),
            Styled(f" {busy}"),
        ),
        (Styled(" memory "), *bar([(fraction, HIGH, "")], length), Styled(f" {memory}")),
        (Styled(f" guard  {_guard(view, width - 8)}"),),
    ]
    return [cut(line, width) for line in made[:lines]]


def _guard(view: View, width: int) -> str:
    """What the guard did in the interval; what does not fit is left out, from the end."""
    guard = view["guard"]
    if guard is None:
        return f"none under policy {view['daemon']['policy']}"
    why = _reasons(guard)
    parts = [
        f"low work held {percent(guard['held'])}",
        f"beside high jobs {percent(guard['harvested'])}",
        f"{counted(guard['bans'], 'ban')} in force",
        *([f"reasons: {why[0]}", *why[1:]] if why else []),
    ]
    while len(parts) > 1 and cells(", ".join(parts)) > width:
        parts.pop()
    return ", ".join(parts)


def _reasons(guard: dict[str, Any]) -> list[str]:
    parts = sorted(((part, reason) for reason, part in guard["held_by_reason"].items() if part >= 0.005), reverse=True)
    return [f"{reason} {percent(part)}" for part, reason in parts]


def reasons(guard: dict[str, Any]) -> str:
    """Why low work was held, the most frequent reason first, in brackets; "" if it was not."""
    found = _reasons(guard)
    return f" ({', '.join(found)})" if found else ""


# ---- Charts.


def charts(view: View, history: History, chosen: str, width: int, space: Room) -> list[Line]:
    """Charts beside each other: the slowdown of a high job (that of the short id `chosen`, or the one that is worst
    off), the device's use, and steps that wait; as many as `space` allows."""
    if not space.charts:
        return []
    slow = _slowdown_chart(view, history, chosen)
    kinds = [*([slow] if slow else []), _device_chart(view, history), _queue_chart(view, history)][: space.charts]
    wide = width // len(kinds) - 2
    blocks = [kind.drawn(wide, space.chart_lines, history.interval_s) for kind in kinds]
    return [
        tuple(span for block in blocks for span in (Styled(" "), *_padded(block[row], wide), Styled(" ")))
        for row in range(space.chart_lines + 1)
    ]


@dataclass(frozen=True, slots=True)
class _Chart:
    """What is drawn, its newest value in words, and its scale; `mark` says a value beside it. limit: lies between two
    rows, and the scale's end follows from that."""

    title: str
    values: Sequence[float | None]
    least: float
    most: float
    mark: Callable[[float], str]
    limit: float | None = None

    def drawn(self, width: int, lines: int, interval_s: float) -> list[Line]:
        """The title and so many lines, with marks of the scale at the left."""
        most, limit_row = self.most, None
        if self.limit is not None:
            above = (self.limit - self.least) / (most - self.least)  # where the limit lies, as part of the scale
            limit_row = min(lines - 1, max(1, int(above * lines)))
            most = self.least + (self.limit - self.least) * lines / limit_row
        marks = {lines - 1: self.mark(most), 0: self.mark(self.least)}
        if limit_row is not None and self.limit is not None:
            marks[limit_row] = self.mark(self.limit)
        left = max(MARK_CELLS, *map(cells, marks.values())) + 1
        rows = chart(self.values, width - left, lines, least=self.least, most=most, limit_row=limit_row)
        numbered = zip(reversed(range(lines)), rows, strict=True)
        span, title = f"last {duration(interval_s * (width - left))}", clip(self.title, width)
        if cells(title) + cells(span) + 2 <= width:
            title += span.rjust(width - cells(title))
        return [
            (Styled(title, "bold"),),
            *((Styled(marks.get(row, "").rjust(left - 1) + " ", "dim"), *line) for row, line in numbered),
        ]


def _padded(line: Line, width: int) -> Line:
    missing = width - sum(cells(span.text) for span in line)
    return (*line, Styled(" " * missing)) if missing > 0 else line


def _device_chart(view: View, history: History) -> _Chart:
    most = max(1.0, *(value for value in history.device if value is not None), 0.0)
    title = f"device {percent(view['device']['busy'])}"
    return _Chart(title, history.device, 0.0, most, percent)


def _queue_chart(view: View, history: History) -> _Chart:
    most = max(1.0, *(value for value in history.queued if value is not None), 0.0)
    waiting = sum(job["queued"] for job in view["jobs"])
    return _Chart(f"{counted(waiting, 'step')} queued", history.queued, 0.0, most, "{:.0f}".format)


def _slowdown_chart(view: View, history: History, chosen: str) -> _Chart | None:
    """None if no high job was measured."""
    high = [job for job in view["jobs"] if job["priority"] == "high" and not _unmeasured(job)]
    if not high:
        return None
    job = next((each for each in high if each["short"] == chosen), None) or max(high, key=_how_bad)
    promise, values = job["promise"], history.slowdown.get(job["short"], ())
    limit = max(promise["promised"], 1.001)
    most = max(limit + 0.2 * (limit - 1.0), *(value for value in values if value is not None), 1.0)
    digits = 2 if limit >= 1.02 else 3
    title = f"mean slowdown of {job['short']}: {promise['slowdown']:.{digits}f} of {promise['promised']:.{digits}f}"
    return _Chart(title, values, 1.0, most, lambda value: f"{value:.{digits}f}", limit)


def _how_bad(job: dict[str, Any]) -> tuple[bool, float]:
    return job["kept"] is False, job["promise"]["slowdown"] / job["promise"]["promised"]


# ---- What else there is to say.


def away(error: GpumuxError, endpoint: str, width: int) -> list[Line]:
    """Why the daemon does not answer, and what is done about it."""
    texts = [printable(error.message), *([printable(error.remedy)] if error.remedy else [])]
    texts.append(f"{printable(endpoint)} is tried again every second; q ends")
    return [
        (Styled(f" {line}", "bad" if i == 0 else ""),) for i, text in enumerate(texts) for line in wrap(text, width - 2)
    ]


def notes(state: TopState, matches: int, width: int) -> list[Line]:
    """What is special about the rows that are shown: filter, order, a table that stays as it is."""
    parts = []
    if state.frozen is not None:
        parts.append("table frozen (space goes on)")
    if state.wanted.strip() and state.shown is not None:
        parts.append(
            f"'{printable(state.wanted.strip())}': {matches} of {counted(len(state.shown['jobs']), 'job')} (Esc: all)"
        )
    if state.sorted_by or state.backwards:
        parts.append(f"by {state.sorted_by or 'priority and name'}" + (", backwards" if state.backwards else ""))
    return [cut((Styled(f" {', '.join(parts)}", "unsure"),), width)] if parts else []


def nothing(state: TopState, endpoint: str) -> str:
    """What stands in place of a table without rows."""
    if state.shown is None:
        return "waiting for the daemon"
    if state.shown["jobs"]:
        return f"no job has all of '{printable(state.wanted.strip())}': Esc shows all"
    return (
        "no jobs. A program adds one with gpumux.submit(step, example=batch, model=model, optimizer=optimizer); "
        f"it finds this daemon by GPUMUX_ENDPOINT={printable(endpoint)}"
    )
