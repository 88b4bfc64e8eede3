"""The scheduler's state as plain data: all of it for status and metrics (`take`), and what runs, is held and is banned
now, cheap enough to be read after every event. Reads and changes nothing.

now         seconds, clock of the last event
policy      its name
leaving     why the daemon is leaving, or None
device      {kind, name, parallel, threads}, or None before it is open
sessions    how many are open
jobs        one map a job, see `_job`
windows     by class: {launches, seconds, limit_launches, limit_seconds (None: no bound), active_jobs}
memory      bytes: {capacity (None before the device is open), used, free, state, slots, transient}
counters    {events, ignored: {event: n}, refusals: {fault code: n}}
guard       None under a policy without one, else
    bans            list of {high, low: job ids, operators: [start, end), share, ratio, samples, why, since, until,
                    failures}
    bans_total      ever imposed
    probes_total    launches made to find something out although they should have been held
    held_seconds    {reason: seconds in which low work was ready and had room, but was held}; guard/decisions.py
                    lists reasons
    harvested_seconds   device seconds of low work beside high jobs or in their pauses
    low_window      low launches that may be out beside a high job
jobs, for each high job that has run, under "guard":
    slowdown, slowdown_p99, promised, promised_p99, kept, steps, broken_since
                    `slowdown_figures` in verdict.py; `verdict`, the same in a line of text
    steps_over      steps slower than that, ever; `steps_total` of them
    solo_step_seconds, baseline_samples, estimate_samples
    host_wait_seconds        the device waited for the host with a piece of the job due
    price, balance_seconds, credit_seconds, tail: guard/budget.py
and for each low one:
    held            {reason, high, since, until (None: an event will come)} or None
    held_seconds    {reason: seconds for which it was held since it opened}, only reasons there were
    too_long        {piece_seconds, fits_seconds} or None
"""

from __future__ import annotations

from dataclasses import asdict
from math import isinf
from typing import Any, Final, NamedTuple

from gpumux.scheduler.guard.bans import Ban
from gpumux.scheduler.guard.guard import SlowdownGuard
from gpumux.scheduler.guard.high_job import HELD_LONG_STEPS
from gpumux.scheduler.jobs import JobStep, ScheduledJob
from gpumux.scheduler.state import SchedulerState
from gpumux.scheduler.verdict import slowdown_figures, verdict
from gpumux.scheduler.windows import Outstanding
from gpumux.types import JobId, LaunchId, Priority, ProgramId, StepId

LENGTH_LIMITED: Final = frozenset(("tail", "gap", "ban"))  # reasons that a shorter piece may be free of


# ---- Low jobs that don't get to run: for how long, and whether the length of their pieces is the reason.


def held_steps(guard: SlowdownGuard, job: ScheduledJob) -> int:
    """Steps of the high job that holds this low one, since it was last launched."""
    hold = guard.decisions.holds.current.get(job.id)
    high = guard.high_jobs.get(hold.high_id) if hold is not None else None
    if hold is None or high is None or high.solo_step() <= 0.0:
        return 0
    return int((guard.view.now - hold.since) / high.solo_step())


def too_long(guard: SlowdownGuard, job: ScheduledJob) -> tuple[float, float] | None:
    """(seconds of its next piece, seconds that would fit) for a low job that is held because its pieces are long."""
    hold = guard.decisions.holds.current.get(job.id)
    if hold is None or hold.reason not in LENGTH_LIMITED or job.blocked() or held_steps(guard, job) < HELD_LONG_STEPS:
        return None
    high = guard.high_jobs.get(hold.high_id)
    if high is None or high.costs is None:
        return None
    step, seconds = job.head_step(), job.next_seconds()
    spans = step.spans if step.launched else step.program.spans
    low_costs = high.costs.by_low.get(step.program.whole_key)
    known = low_costs.lows.get(spans[step.launched]) if low_costs is not None else None
    fits = high.arrivals.short
    if known is not None and known.peak > 0.0:  # what it costs is about in proportion to its length
        fits = max(fits, seconds * high.budget.limit / known.upper)
    return (seconds, fits) if fits < seconds else None


# ---- The guard's figures


def guard_figures(guard: SlowdownGuard, now: float) -> dict[str, Any]:
    return {
        "bans": [_ban(ban) for ban in guard.bans.active],
        "bans_total": guard.bans.total,
        "probes_total": guard.bans.probes,
        "held_seconds": guard.decisions.holds.seconds(now),
        "harvested_seconds": guard.learner.harvested,
        "low_window": guard.low_window.width,
    }


def job_figures(guard: SlowdownGuard, job: ScheduledJob, now: float) -> dict[str, Any] | None:
    if job.priority is Priority.LOW:
        hold, long = guard.decisions.holds.current.get(job.id), too_long(guard, job)
        return {
            "held": (
                None
                if hold is None
                else {
                    "reason": hold.reason,
                    "high": hold.high_id,
                    "since": hold.since,
                    "until": hold.until if hold.until < float("inf") else None,
                }
            ),
            "held_seconds": guard.decisions.holds.job_seconds(job, now),
            "too_long": None if long is None else {"piece_seconds": long[0], "fits_seconds": long[1]},
        }
    high = guard.high_jobs.get(job.id)
    if high is None or high.costs is None:
        return None
    costs, budget = high.costs, high.budget
    figures = slowdown_figures(high)
    return {
        **figures,
        "verdict": verdict(figures, now),
        "steps_over": high.over,
        "steps_total": high.steps,
        "solo_step_seconds": high.solo_step(),
        "baseline_samples": sum(baseline.count for baseline in costs.steps),
        "estimate_samples": sum(each.count for low_costs in costs.by_low.values() for each in low_costs.ranges),
        "host_wait_seconds": high.host_wait,
        "price": budget.price,
        "balance_seconds": budget.balance,
        "credit_seconds": budget.credit,
        "tail": budget.tail,
    }


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


# ---- What runs, is held and is banned now


class LaunchInfo(NamedTuple):
    """An outstanding launch: operators [first, end) of its program, `piece` and those behind it that are part of it."""

    launch: LaunchId
    job: JobId
    step: StepId
    program: ProgramId
    piece: int
    first: int
    end: int
    share: float


class HeldJob(NamedTuple):
    """A low job the next piece of which is held for `high` since `since` (seconds); `reason` is one of
    guard/decisions.py."""

    job: JobId
    high: JobId
    reason: str
    since: float


class JobLoad(NamedTuple):
    """Steps of a job that have no piece launched yet, steps that have and are not answered, and the bytes that the job
    is charged."""

    queued: int
    running: int
    memory_bytes: int


class BannedRange(NamedTuple):
    """`low` may not run while operators [first, end) of `high` do, or the collective before `first` where both are the
    same; see guard/bans.py."""

    high: JobId
    low: JobId
    first: int
    end: int
    share: float
    since: float
    ratio: float
    why: str


def out(state: SchedulerState, launch: LaunchId) -> LaunchInfo | None:
    """The launch, if it is outstanding."""
    for window in state.windows.by_class:
        found = window.launches.get(launch)
        if found is not None:
            return _out(found)
    return None


def all_out(state: SchedulerState) -> list[LaunchInfo]:
    """Every outstanding launch, oldest first within a class."""
    return [_out(launch) for window in state.windows.by_class for launch in window.launches.values()]


def _out(launch: Outstanding) -> LaunchInfo:
    step, piece = launch.step, launch.piece
    first, end = step.bounds[piece], step.bounds[piece + launch.pieces]
    return LaunchInfo(launch.id, launch.job.id, step.id, step.program.id, piece, first, end, launch.share)


def held(state: SchedulerState) -> list[HeldJob]:
    """Low jobs that could run now if the guard did not hold them."""
    if state.guard is None:
        return []
    found = []
    for job_id, hold in state.guard.decisions.holds.current.items():
        job = state.jobs.get(job_id)
        if job is not None and not job.blocked():
            found.append(HeldJob(job_id, hold.high_id, hold.reason, hold.since))
    return found


def banned(state: SchedulerState) -> list[BannedRange]:
    """The bans in force."""
    if state.guard is None:
        return []
    return [
        BannedRange(ban.high, ban.low, *ban.operators, ban.share, ban.since, ban.ratio, ban.why)
        for ban in state.guard.bans.active
    ]


def load(state: SchedulerState, job_id: JobId) -> JobLoad:
    """The job's load, which is zero for a job that is not known."""
    job = state.jobs.get(job_id)
    if job is None:
        return JobLoad(0, 0, 0)
    queued = _queued(job)
    return JobLoad(queued, job.inflight - queued, state.ledger.charges[job.id].total)


def _queued(job: ScheduledJob) -> int:
    return sum(1 for item in job.queue if isinstance(item, JobStep) and not item.launched)


def operators(state: SchedulerState, job_id: JobId, program: ProgramId) -> tuple[str, ...]:
    """The program's operators by name, in captured order; empty where the device does not give them."""
    job = state.jobs.get(job_id)
    found = job.programs.get(program) if job is not None else None
    return found.operators if found is not None else ()


# ---- All of it


def take(state: SchedulerState) -> dict[str, Any]:
    info, ledger = state.info, state.ledger
    charges = list(ledger.charges.values())
    return {
        "now": state.now,
        "policy": state.config.policy,
        "leaving": state.leaving,
        "device": info and {"kind": info.kind, "name": info.name, "parallel": info.parallel, "threads": info.threads},
        "sessions": len(state.sessions),
        "jobs": [_job(state, job) for job in state.jobs.values()],
        "windows": {p.name.lower(): _window(state, p) for p in Priority},
        "memory": {
            "capacity": ledger.capacity,
            "used": ledger.used + ledger.reservations.total_bytes(),
            "free": ledger.free_bytes(),
            "state": sum(charge.state for charge in charges),
            "slots": sum(charge.slots for charge in charges),
            "transient": ledger.used - ledger.unused_bytes() - sum(charge.state + charge.slots for charge in charges),
            "reserved": ledger.reserved_bytes(),
        },
        "guard": None if state.guard is None else guard_figures(state.guard, state.now),
        "counters": {"events": state.events, "ignored": dict(state.ignored), "refusals": dict(state.refusals)},
    }


def _gang(job: ScheduledJob) -> dict[str, Any] | None:
    """Which rank the job is, and what it exchanged with the others; None for a job of no gang."""
    gang = job.spec.gang
    if gang is None:
        return None
    return {
        "id": gang.id,
        "rank": gang.rank,
        "ranks": gang.ranks,
        "waits": job.parked(),
        "waited_s": job.peers_s,
        "sent_bytes": job.sent_bytes,
        "received_bytes": job.received_bytes,
    }


def _job(state: SchedulerState, job: ScheduledJob) -> dict[str, Any]:
    """`queued` steps have no piece launched yet, `running` ones do; `outstanding` counts pieces."""
    charge = state.ledger.charges[job.id]
    queued = _queued(job)
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
        "gang": _gang(job),
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
        "guard": None if state.guard is None else job_figures(state.guard, job, state.now),
        "memory": {**asdict(charge), "total": charge.total, "limit": job.spec.memory_limit}
        | {"shared": None if job.arena is None else job.arena.nbytes},
    }


def _window(state: SchedulerState, priority: Priority) -> dict[str, Any]:
    window = state.windows.by_class[priority]
    limit = state.policy.limit(state.windows, priority) if state.policy is not None else None
    return {
        "launches": len(window.launches),
        "seconds": window.seconds,
        "limit_launches": limit and limit.launches,
        "limit_seconds": None if limit is None or isinf(limit.seconds) else limit.seconds,
        "active_jobs": state.windows.active(priority),
    }
