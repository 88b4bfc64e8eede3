"""A coordinator's metrics are those of docs/cluster.md, and say what is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gpumux.coordinator import metrics
from gpumux.coordinator.core import DaemonAway, PromiseSeen
from gpumux.coordinator.metrics import ClusterCollector, ClusterPage
from gpumux.errors import EndpointBusy
from tests.coordinator.test_core import GIB, JOB, OTHER, Cluster
from tests.metrics.contract import CLUSTER

DOCS = (Path(__file__).parents[2] / "docs/cluster.md").read_text()
ROW = re.compile(r"^\| `(gpumux_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def figures(cluster: Cluster) -> dict[str, float]:
    """By name and labels, as PromQL writes them."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(lambda question: question(cluster.coordinator)))
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def cluster() -> Cluster:
    """Two nodes, of which one runs a high job and the other a low one; two more wait."""
    made = Cluster()
    made.connect("s")
    made.place("s", priority=1, nbytes=15 * GIB)
    made.place("s", OTHER, nbytes=15 * GIB)
    made.place("s", f"{3:032x}", nbytes=15 * GIB)
    made.now = 30.0
    made.place("s", f"{4:032x}", nbytes=15 * GIB)
    return made


def test_they_say_what_is_so(cluster: Cluster):
    found = figures(cluster)
    assert found["gpumux_cluster_jobs{priority=high,state=running}"] == 1
    assert found["gpumux_cluster_jobs{priority=low,state=running}"] == 1
    assert found["gpumux_cluster_jobs{priority=low,state=waiting}"] == 2
    assert found["gpumux_cluster_longest_wait_seconds{priority=low}"] == 30.0
    assert found["gpumux_cluster_longest_wait_seconds{priority=high}"] == 0.0
    assert found["gpumux_cluster_nodes{state=up}"] == 2
    assert found["gpumux_cluster_jobs_submitted_total"] == 4
    assert found["gpumux_cluster_jobs_started_total"] == 2
    assert found["gpumux_cluster_node_used_bytes{node=n0}"] == 15 * GIB
    high = cluster.coordinator.placement.jobs[JOB].devices[0].node  # type: ignore[index]
    cluster.happen(PromiseSeen(high, False, "mean 1.30 of 1.10: BROKEN"))
    assert figures(cluster)[f"gpumux_cluster_promise_kept{{node={high}}}"] == 0
    cluster.happen(DaemonAway(high, "it is gone"))
    found = figures(cluster)
    assert found["gpumux_cluster_nodes{state=away}"] == 1
    assert f"gpumux_cluster_promise_kept{{node={high}}}" not in found


def test_the_page_names_each_with_its_labels(cluster: Cluster):
    cluster.happen(PromiseSeen("n0", True, "kept"))
    registry = CollectorRegistry()
    registry.register(ClusterCollector(lambda question: question(cluster.coordinator)))
    live = {}
    for family in registry.collect():
        for sample in family.samples:
            live[sample.name] = (family.type.replace("info", "gauge"), tuple(sorted(sample.labels)))
    documented = {
        name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in ROW.findall(DOCS)
    }
    assert documented == live
    assert live == CLUSTER | {"gpumux_build_info": ("gauge", ("version",))}


class Loop:
    """As far as the page and the metrics use one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.turning = True
        self.leaving = ""
        self.silent = 0.0
        self.asked = 0

    def now(self) -> float:
        return self.cluster.now

    def silent_s(self) -> float:
        return self.silent

    def ask(self, question, limit_s=0.0):
        self.asked += 1
        if self.silent:
            raise TimeoutError
        return question(self.cluster.coordinator)


@pytest.fixture
def served(cluster: Cluster):
    page = ClusterPage("127.0.0.1", 0, allowed_hosts=(), named=False)
    yield page
    page.close()


def ask(page: ClusterPage, path: str) -> tuple[int, str]:
    try:
        with urlopen(page.address + path, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_they_are_served_and_a_port_that_is_taken_is_named(cluster: Cluster, served: ClusterPage):
    served.watch(Loop(cluster))
    status, text = ask(served, "/metrics")
    assert status == 200
    assert {"gpumux_cluster_jobs", "gpumux_build_info"} <= {each.name for each in text_string_to_metric_families(text)}
    with pytest.raises(EndpointBusy, match="can't serve metrics"):
        ClusterPage("127.0.0.1", int(served.address.split(":")[2]), allowed_hosts=(), named=False)


def test_the_status_page_its_data_and_explanations_are_served(
    cluster: Cluster, served: ClusterPage, monkeypatch: pytest.MonkeyPatch
):
    loop = Loop(cluster)
    assert ask(served, "/status.json")[0] == 503, "nothing is watched yet"
    served.watch(loop)
    assert "<title>gpumux cluster</title>" in ask(served, "/")[1]
    monkeypatch.setattr(metrics, "FRESH_S", 1e6)
    status, text = ask(served, "/status.json")
    assert (status, len(json.loads(text)["nodes"])) == (200, 2)
    assert ask(served, "/status.json")[1] == text
    assert loop.asked == 1, "many readers cost no more than one"
    status, explained = ask(served, f"/explain.json?job={f'{4:032x}'[:8]}")
    assert status == 200
    assert json.loads(explained)["sentences"]
    monkeypatch.setattr(metrics, "FRESH_S", 0.0)
    assert json.loads(ask(served, "/status.json")[1])["when"] > json.loads(text)["when"]
    loop.silent = 3.0
    assert ask(served, "/status.json") == (503, '{"error": "the coordinator is starting, or does not answer"}')


def test_probes_tell_starting_turning_leaving_and_stuck(cluster: Cluster, served: ClusterPage):
    probes = lambda: (ask(served, "/healthz"), ask(served, "/readyz"))  # noqa: E731
    starting = ((200, "starting\n"), (503, "starting\n"))
    assert probes() == starting
    loop = Loop(cluster)
    loop.turning = False
    served.watch(loop)
    assert probes() == starting
    loop.turning = True
    assert probes() == ((200, "ok\n"), (200, "ok\n"))
    loop.silent = 3.0
    assert [status for status, _ in probes()] == [200, 200]
    loop.silent = 31.0
    assert probes() == ((503, "the dispatch loop has not turned for 31 s\n"),) * 2
    loop.silent, loop.leaving = 0.0, "told to stop"
    assert probes() == ((200, "ok\n"), (503, "leaving: told to stop\n"))
