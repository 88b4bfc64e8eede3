"""The guard's figures as plain data, for status and metrics.

guard       None under a policy without one, else
    bans            list of {high, low: job ids, operators: [start, end), share, ratio, samples, why, since, until, failures}
    bans_total      ever imposed
    probes_total    launches let out to find something out
    held_seconds    {reason: seconds in which low work was ready and had room, but was held} (holds.py lists reasons)
    harvested_seconds   device seconds of low work beside high jobs or in their gaps
    low_window      low launches that may be out beside a high job
jobs, for each high job that has run, under "guard":
    slowdown, slowdown_p99   of its newest steps over the same alone, None while unknown; `steps` of them
    kept            mean within max_slowdown and p99 within twice the slack, each but for LEAST_SLOWDOWN; None while unknown
    steps_over      steps slower than that, ever; `steps_total` of them
    solo_step_seconds, baseline_samples, estimate_samples
    host_wait_seconds        the device waited for the host with a piece of the job due
    price, balance_seconds, credit_seconds, tail
and for each low one:
    held            {reason, high, since, until (None: an event will come)} or None
    held_seconds    {reason: seconds for which it was held since it opened}, only reasons there were
    too_long        {piece_seconds, fits_seconds} or None
"""

from __future__ import annotations

from math import ceil
from typing import Any

from gpumux.core.bans import Ban
from gpumux.core.interference import Guard
from gpumux.core.queue import Job
from gpumux.core.starving import too_long
from gpumux.core.track import Track
from gpumux.model import Priority


def guard_figures(guard: Guard, now: float) -> dict[str, Any]:
    return {
        "bans": [_ban(ban) for ban in guard.bans.active],
        "bans_total": guard.bans.total,
        "probes_total": guard.bans.probes,
        "held_seconds": guard.holds.seconds(now),
        "harvested_seconds": guard.harvested,
        "low_window": guard.width,
    }


def job_figures(guard: Guard, job: Job, now: float) -> dict[str, Any] | None:
    if job.priority is Priority.LOW:
        hold, long = guard.holds.newest.get(job.id), too_long(guard, job)
        return {
            "held": None
            if hold is None
            else {
                "reason": hold.reason,
                "high": hold.high,
                "since": hold.since,
                "until": hold.until if hold.until < float("inf") else None,
            },
            "held_seconds": guard.holds.of(job, now),
            "too_long": None if long is None else {"piece_seconds": long[0], "fits_seconds": long[1]},
        }
    track = guard.tracks.get(job.id)
    if track is None or track.model is None:
        return None
    model, account = track.model, track.account
    return {
        **promise(track),
        "steps_over": track.over,
        "steps_total": track.steps,
        "solo_step_seconds": track.solo_step(),
        "baseline_samples": sum(baseline.count for baseline in model.steps),
        "estimate_samples": sum(cell.count for pair in model.pairs.values() for cell in pair.cells),
        "host_wait_seconds": track.host_wait,
        "price": account.price,
        "balance_seconds": account.balance,
        "credit_seconds": account.credit,
        "tail": account.tail,
    }


def promise(track: Track) -> dict[str, Any]:
    """How slow the newest steps were, and whether that is within what was promised."""
    ratios = sorted(track.ratios)
    if not ratios:
        return {"slowdown": None, "slowdown_p99": None, "kept": None, "steps": 0}
    mean, p99 = sum(ratios) / len(ratios), ratios[ceil(0.99 * len(ratios)) - 1]
    slack = track.account.slack
    kept = mean <= 1.0 + slack and p99 <= 1.0 + 2.0 * slack
    return {"slowdown": mean, "slowdown_p99": p99, "kept": kept, "steps": len(ratios)}


def _ban(ban: Ban) -> dict[str, Any]:
    return {
        "high": ban.high,
        "low": ban.low,
        "operators": list(ban.operators),
        "share": ban.share,
        "ratio": ban.ratio,
        "samples": ban.samples,
        "why": ban.why,
        "since": ban.since,
        "until": ban.until,
        "failures": ban.failures,
    }
