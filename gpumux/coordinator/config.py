"""The file of a cluster: its daemons, and how jobs are placed on them. TOML; a daemon's own settings are another file.

[[daemons]]
endpoint = "tcp://10.0.0.1:7777"
name = "a0"                  # default: made of the endpoint
host = "a"                   # its machine; gangs are placed on as few of them as possible

[[daemons]]
endpoint = "tcp://gpu[01-16]:[7777-7780]"     # 64 daemons on 16 machines, as Slurm writes lists of hosts

[[daemons]]
service = "tcp://gpumux.gpumux.svc:7777"      # one at each address of a name of DNS: a headless Service of Kubernetes

[placement]                  # PlacementConfig in gpumux/cluster/events.py
choice = "learned"           # or "spread", or "pack"
patience_s = 600.0

[quotas.users.ada]           # at most so many devices at a time, of these by high jobs, and open jobs
devices = 4
high_devices = 2
jobs = 20
[quotas.groups.vision]
devices = 16

[weights]                    # shares of users, 1 where nothing is said
ada = 2.0
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from gpumux.cluster.events import DeviceChoice, PlacementConfig, Quota
from gpumux.config import read_toml
from gpumux.coordinator.daemons import DaemonAddress
from gpumux.coordinator.several import expanded
from gpumux.errors import ConfigError
from gpumux.types import MOST_LEASE_S
from gpumux.wire.endpoint import SOCKET_NAME, parse
from gpumux.wording import nearest

TABLES: Final = ("daemons", "placement", "quotas", "weights")
OF_DAEMONS: Final = ("endpoint", "service", "name", "host")
OF_PLACEMENT: Final = tuple(
    field.name for field in fields(PlacementConfig) if field.name not in ("quotas", "group_quotas", "weights")
)
MOST_TEXT: Final = 200  # characters of a name or an endpoint: messages carry them
MOST_WEIGHT: Final = 1e6
OF_QUOTAS: Final = tuple(field.name for field in fields(Quota))


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """services: endpoints whose host is looked up while the coordinator runs (`Services`)."""

    daemons: tuple[DaemonAddress, ...]
    placement: PlacementConfig
    services: tuple[str, ...] = ()


def address(endpoint: str, name: str = "", host: str = "") -> DaemonAddress:
    """The daemon at an endpoint. Its name is made of the machine and the directory of the socket, or of the address and
    the port; the socket's own name follows if it is not the usual one. Raises ConfigError for what is no endpoint."""
    found = parse(endpoint)
    if found.path is not None:
        host = host or socket.gethostname()
        own = "" if found.path.name == SOCKET_NAME else f"-{found.path.stem}"
        return DaemonAddress(name or f"{host}:{found.path.parent.name}{own}", host, endpoint)
    place = endpoint.removeprefix("tcp://")
    return DaemonAddress(name or place, host or place.rpartition(":")[0], endpoint)


def of_endpoints(endpoints: Sequence[str]) -> ClusterFile:
    """A cluster of these daemons, and defaults for the rest. An endpoint may have ranges (`expanded`). Raises
    ConfigError."""
    return ClusterFile(distinct([address(one) for each in endpoints for one in expanded(each)]), PlacementConfig())


def load(path: Path, *, daemons: bool = True) -> ClusterFile:
    """Read the file. Without `daemons` it may have none, since something else says which there are. Raises ConfigError,
    which names the place and what to write there."""
    tables = read_toml(path, "the cluster's file")
    _known(tables, TABLES, f"{path}: table")
    entries = tables.get("daemons", [])
    if daemons and (not isinstance(entries, list) or not entries):
        raise ConfigError(f"{path} names no daemons", 'write [[daemons]] and endpoint = "..." for each')
    if not daemons and entries:
        raise ConfigError(f"{path} names daemons, and Ray's nodes have them", "leave [[daemons]] out, or --ray")
    addresses: list[DaemonAddress] = []
    services: list[str] = []
    for at, entry in enumerate(entries):
        if isinstance(entry, dict) and "service" in entry:
            services.append(_service(entry, f"{path}: [[daemons]] {at + 1}"))
        else:
            addresses += _daemons(entry, f"{path}: [[daemons]] {at + 1}")
    quotas = _table(tables, "quotas", f"{path}: [quotas]")
    _known(quotas, ("users", "groups"), f"{path}: [quotas]")
    values = dict(_table(tables, "placement", f"{path}: [placement]"))
    _known(values, OF_PLACEMENT, f"{path}: [placement]")
    if "choice" in values:
        values["choice"] = _choice(values["choice"], f"{path}: [placement] choice")
    for name, value in values.items():
        if name != "choice" and not _is_number(value):
            raise ConfigError(f"{path}: [placement] {name} is {_short(value)}", "write a number")
    if values.get("lease_s", 0.0) > MOST_LEASE_S:
        raise ConfigError(f"{path}: [placement] lease_s is {values['lease_s']}", f"daemons allow {MOST_LEASE_S:g} s")
    weights = _table(tables, "weights", f"{path}: [weights]")
    for name, value in weights.items():
        if not _is_number(value) or not 1 / MOST_WEIGHT <= value <= MOST_WEIGHT:
            raise ConfigError(
                f"{path}: [weights] {name} is {_short(value)}",
                f"write a number from {1 / MOST_WEIGHT:g} to {MOST_WEIGHT:g}",
            )
    try:
        placement = PlacementConfig(
            **values,
            quotas=_quotas(quotas, "users", path),
            group_quotas=_quotas(quotas, "groups", path),
            weights={name: float(value) for name, value in weights.items()},
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: [placement]: {error.message}", error.remedy) from error
    return ClusterFile(distinct(addresses), placement, tuple(services))


def _service(entry: Mapping[str, Any], where: str) -> str:
    _check_texts(entry, where)
    if len(entry) > 1:
        raise ConfigError(f"{where} has more than a service", "its daemons are named by their addresses: leave it out")
    service = str(entry["service"])
    if parse(service).is_ipc or service.endswith(":*"):
        raise ConfigError(f"{where} service is {_short(service)}", "write tcp://NAME:PORT")
    return service


def _daemons(entry: Any, where: str) -> list[DaemonAddress]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}", 'write [[daemons]] and endpoint = "..." below it')
    _check_texts(entry, where)
    if "endpoint" not in entry:
        raise ConfigError(f"{where} has no endpoint", "write ipc:///path/to/gpumux.sock or tcp://address:port")
    endpoints = expanded(entry["endpoint"])
    if len(endpoints) > 1 and (named := [name for name in ("name", "host") if name in entry]):
        raise ConfigError(
            f"{where} has a {named[0]} for {len(endpoints)} daemons", "leave it out: each is named by its endpoint"
        )
    return [address(**{**entry, "endpoint": each}) for each in endpoints]


def _check_texts(entry: Mapping[str, Any], where: str) -> None:
    _known(entry, OF_DAEMONS, where)
    for name, value in entry.items():
        if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value) <= MOST_TEXT:
            raise ConfigError(
                f"{where} {name} is {_short(value)}",
                f"write a text in quotes, of 1 to {MOST_TEXT} printable characters",
            )


def distinct(daemons: Sequence[DaemonAddress]) -> tuple[DaemonAddress, ...]:
    """The daemons, each of another name and endpoint. Raises ConfigError."""
    for what in ("node", "endpoint"):
        named = Counter(getattr(each, what) for each in daemons)
        twice = [name for name, count in named.items() if count > 1]
        if twice:
            raise ConfigError(
                f"two daemons have the {'name' if what == 'node' else what} {sorted(twice)[0]}",
                "name each daemon once; the cluster's file can give them names",
            )
    return tuple(daemons)


def _table(tables: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = tables.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {found!r}", "write a table")
    return found


def _quotas(tables: Mapping[str, Any], kind: str, path: Path) -> dict[str, Quota]:
    found = {}
    for name, body in _table(tables, kind, f"{path}: [quotas.{kind}]").items():
        where = f"{path}: [quotas.{kind}.{name}]"
        if not isinstance(body, dict):
            raise ConfigError(f"{where} is {body!r}", "write a table with devices, high_devices or jobs")
        _known(body, OF_QUOTAS, where)
        for limit, value in body.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{where} {limit} is {value!r}", "write a whole number of 0 or more")
        found[name] = Quota(**body)
    return found


def _is_number(value: Any) -> bool:
    """TOML's whole numbers may have any number of digits, too many for a float."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63)


def _short(value: Any) -> str:
    return (
        repr(value)[:MOST_TEXT] if not isinstance(value, int) or abs(value) < 1 << 63 else "a number of too many digits"
    )


def _choice(value: Any, where: str) -> DeviceChoice:
    try:
        return DeviceChoice(value)
    except ValueError:
        names = ", ".join(each.value for each in DeviceChoice)
        raise ConfigError(f"{where} is {value!r}", f"choose one of {names}") from None


def _known(found: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in found:
        if name not in names:
            near = nearest(str(name), names)
            raise ConfigError(
                f"{where} has no {name!r}", f"did you mean {near!r}?" if near else f"known are {', '.join(names)}"
            )
