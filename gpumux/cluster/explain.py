"""Why a job waits, where it is, or why it is being stopped, in sentences, the most important first."""

from __future__ import annotations

from collections import Counter

from gpumux.cluster.jobs import ClusterDevice, JobPhase, PlacedJob, evictions
from gpumux.cluster.placement import ClusterPlacement
from gpumux.cluster.shares import QuotaUse, owners
from gpumux.types import Priority
from gpumux.wording import counted

GIB = 2**30


def explain(placement: ClusterPlacement, job: PlacedJob) -> list[str]:
    """Sentences about a job of the placement, as of its last event."""
    where = ", ".join(map(str, job.devices))
    match job.phase:
        case JobPhase.WAITING:
            return _waiting(placement, job)
        case JobPhase.CLAIMING:
            leaving = {low.id for name in job.devices for low in placement.devices[name].jobs.values() if not low.high}
            return [f"It gets {where} as soon as low jobs have left: {', '.join(sorted(leaving))}."]
        case JobPhase.RESERVING | JobPhase.CONFIRMING:
            missing = ", ".join(map(str, sorted(job.waits_on)))
            return [f"It starts on {where}; an answer is missing from {missing}."]
        case JobPhase.RUNNING:
            return [f"It has run on {where} for {placement.now - job.held_since:.0f} s.", *_smaller(job), *_moved(job)]
        case JobPhase.STOPPING:
            then = "goes on elsewhere from its snapshot" if job.outcome is None else f"is answered: {job.outcome.value}"
            return [f"It is being stopped on {where}, because {job.stopped_for}; then it {then}."]


def _smaller(job: PlacedJob) -> list[str]:
    if job.request.devices == job.asked:
        return []
    return [
        f"It was submitted for {job.asked} devices and goes on with {job.request.devices}, since the cluster had no"
        " more for it; with all of them when they are free again."
    ]


def _moved(job: PlacedJob) -> list[str]:
    return [f"It was stopped {job.moves} times to make room for high jobs."] if job.moves else []


def _waiting(placement: ClusterPlacement, job: PlacedJob) -> list[str]:
    request, lines = job.request, _left(placement, job)
    over = QuotaUse(placement.config, placement.jobs.values()).exceeded(request)
    blocking = _blocking(placement, job)
    if over is not None:
        lines.append(
            f"It needs {counted(request.devices, 'device')}, and {over.owner} {over.limit}: it waits for their jobs to"
            " end."
        )
    elif blocking is not None:
        lines.append(f"Job {blocking.id} of the same user or group has waited longer for its quota, and goes first.")
    else:
        lines.append(_room(placement, job))
    before = [
        each
        for each in placement.jobs.values()
        if not each.holds and each.request.user == request.user and each.request.priority is request.priority
        if placement.shares.rank(each) < placement.shares.rank(job)
    ]
    if before:
        comes = "comes" if len(before) == 1 else "come"
        lines.append(f"{counted(len(before), 'job')} of its user {comes} before it.")
    if job.kept:
        lines.append(f"Kept for it until it starts: {', '.join(map(str, sorted(job.kept)))}.")
    if job.stopped_for and job.began:
        lines.append(f"It was stopped because {job.stopped_for}, and goes on from its snapshot.")
    return [*lines, *_moved(job)]


def _left(placement: ClusterPlacement, job: PlacedJob) -> list[str]:
    """How a gang that ran goes on, if the cluster has fewer devices for it than it was submitted for."""
    most = placement.most(job)
    if not job.began or job.asked == 1 or most >= job.asked:
        return []
    left = f"{most} of the {job.asked} devices that it was submitted for are left"
    if job.request.devices < job.asked:
        return [f"{left}, it goes on with {job.request.devices}."]
    if not job.sizes:
        return [f"{left}, and it may not go on with fewer than {job.asked}: it waits for others."]
    return [f"{left}, and it goes on with {job.sizes[0]} at least: it waits for others."]


def _blocking(placement: ClusterPlacement, job: PlacedJob) -> PlacedJob | None:
    """An overdue job that a quota holds, and that this job may not pass."""
    quotas = QuotaUse(placement.config, placement.jobs.values())
    for other in placement.jobs.values():
        if other is job or other.holds or other.request.priority is not job.request.priority:
            continue
        over = quotas.exceeded(other.request)
        if over is not None and over.owner in owners(job.request) and placement.overdue(other):
            return other
    return None


def _room(placement: ClusterPlacement, job: PlacedJob) -> str:
    """Which devices can't take the job, and why."""
    request = job.request
    needs = f"It needs {counted(request.devices, 'device')} with {request.memory_bytes / GIB:.1f} GiB"
    found = placement.candidates(job)
    names = {device.id for device in found}
    reasons = Counter(
        [_why_not(placement, device, job) for device in placement.devices.values() if device.id not in names]
    )
    if not placement.possible(job):
        needs += ", which the cluster does not have now"
    if len(found) >= request.devices:
        return f"{needs}, and they have just become free."
    listed = [f"{count} {reason}" for reason, count in reasons.most_common()]
    return f"{needs}; of {counted(len(placement.devices), 'device')} {len(found)} could take it" + "".join(
        [f", {each}" for each in listed] + ["."]
    )


def _why_not(placement: ClusterPlacement, device: ClusterDevice, job: PlacedJob) -> str:
    request = job.request
    if placement.nodes[device.id.node].draining:
        return "drain"
    if request.priority not in device.facts.classes:
        return f"take no {request.priority.name.lower()} jobs"
    if device.facts.memory_bytes < request.memory_bytes:
        return "have less memory than that"
    refused = job.refusals.get(device.id)
    if refused is not None and refused.until > placement.now:
        return f"refused it {refused.in_a_row} times in a row (the coordinator's log says why)"
    if device.retry_at > placement.now:
        return "refused or did not answer just now"
    if request.priority is Priority.HIGH and device.high is not None:
        return "run a high job"
    room = (
        evictions(device, request.memory_bytes) is not None
        if job.high
        else device.free_bytes >= request.memory_bytes and device.free_places > 0
    )
    return "are kept for jobs that have waited longer" if room else "have no room beside other jobs"
