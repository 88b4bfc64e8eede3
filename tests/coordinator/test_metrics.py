"""A coordinator's metrics are those of docs/cluster.md, and say what is so."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gpumux.coordinator.core import DaemonAway, PromiseSeen
from gpumux.coordinator.metrics import ClusterCollector, serve_metrics
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
    """As far as the metrics use one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def ask(self, question):
        return question(self.cluster.coordinator)


def test_they_are_served_and_a_port_that_is_taken_is_named(cluster: Cluster, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    with ExitStack() as stack:
        serve_metrics(Loop(cluster), "127.0.0.1", 0, stack)  # type: ignore[arg-type]
        (address,) = re.findall(r"http://\S+/metrics", caplog.text)
        with urlopen(address, timeout=10) as answer:
            names = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        assert {"gpumux_cluster_jobs", "gpumux_build_info"} <= names
        port = int(address.split(":")[2].split("/")[0])
        with pytest.raises(EndpointBusy, match="can't be served"):
            serve_metrics(Loop(cluster), "127.0.0.1", port, stack)  # type: ignore[arg-type]
