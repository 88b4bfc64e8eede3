"""Bodies of GetStatus for the tests of `gpumux top`."""

from __future__ import annotations

import copy

KEPT = "mean 1.04 of 1.10, tail 1.10 of 1.20 in 80 steps: kept"
BROKEN = "mean 1.04 of 1.10, tail 2.36 of 1.20 in 80 steps: BROKEN for 12 s"
HIGH = {
    "verdict": KEPT, "slowdown": 1.04, "slowdown_p99": 1.1, "promised": 1.1, "promised_p99": 1.2, "kept": True,
    "steps": 80, "broken_for_s": 0.0, "steps_over": 0, "solo_step_s": 0.01, "bans": 1,
}  # fmt: skip
BREAKS = {"verdict": BROKEN, "slowdown_p99": 2.36, "kept": False, "broken_for_s": 12.0}
UNMEASURED = {
    "verdict": "mean ? of 1.10, tail ? of 1.20: not measured yet", "slowdown": None, "slowdown_p99": None, "kept": None,
}  # fmt: skip
LOW = {"held": "budget", "held_by": "j1", "held_for_s": 0.25, "held_s": {"budget": 4.0}, "too_long": None, "bans": 1}


def job(short, priority="low", promise=None, **changes):
    """A job; `promise` changes what HIGH or LOW say."""
    base = {
        "job": short * 16, "short": short, "name": f"job {short}", "uid": 7, "priority": priority, "state": "open",
        "paused": False, "queued": 1, "running": 1, "steps_done": 100, "steps_failed": 0, "memory_bytes": 1 << 20,
        "device_busy_s": 10.0, "max_slowdown": 1.1, "mine": True,
        "promise": copy.deepcopy(HIGH if priority == "high" else LOW) | (promise or {}),
    }  # fmt: skip
    return base | changes


def body(**changes):
    base = {
        "daemon": {"version": "1", "pid": 7, "uptime_s": 60.0, "policy": "guarded"},
        "device": {"kind": "cpu", "name": "A CPU"},
        "memory": {"total_bytes": 1 << 30, "free_bytes": 1 << 29, "shared_bytes": 0},
        "sessions": 3,
        "jobs": [job("j2"), job("j1", "high"), job("j3")],
        "guard": {"bans": 1, "bans_total": 4, "probes_total": 1, "harvested_s": 5.0,
                  "held_s": {"budget": 1.0, "gap": 0.0}},
    }  # fmt: skip
    return base | changes


def later(before, seconds=2.0, **per_job):
    """The same daemon, `seconds` later; `per_job`: the growth of each short id's counters."""
    after = copy.deepcopy(before)
    after["daemon"]["uptime_s"] += seconds
    for entry in after["jobs"]:
        steps, busy = per_job.get(entry["short"], (0, 0.0))
        entry["steps_done"] += steps
        entry["device_busy_s"] += busy
    return after
