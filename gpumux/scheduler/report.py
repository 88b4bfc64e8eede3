"""The guard's figures as plain data, for status and metrics.

guard       None under a policy without one, else
    bans            list of {high, low: job ids, operators: [start, end), share, ratio, samples, why, since, until, failures}
    bans_total      ever imposed
    probes_total    launches let out to find something out
    held_seconds    {reason: seconds in which low work was ready and had room, but was held} (scheduler/guard/answers.py lists reasons)
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

from dataclasses import asdict
from math import ceil, isinf
from typing import Any, NamedTuple

from gpumux.scheduler.guard.costs import Ban
from gpumux.scheduler.guard.guard import Guard
from gpumux.scheduler.guard.high_job import STARVED, Track
from gpumux.scheduler.jobs import Job, Step
from gpumux.scheduler.state import CoreState
from gpumux.scheduler.windows import Launch
from gpumux.types import JobId, LaunchId, Priority, ProgramId, StepId

# ---- Low jobs that don't get to run: for how long, and whether their pieces' length is the reason.


LONG = frozenset(("tail", "next", "gap", "ban"))


def starved_steps(guard: Guard, job: Job) -> int:
    """Steps of the high job that holds this low one since it was last launched."""
    hold = guard.holds.newest.get(job.id)
    track = guard.tracks.get(hold.high) if hold is not None else None
    if hold is None or track is None or track.solo_step() <= 0.0:
        return 0
    return int((guard.seen - hold.since) / track.solo_step())


def too_long(guard: Guard, job: Job) -> tuple[float, float] | None:
    """(seconds of its next piece, seconds that would fit) for a low job whose pieces hinder it from running."""
    hold = guard.holds.newest.get(job.id)
    if hold is None or hold.reason not in LONG or job.blocked() or starved_steps(guard, job) < STARVED:
        return None
    track = guard.tracks.get(hold.high)
    if track is None or track.model is None:
        return None
    step, seconds = job.head_step(), job.next_seconds()
    spans = step.spans if step.launched else step.program.spans
    pair = track.model.pairs.get(step.program.whole)
    known = pair.lows.get(spans[step.launched]) if pair is not None else None
    fits = track.gaps.short
    if known is not None and known.peak > 0.0:  # what it costs is about in proportion to its length
        fits = max(fits, seconds * track.account.limit / known.upper)
    return (seconds, fits) if fits < seconds else None


# ----


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
            "held": (
                None
                if hold is None
                else {
                    "reason": hold.reason,
                    "high": hold.high,
                    "since": hold.since,
                    "until": hold.until if hold.until < float("inf") else None,
                }
            ),
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


# ---- What runs, is held and is banned right now, as plain tuples for who watches from outside (daemon/tracing.py).
#
# Reads and changes nothing. `scheduler/report.py` is the whole state, for status; this is cheap enough to be asked
# after every event.


class Out(NamedTuple):
    """A piece that was handed to the device and is not over: operators [first, end) of its program."""

    launch: LaunchId
    job: JobId
    step: StepId
    program: ProgramId
    piece: int
    first: int
    end: int
    share: float


class Held(NamedTuple):
    """A low job whose next piece waits for the sake of `high` since `since` (seconds), with a reason of
    scheduler/guard/answers.py."""

    job: JobId
    high: JobId
    reason: str
    since: float


class Banned(NamedTuple):
    """`low` may not run while operators [first, end) of `high` do; see scheduler/guard/costs.py."""

    high: JobId
    low: JobId
    first: int
    end: int
    share: float
    since: float
    ratio: float
    why: str


def out(core: CoreState, launch: LaunchId) -> Out | None:
    """The launch, if it is outstanding."""
    for window in core.board.windows:
        found = window.launches.get(launch)
        if found is not None:
            return _out(found)
    return None


def all_out(core: CoreState) -> list[Out]:
    """Every outstanding launch, oldest first within a class."""
    return [_out(launch) for window in core.board.windows for launch in window.launches.values()]


def _out(launch: Launch) -> Out:
    step, piece = launch.step, launch.piece
    first, end = step.bounds[piece], step.bounds[piece + 1]
    return Out(launch.id, launch.job.id, step.id, step.program.id, piece, first, end, launch.share)


def held(core: CoreState) -> list[Held]:
    """Low jobs that could run now, were it not for the guard. Whoever is paused has other reasons to wait."""
    if core.guard is None:
        return []
    holds, found = core.guard.holds, []
    for job_id, hold in holds.newest.items():
        job = core.jobs.get(job_id)
        if job is not None and not job.blocked():
            found.append(Held(job_id, hold.high, hold.reason, hold.since))
    return found


def banned(core: CoreState) -> list[Banned]:
    """The bans in force."""
    if core.guard is None:
        return []
    return [
        Banned(ban.high, ban.low, *ban.operators, ban.share, ban.since, ban.ratio, ban.why)
        for ban in core.guard.bans.active
    ]


def operators(core: CoreState, job_id: JobId, program: ProgramId) -> tuple[str, ...]:
    """The program's operators by name, in captured order; empty where the device does not say."""
    job = core.jobs.get(job_id)
    found = job.programs.get(program) if job is not None else None
    return found.operators if found is not None else ()


# ---- The core's state as plain data (maps, lists, numbers, strings), for status and metrics.
#
# now         seconds, clock of the last event
# policy      its name
# leaving     why the daemon is leaving, or None
# device      {kind, name, parallel, threads}, or None before it is open
# sessions    how many are open
# jobs        one map a job, see `_job`
# windows     by class: {launches, seconds, limit_launches, limit_seconds (None: no bound), active_jobs}
# memory      bytes: {capacity (None before the device is open), used, free, state, slots, transient}
# guard       what the guard holds back and why, or None; see `scheduler/report.py`, also for "guard" of each job
# counters    {events, ignored: {event: n}, refusals: {fault code: n}}


def take(core: CoreState) -> dict[str, Any]:
    info, ledger = core.info, core.ledger
    charges = list(ledger.charges.values())
    return {
        "now": core.now,
        "policy": core.config.policy,
        "leaving": core.leaving,
        "device": info and {"kind": info.kind, "name": info.name, "parallel": info.parallel, "threads": info.threads},
        "sessions": len(core.sessions),
        "jobs": [_job(core, job) for job in core.jobs.values()],
        "windows": {p.name.lower(): _window(core, p) for p in Priority},
        "memory": {
            "capacity": ledger.capacity,
            "used": ledger.used,
            "free": None if ledger.capacity is None else ledger.capacity - ledger.used,
            "state": sum(charge.state for charge in charges),
            "slots": sum(charge.slots for charge in charges),
            "transient": sum(charge.transient for charge in charges),
        },
        "guard": None if core.guard is None else guard_figures(core.guard, core.now),
        "counters": {"events": core.events, "ignored": dict(core.ignored), "refusals": dict(core.refusals)},
    }


def _job(core: CoreState, job: Job) -> dict[str, Any]:
    """`queued` steps have no piece launched yet, `running` ones do; `outstanding` counts pieces."""
    charge = core.ledger.charges[job.id]
    queued = sum(1 for item in job.queue if isinstance(item, Step) and not item.launched)
    return {
        "job": job.id,
        "name": job.spec.name,
        "session": job.session,
        "uid": job.peer.uid,
        "pid": job.peer.pid,
        "priority": job.priority.name.lower(),
        "weight": job.weight,
        "max_slowdown": job.spec.max_slowdown,
        "max_inflight": job.spec.max_inflight,
        "models": job.spec.models,
        "state": job.state.value,
        "paused": job.paused,
        "opened": job.opened,
        "queued": queued,
        "running": job.inflight - queued,
        "transfers": job.transfers,
        "outstanding": job.outstanding,
        "programs": len(job.programs),
        "steps_done": job.steps_done,
        "steps_failed": job.steps_failed,
        "device_seconds": job.device_s,
        "guard": None if core.guard is None else job_figures(core.guard, job, core.now),
        "memory": {**asdict(charge), "total": charge.total, "limit": job.spec.memory_limit},
    }


def _window(core: CoreState, priority: Priority) -> dict[str, Any]:
    window = core.board.windows[priority]
    limit = core.policy.limit(core.board, priority) if core.policy is not None else None
    return {
        "launches": len(window.launches),
        "seconds": window.seconds,
        "limit_launches": limit and limit.launches,
        "limit_seconds": None if limit is None or isinf(limit.seconds) else limit.seconds,
        "active_jobs": core.board.active(priority),
    }
