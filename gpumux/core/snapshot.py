"""The core's state as plain data (maps, lists, numbers, strings), for status and metrics.

now         seconds, clock of the last event
policy      its name
leaving     why the daemon is leaving, or None
device      {kind, name, parallel, threads}, or None before it is open
sessions    how many are open
jobs        one map a job, see `_job`
windows     by class: {launches, seconds, limit_launches, limit_seconds (None: no bound), active_jobs}
memory      bytes: {capacity (None before the device is open), used, free, state, slots, transient}
guard       what the guard holds back and why, or None; see `core/figures.py`, also for "guard" of each job
counters    {events, ignored: {event: n}, refusals: {fault code: n}}
"""

from __future__ import annotations

from dataclasses import asdict
from math import isinf
from typing import Any

from gpumux.core.figures import guard_figures, job_figures
from gpumux.core.queue import Job, Step
from gpumux.core.state import CoreState
from gpumux.model import Priority


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
