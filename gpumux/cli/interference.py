"""`gpumux interference`: which programs slow which others down, as the daemon has measured it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpumux import pictures
from gpumux.cli.control import Control
from gpumux.cli.text import emit, emit_json, milliseconds, printable, table

DIGITS = 8  # of a content hash


def run(args: argparse.Namespace) -> int:
    if args.plot:
        pictures.check(Path(args.plot))
    with Control(args.endpoint, args.timeout) as control:
        body = control.interference(args.program or "")
    pairs = body["pairs"]
    if args.plot and pairs:
        heat_map(pairs, Path(args.plot))
    if args.json:
        emit_json(body)
        return 0
    if not pairs:
        emit(_why_none(args.program) + (f"; {args.plot} was not written" if args.plot else ""))
        return 0
    emit(_ranges(pairs) if args.ranges else _pairs(pairs))
    if body["left_out"]:
        emit(f"{body['left_out']} more pairs, whose high programs lose less, are not shown")
    place = printable(body["kept_in"])
    kept = f"kept over restarts in {place}" if place else "not kept over restarts: the daemon has no --state-dir"
    emit(f"\n{kept}")
    if args.plot:
        emit(f"wrote {args.plot}")
    return 0


def _why_none(program: str | None) -> str:
    if program:
        return f"no measured pair has a program {printable(program)}: `gpumux interference` shows what there is"
    return "nothing was measured yet: under --policy guarded, low work is measured while it runs beside high work"


def label(side: dict[str, Any]) -> str:
    """A program by its newest job's name, as far as the asker may know it, and the first digits of its hash."""
    return " ".join(part for part in (printable(side["name"]), printable(side["program"][:DIGITS])) if part)


def _times(slowdown: float) -> str:
    return f"{slowdown:.2f} x"


def _pairs(pairs: list[dict[str, Any]]) -> str:
    header = ("HIGH PROGRAM", "BESIDE LOW PROGRAM", "SHARE", "HIGH TAKES", "LOW GETS", "SAMPLES", "WORST OPERATORS")
    return table(header, [_pair(pair) for pair in pairs])


def _pair(pair: dict[str, Any]) -> list[str]:
    worst = max(pair["ranges"], key=lambda each: each["slowdown"], default=None)
    where = "" if worst is None else f"{_operators(worst)}: {_times(worst['slowdown'])}"
    banned = sum(each["banned"] for each in pair["ranges"])
    if banned:
        where += f" ({banned} of {pair['cut_into']} ranges banned)"
    return [
        label(pair["high"]), label(pair["low"]), f"{pair['share']:g}", _times(pair["slowdown"]),
        f"{pair['low_speed']:.2f}", str(pair["samples"]), where,
    ]  # fmt: skip


def _operators(one: dict[str, Any]) -> str:
    return f"{one['first']} to {one['end'] - 1}"


def _ranges(pairs: list[dict[str, Any]]) -> str:
    """A table for each pair, with a line for each measured range of the high program."""
    parts = []
    for pair in pairs:
        title = (
            f"{label(pair['high'])} beside {label(pair['low'])} on {pair['share']:g} of the device: "
            f"{_times(pair['slowdown'])}, a step alone {milliseconds(pair['solo_s'])}, "
            f"{len(pair['ranges']) + pair['ranges_left_out']} of {pair['cut_into']} ranges measured"
        )
        if pair["ranges_left_out"]:
            title += f"; {pair['ranges_left_out']} that lose less are not shown"
        rows = [
            [
                _operators(one), milliseconds(one["solo_s"]), _times(one["slowdown"]), str(one["samples"]),
                "banned" if one["banned"] else "",
            ]
            for one in pair["ranges"]
        ]  # fmt: skip
        parts.append(f"{title}\n{table(('OPERATORS', 'ALONE', 'TAKES', 'SAMPLES', ''), rows)}")
    return "\n\n".join(parts)


# ---- The heat map.


def heat_map(pairs: list[dict[str, Any]], path: Path) -> None:
    """A row for each high program, a column for each low one and share: how many times as long the high one takes.
    Raises ConfigError if matplotlib is missing or the file can't be written."""
    highs = sorted({pictures.literal(label(pair["high"])) for pair in pairs})
    lows = sorted({_column(pair) for pair in pairs})
    cells = [[float("nan")] * len(lows) for _ in highs]
    for pair in pairs:
        cells[highs.index(pictures.literal(label(pair["high"])))][lows.index(_column(pair))] = pair["slowdown"]
    drawn = pictures.figure(3.5 + 0.9 * len(lows), 2.6 + 0.5 * len(highs))
    axes = drawn.subplots()
    most = max(1.1, max(pair["slowdown"] for pair in pairs))
    image = axes.imshow(cells, cmap="cividis", vmin=1.0, vmax=most, aspect="auto")
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            if value == value:  # measured
                color = "black" if value > (1.0 + most) / 2 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=pictures.TEXT)
    pictures.label(axes, "beside this low program", "high program")
    axes.set_xticks(range(len(lows)), lows, rotation=45, ha="right")
    axes.set_yticks(range(len(highs)), highs)
    drawn.colorbar(image).set_label("times as long as alone", fontsize=pictures.TEXT)
    pictures.save(drawn, path)


def _column(pair: dict[str, Any]) -> str:
    share = f" on {pair['share']:g}" if pair["share"] < 1.0 else ""
    return pictures.literal(label(pair["low"])) + share
