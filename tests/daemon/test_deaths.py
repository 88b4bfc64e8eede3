"""Clients killed while a real daemon checks or loads their Program or moves their state, and a daemon stopped
meanwhile: it runs on, or ends in order, and other clients are not affected."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from gpumux.cli.control import Control
from gpumux.client.session import Session
from tests.program import samples

from .live import SOON_S, LiveJob, floats, read_floats, serving


class Victim:
    def __init__(self, daemon, doing):
        command = [sys.executable, "-m", "tests.daemon.victim", daemon.endpoint, doing]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "submitted\n"

    def kill(self):
        self._process.kill()
        self._process.wait(SOON_S)
        self._process.stdout.close()


def status(daemon):
    """Asked over a connection of its own: one that says nothing while something else is waited for is cut off."""
    with Control(daemon.endpoint, SOON_S) as control:
        return control.status()


def until(daemon, condition):
    """What is waited for needs the processor, too."""
    with Control(daemon.endpoint, SOON_S) as control:
        for _ in range(100_000):
            if condition(body := control.status()):
                return
            threading.Event().wait(0.002)
    raise AssertionError(f"never came true: {body}\n{daemon.log}")


def checked(daemon):
    return sum("program 0 checked" in line for line in daemon.lines)


@pytest.mark.every(3)
@pytest.mark.parametrize("doing", ["check", "load", "transfer"])
def test_kill_9_of_a_client_in_the_middle_harms_no_other(daemon, doing):
    with Session.connect(daemon.endpoint, SOON_S) as session:
        job = LiveJob(session, samples.add_one(), name="bystander")
        before, passed = status(daemon)["memory"], checked(daemon)
        victim = Victim(daemon, "check" if doing == "load" else doing)
        until(daemon, lambda body: len(body["jobs"]) == 2)
        if doing == "load":
            until(daemon, lambda _: checked(daemon) > passed)
        victim.kill()
        until(daemon, lambda body: [j["name"] for j in body["jobs"]] == ["bystander"])
        (result,) = job.run(floats(1, 2, 3, 4))
        assert read_floats(result, 4) == (2, 3, 4, 5)
        until(daemon, lambda body: body["memory"] == before)
        job.close()


def test_a_daemon_told_to_stop_while_it_loads_ends_well(runtime_dir):
    with serving(runtime_dir) as daemon:
        victim = Victim(daemon, "check")
        until(daemon, lambda _: checked(daemon))
        assert daemon.stop() == 0, daemon.log
        victim.kill()
