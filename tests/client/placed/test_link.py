"""A job's session with its coordinator, without daemons: those are played, or take nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpumux.client.placed import link
from gpumux.client.placed.link import CoordinatorLink
from gpumux.client.recovery import Recovery
from gpumux.client.session import Session
from gpumux.errors import AdmissionRefused, DaemonGone
from gpumux.wire import messages as m
from tests.client.placed.coordinator import WAIT_S, FakeCoordinator

JOB = "1" * 32


class PlayedSession:
    """A session with daemons that take snapshots."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.dead = None
        kind = endpoints[0].partition(":")[0]
        self.welcome = SimpleNamespace(device={"kind": kind, "snapshot_s": 1.0})

    def close(self) -> None:
        pass


class PlayedJob:
    """What a link uses of a job's Recovery."""

    closed, recorder = False, object()

    def __init__(self) -> None:
        self.told = threading.Event()  # to leave

    def programs(self) -> list[str]:
        return []

    def leave(self, patience_s: float) -> None:
        self.told.set()

    def ensure_open(self) -> None:
        pass


def linked(coordinator: FakeCoordinator, devices: int = 1, reconnect_s: float = WAIT_S) -> CoordinatorLink:
    """A link. Endpoints are the kinds of devices that are there."""
    return CoordinatorLink(
        cluster=coordinator.endpoint,
        request=m.PlaceJob(0, JOB, "a job", 0, devices, 1, [], 0, True, 0),
        connect=lambda endpoints, timeout: cast("Session", PlayedSession(endpoints)),
        limited=False,
        reconnect_s=reconnect_s,
    )


def opened(made: CoordinatorLink, job: Any = None) -> Session:
    """Wait until the job has devices, and open it there."""
    session = made.connect(None, WAIT_S)
    assert session is not None
    made.accepted()
    if job is not None:
        made.attach(cast("Recovery", job), [1])
    made.opened()
    return session


def test_a_job_does_not_go_on_at_a_device_of_another_kind(coordinator: FakeCoordinator):
    coordinator.places = ["cpu:1", "cuda:1", "cpu:2"]
    made = linked(coordinator)
    made.join()
    session = opened(made, job := PlayedJob())
    coordinator.vacate()
    assert job.told.wait(WAIT_S)
    made.left(forgotten=True)
    assert made.connect(session, WAIT_S) is None
    refused = coordinator.hear(m.JobNotStarted)
    assert refused.why == "the job was captured for a cpu device, and this is a cuda one"
    assert made.connect(None, WAIT_S) is not None
    made.ended("")


def test_the_coordinator_that_comes_back_is_told_with_how_many_devices_a_gang_may_go_on(coordinator: FakeCoordinator):
    coordinator.places = [["cpu:1", "cpu:2"]]
    made, job = linked(coordinator, 2), PlayedJob()
    made.join()
    opened(made, job)
    assert coordinator.hear(m.GangSizes).sizes == [1]
    coordinator.die()
    coordinator.come_back()
    assert coordinator.hear(m.PlaceJob, 2).attempt == 1
    assert coordinator.hear(m.GangSizes, 2).sizes == [1]
    made.ended("")


def test_a_job_that_no_device_takes_is_not_tried_without_end(coordinator: FakeCoordinator):
    coordinator.places = ["cpu:1"]
    made = linked(coordinator)
    made.join()
    refusal = AdmissionRefused("the program needs 1.00 GiB more", "free it")
    for tried in range(link.MOST_TRIES):
        session = made.connect(None, WAIT_S)
        assert session is not None
        assert made.refused(session, refusal)
        assert coordinator.hear(m.JobNotStarted, tried + 1).attempt == tried + 1
    session = made.connect(None, WAIT_S)
    assert session is not None
    assert not made.refused(session, refusal)
    made.ended("")


def test_a_coordinator_that_goes_before_it_has_answered_is_asked_again(coordinator: FakeCoordinator):
    coordinator.silent = True
    made = linked(coordinator)
    joining = threading.Thread(target=made.join)
    joining.start()
    coordinator.hear(m.PlaceJob)
    coordinator.die()
    coordinator.silent = False
    coordinator.places = ["cpu:1"]
    coordinator.come_back()
    joining.join()
    opened(made)
    made.ended("")
    assert coordinator.hear(m.PlacedJobEnded).fault == ""


def test_a_submit_that_may_not_wait_does_not_ask_again(coordinator: FakeCoordinator):
    coordinator.silent = True
    made = linked(coordinator, reconnect_s=0.0)
    caught: list[BaseException] = []

    def join() -> None:
        with pytest.raises(DaemonGone) as error:
            made.join()
        caught.append(error.value)

    joining = threading.Thread(target=join)
    joining.start()
    coordinator.hear(m.PlaceJob)
    coordinator.die()
    joining.join()
    assert len(caught) == 1
    made.ended("it could not be placed")
