"""The placement as plain data, to be kept over a restart of its coordinator: maps, lists, texts and numbers.

Jobs that ran, or were being stopped, do so still. An attempt that had not started is over: its reservations expire, and
the job waits again, in its old place. What was measured of pairs of programs is kept apart (coordinator/journal.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from gpumux.cluster.events import ClusterJob, DeviceFacts, DeviceId, JobOutcome, NodeJoined, PlacementConfig
from gpumux.cluster.jobs import ClusterNode, JobPhase, PlacedJob
from gpumux.cluster.placement import ClusterPlacement
from gpumux.types import JobId, Priority

ON_DEVICES = (JobPhase.RUNNING, JobPhase.STOPPING)


def facts_of(placement: ClusterPlacement) -> dict[str, Any]:
    """All but nodes and jobs."""
    return {
        "now": placement.now,
        "jobs_so_far": placement.jobs_so_far,
        "attempts_so_far": placement.attempts_so_far,
        "shares": [[int(priority), user, used] for (priority, user), used in placement.shares.settled.items()],
    }


def node_data(node: ClusterNode) -> dict[str, Any]:
    devices = [
        [device.facts.memory_bytes, device.facts.max_jobs, sorted(map(int, device.facts.classes))]
        for device in node.devices
    ]
    return {"name": node.name, "host": node.host, "draining": node.draining, "devices": devices}


def job_data(job: PlacedJob) -> dict[str, Any]:
    """A job. It changes only when something of it has to be kept."""
    on_devices = job.phase in ON_DEVICES
    asked = job.request
    return {
        "request": {
            "id": asked.id,
            "user": asked.user,
            "group": asked.group,
            "priority": int(asked.priority),
            "devices": asked.devices,
            "memory_bytes": asked.memory_bytes,
            "programs": list(asked.programs),
            "urgency": asked.urgency,
            "movable": asked.movable,
        },
        "number": job.number,
        "submitted_at": job.submitted_at,
        "held_since": job.held_since if on_devices else 0.0,
        "phase": job.phase.value if on_devices else JobPhase.WAITING.value,
        "attempt": job.attempt,
        "devices": [[each.node, each.gpu] for each in job.devices] if on_devices else [],
        "waits_on": [[each.node, each.gpu] for each in sorted(job.waits_on)] if on_devices else [],
        "turn_at": None if job.turn_at == inf else job.turn_at,
        "blocked_at": None if job.blocked_at == inf else job.blocked_at,
        "kept": [[each.node, each.gpu] for each in sorted(job.kept)],
        "began": job.began,
        "moves": job.moves,
        "stopped_for": job.stopped_for,
        "outcome": None if job.outcome is None else job.outcome.value,
        "keep": job.keep,
        "asked": job.asked,
        "sizes": list(job.sizes),
        "had": job.had,
    }


def restore(
    config: PlacementConfig, facts: dict[str, Any], nodes: Iterable[dict[str, Any]], jobs: Iterable[dict[str, Any]]
) -> ClusterPlacement:
    """The placement of which `facts_of`, `node_data` and `job_data` made this. Raises KeyError, TypeError or ValueError
    for anything else."""
    placement = ClusterPlacement(config)
    placement.now = float(facts["now"])
    placement.jobs_so_far, placement.attempts_so_far = int(facts["jobs_so_far"]), int(facts["attempts_so_far"])
    placement.shares.settled = {(Priority(priority), user): float(used) for priority, user, used in facts["shares"]}
    for data in nodes:
        devices = tuple(
            DeviceFacts(memory, most, frozenset(map(Priority, classes))) for memory, most, classes in data["devices"]
        )
        placement.add_node(NodeJoined(data["name"], devices, data["host"], bool(data["draining"])))
    for data in sorted(jobs, key=lambda each: int(each["number"])):
        job = _job(data, placement.now)
        placement.jobs[job.id] = job
        if not job.holds:
            continue
        placement.attempts[job.attempt] = job
        for name in job.devices:
            device = placement.devices.get(name)
            if device is not None:  # a node that was lost while the job is still being stopped on others
                device.jobs[job.id] = job
                device.high = job if job.high else device.high
    return placement


def _job(data: dict[str, Any], now: float) -> PlacedJob:
    request = data["request"]
    job = PlacedJob(
        ClusterJob(
            **{
                **request,
                "id": JobId(request["id"]),
                "priority": Priority(request["priority"]),
                "programs": tuple(request["programs"]),
            }
        ),
        int(data["number"]),
        float(data["submitted_at"]),
    )
    job.held_since, job.phase, job.attempt = float(data["held_since"]), JobPhase(data["phase"]), int(data["attempt"])
    job.devices, job.waits_on = tuple(_devices(data["devices"])), set(_devices(data["waits_on"]))
    job.kept = frozenset(_devices(data["kept"]))
    job.turn_at = inf if data["turn_at"] is None else float(data["turn_at"])
    job.blocked_at = inf if data["blocked_at"] is None else float(data["blocked_at"])
    job.began, job.moves, job.stopped_for = bool(data["began"]), int(data["moves"]), str(data["stopped_for"])
    job.outcome, job.keep = None if data["outcome"] is None else JobOutcome(data["outcome"]), bool(data["keep"])
    job.asked = int(data.get("asked", job.asked))  # absent from what was kept before gangs could be made smaller
    job.sizes = tuple([int(size) for size in data.get("sizes", ())])
    job.had = int(data.get("had", 0))  # absent from what was kept before they went back to it
    job.due = now if job.phase is JobPhase.STOPPING else inf  # its ranks are asked again at once
    return job


def _devices(pairs: Iterable[tuple[str, int]]) -> list[DeviceId]:
    return [DeviceId(str(node), int(gpu)) for node, gpu in pairs]
