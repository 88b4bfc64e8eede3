"""Whether the promise to a high job is kept, in figures and in one line of text.

`gpumux status`, `jobs`, `top` and `jobs explain`, the status page and the alerts all say it in these words. Judged are
the job's newest steps (RECENT_STEPS in guard/high_job.py): their mean has to be within what was promised, and 99 in 100
of them (the tail) within twice the excess over 1.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from gpumux.scheduler.guard.high_job import HighJob
from gpumux.wording import age, counted

MOST_DIGITS = 4  # to tell a value from the limit it exceeds


def slowdown_figures(high: HighJob) -> dict[str, Any]:
    """How slow the newest steps were, all over the same alone, and whether that is within what was promised:
    slowdown, slowdown_p99 (None while unknown), promised, promised_p99, kept (None while unknown), steps (how many are
    judged), broken_since (scheduler's clock; None unless broken)."""
    slack, ratios = high.budget.slack, sorted(high.ratios)
    found: dict[str, Any] = {"promised": 1.0 + slack, "promised_p99": 1.0 + 2.0 * slack, "steps": len(ratios)}
    if not ratios:
        return {**found, "slowdown": None, "slowdown_p99": None, "kept": None, "broken_since": None}
    return {
        **found,
        "slowdown": high.mean_ratio(),
        "slowdown_p99": ratios[ceil(0.99 * len(ratios)) - 1],
        "kept": high.broken_since == inf,
        "broken_since": None if high.broken_since == inf else high.broken_since,
    }


def verdict(figures: dict[str, Any], now: float) -> str:
    """`slowdown_figures` in a line: "mean 1.05 of 1.10, tail 2.36 of 1.20 in 200 steps: BROKEN for 12 s".

    now: seconds, the scheduler's clock."""
    mean, promised, tail, tail_promised = (
        figures[name] for name in ("slowdown", "promised", "slowdown_p99", "promised_p99")
    )
    if mean is None:
        return f"mean ? of {promised:.2f}, tail ? of {tail_promised:.2f}: not measured yet"
    steps = counted(figures["steps"], "step")
    state = "kept" if figures["kept"] else f"BROKEN for {age(now - figures['broken_since'])}"
    return f"mean {_of(mean, promised)}, tail {_of(tail, tail_promised)} in {steps}: {state}"


def _of(value: float, limit: float) -> str:
    """A value and its limit, with as many digits as show that a value above the limit is; with MOST_DIGITS such a value
    is rounded up."""
    digits = 2
    while value > limit and f"{value:.{digits}f}" == f"{limit:.{digits}f}":
        if digits == MOST_DIGITS:
            value = round(limit, digits) + 10.0**-digits
            break
        digits += 1
    return f"{value:.{digits}f} of {limit:.{digits}f}"
