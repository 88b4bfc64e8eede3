"""A coordinator's metrics, in the Prometheus text format (docs/cluster.md, "Metrics"). Each scrape asks the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from math import inf
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpumux import __version__
from gpumux.cluster.jobs import JobPhase
from gpumux.coordinator.core import Coordinator
from gpumux.coordinator.loop import CoordinatorLoop
from gpumux.errors import EndpointBusy
from gpumux.types import Priority

log = logging.getLogger("gpumux.coordinator")

NODE_STATES: Final = ("up", "away", "draining")
OUTCOMES: Final = ("done", "failed", "cancelled", "refused")


class ClusterCollector(Collector):
    """`ask(f)`: what f returns for the coordinator, in the thread that owns it."""

    def __init__(self, ask: Callable[[Callable[[Coordinator], list[Metric]]], list[Metric]]) -> None:
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """No names, so that registering doesn't ask the loop."""
        return ()

    def collect(self) -> Iterable[Metric]:
        build = InfoMetricFamily("gpumux_build", "Which gpumux this is.")
        build.add_metric([], {"version": __version__})
        return [build, *self._ask(families)]


def families(coordinator: Coordinator) -> list[Metric]:
    """All families but the build's."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    jobs = gauge("gpumux_cluster_jobs", "Jobs of the cluster.", labels=["priority", "state"])
    waits = gauge("gpumux_cluster_longest_wait_seconds", "Of the job that waits longest.", labels=["priority"])
    nodes = gauge("gpumux_cluster_nodes", "Nodes of the cluster.", labels=["state"])
    held = gauge("gpumux_cluster_node_jobs", "Jobs of the cluster on the node.", labels=["node"])
    memory = gauge("gpumux_cluster_node_memory_bytes", "Memory of the node's device.", labels=["node"])
    used = gauge("gpumux_cluster_node_used_bytes", "Of that, what the cluster's jobs have.", labels=["node"])
    kept = gauge("gpumux_cluster_promise_kept", "Whether the node's high job keeps its promise.", labels=["node"])
    submitted = counter("gpumux_cluster_jobs_submitted", "Jobs submitted.")
    answered = counter("gpumux_cluster_jobs_answered", "Jobs answered.", labels=["outcome"])
    started = counter("gpumux_cluster_jobs_started", "Starts of jobs on their devices.")
    moved = counter("gpumux_cluster_jobs_moved", "Jobs that left their devices to go on elsewhere.")
    pairs = gauge("gpumux_cluster_pairs", "Pairs of programs whose cost is known.")

    count = {(priority, phase): 0 for priority in Priority for phase in JobPhase}
    for job in coordinator.placement.jobs.values():
        count[job.request.priority, job.phase] += 1
    for (priority, phase), number in count.items():
        jobs.add_metric([priority.name.lower(), phase.value], number)
    for priority, seconds in coordinator.waited().items():
        waits.add_metric([priority.name.lower()], seconds)
    states = dict.fromkeys(NODE_STATES, 0)
    for daemon in coordinator.daemons.values():
        node = coordinator.placement.nodes.get(daemon.node)
        away = node is None or daemon.away_since < inf
        states["away" if away else "draining" if node is not None and node.draining else "up"] += 1
        if node is None:
            continue
        held.add_metric([daemon.node], sum(len(device.jobs) for device in node.devices))
        memory.add_metric([daemon.node], sum(device.facts.memory_bytes for device in node.devices))
        used.add_metric([daemon.node], sum(device.used_bytes for device in node.devices))
        if daemon.kept is not None and not away:
            kept.add_metric([daemon.node], int(daemon.kept))
    for state, number in states.items():
        nodes.add_metric([state], number)
    for outcome in OUTCOMES:
        answered.add_metric([outcome], coordinator.counts[outcome])
    submitted.add_metric([], coordinator.counts["submitted"])
    started.add_metric([], coordinator.counts["started"])
    moved.add_metric([], coordinator.counts["moved"])
    pairs.add_metric([], len(coordinator.placement.costs))
    return [jobs, waits, nodes, held, memory, used, kept, submitted, answered, started, moved, pairs]


def serve_metrics(loop: CoordinatorLoop, host: str, port: int, stack: ExitStack) -> None:
    """Serve them until `stack` closes. Raises EndpointBusy if the port is taken."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(loop.ask))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise EndpointBusy(
            f"the metrics can't be served at {host}:{port}: {error.strerror}", "choose another --metrics-port, or off"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    stack.callback(close)
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)
