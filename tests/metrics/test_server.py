"""/metrics over HTTP, and the hand-over of snapshots between two threads."""

from __future__ import annotations

import threading
import urllib.request

import pytest

from gpumux.errors import ConfigError
from gpumux.metrics import collector
from gpumux.metrics.collector import SnapshotBox
from gpumux.metrics.registry import Metrics
from gpumux.metrics.server import MetricsServer

from .test_contract import figures


@pytest.fixture
def server():
    server = MetricsServer(Metrics([int]).registry, "127.0.0.1", 0)
    yield server
    server.close()


def test_a_free_port_is_picked_and_served(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        body = answer.read().decode()
    assert answer.status == 200
    assert "gpumux_daemon_start_time_seconds" in body


def test_a_taken_port_is_a_typed_error_that_names_it(server):
    with pytest.raises(ConfigError, match=f"{server.port}.*--metrics-port"):
        MetricsServer(Metrics([int]).registry, "127.0.0.1", server.port)


def test_a_scrape_wakes_the_loop_and_gets_its_snapshot():
    box = SnapshotBox(lambda: box.publish(figures()))
    assert box.fetch() == figures()
    assert not box.wanted()


def test_scrapes_close_together_share_a_snapshot(monkeypatch):
    monkeypatch.setattr(collector, "FRESH_S", 1e9)
    woken = []
    box = SnapshotBox(lambda: woken.append(1) or box.publish(figures()))
    assert box.fetch() is box.fetch()
    assert len(woken) == 1


def test_a_stuck_loop_leaves_the_last_snapshot(monkeypatch):
    monkeypatch.setattr(collector, "FRESH_S", 0.0)
    monkeypatch.setattr(collector, "STALE_S", 0.0)
    box = SnapshotBox(lambda: None)
    assert box.fetch() is None
    box.publish(figures())
    assert box.fetch() == figures()
    assert box.wanted()


def test_a_scrape_that_waits_is_let_go_when_the_loop_ends(monkeypatch):
    monkeypatch.setattr(collector, "STALE_S", 1e6)
    asked = threading.Event()
    box = SnapshotBox(asked.set)
    got = []
    scrape = threading.Thread(target=lambda: got.append(box.fetch()))
    scrape.start()
    asked.wait(10)
    box.close()
    scrape.join(10)
    assert got == [None]
