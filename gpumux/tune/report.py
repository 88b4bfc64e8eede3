"""The result of a sweep as tables and plain data, and its progress while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any, TextIO

from gpumux.tune.algorithms import Rung, ranked
from gpumux.tune.sweep import Listener, TrialRecord
from gpumux.tune.trainer import Outcome, TrainingProgress

if TYPE_CHECKING:
    from gpumux.tune.run import SweepResult


HEADER = ("TRIAL", "SCORE", "STEPS", "STATE", "DEVICE", "CONFIGURATION")


def body(found: SweepResult) -> dict[str, Any]:
    """The result as plain data. Scores that are nan become null."""
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


def _entry(entry: TrialRecord) -> dict[str, Any]:
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


def rows(found: SweepResult) -> list[tuple[str, ...]]:
    """A row for each trial: those trained longest first, among them the best first."""
    shown: list[tuple[str, ...]] = []
    for entry in order(found.entries, maximize=found.direction == "maximize"):
        config = " ".join(f"{name}={value_text(value)}" for name, value in entry.config.items())
        score = "-" if isnan(entry.score) else f"{entry.score:.6g}"
        shown.append((str(entry.number), score, str(entry.steps), entry.state, f"{entry.device_s:.2f} s", config))
    return shown


def order(entries: Sequence[TrialRecord], *, maximize: bool) -> list[TrialRecord]:
    known = {entry.number: entry for entry in entries}
    by_score = ranked({number: entry.score for number, entry in known.items()}, maximize=maximize)
    return sorted(
        (known[number] for number in by_score), key=lambda e: (e.state != "complete", -e.steps, isnan(e.score))
    )


def value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(found: SweepResult) -> str:
    """The last lines of the output: the best trial, the seconds, and the scheduler's notes."""
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


# ---- Progress of a running sweep: lines on a terminal or in a log. Clock and stream are arguments.


REWRITE_S, REPEAT_S = 0.1, 10.0


class ProgressReporter:
    """Reports each rung, each score with the best so far, and between scores the progress of training trials. On a
    terminal the progress line is overwritten; elsewhere it is written every ten seconds."""

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
        """End a line that would be overwritten."""
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

    def _watch(self, event: TrainingProgress) -> None:
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
