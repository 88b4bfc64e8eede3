"""A job that takes more than it is charged is named once; status and the gauges say what was measured."""

from __future__ import annotations

import logging

import pytest

from gpumux.daemon.report import OVERUSE_EVERY_S, SLACK_BYTES
from gpumux.device.base import MemoryFigures
from gpumux.types import JobId

from .fakes import Daemon

JOB, OTHER = "a" * 32, "b" * 32
CHARGED = 0  # these have no Program


@pytest.fixture
def daemon():
    daemon = Daemon()
    daemon.connect("s")
    daemon.open_job("s", JOB)
    daemon.open_job("s", OTHER)
    yield daemon
    daemon.close()


def look(daemon, measured, monkeypatch):
    """The daemon looks, some seconds later, while the first job was measured to hold so much."""
    figures = MemoryFigures(1 << 34, 1 << 33, {}, {JobId(JOB): measured})
    monkeypatch.setattr(daemon.device, "memory", lambda: figures)
    daemon.now += OVERUSE_EVERY_S
    daemon.turn()


def named(caplog):
    return [record.getMessage() for record in caplog.records if "its Programs declare" in record.getMessage()]


def test_a_job_that_outgrows_its_charge_is_named_once(daemon, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    allowed = CHARGED * 11 // 10 + SLACK_BYTES
    look(daemon, allowed, monkeypatch)
    assert named(caplog) == []
    look(daemon, allowed + 4096, monkeypatch)
    look(daemon, allowed + 8192, monkeypatch)
    assert len(named(caplog)) == 1
    assert f"{allowed + 4096} bytes" in named(caplog)[0]
    assert f"declare {CHARGED}:" in named(caplog)[0]
    assert daemon.metrics.outgrown._value.get() == 1


def test_status_and_gauges_say_what_was_measured(daemon, monkeypatch):
    look(daemon, 12345, monkeypatch)
    jobs = {job["job"]: job for job in daemon.loop.status()["jobs"]}
    assert (jobs[JOB]["measured_bytes"], jobs[OTHER]["measured_bytes"]) == (12345, 0)
    assert sorted(job.measured_bytes for job in daemon.loop.figures().jobs) == [0, 12345]
