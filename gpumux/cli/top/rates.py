"""Two answers to GetStatus as one view: what the newer one says, with rates since the older. Pure."""

from __future__ import annotations

from typing import Any


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A view of the daemon: what `after` says, with rates since `before` (both bodies of GetStatus).

    seconds   between the two, by the daemon's clock
    device    {name, kind, busy: device seconds a second, high and low: the same by class (more than 1 where
              pieces run at once), memory_bytes, free_bytes}
    guard     None, or {bans, bans_total, harvested: device seconds a second of low work beside high jobs, held: part
              of the time in which low work was held, held_by_reason}
    jobs      high ones first, then by device share, each {job, short, name, uid, priority, state, paused, mine (as in
              GetStatus), steps_s, device, promise (as in GetStatus, of a high job), slowdown, max_slowdown, kept, held,
              held_by, held_for_s, held_share: part of the time in which it was held, by reason (None if unknown), bans,
              queued, running, steps_done, steps_failed, memory_bytes, gang (as in GetStatus), peers: part of the
              time it waited for other ranks}; rates of a job that was not there before are None
    """
    seconds = after["daemon"]["uptime_s"] - before["daemon"]["uptime_s"]
    earlier = {job["short"]: job for job in before["jobs"]}
    jobs = [_job(job, earlier.get(job["short"]), seconds) for job in after["jobs"]]
    jobs.sort(key=lambda job: (job["priority"] != "high", -(job["device"] or 0.0), job["short"]))
    shares = {name: sum(job["device"] or 0.0 for job in jobs if job["priority"] == name) for name in ("high", "low")}
    device, memory = after["device"], after["memory"]
    return {
        "seconds": seconds,
        "daemon": {key: after["daemon"][key] for key in ("version", "pid", "policy", "uptime_s")},
        "device": {
            "kind": device["kind"],
            "name": device["name"],
            "busy": sum(shares.values()),
            **shares,
            "memory_bytes": memory["total_bytes"],
            "free_bytes": memory["free_bytes"],
        },
        "sessions": after["sessions"],
        "guard": _guard(before["guard"], after["guard"], seconds),
        "jobs": jobs,
    }


def _rate(before: float, after: float, seconds: float) -> float:
    return max(0.0, after - before) / seconds if seconds > 0.0 else 0.0


def _guard(before: dict[str, Any] | None, after: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
    if before is None or after is None:
        return None
    held = {name: _rate(before["held_s"].get(name, 0.0), s, seconds) for name, s in after["held_s"].items()}
    return {
        "bans": after["bans"],
        "bans_total": after["bans_total"],
        "harvested": _rate(before["harvested_s"], after["harvested_s"], seconds),
        "held": sum(held.values()),
        "held_by_reason": held,
    }


def _job(job: dict[str, Any], earlier: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    known_promise = job["promise"] or {}
    same = ("job", "short", "name", "uid", "priority", "state", "paused", "mine", "max_slowdown", "queued", "running")
    counts = ("steps_done", "steps_failed", "memory_bytes")
    known = earlier is not None and seconds > 0.0
    gang, before = job.get("gang"), earlier.get("gang") if earlier else None
    return {
        **{key: job[key] for key in (*same, *counts)},
        "gang": gang,
        "peers": _rate(before["waited_s"], gang["waited_s"], seconds) if gang and before and known else None,
        "steps_s": _rate(earlier["steps_done"], job["steps_done"], seconds) if earlier and known else None,
        "device": _rate(earlier["device_busy_s"], job["device_busy_s"], seconds) if earlier and known else None,
        "promise": job["promise"] if job["priority"] == "high" else None,
        "slowdown": known_promise.get("slowdown"),
        "kept": known_promise.get("kept"),
        "held": known_promise.get("held", ""),
        "held_by": known_promise.get("held_by", ""),
        "held_for_s": known_promise.get("held_for_s", 0.0),
        "held_share": _held_share((earlier["promise"] or {}) if earlier else {}, known_promise, seconds),
        "bans": known_promise.get("bans", 0),
    }


def _held_share(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, float] | None:
    """Of a low job that was there before; both are its `promise` in GetStatus."""
    if "held_s" not in before or "held_s" not in after or seconds <= 0.0:
        return None
    shares = {reason: _rate(before["held_s"].get(reason, 0.0), s, seconds) for reason, s in after["held_s"].items()}
    return {reason: share for reason, share in shares.items() if share > 0.0}
