"""A cluster on a virtual clock around the placement: daemons with reservations and leases, jobs that run, nodes that
die, messages that are late or lost. Everything comes from one seed. `World.run` raises AssertionError when something
does not hold that the placement promises.

Histories are of three kinds. *calm*: messages are quick and none is lost, so a daemon has no cause to refuse anything
and a gang none to fail at its start. *rough*: messages are late and lost, foreign jobs take memory. *crowded*: small
jobs never end to come, and one large job among them has to be started in bounded time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random

import msgpack

from gpumux.cluster import events as ev
from gpumux.cluster.events import ClusterJob, DeviceChoice, DeviceFacts, DeviceId, JobOutcome, PlacementConfig, Quota
from gpumux.cluster.explain import explain
from gpumux.cluster.jobs import JobPhase, PlacedJob
from gpumux.cluster.placement import ClusterPlacement
from gpumux.cluster.saved import facts_of, job_data, node_data, restore
from gpumux.cluster.shares import owners
from gpumux.types import JobId, Priority

GIB = 2**30
USERS = {"ada": "vision", "ben": "vision", "cleo": "speech", "dan": "speech"}
PROGRAMS = ("p0", "p1", "p2", "p3")
LONGEST_S = 300.0  # of a job
SNAPSHOT_S = 60.0
PATIENCE_S = 200.0
HORIZON_S = 1500.0
QUIET_S = 60_000.0  # in which all that is left has to be answered


@dataclass
class Reservation:
    job: JobId
    high: bool
    nbytes: int
    expires: float
    confirmed: bool = False


@dataclass
class Rank:
    job: JobId
    high: bool
    nbytes: int


@dataclass
class Daemon:
    """What a daemon keeps of one device. It refuses what does not fit."""

    facts: DeviceFacts
    foreign_bytes: int = 0
    reservations: dict[int, Reservation] = field(default_factory=dict)  # by attempt
    ranks: dict[int, Rank] = field(default_factory=dict)  # by attempt

    def expire(self, now: float) -> None:
        self.reservations = {key: each for key, each in self.reservations.items() if each.expires > now}

    def refusal(self, high: bool, nbytes: int) -> str:
        held = [*self.reservations.values(), *self.ranks.values()]
        if high and any(each.high for each in held):
            return "another high job has the device"
        if self.foreign_bytes + sum(each.nbytes for each in held) + nbytes > self.facts.memory_bytes:
            return "too little memory"
        if len(held) >= self.facts.max_jobs:
            return "too many jobs"
        return ""

    def check(self) -> None:
        held = [*self.reservations.values(), *self.ranks.values()]
        assert sum(each.high for each in held) <= 1, "two high jobs on one device"


@dataclass
class RunningJob:
    """A job of the world: how long it has to run, and what it is doing now."""

    request: ClusterJob
    remaining: float
    saved: float  # what remained at the newest snapshot
    attempt: int = 0
    devices: tuple[DeviceId, ...] = ()
    began_at: float = 0.0
    here: set[DeviceId] = field(default_factory=set)  # with a rank that runs
    sizes: tuple[int, ...] = ()  # with which it may go on, fewer than it asked for
    placed: int = 0  # the newest attempt that was looked at
    ran: bool = False  # it ran, and was stopped
    dropped: bool = False  # without a snapshot
    submitted_at: float = 0.0
    started_at: float = inf


class World:
    def __init__(self, seed: int) -> None:
        self.random = random = Random(f"cluster/{seed}")
        self.kind = random.choice(("calm", "calm", "rough", "rough", "crowded"))
        self.faulty = self.kind == "rough"
        self.now = 0.0
        self.happened: list[str] = []
        self.answers: dict[JobId, ev.AnswerJob] = {}
        self.jobs: dict[JobId, RunningJob] = {}
        self.daemons: dict[DeviceId, Daemon] = {}
        self.shapes: dict[str, tuple[DeviceFacts, ...]] = {}
        self.up: dict[str, int] = {}  # nodes that run, with the number of the life
        self.lives = count(1)
        self.met: set[str] = set()
        self.large: JobId | None = None
        self.confirmed: set[tuple[int, DeviceId]] = set()  # attempts and devices whose confirmations have arrived
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._last: dict[str, float] = {}  # by node and direction: when the newest message arrives
        self._woken = inf
        self._restarted = False  # since the newest event
        quotas = {}
        if self.kind != "crowded" and random.random() < 0.6:
            quotas = {user: Quota(random.choice((None, 3, 5)), random.choice((None, 2)), random.choice((None, 6)))
                      for user in USERS if random.random() < 0.5}  # fmt: skip
        groups = {"vision": Quota(6, 4)} if quotas and random.random() < 0.5 else {}
        self.placement = ClusterPlacement(
            PlacementConfig(
                choice=random.choice(list(DeviceChoice)),
                patience_s=PATIENCE_S,
                urgency_s=100.0,
                rebalance_s=random.choice((30.0, inf)),
                quotas=quotas,
                group_quotas=groups,
                weights={"ada": 2.0} if random.random() < 0.3 else {},
            )
        )

    # ---- time

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), act))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def run(self) -> None:
        random = self.random
        if self.kind == "crowded":
            self._crowd()
        else:
            self._scatter()
        if self.faulty:
            for _ in range(3):
                self.later(random.uniform(0, HORIZON_S), self.foreign)
            for _ in range(random.randint(0, 4)):
                self.later(random.uniform(0, HORIZON_S), self.restart)
        self._until(HORIZON_S)
        self._finish()

    def _until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        self.now = max(self.now, end)

    def _finish(self) -> None:
        """Mend everything, add a node that can run whatever waits, and see that all is answered and nothing is left."""
        self.faulty = False
        for daemon in self.daemons.values():
            daemon.foreign_bytes = 0
        for name in [name for name in self.shapes if name not in self.up]:
            self.join(name)
        for name in self.up:
            self.feed(ev.NodeJoined(name, self.shapes[name]))
        self.shapes["large"] = (DeviceFacts(80 * GIB, 8),) * 8
        self.join("large")
        end = self.now + QUIET_S
        while self._heap and len(self.answers) < len(self.jobs) and self._heap[0][0] <= end:
            self._until(self._heap[0][0])
        open_jobs = [(name, explain(self.placement, job)) for name, job in self.placement.jobs.items()]
        assert len(self.answers) == len(self.jobs), f"not answered in {QUIET_S:g} s: {open_jobs}"
        self._until(self.now + 2 * self.placement.config.lease_s)
        placement = self.placement
        assert not placement.jobs, f"still known: {placement.jobs}"
        assert not placement.attempts, f"attempts left: {placement.attempts}"
        assert not len(placement.shares), "users without jobs are still charged"
        for device in placement.devices.values():
            there = {*device.jobs.values(), device.high, device.claimed} - {None}
            assert not there, f"{device.id} is not free: {there}"
        for name, daemon in self.daemons.items():
            daemon.expire(self.now)
            assert not daemon.ranks | daemon.reservations, f"{name} still holds {daemon}"  # type: ignore[operator]

    # ---- what happens

    def _scatter(self) -> None:
        """Nodes, jobs and faults of any kind at any time."""
        random = self.random
        for index in range(random.randint(1, 4)):
            devices = random.randint(1, 4)
            only = random.random() < 0.15
            classes = frozenset({random.choice(list(Priority))}) if only else frozenset(Priority)
            facts = DeviceFacts(random.choice((16, 40, 80)) * GIB, random.randint(2, 5), classes)
            self.shapes[f"n{index}"] = (facts,) * devices
            self.later(random.uniform(0, 5), lambda name=f"n{index}": self.join(name))  # type: ignore[misc]
        for _ in range(random.randint(8, 30)):
            self.later(random.uniform(0, HORIZON_S), self.submit)
        if random.random() < 0.3:
            self._lose_from_gangs(sum(len(devices) for devices in self.shapes.values()))
        for _ in range(random.randint(0, 8)):
            act = random.choice((self.lose, self.drain, self.cancel, self.measure))
            self.later(random.uniform(0, HORIZON_S), act)

    def _lose_from_gangs(self, devices: int) -> None:
        """Gangs of all devices, or of some fewer, and nodes that die under them."""
        random = self.random
        for _ in range(2):
            user, priority, count = random.choice(list(USERS)), random.choice(list(Priority)), max(2, devices)
            count = random.randint(max(2, count - 2), count)
            when = random.uniform(0, HORIZON_S / 2)
            self.later(when, lambda u=user, p=priority, c=count: self._add(u, p, c, 8, 1.0))  # type: ignore[misc]
            self.later(when + random.uniform(20, 200), self.lose)

    def _crowd(self) -> None:
        """Small jobs of four users, more than fit, and one large one of a fifth."""
        random = self.random
        self.shapes = {f"n{i}": (DeviceFacts(40 * GIB, 3),) * 2 for i in range(random.randint(1, 3))}
        priority = random.choice(list(Priority))
        for name in self.shapes:
            self.at(0.0, lambda name=name: self.join(name))  # type: ignore[misc]
        devices = 2 * len(self.shapes)
        for i in range(14 * devices):
            when = 10.0 + i * HORIZON_S / (14 * devices)
            self.at(when, lambda: self._add(random.choice(list(USERS)), priority, 1, random.randint(10, 20), 0.9))
        large = random.randint(max(1, devices - 1), devices)
        self.at(random.uniform(300, 500), lambda: self._add_large(priority, large))

    def _add_large(self, priority: Priority, devices: int) -> None:
        self.large = self._add("eve", priority, devices, 40, 0.1)

    def _add(self, user: str, priority: Priority, devices: int, gib: int, longest: float) -> JobId:
        random = self.random
        name = JobId(f"j{len(self.jobs)}")
        programs = tuple(random.sample(PROGRAMS, random.randint(0, 2)))
        movable = True if self.kind == "crowded" else random.random() < 0.8
        request = ClusterJob(
            name, user, USERS.get(user, "vision"), priority, devices, gib * GIB, programs,
            0 if self.kind == "crowded" else random.choice((0, 0, 0, 1, 2)), movable,
        )  # fmt: skip
        seconds = random.uniform(1.0, longest * LONGEST_S)
        self.jobs[name] = RunningJob(request, seconds, seconds, submitted_at=self.now)
        self.feed(ev.JobSubmitted(request))
        if name not in self.answers and random.random() < 0.1:
            self.feed(ev.JobSubmitted(request))  # the client asks again
        return name

    def submit(self) -> None:
        random = self.random
        devices = random.choice((1, 1, 1, 1, 2, 3, 4))
        priority = random.choice(list(Priority))
        self._add(random.choice(list(USERS)), priority, devices, random.choice((2, 8, 14, 30, 60)), 1.0)

    def cancel(self) -> None:
        open_jobs = [name for name in self.jobs if name not in self.answers]
        if open_jobs:
            self.met.add("cancelled")
            self.feed(ev.JobCancelled(self.random.choice(open_jobs)))

    def measure(self) -> None:
        random = self.random
        high, low = random.choice(PROGRAMS), random.choice(PROGRAMS)
        self.feed(ev.PairMeasured(high, low, random.uniform(1.0, 1.5), random.uniform(0.0, 1.0)))

    def foreign(self) -> None:
        if self.daemons and self.faulty:
            daemon = self.random.choice(list(self.daemons.values()))
            daemon.foreign_bytes = self.random.randint(0, daemon.facts.memory_bytes)
            self.later(self.random.uniform(10, 300), lambda: setattr(daemon, "foreign_bytes", 0))

    def join(self, name: str) -> None:
        if name in self.up:
            return
        self.up[name] = next(self.lives)
        for gpu, facts in enumerate(self.shapes[name]):
            self.daemons[DeviceId(name, gpu)] = Daemon(facts)
        self.feed(ev.NodeJoined(name, self.shapes[name]))

    def drain(self) -> None:
        if self.up:
            name = self.random.choice(list(self.up))
            self.met.add("drained")
            self.feed(ev.NodeDraining(name))
            self.later(self.random.uniform(50, 400), lambda: self._rejoin(name))

    def _rejoin(self, name: str) -> None:
        if name in self.up:
            self.feed(ev.NodeJoined(name, self.shapes[name]))

    def lose(self) -> None:
        """A node dies; the coordinator hears of it a little later."""
        if not self.up:
            return
        name = self.random.choice(list(self.up))
        self.met.add("lost")
        del self.up[name]
        for device in [each for each in self.daemons if each.node == name]:
            del self.daemons[device]
        for job in self.jobs.values():
            lost = {device for device in job.here if device.node == name}
            if lost:
                self._pause(job)
                job.remaining, job.ran = job.saved, True
                job.here -= lost
        self.later(self.random.uniform(0, 5), lambda: self._heard(name))

    def _heard(self, name: str) -> None:
        self.feed(ev.NodeLost(name))
        self.later(self.random.uniform(1, 200), lambda: self.join(name))

    def restart(self) -> None:
        """The coordinator dies, and goes on from what it has kept."""
        if not self.faulty:
            return
        self.met.add("restarted")
        before = self.placement
        kept = (
            facts_of(before),
            [node_data(n) for n in before.nodes.values()],
            [job_data(j) for j in before.jobs.values()],
        )
        self.placement = restore(before.config, *msgpack.unpackb(msgpack.packb(kept)))
        again = [job_data(job) for job in self.placement.jobs.values()]
        assert again == kept[2], f"kept as {kept[2]}, and again as {again}"
        self._restarted = True
        self.at(self.now, lambda: self.feed(ev.TimePassed()))

    # ---- messages

    def feed(self, event: ev.ClusterEvent) -> None:
        self.happened.append(f"{self.now:9.2f} {event}")
        late = [job.id for job in self.placement.jobs.values() if job.due < self.now]
        assert not late or self._restarted, f"answers for {late} are too late, and nothing was done"
        if isinstance(event, ev.DeviceConfirmed):
            self.confirmed.add((event.attempt, event.device))
        self._restarted = False
        commands = self.placement.handle(event, self.now)
        dies = self.faulty and self.random.random() < 0.005
        if dies:  # what it decided is kept, and no daemon hears of it
            commands = [each for each in commands if isinstance(each, (ev.AnswerJob, ev.StartJob))]
            self.restart()
        for command in commands:
            self.happened.append(f"{self.now:9.2f}     {command}")
            self._carry_out(command)
        if dies:
            return
        self.check()
        due = self.placement.due
        if due < inf and due != self._woken:
            self._woken = due
            self.at(due, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if due == self._woken:
            self._woken = inf
            self.feed(ev.TimePassed())

    def _carry_out(self, command: ev.ClusterCommand) -> None:
        match command:
            case ev.AnswerJob():
                assert command.job not in self.answers, f"{command.job} is answered twice"
                assert command.job in self.jobs, f"{command.job} was never submitted"
                self.answers[command.job] = command
                job = self.jobs[command.job]
                if command.outcome in (JobOutcome.DONE, JobOutcome.FAILED, JobOutcome.CANCELLED):
                    assert not job.here, f"{command.job} is answered and runs on {job.here}"
                self.met.add(command.outcome.value)
            case ev.StartJob():
                missing = [str(each) for each in command.devices if (command.attempt, each) not in self.confirmed]
                assert not missing, f"{missing} did not confirm {command}"
                self.later(self._delay(), lambda: self._start(command))
            case ev.NodeEmpty():
                ranks = [
                    each for name, daemon in self.daemons.items() if name.node == command.node for each in daemon.ranks
                ]
                assert not ranks or self.kind == "rough", f"{command.node} is called empty, and runs {ranks}"
            case _:
                self._send(command)
        if isinstance(command, ev.StopRank) and self.placement.jobs[command.job].had and self.random.random() < 0.5:
            self.later(0.0, self._rival)  # for the devices that the gang is stopped for

    def _rival(self) -> None:
        self._add(self.random.choice(list(USERS)), Priority.HIGH, 1, 60, 1.0)

    def _delay(self) -> float:
        slow = self.faulty and self.random.random() < 0.1
        return self.random.uniform(5.0, 40.0) if slow else self.random.uniform(0.001, 1.0)

    def _lost(self) -> bool:
        return self.faulty and self.random.random() < 0.05

    def _send(self, command: ev.ReserveDevice | ev.ConfirmDevice | ev.ReleaseDevice | ev.StopRank) -> None:
        """In order with what was sent to the node before."""
        name = command.device.node
        life = self.up.get(name)
        if life is None or self._lost():
            return
        self._last[name] = max(self._last.get(name, 0.0), self.now + self._delay())
        self.at(self._last[name], lambda: self._arrive(command, life))

    def _arrive(self, command: ev.ReserveDevice | ev.ConfirmDevice | ev.ReleaseDevice | ev.StopRank, life: int) -> None:
        if self.up.get(command.device.node) != life:
            return
        daemon = self.daemons[command.device]
        daemon.expire(self.now)
        match command:
            case ev.ReserveDevice():
                self._reply(self._reserve(daemon, command), life)
            case ev.ConfirmDevice():
                found = daemon.reservations.get(command.attempt)
                if found is None:
                    assert self.kind == "rough", f"calm: a reservation of {command} is gone before it was confirmed"
                    self._reply(ev.DeviceRefused(command.attempt, command.device, "expired"), life)
                else:
                    found.confirmed, found.expires = True, self.now + command.lease_s
                    self._reply(ev.DeviceConfirmed(command.attempt, command.device), life)
            case ev.ReleaseDevice():
                daemon.reservations.pop(command.attempt, None)
            case ev.StopRank():
                daemon.reservations.pop(command.attempt, None)
                if daemon.ranks.pop(command.attempt, None) is not None:
                    job = self.jobs[command.job]
                    job.dropped = job.dropped or not command.keep
                    assert job.request.movable or not command.keep, f"{command.job} can't move: {command}"
                    if self._whole(job):
                        self._pause(job)
                    job.ran = True
                    job.here.discard(command.device)
                self._reply(ev.RankStopped(command.attempt, command.device), life)
        daemon.check()

    def _reserve(self, daemon: Daemon, command: ev.ReserveDevice) -> ev.DeviceReserved | ev.DeviceRefused:
        high = command.priority is Priority.HIGH
        reason = daemon.refusal(high, command.memory_bytes)
        if reason:
            assert self.kind == "rough", f"calm: {reason} for {command} on {daemon}"
            self.met.add("refused a reservation")
            return ev.DeviceRefused(command.attempt, command.device, reason)
        daemon.reservations[command.attempt] = Reservation(
            command.job, high, command.memory_bytes, self.now + command.lease_s
        )
        return ev.DeviceReserved(command.attempt, command.device)

    def _reply(
        self, event: ev.DeviceReserved | ev.DeviceConfirmed | ev.DeviceRefused | ev.RankStopped, life: int
    ) -> None:
        if self._lost():
            return
        way = f"{event.device.node} answers"
        self._last[way] = max(self._last.get(way, 0.0), self.now + self._delay())

        def arrive() -> None:
            if self.up.get(event.device.node) == life:
                self.feed(event)

        self.at(self._last[way], arrive)

    # ---- jobs that run

    def _start(self, command: ev.StartJob) -> None:
        """The client opens the job on every device, under its reservations: on all of them or on none."""
        job = self.jobs[command.job]
        sizes = (job.request.devices, *(job.sizes if command.resumed else ()))
        assert len(set(command.devices)) in sizes, f"{command} is not the whole job"
        found = []
        for name in command.devices:
            daemon = self.daemons.get(name)
            if daemon is not None:
                daemon.expire(self.now)
            reservation = None if daemon is None else daemon.reservations.get(command.attempt)
            if reservation is None or not reservation.confirmed:
                stops = self.placement.attempts.get(command.attempt)
                calm = (
                    self.kind != "rough"
                    and name.node in self.up
                    and stops is not None
                    and stops.phase is JobPhase.RUNNING
                )
                assert not calm, f"calm: {command} has no reservation on {name}"
                self.met.add("failed to start")
                self.feed(ev.StartFailed(command.job, command.attempt))
                return
            found.append((name, daemon, reservation))
        assert not job.here, f"{command.job} is started twice"
        assert not job.dropped, f"{command.job} was stopped without a snapshot, and goes on"
        assert command.resumed or not job.ran, f"{command.job} ran before, and begins anew: {command}"
        for name, daemon, reservation in found:
            assert daemon is not None
            del daemon.reservations[command.attempt]
            daemon.ranks[command.attempt] = Rank(command.job, reservation.high, reservation.nbytes)
            daemon.check()
        if len(command.devices) < job.request.devices:
            self.met.add("made smaller")
            if self.random.random() < 0.2:
                self.later(self.random.uniform(0.0, 100.0), lambda: self._outgrow(job, len(command.devices)))
        elif job.devices and len(job.devices) < len(command.devices):
            self.met.add("whole again")
        job.attempt, job.devices, job.here, job.began_at = (
            command.attempt,
            command.devices,
            set(command.devices),
            self.now,
        )
        job.started_at = min(job.started_at, self.now)
        if job.request.devices > 1 and job.request.movable and not job.sizes and self.random.random() < 0.7:
            least = self.random.randint(1, job.request.devices - 1)
            job.sizes = tuple(range(least, job.request.devices))
            self.feed(ev.SizesKnown(command.job, job.sizes))
        self.later(job.remaining, lambda: self._ended(job, command.attempt))

    def _outgrow(self, job: RunningJob, size: int) -> None:
        """The job has a step that does not go with so few devices."""
        if job.request.id not in self.answers:
            job.sizes = tuple(each for each in job.sizes if each != size)
            self.met.add("outgrown")
            self.feed(ev.SizesKnown(job.request.id, job.sizes))
            placed = self.placement.jobs[job.request.id]
            left = placed.phase is not JobPhase.RUNNING or len(placed.devices) != size
            assert left, f"{job.request.id} runs with {size} devices, which are too few"

    def _whole(self, job: RunningJob) -> bool:
        return len(job.here) == len(job.devices)

    def _pause(self, job: RunningJob) -> None:
        """The job stops running, as a whole; what it did is in a snapshot, or was in one at the last interval."""
        ran = self.now - job.began_at
        job.saved = job.remaining - ran // SNAPSHOT_S * SNAPSHOT_S
        job.remaining -= ran

    def _ended(self, job: RunningJob, attempt: int) -> None:
        if job.attempt != attempt or not self._whole(job):
            return
        for name in job.devices:
            self.daemons[name].ranks.pop(attempt)
        job.here = set()
        fault = "its loss is not a number" if self.random.random() < 0.05 else ""
        self.later(self.random.uniform(0.0, 0.5), lambda: self.feed(ev.JobFinished(job.request.id, attempt, fault)))

    # ---- what must hold after every event

    def check(self) -> None:
        placement, config = self.placement, self.placement.config
        holding = {job.attempt for job in placement.jobs.values() if job.holds}
        assert set(placement.attempts) == holding, f"attempts {set(placement.attempts)}, of jobs {holding}"
        held: dict[str, list[int]] = {}
        if placement.jobs:  # one at each event, since it takes as long as everything else
            some = list(placement.jobs.values())[len(self.happened) % len(placement.jobs)]
            assert explain(placement, some), f"nothing is said of {some.id}"
        for job in placement.jobs.values():
            request = job.request
            assert len(set(job.devices)) == (request.devices if job.holds else 0), f"{job.id} has {job.devices}"
            if job.holds:
                for owner in owners(request):
                    sums = held.setdefault(owner, [0, 0])
                    sums[0] += request.devices
                    sums[1] += request.devices if job.high else 0
        for quotas, what in ((config.quotas, "user"), (config.group_quotas, "group")):
            for name, quota in quotas.items():
                devices, high = held.get(f"{what} {name}", (0, 0))
                assert quota.devices is None or devices <= quota.devices, f"{what} {name} holds {devices}"
                assert quota.high_devices is None or high <= quota.high_devices, f"{what} {name} holds {high} high"
        for device in placement.devices.values():
            jobs = list(device.jobs.values())
            assert device.used_bytes <= device.facts.memory_bytes, f"{device.id} promised {device.used_bytes} bytes"
            assert len(jobs) <= device.facts.max_jobs, f"{device.id} has {len(jobs)} jobs"
            highs = {job.id for job in (*jobs, device.claimed, device.high) if job is not None and job.high}
            assert len(highs) <= 1, f"{device.id} has high jobs {highs}"
            for job in jobs:
                assert placement.jobs.get(job.id) is job, f"{device.id} keeps {job.id}, which is answered"
                assert device.id in job.devices, f"{device.id} keeps {job.id}, which is elsewhere"
                assert job.request.priority in device.facts.classes, f"{device.id} takes no such job as {job.id}"
                if placement.nodes[device.id.node].draining:
                    assert job.phase in (JobPhase.RUNNING, JobPhase.STOPPING), f"{job.id} begins on a node that drains"
        self._check_sizes()
        self._check_room()
        self._check_large()

    def _check_sizes(self) -> None:
        """A gang gets what it asked for; one that ran and that the cluster could not give that much, whatever runs
        there, the most that it could, and never less than the gang allows."""
        for job in self.placement.jobs.values():
            known = self.jobs[job.id]
            asked = known.request.devices
            assert job.asked == asked, f"{job.id} asked for {asked} devices, not {job.asked}"
            if job.attempt == known.placed:
                continue
            assert job.request.devices in (asked, *known.sizes), f"{job.id} has {job.request.devices} of {asked}"
            known.placed = job.attempt
            if job.holds:
                due = self._size_due(job)
                if len(job.devices) != due and job.had:
                    assert job.stopped_for.startswith("all of the"), f"{job.id} goes back to {job.had}"
                    due = self._size_before(job)
                    self.met.add("went back")
                assert len(job.devices) == due, f"{job.id} gets {len(job.devices)} devices of {due}"

    def _size_before(self, job: PlacedJob) -> int:
        """With how many devices a gang goes on that was stopped to get all of its devices, and lost them to others."""
        return max([size for size in self.jobs[job.id].sizes if size <= job.had], default=job.asked)

    def _size_due(self, job: PlacedJob) -> int:
        """With how many devices the job is to begin now."""
        known, config = self.jobs[job.id], self.placement.config
        request = known.request
        most = sum(
            request.priority in device.facts.classes and device.facts.memory_bytes >= request.memory_bytes
            for device in self.placement.devices.values()
            if not self.placement.nodes[device.id.node].draining
        )
        for quota in (config.quotas.get(request.user), config.group_quotas.get(request.group)):
            if quota is not None and quota.devices is not None:
                most = min(most, quota.devices)
            if quota is not None and quota.high_devices is not None and request.priority is Priority.HIGH:
                most = min(most, quota.high_devices)
        fewer = [size for size in known.sizes if size <= most]
        return max(fewer) if job.began and fewer and most < request.devices else request.devices

    def _check_room(self) -> None:
        """Nothing waits that could run on devices that are wholly free and kept for no other."""
        placement = self.placement
        waiting = [job for job in placement.jobs.values() if not job.holds]
        if placement.config.quotas or not waiting:
            return  # quotas may hold a job although there is room
        for job in waiting:
            kept = {name for other in placement.jobs.values() if other is not job for name in other.kept}
            free = [
                device
                for device in placement.devices.values()
                if not device.jobs and device.claimed is None and device.high is None and device.retry_at <= self.now
                if not placement.nodes[device.id.node].draining and device.id not in kept
                if job.request.priority in device.facts.classes
                if device.facts.memory_bytes >= job.request.memory_bytes
                if device.id not in job.refusals or job.refusals[device.id].until <= self.now
            ]
            for refused in job.refusals.values():
                assert refused.until - self.now <= 16.001 * placement.config.retry_s, f"{job.id}: {refused}"
            due = self._size_due(job)
            if job.had and not job.refusals and all(each.retry_at <= self.now for each in placement.devices.values()):
                due = min(due, self._size_before(job))
            assert len(free) < due, f"{job.id} waits, and {[str(device.id) for device in free]} are free"

    def _check_large(self) -> None:
        """The large job of a crowded history starts within: its turn, the patience, and the jobs that run then; twice,
        since others may be overdue before it."""
        if self.large is None:
            return
        job = self.jobs[self.large]
        bound = PATIENCE_S + 3 * 0.9 * LONGEST_S
        waits = self.now - job.submitted_at
        assert job.started_at < inf or self.large in self.answers or waits <= bound, (
            f"{self.large} waits for {waits:.0f} s"
        )
