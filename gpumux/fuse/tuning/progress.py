"""What is told while a sweep runs: lines on a terminal or in a log. Takes its clock and its stream from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import TextIO

from gpumux.fuse.tuning.algorithms import Rung
from gpumux.fuse.tuning.sweep import Listener
from gpumux.fuse.tuning.trainer import Event, Outcome

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
