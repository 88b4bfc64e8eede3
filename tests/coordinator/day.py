"""The simulated day of microbench/cluster_day.py with everything said by messages: jobs are submitted to a coordinator,
which reserves at daemons, and clients open their jobs there. The daemons are the real ones over fake devices, with one
device each. All of it runs on the day's virtual clock.

`kills`: so many times, at random, the coordinator dies: half of them right after it has kept what it decided and before
it has sent that. What was on its way to it is lost. It is started again from its journal, and the clients come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from gpumux.cluster import events as ev
from gpumux.cluster.events import ClusterJob, DeviceId, PlacementConfig
from gpumux.config import Config
from gpumux.coordinator.core import Action, Coordinator, CoordinatorConfig, DaemonFound, Order, Tell
from gpumux.coordinator.journal import Journal
from gpumux.types import JobId, Peer, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.router import Incoming, Opened
from microbench.cluster_day import ANSWER_S, DAY, START_S, STOP_S, Day, DayJob, PairTable, Running, Way
from tests.daemon.fakes import INFO, Daemon

HELLO = msg.Hello(msg.PROTOCOL_VERSION, "0", "control", 1, "", False)
BACK_S = 2.0  # from a coordinator's death to the next one
REJOIN_S = 1.0  # and from there until a client is back
PLACE, ENDED = 1, 2  # refs


def names_of(peer: Peer) -> tuple[str, str]:
    return f"user{peer.uid}", "all"


def uid_of(request: ClusterJob) -> int:
    return int(request.user.removeprefix("user"))


class DayByMessages(Day):
    def __init__(
        self, jobs: Sequence[DayJob], way: Way, pairs: PairTable, nodes: int, directory: Path, *,
        kills: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(jobs, way, pairs, nodes, 1)
        config = Config(max_jobs_per_user=1000, max_sessions_per_user=1000)
        self.daemons = {
            f"node{at}": Daemon(config, info=replace(INFO, memory_bytes=way.facts(at).memory_bytes))
            for at in range(nodes)
        }
        for daemon in self.daemons.values():
            daemon.connect("coordinator", uid=0)
        self.directory = directory
        self.config = CoordinatorConfig(PlacementConfig(choice=way.choice), max_jobs=len(jobs))
        self.journal = Journal(directory)
        self.use(Coordinator(self.config, names_of))
        self.life = 1
        self.up = True
        self.refusals: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.requests: dict[JobId, ClusterJob] = {}  # jobs that their clients have not left yet
        self.opening: dict[JobId, int] = {}  # attempts
        self.over: set[JobId] = set()
        self.connected: set[JobId] = set()  # jobs whose clients have a session with this coordinator
        self.killed: Counter[str] = Counter()
        random = self.random = Random(f"kills/{seed}")
        self.unsent_kills = kills // 2
        for _ in range(kills - self.unsent_kills):
            self._at(random.uniform(0.0, DAY), partial(self.kill, "between"))

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.close()
        self.journal.close()

    def use(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.placement = coordinator.placement

    # ---- the coordinator

    def happen(self, happening: Any) -> None:
        """Have the coordinator handle it, keep what it decided, and send that. Nothing happens to one that is dead."""
        if not self.up:
            return
        actions = self.coordinator.handle(happening, self.now)
        self.journal.keep(self.coordinator)
        if actions and self.unsent_kills and self.random.random() < 0.05:
            self.unsent_kills -= 1
            self.kill("unsent")
            return
        for action in actions:
            self.carry_out(action)
        due = self.coordinator.due
        if due < inf and due != self._wake_at:
            self._wake_at = due
            self._at(due, lambda: self._wake(due))

    def feed(self, event: ev.ClusterEvent) -> None:
        self.happen(None if isinstance(event, ev.TimePassed) else event)

    def arrives(self, seconds: float, happening: Any) -> None:
        """It arrives in some seconds, at this coordinator or at none."""
        life = self.life
        self._at(self.now + seconds, lambda: self.happen(happening) if self.life == life else None)

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Tell) and action.message == msg.Done(ENDED):
            del self.requests[JobId(action.session.split()[0])]
            self._ended += 1
        elif isinstance(action, Tell):
            self.told(action.message)
        elif isinstance(action, Order):
            self.order(action.command)

    def order(self, command: ev.ReserveDevice | ev.ConfirmDevice | ev.ReleaseDevice) -> None:
        node, done = command.device.node, None
        match command:
            case ev.ReserveDevice():
                request = msg.Reserve(1, command.job, int(command.priority), command.memory_bytes, command.lease_s)
                answer = self.say(node, "coordinator", request)
                done = ev.DeviceReserved(command.attempt, command.device)
            case ev.ConfirmDevice():
                answer = self.say(node, "coordinator", msg.ConfirmReservation(1, command.job, command.lease_s))
                done = ev.DeviceConfirmed(command.attempt, command.device)
            case ev.ReleaseDevice():
                self.say(node, "coordinator", msg.ReleaseReservation(1, command.job))
                return
        if isinstance(answer, msg.Refusal):
            self.refusals.append(answer.message)
            self.arrives(ANSWER_S, ev.DeviceRefused(command.attempt, command.device, answer.message))
        else:
            self.arrives(ANSWER_S, done)

    def say(self, node: str, session: str, request: msg.Message) -> Any:
        daemon = self.daemons[node]
        daemon.now = 100.0 + self.now
        return daemon.say(session, request)[0][0]

    def kill(self, when: str) -> None:
        if not self.up:
            return
        self.killed[when] += 1
        self.up = False
        self.life += 1
        self.connected.clear()
        self.journal.close()
        self._at(self.now + BACK_S, self.start_again)

    def start_again(self) -> None:
        self.up = True
        self.journal = Journal(self.directory)
        self.use(self.journal.load(self.config, names_of, self.now))
        self._wake_at = inf
        for node in range(self.nodes):
            self.join(node)
        for job in list(self.requests):
            self._at(self.now + self.random.uniform(0.1, REJOIN_S), partial(self.come, job, self.life))

    def join(self, node: int) -> None:
        self.happen(DaemonFound(f"node{node}", f"node{node}", (f"ipc:///node{node}",), self.way.facts(node)))

    # ---- clients: a session for each job

    def submit(self, request: ClusterJob) -> None:
        self.requests[request.id] = request
        self.come(request.id, self.life)

    def come(self, job: JobId, life: int) -> None:
        """Open a session with the coordinator, and say what the job is and under which attempt it runs."""
        if life != self.life or job not in self.requests:
            return
        request, running = self.requests[job], self.known[job]
        arrival = self.message(job, msg.Goodbye())
        attempt = running.attempt if running.devices or job in self.over else self.opening.get(job, 0)
        place = msg.PlaceJob(
            PLACE, job, "a job", int(request.priority), request.devices, request.memory_bytes, list(request.programs),
            request.urgency, request.movable, attempt,
        )  # fmt: skip
        self.connected.add(job)
        self.happen(Opened(arrival.session, arrival.peer, HELLO, False))
        self.happen(self.message(job, place))
        if job in self.over:
            self.happen(self.message(job, msg.PlacedJobEnded(ENDED, job, "")))

    def message(self, job: JobId, message: msg.Message) -> Incoming:
        uid = uid_of(self.known[job].job.request)
        return Incoming(SessionId(f"{job} {self.life}"), Peer(uid, uid, 1), message, [])

    def told(self, message: msg.Message) -> None:
        match message:
            case msg.JobPlaced():
                job = JobId(message.job)
                assert message.attempt >= self.known[job].attempt, f"{job} is told {message}, and is further already"
                self._stop(self.known[job], self.known[job].attempt)  # it is told that it is elsewhere now
                self.opening[job] = message.attempt
                self._at(self.now + START_S, partial(self.open, message))
            case msg.VacateDevices():
                self.vacate(JobId(message.job), message.attempt)
            case msg.JobAnswered():
                self.outcomes[message.outcome] += 1
            case msg.Refusal():
                raise AssertionError(message)
            case _:
                pass

    def open(self, placed: msg.JobPlaced) -> None:
        """Open the job at its daemons, unless it was told to leave before."""
        job = JobId(placed.job)
        if self.opening.get(job) != placed.attempt:
            return
        del self.opening[job]
        request = self.requests[job]
        assert not self.known[job].devices, f"{job} is started twice"
        for node in placed.nodes:
            self.daemons[node].connect(self.client(job, placed.attempt), uid=uid_of(request))
            opened = msg.OpenJob(1, job, "a job", int(request.priority), 1.0, 1.1, None, 2, 0)
            answer = self.say(node, self.client(job, placed.attempt), opened)
            assert isinstance(answer, msg.JobOpened), answer
        devices = tuple(DeviceId(node, 0) for node in placed.nodes)
        self.begin(ev.StartJob(job, placed.attempt, devices, placed.resumed))

    def client(self, job: JobId, attempt: int) -> str:
        return f"{job} {attempt}"

    def vacate(self, job: JobId, attempt: int) -> None:
        if self.opening.get(job) == attempt:
            del self.opening[job]
        self._stop(self.known[job], attempt)
        self.arrives(STOP_S, self.message(job, msg.DevicesVacated(job, attempt)))

    def finished(self, running: Running) -> None:
        job = running.job.request.id
        assert job not in self.over, f"{job} ends twice"
        self.over.add(job)
        if job in self.connected:  # otherwise it is said when it has come back
            self.happen(self.message(job, msg.PlacedJobEnded(ENDED, job, "")))

    def _leave(self, running: Running) -> None:
        """The client leaves the job's daemons at once."""
        for device in running.devices:
            daemon = self.daemons[device.node]
            daemon.now = 100.0 + self.now
            daemon.disconnect(self.client(running.job.request.id, running.attempt))
        super()._leave(running)
