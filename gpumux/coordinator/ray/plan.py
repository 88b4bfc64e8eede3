"""Which daemons a node of a Ray cluster gets, under which names, at which endpoints. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumux.coordinator.daemons import DaemonAddress
from gpumux.errors import ConfigError
from gpumux.wire.endpoint import SOCKET_NAME

NAMESPACE: Final = "gpumux"  # of the actors, in Ray
NAME: Final = "gpumux-daemon"  # begins their names
RESOURCE: Final = "gpumux_node"  # of the node of a Ray that gpumux starts itself
MARK: Final = 0.001  # how much of a node's custom resource a daemon takes
SHORT: Final = 8  # digits of a node's id in names that people read


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive. `address`: of its machine, which fake nodes share; `gpus`: how many it has."""

    id: str
    host: str
    address: str
    gpus: int
    resources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """device: "cuda" for a daemon on each GPU; "cpu" or "sim" for `daemons_per_node` of them on each node. resource:
    only nodes with this custom resource, "" for all. port: of a node's first daemon, where they listen on tcp. keys:
    whether `daemon_config`, a file of settings that each node has at this path, names CURVE keys. state_dir: on each
    node, in which each daemon has a directory of its own. directory: of local sockets, on each node."""

    device: str = "cuda"
    daemons_per_node: int = 1
    resource: str = ""
    port: int = 7777
    daemon_config: str = ""
    keys: bool = False
    state_dir: str = ""
    directory: str = f"/tmp/gpumux-{os.getuid()}/ray"


@dataclass(frozen=True, slots=True)
class PlannedDaemon:
    """`name`: of its actor; `arguments`: of `gpumux serve`; `endpoints`: where it listens, the local one first."""

    name: str
    node_id: str
    gpus: int
    address: DaemonAddress
    endpoints: tuple[str, ...]
    arguments: tuple[str, ...]


def nodes_of(listed: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """The nodes that are alive, of what `ray.nodes()` returned, by id."""
    found = [
        RayNode(
            str(each["NodeID"]),
            str(each["NodeManagerHostname"]),
            str(each["NodeManagerAddress"]),
            int(each["Resources"].get("GPU", 0)),
            frozenset(each["Resources"]),
        )
        for each in listed
        if each["Alive"]
    ]
    return sorted(found, key=lambda node: node.id)


def name_of(node_id: str, number: int) -> str:
    """The name of the actor of a node's daemon."""
    return f"{NAME}-{node_id}-{number}"


def number_of(name: str, node_id: str) -> int | None:
    """The number of the daemon whose actor has the name, None if it is none of the node's."""
    start, _, number = name.rpartition("-")
    return int(number) if start == f"{NAME}-{node_id}" and number.isdecimal() else None


def node_and_number(name: str, nodes: Iterable[RayNode]) -> tuple[RayNode, int] | None:
    """The Ray node of the coordinator's node `name`, and the number of its daemon there; None if it is gone."""
    for node in nodes:
        start, _, number = name.rpartition("-")
        if start == f"{node.host}:{node.id[:SHORT]}" and number.isdecimal():
            return node, int(number)
    return None


def daemons_of(node: RayNode, settings: RaySettings, here: str) -> list[PlannedDaemon]:
    """The daemons of a node. `here`: the address of the coordinator's machine, where it reaches them by local sockets.
    Raises ConfigError for a node of another machine if there are no keys."""
    if settings.resource and settings.resource not in node.resources:
        return []
    count = node.gpus if settings.device == "cuda" else settings.daemons_per_node
    if count and node.address != here and not settings.keys:
        raise ConfigError(
            f"the daemons of Ray node {node.host} ({node.address}) can be reached by tcp only, which needs CURVE keys",
            "name a file with [access] curve_secret_key and curve_client_keys as --daemon-config, and set"
            " GPUMUX_CURVE_KEY and GPUMUX_CURVE_SERVER for the coordinator (docs/cluster.md, Over Ray)",
        )
    return [_daemon(node, settings, here, number) for number in range(count)]


def _daemon(node: RayNode, settings: RaySettings, here: str, number: int) -> PlannedDaemon:
    own = f"{node.id[:SHORT]}-{number}"
    local = f"ipc://{settings.directory}/{own}/{SOCKET_NAME}"
    by_tcp = f"tcp://{f'[{node.address}]' if ':' in node.address else node.address}:{settings.port + number}"
    endpoints = (local, by_tcp) if settings.keys else (local,)
    arguments = ["--device", settings.device, "--metrics-port", "0"]
    for endpoint in endpoints:
        arguments += ["--endpoint", endpoint]
    if settings.daemon_config:
        arguments += ["--config", settings.daemon_config]
    if settings.state_dir:
        arguments += ["--state-dir", f"{settings.state_dir}/{own}"]
    return PlannedDaemon(
        name_of(node.id, number),
        node.id,
        1 if settings.device == "cuda" else 0,
        DaemonAddress(f"{node.host}:{own}", node.host, local if node.address == here else by_tcp),
        endpoints,
        tuple(arguments),
    )
