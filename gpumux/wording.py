"""Numbers, names and times in sentences, for texts of every part: the scheduler's explanations, the cluster's, and what
commands print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """A number of things, whose plural ends in s: "1 job", "2 jobs", "1,000 jobs"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names in a sentence: "a", "a and b", "a, b, c and 4 more"."""
    rest = len(names) - most
    shown = [*names[:most], f"{rest} more"] if rest > 0 else list(names)
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def age(seconds: float) -> str:
    """A time that has passed, rounded as people say it: "0.4 s", "12 s", "3 min", "2 h", "5 days"."""
    if seconds < 1.0:
        return f"{max(0.0, seconds):.1f} s"
    for unit, length, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if seconds < most:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def nearest(wanted: str, known: Iterable[str]) -> str | None:
    """The known name that is written most like `wanted`, for "did you mean"; None if none is near."""
    found = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
