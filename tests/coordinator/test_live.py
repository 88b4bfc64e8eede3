"""A coordinator as a process, with daemons as processes: what people and clients do with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from gpumux.cli.control import Control
from gpumux.client.session import Session
from gpumux.errors import ConfigError
from gpumux.types import JobSpec, Priority
from gpumux.wire import messages as msg
from microbench.daemon import GPUMUX, RunningDaemon, running_daemon
from tests.coordinator.live import END_S, RunningCoordinator

MIB = 2**20


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[RunningDaemon]]:
    with running_daemon(device="sim") as first, running_daemon(device="sim") as second:
        yield [first, second]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gm-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def coordinator(daemons: list[RunningDaemon], place: Path) -> Iterator[RunningCoordinator]:
    made = RunningCoordinator([each.endpoint for each in daemons], place)
    yield made
    if made.process.poll() is None:
        assert made.stop() == 0, made.log.read_text()


class Client:
    """A job's client, as far as the coordinator sees one."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.job = uuid.uuid4().hex
        self.heard: list[Any] = []
        self.connect()

    def connect(self) -> None:
        self.session = Session.connect(self.endpoint, 20.0, role="control")
        self.session.register(self.job, lambda message, frames: self.heard.append(message))

    def place(self, attempt: int = 0, priority: Priority = Priority.LOW) -> None:
        self.session.call(msg.PlaceJob(0, self.job, "a job", int(priority), 1, 64 * MIB, [], 0, True, attempt))

    def wait_for(self, kind: type[Any]) -> Any:
        found = lambda: next((each for each in self.heard if type(each) is kind), None)  # noqa: E731
        assert self.session.wait(lambda: found() is not None, END_S), f"no {kind.__name__}: {self.heard}"
        self.heard.remove(first := found())
        return first

    def end(self) -> None:
        self.session.call(msg.PlacedJobEnded(0, self.job, ""))


@pytest.fixture
def new_client() -> Iterator[Callable[[str], Client]]:
    """Makes clients, and closes their sessions at the end."""
    made: list[Client] = []

    def make(endpoint: str) -> Client:
        made.append(Client(endpoint))
        return made[-1]

    yield make
    for client in made:
        client.session.close()


NewClient = Callable[[str], Client]


def command(coordinator: RunningCoordinator, *words: str) -> subprocess.CompletedProcess[str]:
    """`gpumux cluster ...`"""
    environment = {**os.environ, "GPUMUX_CLUSTER": coordinator.endpoint}
    return subprocess.run(
        [*GPUMUX, "cluster", *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def jobs_of(coordinator: RunningCoordinator) -> list[dict[str, Any]]:
    found = command(coordinator, "jobs", "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def until_up(coordinator: RunningCoordinator, number: int = 2) -> dict[str, Any]:
    while True:
        with Control(coordinator.endpoint, 10.0, coordinator=True) as control:
            body = control.status()
        if sum(node["state"] == "up" for node in body["nodes"]) == number:
            return body


def test_a_job_is_placed_opened_under_its_reservation_and_seen(coordinator: RunningCoordinator, new_client: NewClient):
    client = new_client(coordinator.endpoint)
    client.place(priority=Priority.HIGH)
    placed = client.wait_for(msg.JobPlaced)
    with Session.connect(placed.endpoints[0], 20.0) as at_daemon:
        at_daemon.open_job(client.job, JobSpec(name="a job", priority=Priority.HIGH))
        with Control(placed.endpoints[0], 10.0) as control:
            body = control.status()
        assert [job["job"] for job in body["jobs"]] == [client.job]
        assert body["memory"]["reserved_bytes"] == 64 * MIB  # held for it from the start
    (seen,) = jobs_of(coordinator)
    assert (seen["job"], seen["state"], seen["nodes"]) == (client.job, "running", placed.nodes)
    shown = command(coordinator, "jobs").stdout
    assert client.job[:8] in shown
    assert "It has run on" in command(coordinator, "explain", client.job[:6]).stdout
    client.end()
    assert jobs_of(coordinator) == []


def test_a_coordinator_that_is_killed_knows_its_jobs_when_it_is_back(
    coordinator: RunningCoordinator, new_client: NewClient
):
    running, waiting = new_client(coordinator.endpoint), new_client(coordinator.endpoint)
    running.place()
    placed = running.wait_for(msg.JobPlaced)
    coordinator.kill()
    coordinator.start()
    for client in (running, waiting):
        client.session.close()
        client.connect()
    running.place(placed.attempt)
    waiting.place()
    waiting.wait_for(msg.JobPlaced)
    assert {job["job"]: job["state"] for job in jobs_of(coordinator)} == {
        running.job: "running", waiting.job: "running",
    }  # fmt: skip
    assert [type(each) for each in running.heard] == []  # it is where it was
    for client in (running, waiting):
        client.end()


def test_a_drained_node_is_left_and_taken_again(coordinator: RunningCoordinator, new_client: NewClient):
    until_up(coordinator)
    client = new_client(coordinator.endpoint)
    client.place()
    placed = client.wait_for(msg.JobPlaced)
    drained = command(coordinator, "drain", placed.nodes[0])
    assert drained.returncode == 0, drained.stderr
    asked = client.wait_for(msg.VacateDevices)
    assert (asked.attempt, asked.keep) == (placed.attempt, True)
    client.session.post(msg.DevicesVacated(client.job, placed.attempt))
    elsewhere = client.wait_for(msg.JobPlaced)
    assert elsewhere.resumed
    assert elsewhere.nodes != placed.nodes
    assert "draining" in command(coordinator, "status").stdout
    assert command(coordinator, "drain", placed.nodes[0], "--undo").returncode == 0
    assert "draining" not in command(coordinator, "status").stdout
    client.end()


def test_a_job_is_cancelled(coordinator: RunningCoordinator, new_client: NewClient):
    client = new_client(coordinator.endpoint)
    client.place()
    client.wait_for(msg.JobPlaced)
    assert command(coordinator, "cancel", client.job).returncode == 0
    asked = client.wait_for(msg.VacateDevices)
    assert not asked.keep
    client.session.post(msg.DevicesVacated(client.job, asked.attempt))
    assert client.wait_for(msg.JobAnswered).outcome == "cancelled"


def test_down_stops_it_and_what_is_wrong_is_said(coordinator: RunningCoordinator, daemons: list[RunningDaemon]):
    for words, says in (
        (("explain", "nothing"), "no job 'nothing'"),
        (("cancel", "nothing"), "no job 'nothing'"),
        (("drain", "nowhere"), "no node 'nowhere'"),
        (("status", "--cluster", daemons[0].endpoint), "not a coordinator"),
        (("down", "--cluster", daemons[0].endpoint), "not a coordinator"),
        (("up", "a.toml", daemons[0].endpoint), "name all of them in the file"),
        (("up", daemons[0].endpoint, daemons[0].endpoint), "name each daemon once"),
        (("up", "/nowhere/cluster.toml"), "can't read the cluster's file"),
        (("up", "10.0.0.1:7777"), "write tcp://10.0.0.1:7777"),
    ):
        found = command(coordinator, *words)
        assert found.returncode != 0
        assert says in found.stderr, found.stderr
        assert "Traceback" not in found.stderr
    Session.connect(daemons[0].endpoint, 20.0).close()  # it is there still
    environment = {**os.environ, "GPUMUX_ENDPOINT": coordinator.endpoint}
    with pytest.raises(ConfigError, match="a coordinator is at") as caught:
        Session.connect(coordinator.endpoint, 20.0)
    assert f'cluster="{coordinator.endpoint}"' in caught.value.remedy
    at_a_daemon = subprocess.run(
        [*GPUMUX, "status"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "gpumux cluster status" in at_a_daemon.stderr
    assert command(coordinator, "down").returncode == 0
    assert coordinator.process.wait(END_S) == 0
    gone = command(coordinator, "status")
    assert gone.returncode != 0
    assert "gpumux cluster up" in gone.stderr


def test_a_daemon_that_is_not_there_yet_is_taken_when_it_comes(place: Path, new_client: NewClient):
    (place / "d").mkdir(mode=0o700)
    coordinator = RunningCoordinator([f"ipc://{place}/d/gpumux.sock"], place, state=False)
    client = new_client(coordinator.endpoint)
    client.place()
    assert "does not have now" in command(coordinator, "explain", client.job).stdout
    with running_daemon(device="sim", directory=place / "d"):
        client.wait_for(msg.JobPlaced)
        client.end()
    assert coordinator.stop() == 0
    assert "nothing is kept over a restart" in coordinator.log.read_text()


def test_the_status_page_says_what_is_so_and_status_names_its_address(
    daemons: list[RunningDaemon], place: Path, new_client: NewClient
):
    made = RunningCoordinator([each.endpoint for each in daemons], place, state=False, flags=["--metrics-port", "0"])
    try:
        until_up(made)
        client = new_client(made.endpoint)
        client.place(priority=Priority.HIGH)
        (node,) = client.wait_for(msg.JobPlaced).nodes
        assert f"status page: http://{made.metrics}/\n" in command(made, "status").stdout

        def ask(path: str) -> str:
            with urlopen(f"http://{made.metrics}{path}", timeout=END_S) as answer:
                return str(answer.read().decode())

        assert (ask("/healthz"), ask("/readyz")) == ("ok\n", "ok\n")
        body = json.loads(ask("/status.json"))
        assert [each["state"] for each in body["nodes"]] == ["up", "up"]
        assert [each["high"] for each in body["nodes"]] == [each["name"] == node for each in body["nodes"]]
        (job,) = body["placed"]
        assert (job["short"], job["name"], job["nodes"], job["state"]) == (client.job[:8], "", [node], "running")
        assert [each["user"] for each in body["users"]] == [f"uid {os.getuid()}"]
        said = json.loads(ask(f"/explain.json?job={job['short']}"))["sentences"]
        assert said[0].startswith(f"It has run on {node}")
        client.end()
    finally:
        assert made.stop() == 0, made.log.read_text()
