"""Reports of the daemon's state: the body of GetStatus, and the figures behind the gauges.

GetStatus's body is a contract for scripts (`gpumux status --json`): fields may be added, not changed.

daemon    {version, pid, endpoints, policy, core (compiled or interpreted), started (Unix time), uptime_s, metrics_host,
metrics_port
          (0: off), leaving}
device    {kind, name, torch_version, threads, parallel, memory_bytes}
memory    bytes: {total_bytes, free_bytes, reserved_bytes, shared_bytes}
sessions  how many clients are connected
windows   by priority, as scheduler/report.py has it
jobs      [{job, short, name, uid, pid, priority, weight, state, paused, queued, running, outstanding,
          memory_bytes (charged), measured_bytes (what it really held at most in a recent step; 0: not known),
          device_busy_s, steps_done, steps_failed, programs, transfers, opened_s_ago, max_slowdown, models (that a
          step trains), gang (None, or {id, rank, ranks, waits (for its peers, now), waited_s, sent_bytes,
          received_bytes}), fusion (None, or of a job that may be fused {possible (whether this daemon fuses jobs), jobs
          (that run as one now, itself included), steps (its own that ran so), why (a sentence; "" if not mine)}),
          promise, mine (whether the asker may change it; where not, job and name are "" and pid is 0:
          daemon/context.py)}]; promise is None where nothing is known, and otherwise
          {verdict (a line of text, scheduler/verdict.py), slowdown, slowdown_p99 (both over the job alone, or
          None), promised, promised_p99 (their limits), steps (that are judged), kept, broken_for_s (0 unless it is
          broken), steps_over (ever), solo_step_s} of a high job, {held (why: docs/metrics.md; "": it is not),
          held_by (short id of the high job, or ""), held_for_s, too_long (None, or {piece_seconds, fits_seconds}:
          its pieces don't fit beside high jobs)} of a low one; with both, bans (in force for its sake, or against it)
guard     None under a policy without one, or {bans, bans_total, probes_total, harvested_s, held_s (by reason)}
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from gpumux import __version__
from gpumux.config import Config
from gpumux.daemon.context import ENDED_JOB, DaemonContext, log, with_short_ids
from gpumux.daemon.records import Records
from gpumux.device.base import MemoryFigures
from gpumux.errors import UnknownJob
from gpumux.metrics.gauges import (
    BanFigures,
    Figures,
    GangFigures,
    GuardFigures,
    JobFigures,
    PairFigures,
    PromiseFigures,
    label_text,
)
from gpumux.scheduler import RUNS
from gpumux.scheduler.scheduler import Scheduler
from gpumux.types import DeviceInfo, JobId

MOST_RATIO = 1e9  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts about a daemon that don't change while it runs. `started` is Unix time, `began` the same moment by
    time.monotonic(), which is never set."""

    config: Config
    endpoints: Sequence[str]
    device: DeviceInfo
    started: float
    metrics_port: int = 0
    began: float = field(default_factory=time.monotonic)


def state_of(job: dict[str, Any]) -> str:
    """A job's state as one word: open, paused, draining or closing. A job paused while it drains is draining."""
    return "paused" if job["paused"] and job["state"] == "open" else str(job["state"])


def status(
    identity: Identity,
    scheduler: Scheduler,
    records: Records,
    shared_bytes: int,
    held: MemoryFigures,
    fusion: Callable[[JobId], dict[str, Any] | None],
) -> dict[str, Any]:
    """Make the body of GetStatus. `held`: the device's memory figures; `fusion`: of a job."""
    snapshot = scheduler.snapshot()
    config, device = identity.config, identity.device
    memory = snapshot["memory"]
    return {
        "daemon": {
            "version": __version__,
            "pid": os.getpid(),
            "endpoints": list(identity.endpoints),
            "policy": config.policy,
            "core": RUNS.kind,
            "started": identity.started,
            "uptime_s": time.monotonic() - identity.began,
            "metrics_host": config.metrics_host,
            "metrics_port": identity.metrics_port,
            "leaving": snapshot["leaving"] or "",
        },
        "device": {
            "kind": device.kind,
            "name": device.name,
            "torch_version": device.torch_version,
            "threads": device.threads,
            "parallel": device.parallel,
            "memory_bytes": device.memory_bytes,
        },
        "memory": {
            "total_bytes": memory["capacity"] or 0,
            "free_bytes": memory["free"] or 0,
            "reserved_bytes": memory["reserved"],
            "shared_bytes": shared_bytes,
        },
        "sessions": len(records.sessions),
        "windows": snapshot["windows"],
        "jobs": [
            {**_job(job, records, snapshot, held), "fusion": fusion(job["job"])}
            for job in snapshot["jobs"]
            if job["job"] in records.jobs
        ],
        "guard": _guard_status(snapshot["guard"]),
    }


def _guard_status(guard: dict[str, Any] | None) -> dict[str, Any] | None:
    if guard is None:
        return None
    return {
        "bans": len(guard["bans"]),
        "bans_total": guard["bans_total"],
        "probes_total": guard["probes_total"],
        "harvested_s": guard["harvested_seconds"],
        "held_s": dict(guard["held_seconds"]),
    }


def _promise_status(job: dict[str, Any], records: Records, snapshot: dict[str, Any]) -> dict[str, Any] | None:
    known = job["guard"]
    if known is None:
        return None
    bans = sum(1 for ban in snapshot["guard"]["bans"] if job["job"] in (ban["high"], ban["low"]))
    if job["priority"] == "low":
        held = known["held"]
        if held is None:
            held = {"reason": "", "high": "", "since": snapshot["now"]}
        return {
            "held": held["reason"],
            "held_by": _short(held["high"], records),
            "held_for_s": max(0.0, snapshot["now"] - held["since"]),
            "held_s": known["held_seconds"],
            "too_long": known["too_long"],
            "bans": bans,
        }
    fields = ("verdict", "slowdown", "slowdown_p99", "promised", "promised_p99", "steps", "kept", "steps_over")
    return {
        **{name: known[name] for name in fields},
        "broken_for_s": _broken_for(known, snapshot["now"]),
        "solo_step_s": known["solo_step_seconds"] or None,
        "bans": bans,
    }


def _broken_for(known: dict[str, Any], now: float) -> float:
    """Seconds for which the promise has been broken, 0 unless it is."""
    since = known["broken_since"]
    return 0.0 if since is None else max(0.0, now - float(since))


def _short(job: JobId, records: Records) -> str:
    record = records.jobs.get(job)
    return record.short if record is not None else ""


def _job(job: dict[str, Any], records: Records, snapshot: dict[str, Any], held: MemoryFigures) -> dict[str, Any]:
    return {
        "job": job["job"],
        "short": _short(job["job"], records),
        "name": job["name"],
        "uid": job["uid"],
        "pid": job["pid"],
        "priority": job["priority"],
        "weight": job["weight"],
        "state": state_of(job),
        "paused": job["paused"],
        "queued": job["queued"],
        "running": job["running"],
        "outstanding": job["outstanding"],
        "memory_bytes": _charged(job, held),
        "measured_bytes": held.measured.get(job["job"], 0),
        "device_busy_s": job["device_seconds"] + records.jobs[job["job"]].group_s,
        "steps_done": job["steps_done"] + records.jobs[job["job"]].group_steps,
        "steps_failed": job["steps_failed"],
        "programs": job["programs"],
        "transfers": job["transfers"],
        "opened_s_ago": max(0.0, snapshot["now"] - job["opened"]),
        "max_slowdown": job["max_slowdown"],
        "models": job["models"],
        "gang": job["gang"],
        "promise": _promise_status(job, records, snapshot),
    }


def _charged(job: dict[str, Any], held: MemoryFigures) -> int:
    """Bytes that admission counts: those that the job's Programs declare, or those measured by the device, if more."""
    return max(int(job["memory"]["total"]), held.by_job.get(job["job"], 0))


def job_stats(body: dict[str, Any], short: str) -> dict[str, Any]:
    """One job's part of a status body, with name and id of the high job that it is held for, as far as the body has
    them. Raises UnknownJob if the job has just ended."""
    for entry in body["jobs"]:
        if entry["short"] == short:
            promise = entry["promise"]
            if promise is not None and promise.get("held_by"):
                by = next((other for other in body["jobs"] if other["short"] == promise["held_by"]), None)
                if by is not None:
                    promise = {**promise, "held_by_name": by["name"], "held_by_job": by["job"]}
            return {**entry, "promise": promise}
    raise UnknownJob(f"job {short} has ended", "")


def figures(
    identity: Identity,
    scheduler: Scheduler,
    context: DaemonContext,
    shared_bytes: int,
    saved: Callable[[JobId], tuple[float, int]],
    pairs: tuple[tuple[PairFigures, ...], int],
) -> Figures:
    """Make the figures for the metric gauges. `saved` returns Unix time and bytes of a job's newest state snapshot.
    `pairs`: some of the pairs of programs that were measured side by side, and the number of all."""
    snapshot = scheduler.snapshot()
    memory, records = snapshot["memory"], context.records
    held = context.device.memory()
    named = context.config.metrics_names == "shown"
    return Figures(
        when=time.time(),
        device=identity.device,
        jobs=tuple(
            _figures(job, records, named, saved(job["job"]), held, snapshot["now"])
            for job in snapshot["jobs"]
            if job["job"] in records.jobs
        ),
        sessions=len(records.sessions),
        shared_bytes=shared_bytes,
        device_total_bytes=memory["capacity"] or 0,
        device_free_bytes=memory["free"] or 0,
        protocol_errors={**context.router.counters, "unexpected": context.unexpected},
        guard=_guard(snapshot["guard"]),
        bans=_bans(snapshot, records),
        pairs=pairs[0],
        pairs_known=pairs[1],
        leaving=snapshot["leaving"] or "",
    )


def _bans(snapshot: dict[str, Any], records: Records) -> tuple[BanFigures, ...]:
    now, guard = snapshot["now"], snapshot["guard"]
    return tuple(
        BanFigures(
            high=_short(ban["high"], records),
            low=_short(ban["low"], records),
            ratio=min(ban["ratio"], MOST_RATIO),
            why=ban["why"],
            since_s=max(0.0, now - ban["since"]),
            left_s=max(0.0, ban["until"] - now),
        )
        for ban in (guard["bans"] if guard is not None else ())
    )


def _held(job: dict[str, Any]) -> dict[str, Any]:
    """Why a low job is held, for which high job and since when; without a reason, if it is not."""
    known = job["guard"]
    held = known["held"] if known is not None and job["priority"] == "low" else None
    return held if held is not None else {"reason": "", "high": "", "since": inf}


def _guard(guard: dict[str, Any] | None) -> GuardFigures | None:
    if guard is None:
        return None
    return GuardFigures(
        bans_active=len(guard["bans"]),
        bans=guard["bans_total"],
        probes=guard["probes_total"],
        harvested_s=guard["harvested_seconds"],
        held_s=guard["held_seconds"],
    )


def _promise(job: dict[str, Any], now: float) -> PromiseFigures | None:
    """Figures of a high job that has run, else None: a low job has no promise."""
    known = job.get("guard")
    if job["priority"] != "high" or known is None:
        return None
    return PromiseFigures(
        target=job["max_slowdown"],
        slowdown=known["slowdown"],
        slowdown_p99=known["slowdown_p99"],
        kept=bool(known["kept"]),
        steps_over=known["steps_over"],
        solo_step_s=known["solo_step_seconds"] or None,
        samples=known["baseline_samples"],
        estimates=known["estimate_samples"],
        host_wait_s=known["host_wait_seconds"],
        verdict=known["verdict"],
        broken_for_s=_broken_for(known, now),
    )


def _gang(job: dict[str, Any]) -> GangFigures | None:
    gang = job["gang"]
    return None if gang is None else GangFigures(gang["waited_s"], gang["sent_bytes"], gang["received_bytes"])


def _figures(
    job: dict[str, Any], records: Records, named: bool, saved: tuple[float, int], held: MemoryFigures, now: float
) -> JobFigures:
    waits = _held(job)
    return JobFigures(
        short=records.jobs[job["job"]].short,
        name=job["name"] if named else "",
        uid=job["uid"],
        priority=job["priority"],
        state=state_of(job),
        queued=job["queued"],
        outstanding=job["outstanding"],
        memory_bytes=_charged(job, held),
        measured_bytes=held.measured.get(job["job"], 0),
        device_busy_s=job["device_seconds"] + records.jobs[job["job"]].group_s,
        steps_done=job["steps_done"] + records.jobs[job["job"]].group_steps,
        promise=_promise(job, now),
        held=waits["reason"],
        held_by=_short(waits["high"], records),
        held_for_s=max(0.0, now - waits["since"]),
        saved=saved[0],
        saved_bytes=saved[1],
        models=job["models"],
        gang=_gang(job),
    )


def page_explanation(scheduler: Scheduler, context: DaemonContext, short: str) -> dict[str, Any] | None:
    """What the status page says of the job with this short id: {short, name, priority, verdict, causes, remedies:
    [{text, command}]}, as `gpumux jobs explain` does; None if there is none. The page asks for no password: it names
    jobs only where the configuration says so, and no operators."""
    records = context.records.jobs
    job = next((each for each in records.values() if each.short == short), None)
    if job is None:
        return None
    named = context.config.metrics_names == "shown"

    def name(job_id: JobId) -> str:
        known = records.get(job_id)
        if known is None:
            return ENDED_JOB
        return f"{known.short} ({label_text(known.spec.name)})" if named and known.spec.name else known.short

    shorts = {known.id: known.short for known in records.values()}

    def brief(text: str) -> str:
        return with_short_ids(text, shorts, ENDED_JOB)

    found = scheduler.advise(job.id, name)
    return {
        "short": job.short,
        "name": label_text(job.spec.name) if named else "",
        "priority": job.spec.priority.name.lower(),
        "verdict": brief(found.verdict),
        "causes": [brief(cause) for cause in found.causes],
        "remedies": [{"text": brief(each.text), "command": brief(each.command)} for each in found.remedies],
    }


# ---- Jobs that hold more memory than their Programs declare, which is what they were admitted with.
#
# Devices report what a job really holds if they can measure it (`MemoryFigures.measured`). A job's process also holds
# memory that its Programs don't declare (graphs, a library's scratch memory, gaps in the heap), hence the slack.


OVERUSE_EVERY_S = 5.0
SLACK = 1.10
SLACK_BYTES = 128 << 20


class MemoryOveruseCheck:
    """Logs each such job once. Call `check` when it is `due`, on the loop's clock."""

    def __init__(self, context: DaemonContext, clock: Callable[[], float]) -> None:
        self._context = context
        self.due = clock() + OVERUSE_EVERY_S
        self._named: set[JobId] = set()

    def check(self, now: float) -> None:
        """Log jobs that hold more than they are charged, and were not logged before. Does nothing before `due`."""
        if now < self.due:
            return
        self.due = now + OVERUSE_EVERY_S
        figures = self._context.device.memory()
        if not any(figures.measured.values()):
            return
        jobs = self._context.records.jobs
        self._named &= jobs.keys()
        declared = {job["job"]: int(job["memory"]["total"]) for job in self._context.scheduler.snapshot()["jobs"]}
        for job, measured in figures.measured.items():
            charged = declared.get(job, 0)
            if job in self._named or job not in jobs or measured <= charged * SLACK + SLACK_BYTES:
                continue
            self._named.add(job)
            self._context.metrics.outgrown.inc()
            log.warning(
                "job %s: %r holds %d bytes in a step, and its Programs declare %d: it is charged what it holds from "
                "now on; leave room for that on this machine",
                jobs[job].short,
                jobs[job].spec.name,
                measured,
                charged,
            )
