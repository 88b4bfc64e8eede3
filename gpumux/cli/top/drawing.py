"""Text with styles, bars and charts, made of characters. Pure; `app.py` gives the styles their colours.

No style says anything that the characters do not say: a screen without colours reads the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil
from typing import NamedTuple
from unicodedata import combining, east_asian_width

STYLES = (
    "",
    "dim",
    "bold",
    "trend",
    "good",
    "bad",
    "unsure",
    "high",
    "low",
    "limit",
    "good banner",
    "bad banner",
    "banner",
)
LEVELS = "▁▂▃▄▅▆▇█"
LIMIT, BEYOND, EMPTY = "┄", "▓", "·"
HIGH, LOW = "█", "▒"


class Styled(NamedTuple):
    """Characters of one style (one of STYLES)."""

    text: str
    style: str = ""


Line = tuple[Styled, ...]


# ---- Text and its width.


def char_cells(char: str) -> int:
    """How many cells of a terminal a character takes."""
    if combining(char):
        return 0
    return 2 if east_asian_width(char) in "WF" else 1


def cells(text: str) -> int:
    return len(text) if text.isascii() else sum(map(char_cells, text))


def clip(text: str, width: int) -> str:
    """The text in at most `width` cells; an ellipsis stands for what is left out."""
    if cells(text) <= width:
        return text
    kept, used = "", 0
    for char in text:
        used += char_cells(char)
        if used > width - 1:
            break
        kept += char
    return kept + "…" if width > 0 else ""


def plain(line: Line) -> str:
    """The line's characters."""
    return "".join(span.text for span in line)


def cut(line: Line, width: int) -> Line:
    """The line in at most `width` cells."""
    made: list[Styled] = []
    for span in line:
        left = width - sum(cells(each.text) for each in made)
        text = clip(span.text, left)
        made += [Styled(text, span.style)] if text else []
        if text != span.text:
            break
    return tuple(made)


def wrap(text: str, width: int, indent: str = "  ") -> list[str]:
    """The text in lines of at most `width` cells, broken at spaces; all but the first are indented. A longer word is
    clipped."""
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else (indent if lines else "") + word
        if line and cells(longer) > width:
            lines.append(clip(line, width))
            longer = indent + word
        line = longer
    return [*lines, clip(line, width)]


# ---- Bars and charts.


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> Line:
    """A bar of `width` cells. parts: (fraction of the bar, character, style) from the left; what is beyond 1 is not
    drawn, and a part that is not 0 has a cell if there is room."""
    made: list[Styled] = []
    left = width
    for fraction, char, style in parts:
        count = min(left, max(round(fraction * width), 1 if fraction > 0.0 else 0))
        left -= count
        made += [Styled(char * count, style)] if count else []
    return (*made, Styled(EMPTY * left, "dim")) if left else tuple(made)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The newest `width` values, the last at the right end, on a scale from 0 to their most; spaces for unknown ones
    and those that are missing."""
    shown = list(values)[-width:] if width > 0 else []
    most = max((value for value in shown if value is not None), default=0.0)
    return "".join(" " if value is None else _level(value, 0.0, most) for value in shown).rjust(width)


def _level(value: float, least: float, most: float) -> str:
    part = (value - least) / (most - least) if most > least else 0.0
    return LEVELS[min(len(LEVELS) - 1, max(0, int(part * len(LEVELS))))]


def chart(
    values: Sequence[float | None], width: int, height: int, *, least: float, most: float, limit_row: int | None = None
) -> list[Line]:
    """The newest `width` values as columns of `height` rows, the last value at the right end, the top row first.

    Values outside [least, most] are drawn at its ends; a known value has one eighth of a row at least, an unknown one
    (None) has nothing. limit_row: the row, from the bottom, at whose lower edge a limit lies: a dashed line stands in
    it, and what reaches into it and above is shaded and has the style "bad"."""
    newest = list(values)[-width:]
    eighths = [_eighths(value, height, least, most) for value in (*[None] * (width - len(newest)), *newest)]
    rows = []
    for row in reversed(range(height)):
        marks = [_mark(each, row, limit_row) for each in eighths]
        rows.append(
            tuple(
                Styled("".join(mark.text for mark in same), style)
                for style, same in groupby(marks, key=lambda mark: mark.style)
            )
        )
    return rows


def _eighths(value: float | None, height: int, least: float, most: float) -> int:
    """The height of a value's column in eighths of a row."""
    if value is None:
        return 0
    part = min(1.0, max(0.0, (value - least) / (most - least))) if most > least else 0.0
    # Rounded up: what is beyond a limit, by however little, reaches into the next row.
    return max(1, ceil(round(part * height * len(LEVELS), 6)))


def _mark(eighths: int, row: int, limit_row: int | None) -> Styled:
    """The character of a column of that height in a row, counted from the bottom."""
    here = eighths - row * len(LEVELS)
    if here <= 0:
        return Styled(LIMIT, "limit") if row == limit_row else Styled(" ")
    if limit_row is None or row < limit_row:
        return Styled(LEVELS[min(here, len(LEVELS)) - 1], "high")
    return Styled(LEVELS[here - 1] if here < len(LEVELS) else BEYOND, "bad")
