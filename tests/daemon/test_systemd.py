"""The words for a service manager, on a socket like its own, and a loop on a virtual clock."""

from __future__ import annotations

import os
import socket
from math import inf

import pytest

from gpumux.daemon.systemd import ServiceManager

from .fakes import Daemon

PID = 4242


class Notified:
    """A service manager's socket. Datagrams on one machine are there when the sender returns."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)

    def heard(self):
        said = []
        try:
            while True:
                said.append(self.socket.recv(1000).decode())
        except BlockingIOError:
            return said


@pytest.fixture(params=["file", "abstract"])
def service(request, runtime_dir):
    """What a manager hears, and the environment it gives its service."""
    name = str(runtime_dir / "notify") if request.param == "file" else f"@gpumux-test-{os.getpid()}"
    notified = Notified(name.replace("@", "\0"))
    yield notified, {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(PID)}
    notified.socket.close()
    if request.param == "file":
        os.unlink(name)


@pytest.fixture
def daemon():
    daemon = Daemon()
    yield daemon
    daemon.close()


def test_ready_and_status_are_one_datagram(service):
    notified, env = service
    ServiceManager(env, PID).ready("serves a CPU at ipc:///run/x")
    assert notified.heard() == ["READY=1\nSTATUS=serves a CPU at ipc:///run/x"]


def test_a_status_can_not_carry_another_assignment(service):
    notified, env = service
    ServiceManager(env, PID).ready("a device\nMAINPID=1")
    assert notified.heard() == ["READY=1\nSTATUS=a device?MAINPID=1"]


def test_the_watchdog_is_fed_twice_a_period_by_turns_and_by_nothing_else(service, daemon):
    notified, env = service
    ServiceManager(env, PID).watch(daemon.loop)
    daemon.turn()
    assert notified.heard() == ["WATCHDOG=1"]
    daemon.now += 14.9
    daemon.turn()
    assert notified.heard() == []
    daemon.now += 0.2
    daemon.turn()
    assert notified.heard() == ["WATCHDOG=1"]
    daemon.now += 1000.0  # stuck: no turns, however long
    assert notified.heard() == []
    daemon.turn()
    assert notified.heard() == ["WATCHDOG=1"]


def test_stopping_is_said_when_leaving_begins_and_not_when_it_is_over(service, daemon):
    notified, env = service
    daemon.connect("s")
    daemon.open_job("s", "a" * 32)
    daemon.device.unload, unload = lambda job: None, daemon.device.unload  # a device that does not let go
    ServiceManager({**env, "WATCHDOG_USEC": ""}, PID).watch(daemon.loop)
    daemon.loop.stop("the daemon got SIGTERM")
    daemon.turn()
    assert not daemon.loop.scheduler.drained
    assert notified.heard() == ["STOPPING=1\nSTATUS=leaving: the daemon got SIGTERM"]
    daemon.turn()
    assert notified.heard() == []
    daemon.device.unload = unload


@pytest.mark.parametrize("change", [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "0"},
                                    {"WATCHDOG_USEC": "-5"}, {"WATCHDOG_USEC": "²"}])  # fmt: skip
def test_the_watchdog_is_fed_only_if_this_process_was_asked(service, daemon, change):
    notified, env = service
    manager = ServiceManager({**env, **change}, PID)
    assert manager.watchdog_s == inf
    manager.watch(daemon.loop)
    daemon.turn()
    assert notified.heard() == []


def test_without_a_manager_nothing_is_said_and_nothing_fails(daemon, caplog):
    manager = ServiceManager({"WATCHDOG_USEC": "1000"}, PID)
    manager.watch(daemon.loop)
    daemon.turn()
    manager.ready("x")
    manager.stopping("y")
    assert (manager.watchdog_s, caplog.text) == (inf, "")


def test_a_manager_that_is_gone_costs_a_warning(runtime_dir, caplog):
    ServiceManager({"NOTIFY_SOCKET": str(runtime_dir / "nobody")}, PID).ready("x")
    assert "READY=1" in caplog.text
    assert "No such file" in caplog.text


def test_a_socket_of_another_machine_is_named_once(caplog):
    manager = ServiceManager({"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "1000"}, PID)
    manager.ready("x")
    assert [record.getMessage() for record in caplog.records] == [
        "NOTIFY_SOCKET 'vsock:2:1234' is no socket of this machine: nothing is sent"
    ]


def test_a_manager_that_does_not_listen_never_holds_the_loop_up(service):
    """Its queue is full and stays full; a send that waited would never return."""
    notified, env = service
    manager = ServiceManager(env, PID)
    fed = 0
    with pytest.MonkeyPatch.context() as patch:
        warned = []
        patch.setattr("gpumux.daemon.main.log.warning", lambda *args: warned.append(args))
        while not warned:
            manager.alive()
            fed += 1
            assert fed < 100_000
    assert len(notified.heard()) == fed - 1
