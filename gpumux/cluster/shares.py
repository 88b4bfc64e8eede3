"""In which order jobs get their turn, and how many devices a user and a group may hold.

Each class has its own fair queue: the user goes first whose jobs of that class have held the fewest device-seconds,
over the user's weight. A user that had no job joins at the level of the one that is furthest behind, so absence saves
nothing up; what a user has had too much is not forgotten before the others have caught up. While a job holds its
devices it is charged for `advance_s` at least, so that a user with many jobs does not get all of a free cluster in one
instant.

Within a user, jobs that ran before and were stopped come first; then the order is by submission, where a step of
urgency counts as `urgency_s` of waiting. So a job's turn always comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from gpumux.cluster.events import NO_QUOTA, ClusterJob, PlacementConfig, Quota
from gpumux.cluster.jobs import PlacedJob
from gpumux.types import Priority

LEAST_S: Final = 1.0  # what a job that ran is charged for at least, so that every job moves its user back
Account = tuple[Priority, str]  # a class and a user


@dataclass(frozen=True, slots=True)
class OverQuota:
    """The owner of a quota that a job does not fit in: "user ada" or "group vision"; and which limit."""

    owner: str
    limit: str


class FairShares:
    """Device-seconds of users whose jobs are known, and of those that are ahead of the others."""

    def __init__(self, config: PlacementConfig) -> None:
        self._config = config
        self.settled: dict[Account, float] = {}  # over the weight, of jobs that no longer hold devices

    def __len__(self) -> int:
        return len(self.settled)

    def joined(self, job: PlacedJob, others: Iterable[PlacedJob], now: float) -> None:
        """The job is new; `others` are all jobs but it."""
        account = job.request.priority, job.request.user
        active = {(each.request.priority, each.request.user) for each in others}
        if account in active:
            return
        used = self.used(others, now)
        level = min((used[each] for each in active if each[0] is account[0]), default=0.0)
        self.settled[account] = max(self.settled.get(account, 0.0), level)

    def advance(self, job: ClusterJob) -> float:
        """What a job is charged as soon as it holds its devices."""
        return self._charge(job, self._config.advance_s)

    def settle(self, job: PlacedJob, now: float) -> None:
        """The job no longer holds its devices, and did run: it is charged for the time that it held them."""
        account = job.request.priority, job.request.user
        charge = self._charge(job.request, max(LEAST_S, now - job.held_since))
        self.settled[account] = self.settled.get(account, 0.0) + charge

    def _charge(self, job: ClusterJob, seconds: float) -> float:
        return seconds * job.devices / self._config.weights.get(job.user, 1.0)

    def used(self, jobs: Iterable[PlacedJob], now: float) -> dict[Account, float]:
        """By account, of all that are known."""
        found = dict(self.settled)
        for job in jobs:
            account = job.request.priority, job.request.user
            held_s = max(self._config.advance_s, now - job.held_since) if job.holds else 0.0
            found[account] = found.get(account, 0.0) + self._charge(job.request, held_s)
        return found

    def prune(self, jobs: Iterable[PlacedJob], now: float) -> None:
        """Forget users without jobs that are not ahead of any that has some."""
        active = {(job.request.priority, job.request.user) for job in jobs}
        used = self.used(jobs, now)
        for account in [each for each in self.settled if each not in active]:
            level = min((used[each] for each in active if each[0] is account[0]), default=None)
            if level is None or self.settled[account] <= level:
                del self.settled[account]

    def rank(self, job: PlacedJob) -> tuple[bool, float, int]:
        """The job's place among those of its user and class, the least first."""
        return not job.began, job.submitted_at - job.request.urgency * self._config.urgency_s, job.number


class QuotaUse:
    """Devices held, by users and groups."""

    def __init__(self, config: PlacementConfig, jobs: Iterable[PlacedJob]) -> None:
        self._config = config
        self._devices: dict[str, int] = {}
        self._high: dict[str, int] = {}
        for job in jobs:
            if job.holds:
                self.add(job.request)

    def add(self, job: ClusterJob) -> None:
        for owner in owners(job):
            self._devices[owner] = self._devices.get(owner, 0) + job.devices
            if job.priority is Priority.HIGH:
                self._high[owner] = self._high.get(owner, 0) + job.devices

    def exceeded(self, job: ClusterJob) -> OverQuota | None:
        """The first quota that the job does not fit in now."""
        for owner, quota in zip(owners(job), _quotas(self._config, job), strict=True):
            held = self._devices.get(owner, 0)
            if quota.devices is not None and held + job.devices > quota.devices:
                return OverQuota(owner, f"holds {held} of {quota.devices} devices")
            held = self._high.get(owner, 0)
            high = job.priority is Priority.HIGH and quota.high_devices is not None
            if high and held + job.devices > (quota.high_devices or 0):
                return OverQuota(owner, f"holds {held} of {quota.high_devices} devices with high jobs")
        return None


def owners(job: ClusterJob) -> tuple[str, str]:
    return f"user {job.user}", f"group {job.group}"


def _quotas(config: PlacementConfig, job: ClusterJob) -> tuple[Quota, Quota]:
    return config.quotas.get(job.user, NO_QUOTA), config.group_quotas.get(job.group, NO_QUOTA)


def most_devices(config: PlacementConfig, job: ClusterJob) -> float:
    """How many devices the job's quotas allow it if its owners hold nothing else; inf: any number."""
    limits = [inf]
    for quota in _quotas(config, job):
        limits += [] if quota.devices is None else [quota.devices]
        limits += [quota.high_devices] if job.priority is Priority.HIGH and quota.high_devices is not None else []
    return min(limits)


def refuse(config: PlacementConfig, job: ClusterJob, jobs: Iterable[PlacedJob]) -> str:
    """Why a job is refused when it is submitted, with the remedy; "" if it is not."""
    known = list(jobs)
    for owner, quota in zip(owners(job), _quotas(config, job), strict=True):
        most = QuotaUse(config, ()).exceeded(job)
        if most is not None and most.owner == owner:
            return f"{job.devices} devices are more than the quota of {owner} allows: ask for fewer, or the operator"
        count = sum([owner in owners(each.request) for each in known])
        if quota.jobs is not None and count >= quota.jobs:
            return (
                f"{owner} has {count} jobs of {quota.jobs} that its quota allows: submit it when one of them has ended"
            )
    return ""
