"""Which jobs of a cluster run on which devices: events in, commands out; pure.

`ClusterPlacement.handle(event, now)` applies the event, places what can be placed, and returns commands. `due` says
when it has to be called again with TimePassed if nothing else happens. What it promises, whatever comes:

- A device has at most one high job, and memory is never promised twice. A gang starts on all its devices or on none.
- A submitted job is answered once. What is stopped for others goes on from its snapshot, and keeps its place.
- A gang that ran goes on with fewer devices, if it may (`SizesKnown`), while the cluster could not give it all of them
  whatever runs there: with as many as it could. One that only waits for others to end keeps its size, but for one
  that was stopped to get all of its devices again, and lost them to others: that one goes on with as many as before.
- A job that waits gets its turn (`shares.py`). If it finds no room then, and others of its class pass it for
  `patience_s`, devices are kept for it until those that run there have ended.

A high job may take a device from low ones, as far as memory and places need it. First it claims its devices, so that
no other job gets them; when the low jobs have left, it reserves. Low jobs run beside high ones while there is room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from gpumux.cluster import events as ev
from gpumux.cluster.costs import LearnedCosts
from gpumux.cluster.events import ClusterCommand, ClusterEvent, DeviceChoice, DeviceId, JobOutcome, PlacementConfig
from gpumux.cluster.jobs import ClusterDevice, ClusterNode, JobPhase, PlacedJob, Refusals, evictions
from gpumux.cluster.shares import FairShares, QuotaUse, most_devices, owners, refuse
from gpumux.types import JobId, Priority

MOST_REFUSED = 3  # times in a row that a device may refuse a gang that was stopped to get it
MOST_DOUBLED = 16  # times retry_s: the longest pause of a job that a device refuses again and again
CROWDED = 0.5  # what a job more on a device counts, where devices are chosen by the number of jobs
EVICTED = 0.5  # what a low job that has to leave counts
OUTCOMES = {"": JobOutcome.DONE}  # by fault; any other is FAILED


class ClusterPlacement:
    """The decisions of a coordinator. Nodes, devices and jobs are there to be read."""

    def __init__(self, config: PlacementConfig | None = None) -> None:
        self.config = config or PlacementConfig()
        self.costs = LearnedCosts()
        self.shares = FairShares(self.config)
        self.nodes: dict[str, ClusterNode] = {}
        self.devices: dict[DeviceId, ClusterDevice] = {}
        self.jobs: dict[JobId, PlacedJob] = {}
        self.now = 0.0
        self.attempts: dict[int, PlacedJob] = {}  # those under way
        self._commands: list[ClusterCommand] = []
        self.jobs_so_far = 0
        self.attempts_so_far = 0
        self._rebalanced_at = 0.0

    # ---- events

    def handle(self, event: ClusterEvent, now: float) -> list[ClusterCommand]:
        """Apply the event, and return what is to be done, in this order. Raises ValueError if time goes back."""
        if now < self.now:
            raise ValueError(f"an event at {now} s after one at {self.now} s")
        self.now = now
        match event:
            case ev.NodeJoined():
                self._node_joined(event)
            case ev.NodeDraining():
                self._node_draining(event.node)
            case ev.NodeLost():
                self._node_lost(event.node)
            case ev.JobSubmitted():
                self._submitted(event.job)
            case ev.JobCancelled():
                self._cancelled(event.job)
            case ev.JobFinished():
                self._finished(event)
            case ev.StartFailed():
                self._start_failed(event)
            case ev.JobDescribed():
                self._described(event)
            case ev.SizesKnown():
                self._sizes_known(event)
            case ev.RankStopped():
                self._rank_stopped(event)
            case ev.DeviceReserved():
                self._answered(event.attempt, event.device, JobPhase.RESERVING)
            case ev.DeviceConfirmed():
                self._answered(event.attempt, event.device, JobPhase.CONFIRMING)
            case ev.DeviceRefused():
                self._refused(event.attempt, event.device)
            case ev.PairMeasured():
                self.costs.learn(event)
            case ev.TimePassed():
                pass
        self._late()
        self._reserve_claimed()
        self._place()
        self._rebalance()
        self._say_empty()
        self.shares.prune(self.jobs.values(), now)
        commands, self._commands = self._commands, []
        return commands

    @property
    def due(self) -> float:
        """When TimePassed is to come at the latest; inf if nothing waits for time."""
        times = [job.due for job in self.jobs.values()]
        waiting = [job for job in self.jobs.values() if not job.holds]
        if waiting:
            times += [device.retry_at for device in self.devices.values()]
            times += [refused.until for job in waiting for refused in job.refusals.values()]
            times += [min(job.turn_at, job.blocked_at) + self.config.patience_s for job in waiting]
        if self.config.rebalance_s < inf and any(
            job.phase is JobPhase.RUNNING and (not job.high or job.request.devices < job.asked)
            for job in self.jobs.values()
        ):
            times.append(self._rebalanced_at + self.config.rebalance_s)
        return min([each for each in times if each > self.now], default=inf)

    # ---- nodes

    def _node_joined(self, event: ev.NodeJoined) -> None:
        known = self.nodes.get(event.node)
        if known is not None and tuple(device.facts for device in known.devices) == event.devices:
            if event.draining:
                self._node_draining(event.node)
            else:
                known.draining = known.said_empty = False
            return
        self._node_lost(event.node)
        self.add_node(event)

    def add_node(self, joined: ev.NodeJoined) -> ClusterNode:
        """Enter a node that is not known."""
        devices = [ClusterDevice(DeviceId(joined.node, i), facts) for i, facts in enumerate(joined.devices)]
        node = self.nodes[joined.node] = ClusterNode(joined.node, devices, joined.host or joined.node, joined.draining)
        self.devices |= {device.id: device for device in devices}
        return node

    def _node_draining(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None or node.draining:
            return
        node.draining = True
        for device in node.devices:
            claimed = () if device.claimed is None else (device.claimed,)
            for job in (*device.jobs.values(), *claimed):
                if job.phase in (JobPhase.CLAIMING, JobPhase.RESERVING, JobPhase.CONFIRMING):
                    self._give_up(job)
                elif job.phase is JobPhase.RUNNING and not job.high and job.request.movable:
                    self._stop(job, f"node {name} drains")
        self._forget_kept(node)

    def _node_lost(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is None:
            return
        for device in node.devices:
            del self.devices[device.id]
        self._forget_kept(node)
        lost = {device.id for device in node.devices}
        for job in [job for job in self.jobs.values() if not lost.isdisjoint(job.devices)]:
            if job.phase in (JobPhase.CLAIMING, JobPhase.RESERVING, JobPhase.CONFIRMING):
                self._give_up(job)
                continue
            if job.phase is JobPhase.RUNNING:
                outcome = None if job.request.movable else JobOutcome.FAILED
                self._stop(job, f"node {name} was lost", outcome, moved=False)
            job.waits_on -= lost
            self._stopped_if_gone(job)

    def _forget_kept(self, node: ClusterNode) -> None:
        gone = {device.id for device in node.devices}
        for job in self.jobs.values():
            if not gone.isdisjoint(job.kept):
                job.kept = frozenset()

    def _say_empty(self) -> None:
        for node in self.nodes.values():
            if node.draining and not node.said_empty and not any(device.jobs for device in node.devices):
                node.said_empty = True
                self._commands.append(ev.NodeEmpty(node.name))

    # ---- jobs

    def _submitted(self, request: ev.ClusterJob) -> None:
        if request.id in self.jobs:
            return
        reason = refuse(self.config, request, self.jobs.values())
        if reason:
            self._commands.append(ev.AnswerJob(request.id, JobOutcome.REFUSED, reason))
            return
        self.jobs_so_far += 1
        job = PlacedJob(request, self.jobs_so_far, self.now)
        self.shares.joined(job, self.jobs.values(), self.now)
        self.jobs[job.id] = job

    def _cancelled(self, name: JobId) -> None:
        job = self.jobs.get(name)
        if job is None:
            return
        if job.phase is JobPhase.RUNNING:
            self._stop(job, "it was cancelled", JobOutcome.CANCELLED, moved=False)
            job.keep = False
        elif job.phase is JobPhase.STOPPING:
            job.stopped_for, job.outcome, job.keep = "it was cancelled", JobOutcome.CANCELLED, False
        else:
            self._give_up(job)
            self._answer(job, JobOutcome.CANCELLED, "it was cancelled while it waited")

    def _finished(self, event: ev.JobFinished) -> None:
        job = self.attempts.get(event.attempt)
        if job is None or job.phase not in (JobPhase.RUNNING, JobPhase.STOPPING):
            return
        self.shares.settle(job, self.now)
        self._release(job, job.devices)
        self._answer(job, OUTCOMES.get(event.fault, JobOutcome.FAILED), event.fault)

    def _start_failed(self, event: ev.StartFailed) -> None:
        job = self.attempts.get(event.attempt)
        if job is None:
            return
        if job.phase is JobPhase.RUNNING:
            devices = job.devices
            self._give_up(job)
            if event.memory_bytes > job.request.memory_bytes:
                job.request = replace(job.request, memory_bytes=event.memory_bytes)
            else:
                for name in devices:
                    self.devices[name].retry_at = self.now + self.config.retry_s
                    self._pause(job, name)
        elif job.phase is JobPhase.STOPPING:
            job.waits_on.clear()
            self._stopped_if_gone(job, ran=False)

    def _described(self, event: ev.JobDescribed) -> None:
        job = self.jobs.get(event.job)
        if job is not None:
            job.request = replace(job.request, programs=event.programs, movable=event.movable)

    def _sizes_known(self, event: ev.SizesKnown) -> None:
        job = self.jobs.get(event.job)
        if job is None:
            return
        job.sizes = tuple(sorted({size for size in event.sizes if 0 < size < job.asked}))
        if job.request.devices in (job.asked, *job.sizes):
            return
        if job.phase is JobPhase.RUNNING and job.request.movable:
            self._stop(job, f"it can't go on with {job.request.devices} devices")
        elif job.phase in (JobPhase.CLAIMING, JobPhase.RESERVING, JobPhase.CONFIRMING):
            self._give_up(job)

    def _answer(self, job: PlacedJob, outcome: JobOutcome, reason: str) -> None:
        """The end of the job, which holds nothing more."""
        del self.jobs[job.id]
        self._commands.append(ev.AnswerJob(job.id, outcome, reason))

    # ---- an attempt: claim, reserve, confirm, start

    def _begin(self, job: PlacedJob, devices: list[ClusterDevice]) -> None:
        """The job gets these devices, high ones as soon as low jobs have left them."""
        self.attempts_so_far += 1
        job.attempt, job.devices, job.held_since = self.attempts_so_far, tuple(each.id for each in devices), self.now
        job.kept, job.phase = frozenset(), JobPhase.CLAIMING
        self.attempts[job.attempt] = job
        if job.high:
            for device in devices:
                device.high = device.claimed = job
            for device in devices:
                self._evict(job, device)
        if not self._has_room(job):
            return
        self._reserve(job)

    def _evict(self, job: PlacedJob, device: ClusterDevice) -> None:
        device.claimed = None
        leaving = evictions(device, job.request.memory_bytes)
        device.claimed = job
        for low in leaving or ():
            if low.phase is JobPhase.RUNNING:
                self._stop(low, f"high job {job.id} needs the room on {device.id}")
            elif low.phase is not JobPhase.STOPPING:
                self._give_up(low)

    def _has_room(self, job: PlacedJob) -> bool:
        """Whether everything that the job takes is free; its claims are counted as taken."""
        devices = [self.devices[each] for each in job.devices]
        return all(device.free_bytes >= 0 and device.free_places >= 0 for device in devices) if job.high else True

    def _reserve_claimed(self) -> None:
        for job in [job for job in self.jobs.values() if job.phase is JobPhase.CLAIMING]:
            if self._has_room(job):
                self._reserve(job)

    def _reserve(self, job: PlacedJob) -> None:
        job.phase, job.waits_on, job.due = JobPhase.RESERVING, set(job.devices), self.now + self.config.answer_s
        for name in job.devices:
            device, request = self.devices[name], job.request
            device.claimed = None if device.claimed is job else device.claimed
            device.jobs[job.id] = job
            self._commands.append(
                ev.ReserveDevice(job.attempt, name, job.id, request.priority, request.memory_bytes, self.config.lease_s)
            )

    def _answered(self, attempt: int, device: DeviceId, phase: JobPhase) -> None:
        job = self.attempts.get(attempt)
        if job is None or job.phase is not phase or device not in job.waits_on:
            return
        job.waits_on.discard(device)
        if job.waits_on:
            return
        if phase is JobPhase.RESERVING:
            job.phase, job.waits_on, job.due = JobPhase.CONFIRMING, set(job.devices), self.now + self.config.answer_s
            self._commands += [ev.ConfirmDevice(job.attempt, each, job.id, self.config.lease_s) for each in job.devices]
        else:
            job.phase, job.due, job.turn_at, job.blocked_at = JobPhase.RUNNING, inf, inf, inf
            job.races_lost = job.races_lost + 1 if job.had and job.request.devices < job.asked else 0
            job.had = 0
            self._commands.append(ev.StartJob(job.id, job.attempt, job.devices, job.began))

    def _refused(self, attempt: int, name: DeviceId) -> None:
        job = self.attempts.get(attempt)
        if job is None or job.phase not in (JobPhase.RESERVING, JobPhase.CONFIRMING) or name not in job.devices:
            return
        self.devices[name].retry_at = self.now + self.config.retry_s
        self._pause(job, name)
        self._give_up(job)

    def _pause(self, job: PlacedJob, name: DeviceId) -> None:
        """Leave a device that refused the job to others, each time for twice as long: they would make room for it there
        again and again."""
        before = job.refusals[name].in_a_row if name in job.refusals else 0
        pause = self.config.retry_s * min(2.0**before, MOST_DOUBLED)
        job.refusals[name] = Refusals(before + 1, self.now + pause)

    def _give_up(self, job: PlacedJob) -> None:
        """End an attempt that runs nothing: the job waits again."""
        reserved = job.phase in (JobPhase.RESERVING, JobPhase.CONFIRMING, JobPhase.RUNNING)
        self._release(job, job.devices if reserved else ())
        self._wait_again(job)

    def _release(self, job: PlacedJob, devices: tuple[DeviceId, ...]) -> None:
        """The attempt is over: the job holds nothing more. Tell the daemons of `devices`."""
        self.attempts.pop(job.attempt, None)
        for name in job.devices:
            device = self.devices.get(name)
            if device is None:
                continue
            device.jobs.pop(job.id, None)
            device.claimed = None if device.claimed is job else device.claimed
            device.high = None if device.high is job else device.high
            if name in devices:
                self._commands.append(ev.ReleaseDevice(job.attempt, name, job.id))

    def _wait_again(self, job: PlacedJob) -> None:
        job.phase, job.devices, job.due = JobPhase.WAITING, (), inf
        job.waits_on = set()

    def _late(self) -> None:
        """Give up attempts whose answers did not come, and ask again for ranks to be stopped."""
        for job in [job for job in self.jobs.values() if job.due <= self.now]:
            if job.phase is JobPhase.STOPPING:
                self._ask_to_stop(job)
                continue
            for name in job.waits_on:
                self.devices[name].retry_at = self.now + self.config.retry_s
            self._give_up(job)

    # ---- stopping what runs

    def _stop(self, job: PlacedJob, reason: str, outcome: JobOutcome | None = None, *, moved: bool = True) -> None:
        """Stop all ranks of a running job. Without an outcome it goes on elsewhere."""
        job.phase, job.waits_on = JobPhase.STOPPING, {each for each in job.devices if each in self.devices}
        job.stopped_for, job.outcome, job.keep = reason, outcome, outcome is None
        job.moves += moved
        self._ask_to_stop(job)

    def _ask_to_stop(self, job: PlacedJob) -> None:
        job.due = self.now + self.config.answer_s
        waits_on = [each for each in job.devices if each in job.waits_on]
        self._commands += [ev.StopRank(job.id, job.attempt, each, job.keep) for each in waits_on]

    def _rank_stopped(self, event: ev.RankStopped) -> None:
        job = self.attempts.get(event.attempt)
        if job is not None and job.phase is JobPhase.STOPPING:
            job.waits_on.discard(event.device)
            self._stopped_if_gone(job)

    def _stopped_if_gone(self, job: PlacedJob, *, ran: bool = True) -> None:
        if job.phase is not JobPhase.STOPPING or job.waits_on:
            return
        self.shares.settle(job, self.now)
        self._release(job, ())
        if ran:
            job.began = True
            for name in job.devices:  # it did not refuse the job this time
                job.refusals.pop(name, None)
        if job.outcome is not None:
            self._answer(job, job.outcome, job.stopped_for)
        else:
            self._wait_again(job)

    # ---- how many devices a gang gets

    def _resize(self) -> None:
        """Let gangs that wait, and ran before, go on with what the cluster could give them; whole again if it can."""
        for job in self.jobs.values():
            if job.asked > 1 and job.began and not job.holds:
                size = self._size(job)
                if size != job.request.devices:
                    job.request = replace(job.request, devices=size)
                    job.kept = job.kept if len(job.kept) == size else frozenset()

    def _size(self, job: PlacedJob) -> int:
        most = self.most(job)
        if most >= job.asked and job.had and not self._can_be_whole(job):
            most = job.had
        fewer = [size for size in job.sizes if size <= most]
        return max(fewer) if fewer and most < job.asked else job.asked

    def _can_be_whole(self, job: PlacedJob) -> bool:
        """Whether a gang that was stopped to get all of its devices can have them still, perhaps after a short pause of
        one that refused it: a daemon may still be closing what ran there."""
        if self._over_quota_whole(job):
            return False
        taken = [name for name, refused in job.refusals.items() if refused.in_a_row >= MOST_REFUSED]
        found = [device for device in self.candidates(job, paused=True) if device.id not in taken]
        return len(found) >= job.asked

    def _over_quota_whole(self, job: PlacedJob) -> bool:
        others = [each for each in self.jobs.values() if each is not job]
        return QuotaUse(self.config, others).exceeded(replace(job.request, devices=job.asked)) is not None

    def most(self, job: PlacedJob) -> int:
        """How many devices the cluster and the quotas could give the job, whatever runs there now."""
        return int(min(self._suiting(job), most_devices(self.config, job.request)))

    def _suiting(self, job: PlacedJob) -> int:
        request = job.request
        return sum(
            self._takes(device, request.priority) and device.facts.memory_bytes >= request.memory_bytes
            for device in self.devices.values()
        )

    # ---- which job gets which devices

    def _place(self) -> None:
        """Give devices to waiting jobs as far as there are some, and again where devices are no longer kept."""
        while self._place_in_order():
            pass

    def _place_in_order(self) -> bool:
        """Whether devices are no longer kept that were: they may suit jobs that were looked at before."""
        freed = False
        quotas = QuotaUse(self.config, self.jobs.values())
        for priority in Priority.HIGH, Priority.LOW:
            self._resize()  # for low jobs again: one that a high job took the devices from waits since
            blocked: dict[str, PlacedJob] = {}  # by owner: the first job that its quota is too small for
            no_room: set[tuple[int, int, bool]] = set()  # kinds of jobs that found none
            first = True
            for job in self._in_order(priority):
                request = job.request
                if any(owner in blocked and self.overdue(blocked[owner]) for owner in owners(request)):
                    continue
                if over := quotas.exceeded(request):
                    if over.owner not in blocked:
                        blocked[over.owner] = job
                        job.blocked_at = min(job.blocked_at, self.now)
                    continue
                kind = request.devices, request.memory_bytes, request.movable
                devices = None if kind in no_room and not job.kept else self._devices_for(job)
                if devices is not None:
                    quotas.add(request)
                    freed = freed or bool(job.kept)
                    self._begin(job, devices)
                    continue
                if not job.refusals:  # others of its kind may have been refused nowhere
                    no_room.add(kind)
                if not self.overdue(job):
                    if first and self.possible(job):
                        job.turn_at = min(job.turn_at, self.now)
                        first = False
                elif not job.kept or not job.kept <= {device.id for device in self._can_keep(job)}:
                    before, job.kept = job.kept, self._to_keep(job)
                    freed = freed or not before <= job.kept
        return freed

    def overdue(self, job: PlacedJob) -> bool:
        return min(job.turn_at, job.blocked_at) + self.config.patience_s <= self.now

    def possible(self, job: PlacedJob) -> bool:
        """Whether the cluster has the devices that the job needs, whatever runs there now."""
        return self._suiting(job) >= job.request.devices

    def _in_order(self, priority: Priority) -> Iterator[PlacedJob]:
        """Waiting jobs of a class: those first that are overdue, by when their turn came; then always the next of the
        user that has had least. What is placed on the way counts at once."""
        waiting = [job for job in self.jobs.values() if not job.holds and job.request.priority is priority]
        overdue = [job for job in waiting if self.overdue(job)]
        yield from sorted(overdue, key=lambda job: (min(job.turn_at, job.blocked_at), job.number))
        used = self.shares.used(self.jobs.values(), self.now)
        queues: dict[str, list[PlacedJob]] = {}
        for job in sorted([job for job in waiting if job not in overdue], key=self.shares.rank, reverse=True):
            queues.setdefault(job.request.user, []).append(job)
        while queues:
            user = min(queues, key=lambda user: (used.get((priority, user), 0.0), queues[user][-1].number))
            job = queues[user].pop()
            yield job
            if job.holds:
                account = priority, user
                used[account] = used.get(account, 0.0) + self.shares.advance(job.request)
            if not queues[user]:
                del queues[user]

    def candidates(self, job: PlacedJob, *, paused: bool = False) -> list[ClusterDevice]:
        """Devices that the job could get now: in a high job's case, perhaps after low jobs have left. What is kept for
        a high job takes no low job that could not leave. `paused`: those too that get nothing for a while, because they
        refused."""
        request, kept = job.request, set[DeviceId]()
        for other in self.jobs.values():
            if other is not job and (other.high is job.high or (other.high and not request.movable)):
                kept |= other.kept
        found = []
        for device in self.devices.values():
            if device.id in kept or not self._takes(device, request.priority):
                continue
            if not paused and (device.retry_at > self.now or self._paused(job, device)):
                continue
            if job.high:
                fits = device.high is None and evictions(device, request.memory_bytes) is not None
            else:
                fits = device.free_bytes >= request.memory_bytes and device.free_places > 0
            if fits:
                found.append(device)
        return found

    def _paused(self, job: PlacedJob, device: ClusterDevice) -> bool:
        return device.id in job.refusals and job.refusals[device.id].until > self.now

    def _takes(self, device: ClusterDevice, priority: Priority) -> bool:
        return priority in device.facts.classes and not self.nodes[device.id.node].draining

    def _devices_for(self, job: PlacedJob) -> list[ClusterDevice] | None:
        """The devices that suit the job best; those of a gang are on as few hosts as possible."""
        found = self.candidates(job)
        if len(found) < job.request.devices:
            return None
        ranked = sorted(found, key=lambda device: (-self._score(job, device), -device.free_bytes, device.id))
        return self._on_few_hosts(ranked, job.request.devices)

    def _on_few_hosts(self, ranked: list[ClusterDevice], count: int) -> list[ClusterDevice]:
        """`count` of the devices, best first, on as few hosts as possible: one's if it has enough, else always those of
        the host that has most."""
        by_host: dict[str, list[ClusterDevice]] = {}
        for device in ranked:
            by_host.setdefault(self.nodes[device.id.node].host, []).append(device)
        chosen: list[ClusterDevice] = []
        while len(chosen) < count:
            missing = count - len(chosen)
            enough = [host for host in by_host if len(by_host[host]) >= missing]
            if enough:
                host = min(enough, key=lambda name: ranked.index(by_host[name][missing - 1]))
            else:
                host = max(by_host, key=lambda name: len(by_host[name]))
            chosen += by_host.pop(host)[:missing]
        return chosen

    def _score(self, job: PlacedJob, device: ClusterDevice) -> float:
        """How well the device suits the job; its own presence there does not count."""
        lows = [low for low in device.lows if low is not job]
        leaving: list[PlacedJob] = []
        if job.high and device.high is not job:
            leaving = evictions(device, job.request.memory_bytes) or []
            lows = [low for low in lows if low not in leaving]
        if self.config.choice is not DeviceChoice.LEARNED:
            others = len(lows) + (device.high not in (None, job))
            sign = 1 if self.config.choice is DeviceChoice.PACK else -1
            return sign * CROWDED * others - EVICTED * len(leaving)
        programs = job.request.programs
        beside = [low.request.programs for low in lows]
        if job.high:
            return self.costs.worth(programs, beside) - self.costs.worth(None, beside) - EVICTED * len(leaving)
        return self.costs.gain(None if device.high is None else device.high.request.programs, beside, programs)

    def _can_keep(self, job: PlacedJob) -> list[ClusterDevice]:
        """Devices that will have room for the job once jobs of its class have ended."""
        request, found = job.request, []
        for device in self.devices.values():
            high = None if job.high else device.high
            room = device.facts.memory_bytes - (0 if high is None else high.request.memory_bytes)
            places = device.facts.max_jobs - (high is not None)
            if self._paused(job, device):
                continue
            if self._takes(device, request.priority) and room >= request.memory_bytes and places > 0:
                found.append(device)
        return found

    def _to_keep(self, job: PlacedJob) -> frozenset[DeviceId]:
        """Devices to keep for an overdue job: those that are least used now; none if there are too few."""
        taken = {name for each in self.jobs.values() if each.high is job.high and each is not job for name in each.kept}
        found = [device for device in self._can_keep(job) if device.id not in taken]
        if len(found) < job.request.devices:
            return frozenset()
        found.sort(key=lambda device: (device.high is not None, len(device.jobs), -device.free_bytes, device.id))
        return frozenset([device.id for device in self._on_few_hosts(found, job.request.devices)])

    # ---- jobs that would do better elsewhere

    def _rebalance(self) -> None:
        """Once in a while, stop gangs that can have all of their devices again, and the low jobs that would gain most
        elsewhere. They are placed anew when they have."""
        config = self.config
        if self.now < self._rebalanced_at + config.rebalance_s:
            return
        self._rebalanced_at = self.now
        for job in [job for job in self.jobs.values() if job.request.devices < job.asked]:
            self._grow(job)
        if config.choice is DeviceChoice.PACK:
            return
        if any(not job.holds and not job.high and self.possible(job) for job in self.jobs.values()):
            return
        gains: list[tuple[float, int, PlacedJob, DeviceId]] = []
        for job in self.jobs.values():
            settled = self.now - job.held_since >= 2 * config.rebalance_s
            if (
                job.high
                or job.phase is not JobPhase.RUNNING
                or len(job.devices) > 1
                or not (settled and job.request.movable)
            ):
                continue
            here = self._score(job, self.devices[job.devices[0]])
            there = [
                (self._score(job, device), device.id) for device in self.candidates(job) if device.id not in job.devices
            ]
            best, where = max(there, default=(-inf, job.devices[0]))
            if best - here >= config.move_gain:
                gains.append((best - here, job.number, job, where))
        used: set[DeviceId] = set()
        for gain, _, job, where in sorted(gains, key=lambda each: (-each[0], each[1]))[: config.moves_at_once]:
            if where not in used:
                used.add(where)
                self._stop(job, f"it gets {gain:.2f} of a device more on {where}", moved=False)

    def _grow(self, job: PlacedJob) -> None:
        """Stop a gang that runs with fewer devices than it was submitted for if all of these are free, or its own. They
        are kept for it until it has left."""
        patience = 2 * self.config.rebalance_s * min(2.0**job.races_lost, MOST_DOUBLED)
        settled = self.now - job.held_since >= patience
        if job.phase is not JobPhase.RUNNING or not (settled and job.request.movable):
            return
        others = [each for each in self.jobs.values() if each is not job]
        own = [name for name in job.devices if self._takes(self.devices[name], job.request.priority)]
        free = [*own, *(device.id for device in self.candidates(job) if device.id not in own)]
        if len(free) < job.asked or self._over_quota_whole(job):
            return
        if any(not each.holds and each.high is job.high and self.possible(each) for each in others):
            return  # jobs that wait come first
        self._stop(job, f"all of the {job.asked} devices that it was submitted for can be had again", moved=False)
        job.kept, job.had = frozenset(free[: job.asked]), job.request.devices
