"""What a coordinator says to clients and daemons, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from gpumux.access import Access, Rule
from gpumux.cluster import events as ev
from gpumux.cluster.events import DeviceFacts, DeviceId, PlacementConfig, Quota
from gpumux.coordinator.core import (
    Coordinator,
    CoordinatorConfig,
    DaemonAway,
    DaemonFound,
    DaemonLeft,
    Happening,
    Note,
    Order,
    Tell,
)
from gpumux.types import Peer, Priority, SessionId
from gpumux.wire import messages as msg
from gpumux.wire.router import GONE, GOODBYE, Closed, Incoming, Opened

GIB = 2**30
HELLO = msg.Hello(msg.PROTOCOL_VERSION, "0", "control", 1, "", False)
JOB, OTHER = f"{1:032x}", f"{2:032x}"
USERS = {1000: ("ada", "vision"), 1001: ("ben", "vision"), 0: ("root", "root"), -5: ("laptop", "laptop")}


class Cluster:
    """A coordinator, and daemons that agree to everything."""

    def __init__(self, nodes: int = 2, **config: Any):
        placement = PlacementConfig(quotas={"ada": Quota(devices=3)}, rebalance_s=float("inf"))
        self.coordinator = Coordinator(CoordinatorConfig(placement, **config), lambda peer: USERS[peer.uid])
        self.now = 0.0
        self.told: list[tuple[str, msg.Message]] = []
        self.orders: list[Any] = []
        self.notes: list[str] = []
        self.agrees = True
        self.refs = 0
        for at in range(nodes):
            self.found(f"n{at}")

    def found(self, node: str, gib: int = 16) -> None:
        endpoints = (f"ipc:///{node}/gpumux.sock", f"tcp://{node}:7777")
        self.happen(DaemonFound(node, f"host of {node}", endpoints, DeviceFacts(gib * GIB)))

    def connect(self, session: str, uid: int = 1000) -> None:
        self.happen(Opened(SessionId(session), Peer(uid, uid, -1 if uid < 0 else 7), HELLO, False))

    def happen(self, happening: Happening | None) -> None:
        todo = [happening]
        while todo:
            for action in self.coordinator.handle(todo.pop(0), self.now):
                match action:
                    case Tell():
                        self.told.append((action.session, action.message))
                    case Note():
                        self.notes.append(action.text)
                    case Order(ev.ReserveDevice() as command) if self.agrees:
                        self.orders.append(command)
                        todo.append(ev.DeviceReserved(command.attempt, command.device))
                    case Order(ev.ConfirmDevice() as command) if self.agrees:
                        self.orders.append(command)
                        todo.append(ev.DeviceConfirmed(command.attempt, command.device))
                    case Order():
                        self.orders.append(action.command)

    def say(self, session: str, message: msg.Message, uid: int = 1000) -> list[msg.Message]:
        """What comes of it for the session."""
        before = len(self.told)
        self.happen(Incoming(SessionId(session), Peer(uid, uid, -1 if uid < 0 else 7), message, []))
        return [told for to, told in self.told[before:] if to == session]

    def place(self, session: str, job: str = JOB, uid: int = 1000, **fields: Any) -> list[msg.Message]:
        given = {
            "name": "a job", "priority": 0, "devices": 1, "nbytes": 4 * GIB, "programs": [], "urgency": 0,
            "movable": True, "attempt": 0, **fields,
        }  # fmt: skip
        return self.say(session, msg.PlaceJob(1, job, **given), uid)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.happen(None)

    def phase(self, job: str = JOB) -> str:
        return self.coordinator.placement.jobs[job].phase.value  # type: ignore[index]


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.connect("s")
    return made


def test_a_job_is_placed_and_ends(cluster: Cluster):
    done, placed = cluster.place("s")
    assert done == msg.Done(1)
    assert isinstance(placed, msg.JobPlaced)
    assert (placed.job, placed.resumed, len(placed.endpoints)) == (JOB, False, 1)
    assert placed.endpoints == [f"ipc:///{placed.nodes[0]}/gpumux.sock"]
    assert cluster.say("s", msg.PlacedJobEnded(2, JOB, "")) == [msg.Done(2)]
    assert not cluster.coordinator.jobs
    assert cluster.place("s")[1:] == [msg.JobAnswered(JOB, "done", "")]  # it asks again, and is told so


def test_devices_that_are_held_for_a_script_become_its_jobs():
    """As `gpumux cluster run` holds and ends them."""
    cluster = Cluster(1)
    cluster.connect("run")
    cluster.connect("script")
    (_, placed) = cluster.place("run", movable=False)
    assert isinstance(placed, msg.JobPlaced)
    cluster.pass_time(60.0)
    assert cluster.place("script", nbytes=2 * GIB)[1:] == [placed]
    job = cluster.coordinator.placement.jobs[JOB].request  # type: ignore[index]
    assert (job.movable, job.memory_bytes) == (True, 4 * GIB)
    assert cluster.say("run", msg.PlacedJobEnded(2, JOB, "")) == [msg.Done(2)]
    assert cluster.phase() == "running"  # it is the script's
    cluster.happen(Closed(SessionId("script"), Peer(1000, 1000, 7), GONE))
    cluster.place("run", movable=False, attempt=placed.attempt)
    why = "the script ended with status 3"
    assert cluster.say("run", msg.PlacedJobEnded(3, JOB, why)) == [msg.Done(3), msg.JobAnswered(JOB, "failed", why)]
    assert not cluster.coordinator.jobs


def test_the_placement_gets_what_was_asked_for(cluster: Cluster):
    cluster.connect("a")
    cluster.place("a", priority=1, devices=2, nbytes=GIB, programs=["p"], urgency=3, movable=False)
    request = cluster.coordinator.placement.jobs[JOB].request
    assert (request.priority, request.devices, request.memory_bytes) == (Priority.HIGH, 2, GIB)
    assert (request.programs, request.urgency, request.movable) == (("p",), 3, False)


def test_a_client_that_comes_by_tcp_is_given_daemons_by_tcp():
    cluster = Cluster()
    cluster.connect("far", -5)
    (placed,) = [m for m in cluster.place("far", uid=-5) if isinstance(m, msg.JobPlaced)]
    assert placed.endpoints == [f"tcp://{placed.nodes[0]}:7777"]
    for session, uid, kind in (("far", -5, "tcp"), ("near", 5, "ipc")):
        if session == "near":
            cluster.connect(session, uid)
        (report,) = cluster.say(session, msg.GetStatus(7), uid=uid)
        assert {node["endpoint"].partition(":")[0] for node in report.body["nodes"]} == {kind}


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"job": "short"}, "protocol"),
        ({"job": "G" * 32}, "protocol"),
        ({"priority": 2}, "protocol"),
        ({"devices": 0}, "protocol"),
        ({"devices": 5000}, "protocol"),
        ({"nbytes": 0}, "protocol"),
        ({"nbytes": 2**62}, "protocol"),
        ({"urgency": 10**9}, "protocol"),
        ({"programs": ["x"] * 65}, "protocol"),
        ({"programs": ["x" * 200]}, "protocol"),
        ({"attempt": 7}, "unknown_job"),
    ],
)
def test_what_is_wrong_is_refused_and_leaves_nothing(cluster: Cluster, wrong: dict[str, Any], code: str):
    (answer,) = cluster.place("s", **wrong)
    assert isinstance(answer, msg.Refusal)
    assert (answer.ref, answer.code) == (1, code)
    assert answer.remedy
    assert not cluster.coordinator.jobs
    assert not cluster.coordinator.placement.jobs


def test_more_than_a_quota_allows_is_answered_with_the_reason(cluster: Cluster):
    done, answered = cluster.place("s", devices=4)
    assert done == msg.Done(1)
    assert isinstance(answered, msg.JobAnswered)
    assert answered.outcome == "refused"
    assert "quota of user ada" in answered.reason


def test_too_many_jobs_of_a_user_are_refused():
    cluster = Cluster(max_jobs=1)
    cluster.connect("s")
    cluster.place("s")
    (refusal,) = cluster.place("s", OTHER)
    assert isinstance(refusal, msg.Refusal)
    assert refusal.code == "admission_refused"


def test_access_rules_are_those_of_daemons():
    rules = (Rule("students", users=frozenset({1000}), max_priority=Priority.LOW),)
    cluster = Cluster(access=Access(rules))
    cluster.connect("s")
    (refusal,) = cluster.place("s", priority=1)
    assert isinstance(refusal, msg.Refusal)
    assert refusal.code == "access_denied"
    assert len(cluster.place("s", priority=0)) == 2


def test_another_users_job_can_be_neither_taken_nor_cancelled_nor_explained(cluster: Cluster):
    cluster.place("s")
    cluster.connect("t", 1001)
    for answer in (
        cluster.place("t", uid=1001),
        cluster.say("t", msg.CloseJob(3, JOB, False), 1001),
        cluster.say("t", msg.ExplainJob(3, JOB), 1001),
    ):
        assert [type(m) for m in answer] == [msg.Refusal]
        assert answer[0].code == "not_owner"  # type: ignore[union-attr]
    for nothing in (
        msg.JobNotStarted(JOB, 1, 0, ""), msg.DevicesVacated(JOB, 1), msg.ProgramsKnown(JOB, ["x"]),
    ):  # fmt: skip
        assert cluster.say("t", nothing, 1001) == []
    cluster.say("t", msg.PlacedJobEnded(4, JOB, ""), 1001)
    assert cluster.phase() == "running"
    (report,) = cluster.say("t", msg.GetStatus(5), 1001)
    assert isinstance(report, msg.Report)
    (job,) = report.body["jobs"]
    assert (job["job"], job["name"], job["why"], job["mine"]) == ("", "", "", False)


def test_a_session_may_speak_for_its_own_jobs_alone(cluster: Cluster):
    cluster.place("s")
    cluster.connect("second")
    assert cluster.say("second", msg.DevicesVacated(JOB, 1)) == []
    cluster.say("second", msg.PlacedJobEnded(4, JOB, ""))
    assert cluster.phase() == "running"


def test_what_a_coordinator_has_no_use_for_is_refused(cluster: Cluster):
    (refusal,) = cluster.say("s", msg.OpenJob(9, JOB, "x", 0, 1.0, 1.1, None, 2, 0))
    assert isinstance(refusal, msg.Refusal)
    assert "coordinator" in refusal.message


def test_a_job_that_needs_more_memory_is_placed_where_there_is_so_much():
    cluster = Cluster(nodes=1)
    cluster.found("large", 64)
    cluster.connect("s")
    sizes = {}
    for tries in range(6):
        placed = [m for _, m in cluster.told if isinstance(m, msg.JobPlaced)]
        if not placed:
            cluster.place("s", nbytes=10 * GIB)
            placed = [m for _, m in cluster.told if isinstance(m, msg.JobPlaced)]
        newest = placed[-1]
        sizes[tries] = newest.nodes
        if newest.nodes == ["large"]:
            break
        cluster.say("s", msg.JobNotStarted(JOB, newest.attempt, 20 * GIB, "out of memory"))
    assert newest.nodes == ["large"]
    assert cluster.coordinator.placement.jobs[JOB].request.memory_bytes >= 10 * GIB  # type: ignore[index]


def test_a_device_where_a_job_could_not_start_gets_nothing_for_a_while():
    cluster = Cluster(nodes=1)
    cluster.connect("s")
    _, placed = cluster.place("s")
    assert isinstance(placed, msg.JobPlaced)
    assert cluster.say("s", msg.JobNotStarted(JOB, placed.attempt, 0, "the daemon is gone")) == []
    assert cluster.phase() == "waiting"
    cluster.pass_time(cluster.coordinator.config.placement.retry_s)
    assert cluster.phase() == "running"


def test_programs_are_remembered_by_the_jobs_name(cluster: Cluster):
    cluster.place("s", name="train")
    cluster.say("s", msg.ProgramsKnown(JOB, ["ab", "cd", "ab"]))
    cluster.place("s", OTHER, name="train")
    assert cluster.coordinator.placement.jobs[OTHER].request.programs == ("ab", "cd")  # type: ignore[index]


def test_a_gang_goes_on_with_the_devices_that_are_left():
    cluster = Cluster(nodes=3)
    cluster.connect("s")
    *_, placed = cluster.place("s", priority=1, devices=3)
    assert isinstance(placed, msg.JobPlaced)
    cluster.say("s", msg.GangSizes(JOB, [1, 2]))
    cluster.happen(DaemonLeft("n2", "its node died"))
    assert isinstance(cluster.told[-1][1], msg.VacateDevices)
    (smaller,) = cluster.say("s", msg.DevicesVacated(JOB, placed.attempt))
    assert isinstance(smaller, msg.JobPlaced)
    assert (len(smaller.endpoints), smaller.resumed) == (2, True)
    (job,) = cluster.coordinator.status(Peer(1000, 1000, 7))["jobs"]
    assert (job["devices"], job["asked"], len(job["nodes"])) == (2, 3, 2)


def test_a_client_that_leaves_ends_its_job_and_one_that_is_silent_may_come_back(cluster: Cluster):
    cluster.place("s")
    cluster.place("s", OTHER)
    cluster.say("s", msg.PlacedJobEnded(2, OTHER, ""))
    cluster.happen(Closed(SessionId("s"), Peer(1000, 1000, 7), GONE))
    cluster.pass_time(cluster.coordinator.config.rejoin_s - 1.0)
    attempt = cluster.coordinator.placement.jobs[JOB].attempt  # type: ignore[index]
    cluster.connect("again")
    assert cluster.place("again", attempt=attempt) == [msg.Done(1)]
    cluster.pass_time(1000.0)
    assert cluster.phase() == "running"
    cluster.happen(Closed(SessionId("again"), Peer(1000, 1000, 7), GONE))
    cluster.pass_time(cluster.coordinator.config.rejoin_s)
    assert cluster.coordinator.answers[JOB].reason == "its client is gone"  # type: ignore[index]
    cluster.connect("third")
    cluster.place("third", f"{3:032x}")
    cluster.happen(Closed(SessionId("third"), Peer(1000, 1000, 7), GOODBYE))
    assert not cluster.coordinator.jobs


def test_a_daemon_may_be_away_for_a_while_and_then_its_jobs_go_elsewhere(cluster: Cluster):
    _, placed = cluster.place("s")
    assert isinstance(placed, msg.JobPlaced)
    (node,) = placed.nodes
    cluster.happen(DaemonAway(node, "it is gone"))
    cluster.pass_time(cluster.coordinator.config.lost_after_s - 1.0)
    cluster.found(node)
    cluster.pass_time(100.0)
    assert cluster.coordinator.placement.jobs[JOB].attempt == placed.attempt  # type: ignore[index]
    cluster.happen(DaemonAway(node, "it is gone"))
    before = len(cluster.told)
    cluster.pass_time(cluster.coordinator.config.lost_after_s)
    (again,) = [m for _, m in cluster.told[before:] if isinstance(m, msg.JobPlaced)]
    assert again.nodes != placed.nodes
    assert again.resumed
    (report,) = cluster.say("s", msg.GetStatus(5))
    assert isinstance(report, msg.Report)
    assert {each["name"]: each["state"] for each in report.body["nodes"]} == {node: "lost", again.nodes[0]: "up"}


def test_the_user_as_which_the_coordinator_runs_is_an_operator():
    cluster = Cluster(1, uid=1001)
    cluster.connect("s")
    cluster.connect("own", 1001)
    (refusal,) = cluster.say("s", msg.DrainNode(5, "n0", True))
    assert isinstance(refusal, msg.Refusal)
    assert cluster.say("own", msg.DrainNode(6, "n0", True), 1001) == [msg.Done(6)]
    assert cluster.say("own", msg.DrainNode(7, "n0", False), 1001) == [msg.Done(7)]
    cluster.place("s")
    assert cluster.say("own", msg.CloseJob(8, JOB, False), 1001) == [msg.Done(8)]


def test_only_operators_drain_and_a_drained_node_loses_what_can_move(cluster: Cluster):
    _, placed = cluster.place("s")
    assert isinstance(placed, msg.JobPlaced)
    (refusal,) = cluster.say("s", msg.DrainNode(2, placed.nodes[0], True))
    assert isinstance(refusal, msg.Refusal)
    assert refusal.code == "access_denied"
    cluster.connect("root", 0)
    (unknown,) = cluster.say("root", msg.DrainNode(2, "nowhere", True), 0)
    assert isinstance(unknown, msg.Refusal)
    before = len(cluster.told)
    assert cluster.say("root", msg.DrainNode(3, f"host of {placed.nodes[0]}", True), 0) == [msg.Done(3)]
    (asked,) = [m for _, m in cluster.told[before:] if isinstance(m, msg.VacateDevices)]
    assert (asked.attempt, asked.keep) == (placed.attempt, True)
    (elsewhere,) = cluster.say("s", msg.DevicesVacated(JOB, placed.attempt))
    assert isinstance(elsewhere, msg.JobPlaced)
    assert elsewhere.resumed
    assert elsewhere.nodes != placed.nodes
    assert any("is drained" in note for note in cluster.notes)
    assert cluster.say("root", msg.DrainNode(4, placed.nodes[0], False), 0) == [msg.Done(4)]


def test_a_cancelled_job_is_told_and_its_devices_are_free_when_it_has_left(cluster: Cluster):
    _, placed = cluster.place("s")
    assert isinstance(placed, msg.JobPlaced)
    done, vacate = cluster.say("s", msg.CloseJob(2, JOB, False))
    assert done == msg.Done(2)
    assert isinstance(vacate, msg.VacateDevices)
    assert not vacate.keep
    assert cluster.phase() == "stopping"
    (answered,) = cluster.say("s", msg.DevicesVacated(JOB, placed.attempt))
    assert answered == msg.JobAnswered(JOB, "cancelled", "it was cancelled")


def test_what_it_says_of_a_waiting_job_names_no_others_jobs():
    cluster = Cluster(nodes=1)
    cluster.connect("s")
    cluster.connect("t", 1001)
    cluster.place("s", priority=1)
    cluster.place("t", OTHER, 1001, priority=1)
    (report,) = cluster.say("t", msg.ExplainJob(3, OTHER), 1001)
    assert isinstance(report, msg.Report)
    assert "run a high job" in report.body["sentences"][0]
    assert JOB not in str(report.body)


def test_reservations_are_for_the_jobs_own_id_and_released_when_a_daemon_refuses(cluster: Cluster):
    cluster.agrees = False
    cluster.place("s", devices=2, priority=1)
    first, second = cluster.orders
    assert {first.job, second.job} == {JOB}
    cluster.happen(ev.DeviceReserved(first.attempt, first.device))
    cluster.happen(ev.DeviceRefused(second.attempt, second.device, "no room"))
    released = {order.device for order in cluster.orders if isinstance(order, ev.ReleaseDevice)}
    assert released == {DeviceId("n0", 0), DeviceId("n1", 0)}


def stopping(cluster: Cluster) -> msg.JobPlaced:
    """Have the job placed, and its node drained."""
    _, placed = cluster.place("s")
    assert isinstance(placed, msg.JobPlaced)
    cluster.connect("root", 0)
    cluster.say("root", msg.DrainNode(3, placed.nodes[0], True), 0)
    assert cluster.phase() == "stopping"
    return placed


def test_a_client_that_comes_back_without_the_devices_has_left_them(cluster: Cluster):
    placed = stopping(cluster)
    cluster.connect("again")
    done, elsewhere = cluster.place("again", attempt=0)
    assert done == msg.Done(1)
    assert isinstance(elsewhere, msg.JobPlaced)
    assert elsewhere.attempt > placed.attempt


def test_a_client_that_comes_back_with_the_devices_is_asked_again_to_leave(cluster: Cluster):
    placed = stopping(cluster)
    cluster.connect("again")
    done, asked = cluster.place("again", attempt=placed.attempt)
    assert done == msg.Done(1)
    assert isinstance(asked, msg.VacateDevices)
    assert asked.attempt == placed.attempt


def test_what_is_about_an_older_attempt_is_ignored(cluster: Cluster):
    placed = stopping(cluster)
    assert cluster.say("s", msg.DevicesVacated(JOB, placed.attempt - 1)) == []
    assert cluster.phase() == "stopping"
    (elsewhere,) = cluster.say("s", msg.DevicesVacated(JOB, placed.attempt))
    assert isinstance(elsewhere, msg.JobPlaced)
    assert cluster.say("s", msg.JobNotStarted(JOB, placed.attempt, 0, "late")) == []
    assert cluster.phase() == "running"


def test_a_low_job_that_has_to_leave_is_not_named_to_another_user():
    cluster = Cluster(nodes=1)
    cluster.connect("s")
    cluster.connect("t", 1001)
    cluster.place("s", nbytes=10 * GIB)
    cluster.place("t", OTHER, 1001, priority=1, nbytes=10 * GIB)
    assert cluster.phase(OTHER) == "claiming"
    (report,) = cluster.say("t", msg.ExplainJob(3, OTHER), 1001)
    assert isinstance(report, msg.Report)
    assert "of another user" in report.body["sentences"][0]
    assert JOB not in str(report.body)
    (mine,) = cluster.say("s", msg.ExplainJob(3, JOB))
    assert isinstance(mine, msg.Report)
    assert "of another user" in mine.body["sentences"][0]  # the high job that needs the room


def test_of_a_coordinator_that_was_started_again_a_client_is_told_when_its_daemon_is_heard_of(cluster: Cluster):
    _, placed = cluster.place("s")
    assert isinstance(placed, msg.JobPlaced)
    before = cluster.coordinator
    cluster.coordinator = Coordinator(
        before.config, lambda peer: USERS[peer.uid], placement=before.placement, jobs=before.jobs.values()
    )
    cluster.connect("again")
    assert cluster.place("again", attempt=0) == [msg.Done(1)]  # where the daemon is is not known yet
    cluster.told.clear()
    cluster.found(placed.nodes[0])
    assert cluster.told == [("again", placed)]


def test_a_job_that_turns_out_to_be_bound_to_its_node_is_not_moved(cluster: Cluster):
    _, placed = cluster.place("s")
    assert isinstance(placed, msg.JobPlaced)
    assert cluster.place("s", attempt=placed.attempt, movable=False) == [msg.Done(1)]
    cluster.connect("root", 0)
    before = len(cluster.told)
    cluster.say("root", msg.DrainNode(3, placed.nodes[0], True), 0)
    assert not [m for _, m in cluster.told[before:] if isinstance(m, msg.VacateDevices)]
    assert cluster.phase() == "running"


def test_a_daemon_that_leaves_is_lost_at_once_and_its_job_goes_elsewhere(cluster: Cluster):
    (placed,) = [m for m in cluster.place("s") if isinstance(m, msg.JobPlaced)]
    (node,) = placed.nodes
    before = len(cluster.told)
    cluster.happen(DaemonLeft(node, "its machine died"))
    (elsewhere,) = [m for _, m in cluster.told[before:] if isinstance(m, msg.JobPlaced)]
    assert elsewhere.resumed
    assert elsewhere.nodes != placed.nodes
    assert node not in cluster.coordinator.daemons
    assert node not in cluster.coordinator.placement.nodes
    assert any("its machine died" in note for note in cluster.notes)
    cluster.happen(DaemonLeft(node, "again"))  # of a node that is not known: nothing
    assert not any("again" in note for note in cluster.notes)
    cluster.found(node)
    assert node in cluster.coordinator.placement.nodes


def test_a_daemon_that_is_back_with_a_little_less_memory_is_the_same_and_with_half_of_it_another(cluster: Cluster):
    _, placed = cluster.place("s", movable=False)
    assert isinstance(placed, msg.JobPlaced)
    cluster.happen(DaemonAway(placed.nodes[0], "it is gone"))
    cluster.found(placed.nodes[0], gib=15)
    assert cluster.phase() == "running"
    cluster.happen(DaemonAway(placed.nodes[0], "it is gone"))
    cluster.found(placed.nodes[0], gib=8)
    assert not cluster.coordinator.jobs  # it could not be moved


def test_a_low_job_that_leaves_for_another_users_high_one_is_told_no_id_of_it():
    cluster = Cluster(nodes=1)
    cluster.connect("s")
    cluster.connect("t", 1001)
    cluster.place("s", nbytes=10 * GIB)
    cluster.place("t", OTHER, 1001, priority=1, nbytes=10 * GIB)
    (asked,) = [m for to, m in cluster.told if to == "s" and isinstance(m, msg.VacateDevices)]
    assert "of another user" in asked.reason
    assert OTHER not in asked.reason


def test_a_node_that_drains_still_drains_when_its_daemon_is_back(cluster: Cluster):
    cluster.connect("root", 0)
    assert cluster.say("root", msg.DrainNode(3, "n0", True), 0) == [msg.Done(3)]
    cluster.happen(DaemonAway("n0", "it is gone"))
    cluster.pass_time(100.0)
    assert "n0" not in cluster.coordinator.placement.nodes
    assert cluster.say("root", msg.DrainNode(4, "n1", True), 0) == [msg.Done(4)]
    cluster.place("s")
    before = len(cluster.orders)
    cluster.found("n0", gib=8)  # also with another device
    assert len(cluster.orders) == before  # nothing is reserved there, not even for a moment
    assert cluster.phase() == "waiting"
    assert cluster.say("root", msg.DrainNode(5, "n0", False), 0) == [msg.Done(5)]
    assert cluster.phase() == "running"


def test_a_node_that_is_lost_can_be_drained_before_it_is_back_and_has_no_drain_once_it_left(cluster: Cluster):
    cluster.connect("root", 0)
    for drain in (True, False, True):
        cluster.happen(DaemonAway("n0", "it is gone"))
        cluster.pass_time(100.0)
        assert cluster.say("root", msg.DrainNode(3, "host of n0", drain), 0) == [msg.Done(3)]
        cluster.found("n0")
        assert cluster.coordinator.placement.nodes["n0"].draining is drain
    cluster.happen(DaemonLeft("n0", "it is no longer one of the cluster's daemons"))
    cluster.found("n0")
    assert not cluster.coordinator.placement.nodes["n0"].draining


def test_a_client_that_comes_back_after_it_was_given_up_keeps_its_job_where_it_runs(cluster: Cluster):
    (placed,) = [m for m in cluster.place("s") if isinstance(m, msg.JobPlaced)]
    cluster.happen(Closed(SessionId("s"), Peer(1000, 1000, 7), GONE))
    cluster.pass_time(100.0)
    assert not cluster.coordinator.jobs
    cluster.connect("again")
    (refused,) = cluster.place("again", attempt=placed.attempt)
    assert isinstance(refused, msg.Refusal)  # and no answer that it failed, with which the client would end it
    assert (refused.code, "goes on where it runs" in refused.remedy) == ("unknown_job", True)
    assert [type(m) for m in cluster.place("again")] == [msg.Done, msg.JobAnswered]  # without devices it is over


def test_a_refusal_and_its_reason_are_logged_and_not_told_to_the_user(cluster: Cluster):
    cluster.agrees = False
    cluster.place("s", priority=1)
    (order,) = cluster.orders
    cluster.happen(ev.DeviceRefused(order.attempt, order.device, f"job {OTHER} has 3 GiB"))
    assert any(f"refused job {JOB[:8]}: job {OTHER} has 3 GiB" in note for note in cluster.notes)
    (report,) = cluster.say("s", msg.ExplainJob(3, JOB))
    assert isinstance(report, msg.Report)
    assert OTHER not in str(report.body)


def test_a_daemon_that_was_never_reached_is_shown_with_the_reason(cluster: Cluster):
    cluster.happen(DaemonAway("n9", "no daemon answers", "h9"))
    cluster.connect("root", 0)
    (report,) = cluster.say("root", msg.GetStatus(3), 0)
    assert isinstance(report, msg.Report)
    (row,) = [node for node in report.body["nodes"] if node["name"] == "n9"]
    assert (row["state"], row["why"], row["host"]) == ("lost", "no daemon answers", "h9")
    cluster.pass_time(100.0)
    cluster.found("n9")
    assert "n9" in cluster.coordinator.placement.nodes


def test_an_operator_cancels_the_job_of_another_user(cluster: Cluster):
    cluster.place("s")
    cluster.connect("t", 1001)
    (refused,) = cluster.say("t", msg.CloseJob(2, JOB, False), 1001)
    assert isinstance(refused, msg.Refusal)
    assert refused.code == "not_owner"
    cluster.connect("root", 0)
    assert cluster.say("root", msg.CloseJob(3, JOB, False), 0) == [msg.Done(3)]
    assert cluster.phase() == "stopping"


def test_users_are_limited_each_by_itself():
    cluster = Cluster(max_jobs=1)
    cluster.connect("s")
    cluster.connect("t", 1001)
    cluster.place("s")
    assert not [m for m in cluster.place("t", OTHER, 1001) if isinstance(m, msg.Refusal)]
    (refused,) = cluster.place("s", f"{3:032x}")
    assert isinstance(refused, msg.Refusal)
    assert "1 jobs of this user" in refused.message
