"""The data of a cluster's status page, from the state of its coordinator; pure.

The page asks for no password. So jobs have no names there, and users and groups their numbers, unless the operator
says otherwise (`named`; docs/security.md).
"""

from __future__ import annotations

from math import inf
from typing import Any, Final

from gpumux.cluster.events import NO_QUOTA, ClusterJob, Quota
from gpumux.cluster.explain import explain
from gpumux.coordinator.core import ClientJob, Coordinator
from gpumux.types import Priority

MOST_REASONS: Final = (
    8  # waiting jobs with a reason in each answer, those that wait longest: up to 5 ms each with 300 jobs
)


def body(coordinator: Coordinator, now: float, *, named: bool) -> dict[str, Any]:
    """What the page shows, as plain data: times in seconds, sizes in bytes. `now`: of the coordinator's clock.

    nodes   [{name, host, state ("up", "away", "draining", "lost"), since_s (away or draining; None: up, or drained
            by a coordinator that did not keep the time), why, memory_bytes, used_bytes, max_jobs, jobs, high, kept,
            verdict}]
    waiting, placed  jobs [{short, name, user, priority, devices, memory_bytes, state, nodes, since_s, moves, why}];
            waiting ones longest first, `why` of the first MOST_REASONS
    users   [{user, devices (held), high_devices, jobs, waiting, share (of the devices held), fair_share, quota
            {devices, high_devices, jobs; None: no limit}}], the one that holds most first; groups, if `named`, are the
            same for those with a quota, and without shares
    counts  of jobs since the start
    """
    placement = coordinator.placement
    rows = [_job(coordinator, record, now, named) for record in coordinator.jobs.values()]
    waiting = sorted([row for row in rows if row["state"] == "waiting"], key=lambda row: -row["since_s"])
    by_short = {record.short: record for record in coordinator.jobs.values()}
    for row in waiting[:MOST_REASONS]:
        row["why"] = _sentences(coordinator, by_short[row["short"]], named)[0]
    return {
        "nodes": _nodes(coordinator, now),
        "devices": len(placement.devices),
        "waiting": waiting,
        "placed": [row for row in rows if row["state"] != "waiting"],
        "users": _users(coordinator, named),
        "groups": _groups(coordinator) if named else [],
        "counts": dict(coordinator.counts),
        "named": named,
    }


def explanation(coordinator: Coordinator, short: str, *, named: bool) -> dict[str, Any] | None:
    """Why the job with this short id waits, or where it is: {short, name, priority, sentences}; None if there is no
    such job."""
    for record in coordinator.jobs.values():
        if record.short == short:
            return {
                "short": short,
                "name": record.name if named else "",
                "priority": coordinator.placement.jobs[record.id].request.priority.name.lower(),
                "sentences": _sentences(coordinator, record, named),
            }
    return None


def _sentences(coordinator: Coordinator, record: ClientJob, named: bool) -> list[str]:
    placed = coordinator.placement.jobs[record.id]
    lines = [coordinator.shortened(line, lambda job: True) for line in explain(coordinator.placement, placed)]
    if named:
        return lines
    user, group = f"user {placed.request.user}", f"group {placed.request.group}"  # as its quotas are called
    return [line.replace(user, _user(record, placed.request, named)).replace(group, "its group") for line in lines]


def _user(record: ClientJob, request: ClusterJob, named: bool) -> str:
    return request.user if named else f"uid {record.uid}"


def _job(coordinator: Coordinator, record: ClientJob, now: float, named: bool) -> dict[str, Any]:
    placed = coordinator.placement.jobs[record.id]
    request = placed.request
    return {
        "short": record.short,
        "name": record.name if named else "",
        "user": _user(record, request, named),
        "priority": request.priority.name.lower(),
        "devices": request.devices,
        "memory_bytes": request.memory_bytes,
        "state": placed.phase.value,
        "nodes": [device.node for device in placed.devices],
        "since_s": max(0.0, now - (placed.held_since if placed.holds else placed.submitted_at)),
        "moves": placed.moves,
        "why": "",
    }


def _nodes(coordinator: Coordinator, now: float) -> list[dict[str, Any]]:
    found = []
    for report in coordinator.node_reports():
        daemon = coordinator.daemons[report["name"]]
        since = daemon.away_since if daemon.away_since < inf else None
        if report["state"] == "draining":
            since = coordinator.drained.get(daemon.node)
        del report["endpoint"]
        found.append({**report, "since_s": None if since is None else max(0.0, now - since)})
    return found


def _use(jobs: list[tuple[ClusterJob, bool]]) -> dict[str, Any]:
    """Of jobs, each with whether it holds its devices."""
    held = [job for job, holds in jobs if holds]
    return {
        "devices": sum(job.devices for job in held),
        "high_devices": sum(job.devices for job in held if job.priority is Priority.HIGH),
        "jobs": len(jobs),
        "waiting": len(jobs) - len(held),
    }


def _users(coordinator: Coordinator, named: bool) -> list[dict[str, Any]]:
    config = coordinator.placement.config
    jobs: dict[str, list[tuple[ClusterJob, bool]]] = {}
    labels: dict[str, str] = {}
    for record in coordinator.jobs.values():
        placed = coordinator.placement.jobs[record.id]
        jobs.setdefault(placed.request.user, []).append((placed.request, placed.holds))
        labels[placed.request.user] = _user(record, placed.request, named)
    uses = {user: _use(each) for user, each in jobs.items()}
    held = sum(use["devices"] for use in uses.values())
    weights = {user: config.weights.get(user, 1.0) for user in jobs}
    found = [
        {
            "user": labels[user],
            **use,
            "share": use["devices"] / held if held else 0.0,
            "fair_share": weights[user] / sum(weights.values()),
            "quota": _quota(config.quotas.get(user, NO_QUOTA)),
        }
        for user, use in uses.items()
    ]
    return sorted(found, key=lambda each: (-each["devices"], -each["waiting"], each["user"]))


def _groups(coordinator: Coordinator) -> list[dict[str, Any]]:
    jobs: dict[str, list[tuple[ClusterJob, bool]]] = {}
    for placed in coordinator.placement.jobs.values():
        jobs.setdefault(placed.request.group, []).append((placed.request, placed.holds))
    quotas = coordinator.placement.config.group_quotas
    return [
        {"user": f"group {group}", **_use(jobs[group]), "quota": _quota(quotas[group])}
        for group in sorted(jobs)
        if group in quotas
    ]


def _quota(quota: Quota) -> dict[str, int | None]:
    return {"devices": quota.devices, "high_devices": quota.high_devices, "jobs": quota.jobs}
