"""What came of a sweep, for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from gpumux.fuse.tuning.algorithms import ranked
from gpumux.fuse.tuning.ledger import Entry

if TYPE_CHECKING:
    from gpumux.fuse.tune import Found

HEADER = ("TRIAL", "SCORE", "STEPS", "STATE", "DEVICE", "CONFIGURATION")


def body(found: Found) -> dict[str, Any]:
    """Plain data. Scores that are no numbers are null."""
    return {
        "task": found.task,
        "algorithm": found.algorithm,
        "scheduler": found.scheduler,
        "direction": found.direction,
        "best": _entry(found.best) if found.best is not None else None,
        "trials": [_entry(each) for each in found.entries],
        "wall_s": found.wall_s,
        "device_s": found.device_s,
        "gpu_hours": found.device_s / 3600,
        "scheduler_notes": dict(found.notes),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "config": dict(entry.config),
        "state": entry.state,
        "score": _number(entry.score),
        "steps": entry.steps,
        "scores": {str(steps): _number(score) for steps, score in sorted(entry.scores.items())},
        "device_s": entry.device_s,
    }


def _number(score: float) -> float | None:
    return None if isnan(score) else score


def rows(found: Found) -> list[tuple[str, ...]]:
    """One a trial: those trained longest first, of them the best ones first."""
    shown: list[tuple[str, ...]] = []
    for entry in order(found.entries, maximize=found.direction == "maximize"):
        config = " ".join(f"{name}={value_text(value)}" for name, value in entry.config.items())
        score = "-" if isnan(entry.score) else f"{entry.score:.6g}"
        shown.append((str(entry.number), score, str(entry.steps), entry.state, f"{entry.device_s:.2f} s", config))
    return shown


def order(entries: Sequence[Entry], *, maximize: bool) -> list[Entry]:
    known = {entry.number: entry for entry in entries}
    by_score = ranked({number: entry.score for number, entry in known.items()}, maximize=maximize)
    return sorted(
        (known[number] for number in by_score), key=lambda e: (e.state != "complete", -e.steps, isnan(e.score))
    )


def value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(found: Found) -> str:
    """The end of what is printed: the best trial, the seconds, and what the scheduler noted."""
    lines = []
    if found.best is None:
        lines.append("no trial was completed with a number for a score")
    else:
        config = " ".join(f"{name}={value_text(value)}" for name, value in found.best.config.items())
        lines.append(f"best: trial {found.best.number}, score {found.best.score:.6g}: {config}")
    lines.append(
        f"{found.algorithm}, {found.scheduler}: {len(found.entries)} trials in {found.wall_s:.1f} s, "
        f"{found.device_s:.2f} device seconds ({found.device_s / 3600:.5f} GPU hours)"
    )
    lines += [
        f"{name.replace('_', ' ')}: {value}" for name, value in found.notes.items() if not isinstance(value, list)
    ]
    return "\n".join(lines)
