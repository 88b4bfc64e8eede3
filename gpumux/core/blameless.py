"""What made a job slower or faster that no other is to be blamed for, in sentences (explain.py)."""

from __future__ import annotations

from collections.abc import Sequence

from gpumux.core.queue import Job
from gpumux.core.track import Track

WILD = 8.0  # times what a step may lose on average
STOOD = 0.1  # of the time its pieces were on the device: for how long they stand still before it is said
NOTEWORTHY = 0.02  # of the steps without low work lose much


def often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def by_itself(track: Track, others: Sequence[str]) -> list[str]:
    """What makes it slower or faster and is nobody's to answer for: its own work, noise, and other high jobs, which are `others`."""
    model, lines = track.model, []
    drifts = sum([baseline.drifts for baseline in model.steps]) if model is not None else 0
    if drifts:
        lines.append(
            f"What its steps take alone was found to have changed {often(drifts)}: that is its own work, and no job is blamed for it."
        )
    if (noise := track.account.noise.over) >= NOTEWORTHY:
        said = f"Without low work its steps differ, too: about {100 * noise:.0f} in 100 lose what low work might be blamed for. "
        lines.append(
            said
            + "That many are charged to nobody, and what seems to cost much is believed to after several times in a row."
        )
    if track.company and others:
        lines.append(
            f"{track.company} of its {track.steps} steps ran beside {' and '.join(others)}, of high priority, too: high jobs share the "
            "device by weight, and what that costs is no part of the promise."
        )
    return lines


def outlier(track: Track) -> list[str]:
    """A step so slow that what low work is known to cost does not explain it."""
    model, slowest = track.model, max(track.ratios, default=1.0)
    if model is None or slowest <= 1.0 + WILD * track.account.slack:
        return []
    known = max([low.bound for pair in model.pairs.values() for low in pair.lows.values()], default=0.0)
    if known > (slowest - 1.0) / 4 * track.solo_step():
        return []
    ago = len(track.ratios) - 1 - list(track.ratios).index(slowest)
    return [
        f"The slowest of them, {ago} steps ago, took {slowest:.2f} times as long; no low work beside it is known to cost more "
        f"than {known * 1e3:.3f} ms: the cause lay elsewhere, and nobody is held for it."
    ]


def stood_still(job: Job) -> list[str]:
    """Where a device can stop a piece (the CPU): what that kept the job for, which no hold says."""
    stood, out = job.suspended_s, job.suspended_s + job.device_s
    if stood <= STOOD * out:
        return []
    return [
        f"Of {out:.3f} s that its pieces were on the device they stood still for {stood:.3f} s: they gave the device away to high jobs' "
        "or other programs' work, and then went on."
    ]
