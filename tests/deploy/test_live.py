"""A real Prometheus scrapes a live daemon: its rules run, and every query of the dashboard returns data."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager

import pytest
import yaml
import zmq

from gpumux.client.session import Session
from gpumux.errors import GpumuxError
from gpumux.wire import messages as msg
from tests.coordinator.live import RunningCoordinator
from tests.daemon.live import SOON_S, LiveJob, floats, serving
from tests.program import samples

from . import dashboard
from .packages import ROOT, need
from .test_prometheus import ALERTS, RECORDING

HOME = ROOT / "deploy" / "prometheus"
LIMIT_S = 250.0  # until everything has been scraped and evaluated, on a machine that is busy with other things


class Prometheus:
    def __init__(self, url):
        self._url = url

    def get(self, path, **query):
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        return self.get("query", query=expression)["result"]


def configuration(target, cluster):
    """The example's, but that it looks at this daemon and this coordinator, every second."""
    text = yaml.safe_load((HOME / "prometheus.yml").read_text())
    text["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
    text["rule_files"] = [str(HOME / name) for name in text["rule_files"]]
    (daemons,) = text["scrape_configs"]
    daemons["static_configs"][0]["targets"] = [target]
    text["scrape_configs"].append({"job_name": "gpumux-cluster", "static_configs": [{"targets": [cluster]}]})
    return yaml.safe_dump(text)


@contextmanager
def prometheus(directory, target, cluster):
    tool = need("prometheus", "prometheus")
    (directory / "prometheus.yml").write_text(configuration(target, cluster))
    held = socket.socket()  # so that no other process is given its port; it does not listen, so that Prometheus may
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Go's listeners do
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    log = (directory / "log").open("w")
    process = subprocess.Popen(
        [tool, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=1h"],
        stdout=log, stderr=log,
    )  # fmt: skip
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
        assert process.poll() is None, (directory / "log").read_text()
    finally:
        process.terminate()
        process.wait(SOON_S)
        log.close()
        held.close()


def misbehave(daemon):
    """A request that is refused, a step that crashes its executor, a client that vanishes and one that sends
    nonsense."""
    with Session.connect(daemon.endpoint, SOON_S) as session:
        crashing = LiveJob(session, samples.crash_div(), name="crashing")
        with pytest.raises(GpumuxError):
            session.call(msg.OpenJob(0, "e" * 32, "greedy", 7, 1.0, 1.1, None, 2, 0))
        crashing.post(struct.pack("4q", -(2**63), 4, 6, 8), struct.pack("4q", -1, 2, 2, 2))
        assert session.wait(lambda: bool(crashing.ended) or bool(crashing.done), SOON_S)
        crashing.data.release()
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 1000
        sock.connect(daemon.endpoint)
        sock.send(b"nonsense")


@contextmanager
def coordinating(daemon, directory):
    """A coordinator of this daemon; where its metrics are."""
    made = RunningCoordinator([daemon.endpoint], directory, state=False, flags=["--metrics-port", "0"])
    try:
        yield made.metrics
    finally:
        assert made.stop() == 0
        made.log.unlink()


@pytest.mark.slow
@pytest.mark.extended
def test_a_real_prometheus_gets_data_for_every_panel_and_sees_a_daemon_die(runtime_dir, tmp_path, monkeypatch):
    need("prometheus", "prometheus")
    monkeypatch.setenv("GPUMUX_METRICS_NAMES", "shown")
    with serving(runtime_dir) as daemon, coordinating(daemon, runtime_dir) as cluster:
        target = daemon.metrics_url.removeprefix("http://").removesuffix("/metrics")
        with Session.connect(daemon.endpoint, SOON_S) as session, prometheus(tmp_path, target, cluster) as server:
            high = LiveJob(session, samples.add_one(), name="train", priority=1)
            low = LiveJob(session, samples.add_one(), name="sweep")
            misbehave(daemon)

            def work():
                for job in (high, low):
                    for _ in range(20):
                        for view in job.run(floats(1, 2, 3, 4)):
                            view.release()

            queries = {(query.panel, query.expression) for query in dashboard.queries()}
            empty = until_empty(work, server, {expression for _, expression in queries})
            assert {panel for panel, expression in queries if expression in empty} == set(), (empty, daemon.log)
            recorded = until_empty(work, server, {rule["record"] for rule in RECORDING})
            assert recorded == set()
            check_labels(work, server)
            check_rules(server, healthy=True)
            high.close()
            low.close()
            session.close()
            assert daemon.stop() == 0
            assert until_empty(lambda: None, server, {'ALERTS{alertname="GpumuxDown"}'}) == set()
            check_rules(server, healthy=False)


def until_empty(work, server, expressions):
    """Keep working and asking until every expression has returned data; those that never did."""
    end = time.monotonic() + LIMIT_S
    left = set(expressions)
    while left and time.monotonic() < end:
        work()
        try:
            left = {expression for expression in left if not server.query(expression)}
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        except OSError:
            continue  # it starts
    return left


def check_labels(work, server):
    """The names people know a job by reach the recorded series, and the daemon's own label stays as it is."""
    ratio = "job:gpumux_slowdown:ratio"
    # A scrape that took longer than it is given leaves a gap until the next.
    assert until_empty(work, server, {ratio}) == set()
    (series,) = server.query(ratio)
    assert series["metric"]["name"] == "train"
    assert series["metric"]["job"] == "gpumux"
    assert series["metric"]["job_id"].startswith("j")


def check_rules(server, healthy):
    end = time.monotonic() + LIMIT_S
    while True:
        groups = server.get("rules")["groups"]
        found = {rule["name"]: rule for group in groups for rule in group["rules"]}
        as_told = (found["GpumuxDown"]["state"] == "inactive") == healthy
        if as_told or time.monotonic() > end:
            break
        time.sleep(0.2)  # one scrape of a busy machine may take longer than it is given; the next counts
    assert set(found) == {rule["alert"] for rule in ALERTS} | {rule["record"] for rule in RECORDING}
    assert {name: rule.get("lastError") for name, rule in found.items() if rule["health"] == "err"} == {}
    assert as_told
