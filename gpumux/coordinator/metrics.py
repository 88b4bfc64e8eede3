"""A coordinator's metrics (docs/cluster.md, "Metrics"), and the server of these and of the status page (`page.py`).

Each scrape asks the loop.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Any, Final, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpumux import __version__
from gpumux.cluster.jobs import JobPhase
from gpumux.coordinator import page
from gpumux.coordinator.core import Coordinator
from gpumux.metrics.server import CLUSTER_FILES, PageServer, health
from gpumux.types import Priority

NODE_STATES: Final = ("up", "away", "draining")
OUTCOMES: Final = ("done", "failed", "cancelled", "refused")
ASK_S: Final = 2.0  # how long the loop may take for an answer to the page or a probe
FRESH_S: Final = 0.9  # an answer is used again for so long, so that many readers cost the loop no more than one
T = TypeVar("T")


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


# ---- The status page and probes.


class AskedLoop(Protocol):
    """What the page needs of a CoordinatorLoop."""

    @property
    def turning(self) -> bool: ...
    @property
    def leaving(self) -> str: ...
    def silent_s(self) -> float: ...
    def now(self) -> float: ...
    def ask(self, question: Callable[[Coordinator], T], limit_s: float = ...) -> T: ...


class ClusterPage:
    """Serves the status page, the metrics and probes until `close()`; nothing is known before `watch`. `named`:
    whether jobs and users have their names there. Raises EndpointBusy and ConfigError as PageServer does."""

    process = "coordinator"
    files = CLUSTER_FILES

    def __init__(self, host: str, port: int, *, allowed_hosts: Collection[str], named: bool) -> None:
        self._loop: AskedLoop | None = None
        self._named = named
        self._started = time.time()
        self._last: tuple[float, dict[str, Any]] | None = None  # when it was made, and the answer
        self._registry = CollectorRegistry()
        self._server = PageServer(self._registry, self, host=host, port=port, allowed_hosts=allowed_hosts)
        shown = f"[{host}]" if ":" in host else host
        self.address: Final = f"http://{shown}:{self._server.port}"

    def watch(self, loop: AskedLoop) -> None:
        """Ask this loop from now on."""
        self._loop = loop
        self._registry.register(ClusterCollector(loop.ask))

    def close(self) -> None:
        self._server.close()

    def status(self) -> dict[str, Any] | None:
        """The data of the page (`page.body`), and of when and of which coordinator it is; None if there is no answer.
        Requests come one after the other."""
        loop = self._loop
        if self._last is not None and 0.0 <= time.time() - self._last[0] < FRESH_S:
            return self._last[1]
        if loop is None or not loop.turning or loop.silent_s() >= ASK_S:
            return None
        try:
            found = loop.ask(lambda coordinator: page.body(coordinator, loop.now(), named=self._named), ASK_S)
        except TimeoutError:
            return None
        facts = {"version": __version__, "started": self._started, "host": socket.gethostname()}
        when = time.time()
        self._last = when, {**facts, "when": when, "leaving": loop.leaving, **found}
        return self._last[1]

    def health(self) -> tuple[bool, str]:
        """Whether the loop turns, as a daemon's."""
        silent_s, begun = self._silent_s()
        well, said = health(None, silent_s)
        return well, "ok" if begun and not silent_s else said

    def readiness(self) -> tuple[bool, str]:
        """Whether jobs may be submitted."""
        if self._loop is not None and self._loop.leaving:
            return False, f"leaving: {self._loop.leaving}"
        silent_s, begun = self._silent_s()
        if not begun:
            return False, "starting"
        return self.health() if silent_s else (True, "ok")

    def explain(self, short: str) -> dict[str, Any] | None:
        """`page.explanation`. Raises TimeoutError."""
        loop = self._loop
        if loop is None or not loop.turning:
            raise TimeoutError
        return loop.ask(lambda coordinator: page.explanation(coordinator, short, named=self._named), ASK_S)

    def _silent_s(self) -> tuple[float, bool]:
        """For how long the loop has left a question unanswered, and whether it has begun."""
        loop = self._loop
        if loop is None or not loop.turning:
            return 0.0, False
        if loop.silent_s() < ASK_S:  # else the last one has not been answered, and one is enough
            try:
                loop.ask(lambda coordinator: None, ASK_S)
            except TimeoutError:
                pass
            else:
                return 0.0, True
        return loop.silent_s(), True
