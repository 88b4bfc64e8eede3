"""What happened between two answers to GetStatus: rates and shares, as `gpumux top` shows them."""

from __future__ import annotations

from typing import Any

NAME_CHARS = 32


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A view of the daemon: what `after` says, with rates since `before` (both bodies of GetStatus).

    seconds   between the two, by the daemon's clock
    device    {name, kind, busy: device seconds a second, high and low: the same by class (more than 1 where
              pieces run at once), memory_bytes, free_bytes}
    guard     None, or {bans, bans_total, harvested: device seconds a second of low work beside high jobs, held: part of the
              time in which low work was held, held_by_reason}
    jobs      high ones first, then by device share, each {job, short, name, uid, priority, state, paused, steps_s, device,
              slowdown, max_slowdown, kept, held, held_by, held_for_s, bans, queued, running, steps_done, steps_failed,
              memory_bytes}; rates of a job that was not there before are None
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
    promise = job["promise"] or {}
    same = ("job", "short", "name", "uid", "priority", "state", "paused", "max_slowdown", "queued", "running")
    counts = ("steps_done", "steps_failed", "memory_bytes")
    known = earlier is not None and seconds > 0.0
    return {
        **{key: job[key] for key in (*same, *counts)},
        "steps_s": _rate(earlier["steps_done"], job["steps_done"], seconds) if earlier and known else None,
        "device": _rate(earlier["device_busy_s"], job["device_busy_s"], seconds) if earlier and known else None,
        "slowdown": promise.get("slowdown"),
        "kept": promise.get("kept"),
        "held": promise.get("held", ""),
        "held_by": promise.get("held_by", ""),
        "held_for_s": promise.get("held_for_s", 0.0),
        "bans": promise.get("bans", 0),
    }
