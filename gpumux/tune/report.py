"""What came of a sweep, for people and for scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any, TextIO

from gpumux.tune.algorithms import Rung, ranked
from gpumux.tune.sweep import Entry, Listener
from gpumux.tune.trainer import Event, Outcome

if TYPE_CHECKING:
    from gpumux.tune.tune import Found


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


# ---- What is told while a sweep runs: lines on a terminal or in a log. Takes its clock and its stream from outside.


REWRITE_S, REPEAT_S = 0.1, 10.0


class Told:
    """Says which rung runs, what each trial scored and what is best; between scores, how far those that train are. On a
    terminal that last line is written over, elsewhere it comes every ten seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], total: int, *, maximize: bool) -> None:
        self._stream, self._clock, self._total, self._maximize = stream, clock, total, maximize
        self._terminal = stream.isatty()
        self._said = clock()
        self._open = False
        self._best: tuple[float, int] | None = None
        self.scored = 0

    def listener(self) -> Listener:
        return Listener(self._rung, self._scored, self._lost, self._watch)

    def end(self) -> None:
        """Leave the line that would be written over."""
        if self._open:
            self._open = False
            self._stream.write("\n")

    def _line(self, text: str) -> None:
        start = "\r\x1b[K" if self._open else ""
        self._open = False
        self._said = self._clock()
        self._stream.write(f"{start}gpumux: {text}\n")
        self._stream.flush()

    def _rung(self, rung: Rung, known: Mapping[int, float]) -> None:
        for trial, score in known.items():
            self._note(trial, score)
        what = f"bracket {rung.bracket}, rung {rung.rung}: " if rung.bracket or rung.rung or rung.keep else ""
        done = f", {len(known)} of them done before" if known else ""
        after = f", the best {rung.keep} go on" if rung.keep else ""
        self._line(f"{what}{len(rung.trials)} trials to {rung.steps} steps{done}{after}")

    def _scored(self, rung: Rung, outcome: Outcome) -> None:
        self.scored += 1
        self._note(outcome.trial, outcome.score)
        best = self._best
        known = f" (best so far {best[0]:.6g}: trial {best[1]})" if best is not None else ""
        self._line(f"trial {outcome.trial} of {self._total}: {outcome.score:.6g} at {rung.steps} steps{known}")

    def _lost(self, trials: Sequence[int], steps: int) -> None:
        named = ", ".join(map(str, trials))
        self._line(f"the checkpoints of trial {named} at {steps} steps are gone: trained again from the beginning")

    def _watch(self, event: Event) -> None:
        now = self._clock()
        if now - self._said < (REWRITE_S if self._terminal else REPEAT_S):
            return
        self._said = now
        many = len(event.trials) > 1
        who = f"an array of {len(event.trials)} trials" if many else f"trial {event.trials[0]}"
        text = f"{who}: step {event.steps} of {event.of}"
        if not self._terminal:
            self._line(text)
            return
        self._open = True
        self._stream.write(f"\r\x1b[Kgpumux: {text}")
        self._stream.flush()

    def _note(self, trial: int, score: float) -> None:
        if not isnan(score) and (self._best is None or self._better(score, self._best[0])):
            self._best = (score, trial)

    def _better(self, a: float, b: float) -> bool:
        return a > b if self._maximize else a < b
