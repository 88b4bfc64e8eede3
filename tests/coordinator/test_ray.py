"""`gpumux cluster up --ray`: which daemons a Ray node gets, and a coordinator over Ray nodes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpumux.cli.control import Control
from gpumux.cli.main import main
from gpumux.client.session import Session
from gpumux.coordinator.ray.plan import RayNode, RaySettings, daemons_of, name_of, nodes_of, number_of
from gpumux.errors import ConfigError
from gpumux.wire import messages as msg
from gpumux.wire.endpoint import living_holder, parse
from microbench.daemon import GPUMUX
from microbench.ray_nodes import RESOURCE, RayNodes, ray_nodes
from tests.coordinator.live import END_S, RunningCoordinator

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

HERE = "10.0.0.1"


def node(name: str = "a" * 56, address: str = HERE, gpus: int = 2, *resources: str) -> RayNode:
    return RayNode(name, "box", address, gpus, frozenset(resources))


def test_a_node_gets_a_daemon_on_each_gpu():
    first, second = daemons_of(node(), RaySettings(directory="/run/x"), HERE)
    assert first.address.endpoint == "ipc:///run/x/aaaaaaaa-0/gpumux.sock"
    assert (first.address.node, first.address.host, first.gpus) == ("box:aaaaaaaa-0", "box", 1)
    assert first.endpoints == (first.address.endpoint,)
    assert "--device cuda" in " ".join(first.arguments)
    assert {first.name, second.name} == {name_of("a" * 56, 0), name_of("a" * 56, 1)}
    assert first.address.endpoint != second.address.endpoint
    assert daemons_of(node(gpus=0), RaySettings(), HERE) == []


def test_a_node_gets_as_many_other_daemons_as_asked_for_if_it_has_the_resource():
    settings = RaySettings(device="cpu", daemons_per_node=3, resource="mine", state_dir="/s")
    assert daemons_of(node(), settings, HERE) == []
    found = daemons_of(node("b" * 56, HERE, 0, "mine"), settings, HERE)
    assert [each.gpus for each in found] == [0, 0, 0]
    states = [each.arguments[each.arguments.index("--state-dir") + 1] for each in found]
    assert states == [f"/s/bbbbbbbb-{number}" for number in range(3)]


def test_daemons_of_another_machine_need_keys():
    far = node(address="10.0.0.2")
    with pytest.raises(ConfigError, match="CURVE keys") as caught:
        daemons_of(far, RaySettings(), HERE)
    assert "--daemon-config" in caught.value.remedy
    first, second = daemons_of(far, RaySettings(keys=True, daemon_config="/k.toml", port=9000), HERE)
    assert first.address.endpoint == "tcp://10.0.0.2:9000"
    assert second.address.endpoint == "tcp://10.0.0.2:9001"
    assert parse(first.endpoints[0]).is_ipc  # for clients on that machine
    assert first.arguments[-2:] == ("--config", "/k.toml")
    (six, _) = daemons_of(node(address="fd00::2"), RaySettings(keys=True), HERE)
    assert parse(six.address.endpoint).text == "tcp://[fd00::2]:7777"
    assert daemons_of(node(address="10.0.0.2", gpus=0), RaySettings(), HERE) == []  # nothing to reach


def test_nodes_that_are_alive_are_taken_and_names_of_actors_are_read_back():
    listed = [
        {
            "NodeID": "b",
            "Alive": True,
            "NodeManagerHostname": "h",
            "NodeManagerAddress": "1",
            "Resources": {"GPU": 2.0},
        },
        {"NodeID": "c", "Alive": False, "NodeManagerHostname": "h", "NodeManagerAddress": "1", "Resources": {}},
        {"NodeID": "a", "Alive": True, "NodeManagerHostname": "h", "NodeManagerAddress": "1", "Resources": {}},
    ]
    assert nodes_of(listed) == [RayNode("a", "h", "1", 0), RayNode("b", "h", "1", 2, frozenset({"GPU"}))]
    assert number_of(name_of("abc", 12), "abc") == 12
    assert number_of(name_of("abc", 12), "ab") is None
    assert number_of("another", "abc") is None


# ---- The command line.


def test_what_does_not_go_together_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine = tmp_path / "daemon.toml"
    mine.write_text('[daemon]\nendpoint = "ipc:///x/gpumux.sock"\n')
    theirs = tmp_path / "cluster.toml"
    theirs.write_text('[[daemons]]\nendpoint = "tcp://a:1"\n')
    for words, says in (
        ((), "no daemons are named"),
        (("ipc:///x/gpumux.sock", "--ray"), "--ray beside daemons"),
        (("ipc:///x/gpumux.sock", "--device", "cpu"), "--device is of daemons on Ray's nodes"),
        (("ipc:///x/gpumux.sock", "--daemon-state-dir", "/s"), "--daemon-state-dir is of daemons"),
        (("--ray", "cluster.toml"), "write the cluster's file before --ray"),
        (("--ray", "ray://a:10001"), "HOST:6379"),
        (("--ray", "--daemons-per-node", "2"), "choose --device cpu"),
        (("--ray", "--device", "cpu", "--daemons-per-node", "0"), "1 or more"),
        (("--ray", "--daemon-config", str(mine)), "has an endpoint"),
        ((str(theirs), "--ray"), "leave [[daemons]] out"),
    ):
        assert main(["cluster", "up", *words]) == 78, words
        assert says in capsys.readouterr().err, words


@needs_ray
def test_a_cluster_that_is_not_there_is_named():
    found = subprocess.run(
        [*GPUMUX, "cluster", "up", "--ray", "127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 78, found.stderr
    assert "no Ray cluster at 127.0.0.1:1" in found.stderr
    assert "Traceback" not in found.stderr


def test_without_ray_the_command_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; from gpumux.cli.main import main; sys.exit(main())"
    found = subprocess.run(
        [GPUMUX[0], "-c", code, "cluster", "up", "--ray"], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 78, found.stderr
    assert "pip install ray" in found.stderr
    assert "Traceback" not in found.stderr


# ---- With Ray.


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gm-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def ray() -> Iterator[RayNodes]:
    with ray_nodes(3) as nodes:
        yield nodes


def until(coordinator: RunningCoordinator, count: int) -> list[dict[str, Any]]:
    """The nodes, once exactly so many are there and all are up."""
    while True:
        assert coordinator.process.poll() is None, coordinator.log.read_text()
        with Control(coordinator.endpoint, 20.0, coordinator=True) as control:
            nodes = control.status()["nodes"]
        if [each["state"] for each in nodes] == ["up"] * count:
            return nodes
        os.sched_yield()


WORKER = """
import json
import sys
import warnings

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

address, node = sys.argv[1:]

@ray.remote(num_cpus=0)
def ask():
    import torch
    from gpumux import client
    from gpumux.integrations.ray import endpoint

    try:
        found = endpoint()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    try:
        endpoint(7)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.ones(8, 4)
    warnings.simplefilter("ignore")  # the device is simulated
    with client.submit(step, example=batch, model=model, optimizer=optimizer, endpoint=found) as job:
        return [found, refused, float(job.step(batch))]

ray.init(address=address, log_to_driver=False)
there = ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
print("found", json.dumps(ray.get(there.remote())))
"""


def asked_by_a_worker(ray: RayNodes, node: str) -> list[Any]:
    """What a worker on the node has of `gpumux.integrations.ray.endpoint`: the endpoint, what it says to a number that
    is not there, and the loss of a step there; or the error alone."""
    found = subprocess.run(
        [GPUMUX[0], "-c", WORKER, ray.address, node], capture_output=True, text=True, timeout=60, check=False
    )
    (line,) = [each for each in found.stdout.splitlines() if each.startswith("found ")] or [found.stderr]
    return list(json.loads(line.removeprefix("found ")))


def socket_of(node: dict[str, Any]) -> Path:
    path = parse(node["endpoint"]).path
    assert path is not None
    return path


def holders(nodes: list[dict[str, Any]]) -> dict[str, int | None]:
    """The processes of the daemons."""
    return {each["endpoint"]: living_holder(socket_of(each)) for each in nodes}


@needs_ray
@pytest.mark.slow
@pytest.mark.extended
def test_a_daemon_that_is_set_up_wrongly_is_named_and_not_started_again(ray: RayNodes, place: Path):
    words = ["--ray", ray.address, "--device", "sim", "--resource", RESOURCE, "--daemon-state-dir", "/proc/none"]
    coordinator = RunningCoordinator(words, place, state=False)
    while coordinator.log.read_text().count("gets none until the coordinator is started again") < len(ray.ids):
        assert coordinator.process.poll() is None, coordinator.log.read_text()
        os.sched_yield()
    until(coordinator, 0)
    assert coordinator.stop() == 0, coordinator.log.read_text()
    assert "/proc/none" in coordinator.log.read_text()


SCRIPT = """
import os
import sys
import warnings

import torch
from gpumux import client

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

batch = torch.ones(8, 4)
warnings.simplefilter("ignore")  # the device is simulated
with client.submit(step, example=batch, model=model, optimizer=optimizer, cluster="auto") as job:
    job.step(batch).result()
    print("ran", *sys.argv[1:], job.id, os.environ["GPUMUX_ENDPOINT"], os.getcwd(), os.environ["MINE"], flush=True)
    try:
        while True:
            os.sched_yield()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(3)
"""


def run_a_script(coordinator: RunningCoordinator, nodes: list[dict[str, Any]], place: Path) -> None:
    """`gpumux cluster run`, with a directory that is copied to the node that is chosen."""
    there = place / "there"
    there.mkdir()
    (there / "train.py").write_text(SCRIPT)
    script = subprocess.Popen(
        [
            *GPUMUX, "cluster", "run", "--cluster", coordinator.endpoint, "--cwd", str(there), "--ship",
            "--env", "MINE=a b", "train.py", "--epochs", "3",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert script.stdout is not None
    # Its line is seen while it runs. It has the job that was asked for, at the daemon of its node.
    words = script.stdout.readline().split()
    assert words[:3] + words[6:] == ["ran", "--epochs", "3", "a", "b"], script.communicate(timeout=END_S)
    job_id, endpoint, directory = words[3:6]
    assert directory != str(there)
    with Control(coordinator.endpoint, 20.0, coordinator=True) as control:
        (job,) = control.status()["jobs"]
    (node,) = [each for each in nodes if each["name"] in job["nodes"]]
    assert (job["job"], job["name"], job["state"], node["endpoint"]) == (job_id, "train", "running", endpoint)
    # Ctrl-C is the script's, and its exit code is the command's. The job ends with it.
    script.send_signal(signal.SIGINT)
    _, said = script.communicate(timeout=END_S)
    assert "interrupted" in said.splitlines()
    assert script.returncode == 3, said
    with Control(coordinator.endpoint, 20.0, coordinator=True) as control:
        assert control.status()["jobs"] == []


@needs_ray
@pytest.mark.slow
@pytest.mark.extended
def test_daemons_on_ray_nodes_are_followed_restarted_and_ended(ray: RayNodes, place: Path):
    words = ["--ray", ray.address, "--device", "sim", "--resource", RESOURCE]
    coordinator = RunningCoordinator(words, place)
    nodes = until(coordinator, 3)
    assert {each["name"].partition(":")[2] for each in nodes} == {f"{each[:8]}-0" for each in ray.ids}
    run_a_script(coordinator, nodes, place)
    # A daemon that dies is started again by Ray, at the same endpoint.
    first = next(each for each in nodes if ray.ids[0][:8] in each["name"])
    daemon = living_holder(socket_of(first))
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    while living_holder(socket_of(first)) in (None, daemon):
        os.sched_yield()
    until(coordinator, 3)
    # A worker of Ray finds the daemon of its node, also if the coordinator is dead, and daemons survive that.
    coordinator.kill()
    found, refused, loss = asked_by_a_worker(ray, ray.ids[0])
    assert (found, loss) == (first["endpoint"], 0.0)  # of a simulated device
    assert refused.startswith("ConfigError: this Ray node has no daemon 7")
    before = holders(nodes)
    assert None not in before.values()
    coordinator.start()
    assert holders(until(coordinator, 3)) == before
    assert "is no longer one of the cluster's daemons" not in coordinator.log.read_text()  # none was lost meanwhile
    # A node that dies is lost at once.
    ray.remove(2)
    left = until(coordinator, 2)
    assert {each["name"].partition(":")[2] for each in left} == {f"{each[:8]}-0" for each in ray.ids[:2]}
    with Session.connect(coordinator.endpoint, 20.0, role="control") as session:
        job = "1" * 32
        heard: list[Any] = []
        session.register(job, lambda message, frames: heard.append(message))
        session.call(msg.PlaceJob(0, job, "a job", 0, 1, 2**20, [], 0, True, 0))
        assert session.wait(lambda: any(type(each) is msg.JobPlaced for each in heard), END_S)
    # Its end is that of the daemons, and Ray goes on.
    assert coordinator.stop() == 0, coordinator.log.read_text()
    assert set(holders(nodes).values()) == {None}
    (gone,) = asked_by_a_worker(ray, ray.ids[0])
    assert gone.startswith("DaemonGone: no gpumux daemon is on this Ray node")
