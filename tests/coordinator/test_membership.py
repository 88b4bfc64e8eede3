"""Daemons that come and go while a coordinator runs."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumux.cli.control import Control
from gpumux.cluster import events as ev
from gpumux.cluster.events import DeviceId, PlacementConfig
from gpumux.coordinator.config import ClusterFile, address
from gpumux.coordinator.core import Order
from gpumux.coordinator.daemons import DaemonAddress, Links, difference
from gpumux.coordinator.main import Reread
from gpumux.coordinator.several import Services
from gpumux.errors import ConfigError
from gpumux.types import JobId, Priority
from microbench.daemon import running_daemon
from tests.coordinator.live import RunningCoordinator

ADDRESSES = st.dictionaries(
    st.sampled_from("abcdef"), st.sampled_from(["ipc:///1/gpumux.sock", "ipc:///2/gpumux.sock"])
).map(lambda found: {node: DaemonAddress(node, "h", endpoint) for node, endpoint in found.items()})


@given(ADDRESSES, ADDRESSES)
def test_known_daemons_less_those_that_left_and_with_those_that_joined_are_the_wanted_ones(
    known: dict[str, DaemonAddress], wanted: dict[str, DaemonAddress]
):
    change = difference(known, wanted.values())
    after = {node: each for node, each in known.items() if node not in change.left}
    assert not {each.node for each in change.joined} & set(after)
    after |= {each.node: each for each in change.joined}
    assert after == wanted
    assert set(change.left) <= set(known)
    assert difference(after, wanted.values()) == ([], [])
    for node, each in known.items():  # those that stay are not touched
        if wanted.get(node) == each:
            assert node not in change.left
            assert each not in change.joined


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="gm-"))
    yield made
    shutil.rmtree(made)


def order(node: str, release: bool = False) -> Order:
    job, device = JobId("1" * 32), DeviceId(node, 0)
    if release:
        return Order(ev.ReleaseDevice(1, device, job))
    return Order(ev.ReserveDevice(1, device, job, Priority.LOW, 1, 1.0))


def test_a_link_that_left_is_not_current_and_orders_to_it_are_refused(place: Path):
    links = Links(lambda link, happening: None)
    first, second = (address(f"ipc://{place}/{name}/gpumux.sock", name, "h") for name in "ab")
    assert links.follow([first, second]) == []
    there = links.link("a")
    assert there is not None
    assert links.current(there)
    assert links.order(order("a")) is None
    assert links.follow([second]) == ["a"]
    assert not links.current(there)
    refused = links.order(order("a"))
    assert isinstance(refused, ev.DeviceRefused)
    assert refused.device == DeviceId("a", 0)
    assert links.order(order("a", release=True)) is None  # nothing is reserved any more
    moved = address(f"ipc://{place}/c/gpumux.sock", "b", "h")
    assert links.follow([moved]) == ["b"]  # jobs of the daemon that was there are not at another one
    again = links.link("b")
    assert again is not None
    assert again.address == moved
    links.close()
    assert not there.alive


def file_of(path: Path, *daemons: str) -> None:
    path.write_text("".join(f'[[daemons]]\nendpoint = "{each}"\n' for each in daemons))


def test_a_file_is_read_again_for_its_daemons_and_a_bad_one_changes_nothing(caplog: pytest.LogCaptureFixture):
    one = ClusterFile((address("tcp://a:1"),), PlacementConfig())
    other = ClusterFile((address("tcp://b:1"),), PlacementConfig(patience_s=1.0))
    followed: list[Any] = []

    def bad() -> ClusterFile:
        raise ConfigError("line 3 is wrong", "mend it")

    with caplog.at_level(logging.INFO, "gpumux.coordinator"):
        Reread(one, lambda: one, followed.append, Services()).read()
        assert "wait for a restart" not in caplog.text
        Reread(one, lambda: other, followed.append, Services()).read()
        assert "quotas and weights wait for a restart" in caplog.text
        Reread(one, bad, followed.append, Services()).read()
        assert "line 3 is wrong" in caplog.text
        Reread(one, None, followed.append, Services()).read()
        assert "no file of daemons" in caplog.text
    assert followed == [one.daemons, other.daemons]


def test_a_service_is_looked_up_again_and_keeps_its_daemons_while_it_can_not_be(caplog: pytest.LogCaptureFixture):
    cluster = ClusterFile((address("tcp://a:1"),), PlacementConfig(), ("tcp://gpumux.svc:7",))
    answers: list[Any] = [["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"], OSError("no name server"), ["10.0.0.2"]]
    followed: list[Any] = []

    def lookup(name: str) -> list[str]:
        assert name == "gpumux.svc"
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    reread = Reread(cluster, lambda: cluster, followed.append, Services(lookup))
    with caplog.at_level(logging.INFO, "gpumux.coordinator"):
        for _ in range(3):
            reread.look_up()
        assert [[each.endpoint for each in daemons] for daemons in followed] == [
            ["tcp://a:1", "tcp://10.0.0.1:7", "tcp://10.0.0.2:7"]
        ]
        assert "gpumux.svc can't be looked up (no name server): 2 daemons stay" in caplog.text
        reread.read()
    assert [each.node for each in followed[-1]] == ["a:1", "10.0.0.2:7"]
    assert "read again: 2 daemons" in caplog.text


def test_a_daemon_that_the_file_names_beside_its_service_changes_nothing(caplog: pytest.LogCaptureFixture):
    cluster = ClusterFile((address("tcp://10.0.0.1:7"),), PlacementConfig(), ("tcp://gpumux.svc:7",))
    followed: list[Any] = []
    Reread(cluster, None, followed.append, Services(lambda _: ["10.0.0.1"])).look_up()
    assert "two daemons have the name 10.0.0.1:7" in caplog.text
    assert followed == []


def nodes(coordinator: RunningCoordinator) -> dict[str, str]:
    with Control(coordinator.endpoint, 10.0, coordinator=True) as control:
        return {node["endpoint"]: node["state"] for node in control.status()["nodes"]}


def test_daemons_of_the_file_join_and_leave_at_sighup(place: Path):
    path = place / "cluster.toml"
    with running_daemon(device="sim") as first, running_daemon(device="sim") as second:
        file_of(path, first.endpoint)
        coordinator = RunningCoordinator([str(path)], place)
        while nodes(coordinator) != {first.endpoint: "up"}:
            os.sched_yield()
        file_of(path, second.endpoint)
        coordinator.process.send_signal(signal.SIGHUP)
        while nodes(coordinator) != {second.endpoint: "up"}:
            os.sched_yield()
        path.write_text("[[daemons")
        coordinator.process.send_signal(signal.SIGHUP)
        while "the daemons stay as they are" not in coordinator.log.read_text():
            os.sched_yield()
        assert nodes(coordinator) == {second.endpoint: "up"}
        coordinator.kill()
        file_of(path, first.endpoint)  # the node that was kept is not named any more
        coordinator.start()
        while nodes(coordinator) != {first.endpoint: "up"}:
            os.sched_yield()
        assert coordinator.stop() == 0
    assert "is no longer one of the cluster's daemons" in coordinator.log.read_text()
