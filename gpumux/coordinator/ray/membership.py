"""Daemons on the nodes of a Ray cluster: an actor for each, and a thread that follows which nodes and actors there are.

Nodes are Ray's to know: one that Ray calls dead is lost at once, and one that joins gets its daemons. A daemon whose
process ends is started again by Ray, at the same endpoint, so its node is only away meanwhile. The actors are detached,
so that they outlive a coordinator that is killed: one that is started again finds them by their names. A coordinator
that is asked to stop ends them.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from gpumux.coordinator.daemons import DaemonAddress
from gpumux.coordinator.ray.daemon_actor import CALLS, STOP_S, DaemonActor
from gpumux.coordinator.ray.plan import (
    MARK,
    NAMESPACE,
    RESOURCE,
    PlannedDaemon,
    RayNode,
    RaySettings,
    daemons_of,
    nodes_of,
)
from gpumux.errors import ConfigError
from gpumux.wire.endpoint import parse

log = logging.getLogger("gpumux.coordinator")

LOOK_EVERY_S: Final = 1.0
CONNECT_S: Final = 5.0
AUTO: Final = "auto"
_QUIET: Final[dict[str, Any]] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING}

Follow = Callable[[Sequence[DaemonAddress]], None]


@dataclass(slots=True)
class Supervised:
    """A daemon's actor. `watch`: what Ray will have when the daemon ends for good, or its actor's process does.
    `failed`: the daemon can't be started."""

    plan: PlannedDaemon
    actor: Any
    watch: Any
    failed: bool = False


class RayCluster:
    """A Ray cluster that this process has joined, at `address` ("auto": the one that runs on this machine, else a new
    one of this machine alone, which ends with this process).

    Raises ConfigError if there is none at the address, a node there now can't be used, or Ray is not installed. Ray
    takes over SIGTERM: handlers are to be set after this."""

    def __init__(self, address: str, settings: RaySettings) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError("daemons on Ray's nodes need ray", "pip install ray") from None
        self._ray = ray
        self._settings = settings
        self._daemons: dict[str, Supervised] = {}
        self._lost: list[PlannedDaemon] = []  # of nodes that died
        self._refused: set[str] = set()  # nodes of which that was logged
        self._ended = threading.Event()
        _join(address, settings)
        try:
            here = ray.get_runtime_context().get_node_id()
            listed = ray.nodes()
            self._here = next(str(each["NodeManagerAddress"]) for each in listed if each["NodeID"] == here)
            planned = [each for node in nodes_of(listed) for each in daemons_of(node, settings, self._here)]
        except BaseException:
            ray.shutdown()
            raise
        if not planned:
            what = f"the resource {settings.resource}" if settings.resource else "a GPU"
            log.warning("no Ray node has %s yet; those that join and have it get daemons", what)

    @property
    def address(self) -> str:
        """HOST:PORT, at which others join it."""
        return str(self._ray.get_runtime_context().gcs_address)

    def close(self) -> None:
        """Leave Ray, and end it if this process started it. The actors stay."""
        self._ray.shutdown()

    @contextmanager
    def membership(self, follow: Follow) -> Iterator[None]:
        """Start the daemons, and have `follow` called with those that there are, whenever that changes. When the
        block ends without an error, so do the daemons."""
        thread = threading.Thread(target=self._run, args=(follow,), name="gpumux-ray", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
        self._end_daemons()

    # ---- the thread

    def _run(self, follow: Follow) -> None:
        told: list[DaemonAddress] | None = None
        failing = False
        while not self._ended.is_set():
            try:
                found: list[DaemonAddress] | None = self._look()
                failing = False
            except (self._ray.exceptions.RayError, RuntimeError, OSError) as error:
                if not failing:
                    log.error("Ray does not say which nodes there are, daemons stay as they are: %s", error)
                failing, found = True, told
            if found is not None and found != told:
                follow(found)
                told = found
            self._ended.wait(LOOK_EVERY_S)

    def _look(self) -> list[DaemonAddress]:
        """Start daemons on new nodes, forget those of dead ones. Returns the daemons that there are."""
        nodes = {node.id: node for node in nodes_of(self._ray.nodes())}
        for name in [name for name, each in self._daemons.items() if each.plan.node_id not in nodes]:
            gone = self._daemons.pop(name)
            self._lost.append(gone.plan)
            self._ray.kill(gone.actor, no_restart=True)  # or Ray would wait for the node to come back
        for node in nodes.values():
            for plan in self._plans(node):
                if plan.name not in self._daemons:
                    self._daemons[plan.name] = self._start(plan)
        self._check()
        return [each.plan.address for each in self._daemons.values() if not each.failed]

    def _plans(self, node: RayNode) -> list[PlannedDaemon]:
        try:
            return daemons_of(node, self._settings, self._here)
        except ConfigError as error:
            if node.id not in self._refused:
                self._refused.add(node.id)
                log.error("Ray node %s is not used: %s", node.host, error)
            return []

    def _start(self, plan: PlannedDaemon) -> Supervised:
        """Have Ray start the actor, or find the one that a coordinator before this one started. Does not wait."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = (
            self._ray.remote(DaemonActor)
            .options(
                name=plan.name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                num_gpus=plan.gpus,
                resources={self._settings.resource: MARK} if self._settings.resource else None,
                max_restarts=-1,
                max_concurrency=CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(plan.node_id, soft=False),
            )
            .remote(plan.arguments, plan.endpoints)
        )
        return Supervised(plan, actor, actor.watch.remote())

    def _check(self) -> None:
        """Log what has ended, and watch again what Ray restarts."""
        watched = {each.watch: each for each in self._daemons.values() if not each.failed}
        if not watched:
            return
        done, _ = self._ray.wait(list(watched), num_returns=len(watched), timeout=0)
        for ref in done:
            each = watched[ref]
            node = each.plan.address.node
            try:
                why = self._ray.get(ref)
            except self._ray.exceptions.ActorDiedError as error:
                why = str(error)
            except self._ray.exceptions.RayError:
                log.warning("the daemon of node %s, or its actor, has ended; Ray starts it again", node)
                each.watch = each.actor.watch.remote()
                continue
            if not why:
                each.watch = each.actor.watch.remote()
                continue
            each.failed = True
            log.error("node %s has no daemon, and gets none until the coordinator is started again: %s", node, why)
            self._ray.kill(each.actor, no_restart=True)

    def _end_daemons(self) -> None:
        """End all daemons in order, and their actors with them."""
        stops = [each.actor.stop.remote() for each in self._daemons.values() if not each.failed]
        if stops:
            self._ray.wait(stops, num_returns=len(stops), timeout=STOP_S + 2.0)
        for each in self._daemons.values():
            self._ray.kill(each.actor, no_restart=True)
        for plan in self._lost:
            path = parse(plan.address.endpoint).path
            if path is not None:  # on this machine, which may have several nodes of Ray
                shutil.rmtree(path.parent, ignore_errors=True)


def _join(address: str, settings: RaySettings) -> None:
    """Join the cluster, or start one for that. Raises ConfigError."""
    import ray

    named = os.environ.get("RAY_ADDRESS", "") if address == AUTO else address
    try:
        join(named or AUTO)
    except (OSError, ValueError, RuntimeError) as error:  # Ray's own is a ConnectionError
        if named:
            raise ConfigError(
                f"no Ray cluster at {named}: {str(error).splitlines()[0]}",
                "look whether it runs there (`ray status --address ADDRESS`); without an address, --ray starts one",
            ) from error
    else:
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    ray.init(address="local", resources={settings.resource or RESOURCE: 1}, include_dashboard=False, **_QUIET)


def join(address: str, ship: str = "") -> None:
    """Join a Ray cluster that is there: at HOST:PORT, or "auto" for the one of this machine. ship: a directory that Ray
    copies to nodes, for what this process starts there; "": none. Raises OSError, ValueError or RuntimeError. Ray takes
    over SIGTERM: handlers are to be set after this."""
    import ray

    if address != AUTO:
        _check_listening(address)
    ray.init(address=address, runtime_env={"working_dir": ship} if ship else None, **_QUIET)


def _check_listening(address: str) -> None:
    """Raises OSError or ValueError if nothing listens at HOST:PORT: Ray itself would wait for a minute."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
