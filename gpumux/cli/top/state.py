"""What `gpumux top` knows of the daemon, and what its user wants to see of it. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumux.cli.top.columns import Column, Job, arranged, matching
from gpumux.cli.top.history import History
from gpumux.cli.top.rates import compare
from gpumux.errors import GpumuxError

OVERDUE_S = 2.0  # later than an interval after the last answer: that is said


class TopState:
    """`view` (see `compare`; None before the first answer) is of the newest answer. `frozen` is the view that the table
    goes on showing, or None. `wanted`: words to filter by. `sorted_by`: a column's title, "" for the usual order.

    now: seconds, of the clock that all of its methods use."""

    def __init__(self, interval_s: float, now: float = 0.0) -> None:
        self.interval_s = interval_s
        self.view: dict[str, Any] | None = None
        self.frozen: dict[str, Any] | None = None
        self.history = History(interval_s)
        self.lost: GpumuxError | None = None  # why the daemon does not answer
        self.wanted = self.sorted_by = ""
        self.backwards = False
        self._before: dict[str, Any] | None = None  # what rates are computed from
        self._newest: dict[str, Any] | None = None
        self._answered_at = now

    # ---- What the daemon says.

    def take(self, body: dict[str, Any], now: float, *, early: bool = False) -> None:
        """An answer to GetStatus. early: before the interval is over, because something was changed; rates go on being
        of the last whole interval and what came since, and the history waits for the next answer."""
        if self._newest is not None and _restarted(self._newest, body):
            self.history.forget_jobs()
            self._before = self._newest = None
        before = (self._before if early else None) or self._newest
        self.view = compare(before or body, body)
        if not early:
            self._before, self._newest = self._newest, body
            self.history.add(self.view)
        self.lost, self._answered_at = None, now

    def lose(self, error: GpumuxError) -> None:
        """The daemon did not answer."""
        if self.lost is None:
            self.history.gap()
        self.lost = error

    def silent_s(self, now: float) -> float | None:
        """For how long the daemon has not answered, in seconds; None if nothing is overdue."""
        silent = now - self._answered_at
        return silent if self.lost is not None or silent > self.interval_s + OVERDUE_S else None

    # ---- What the user wants.

    @property
    def shown(self) -> dict[str, Any] | None:
        """The view that the table shows."""
        return self.frozen or self.view

    def rows(self) -> list[Job]:
        """The jobs of the table, in their order."""
        jobs = self.shown["jobs"] if self.shown is not None else []
        return arranged(matching(jobs, self.wanted), self.sorted_by, self.backwards)

    def freeze(self) -> None:
        """Have the table stay as it is, or go on."""
        self.frozen = None if self.frozen is not None else self.view

    def sort_by(self, title: str) -> None:
        """Sort by this column, and backwards if that is so already."""
        self.backwards = self.sorted_by == title and not self.backwards
        self.sorted_by = title

    def sort_by_neighbour(self, columns: Sequence[Column], step: int) -> None:
        """Sort by the next (1) or last (-1) of the columns that are shown; before the first is the usual order."""
        titles = ["", *(column.title for column in columns)]
        at = titles.index(self.sorted_by) if self.sorted_by in titles else 0
        self.sorted_by, self.backwards = titles[(at + step) % len(titles)], False


def _restarted(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether another process answers."""
    was, now = before["daemon"], after["daemon"]
    return bool(was["pid"] != now["pid"] or now["uptime_s"] < was["uptime_s"])
