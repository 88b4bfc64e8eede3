"""Access rules of a daemon, by user, group and CURVE key, as its administrator sets them (docs/security.md).

Exactly one rule applies to a peer: the first that names its user or its key, else the first that names one of its
groups, else the one called `default`, else BUILT_IN, which allows what the [limits] allow. A rule is complete by
itself: it inherits nothing from `default`. Pure: `config.py` has converted names to ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from gpumux.errors import AccessDenied, Refused
from gpumux.types import Fault, Gang, Peer, Priority

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Rule:
    """What each of the named users may do. Bytes and counts of 0 leave it to the daemon's [limits], a weight of 0.0
    allows any. An operator may control all users' jobs, see their names, and take over the recorder."""

    name: str
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    keys: frozenset[str] = frozenset()
    submit: bool = True
    max_priority: Priority = Priority.HIGH
    max_jobs: int = 0
    max_bytes: int = 0
    max_weight: float = 0.0
    operator: bool = False
    share: str = ""  # of a grant's rule: "25 of 100"

    @property
    def where(self) -> str:
        """What sets the rule, for messages to refused users: its place in the configuration, or the grant."""
        return f"the grant {self.name}" if self.share else f"[access.rules.{self.name}]"


BUILT_IN = Rule(DEFAULT)


@dataclass(frozen=True, slots=True)
class Access:
    """All rules, in the order of the file."""

    rules: tuple[Rule, ...] = ()

    def rule_for(self, peer: Peer) -> Rule:
        """The one rule that applies to the peer: its grant, if it has one."""
        if peer.grant is not None:
            grant = peer.grant
            share = f"{grant.shares} of {grant.of}"
            return Rule(grant.name, max_priority=grant.max_priority, max_bytes=grant.max_bytes, share=share)
        default = BUILT_IN
        by_group: Rule | None = None
        groups = {peer.gid, *peer.groups} if not peer.key else set()
        for rule in self.rules:
            if peer.key in rule.keys if peer.key else peer.uid in rule.users:
                return rule
            if by_group is None and not rule.groups.isdisjoint(groups):
                by_group = rule
            if rule.name == DEFAULT:
                default = rule
        return by_group or default

    def may_operate(self, peer: Peer) -> bool:
        """Whether the peer is root, or a rule makes it an operator."""
        return peer.uid == 0 or self.rule_for(peer).operator


OPEN = Access()  # no rules: BUILT_IN for all


def refuse_submit(rule: Rule, priority: Priority, weight: float) -> Fault | None:
    """Why a job of this priority and weight may not be opened under the rule, or None."""
    if not rule.submit:
        return _denied(f"rule {rule.name!r} lets you submit no jobs", f"ask the operator: submit in {rule.where}")
    return refuse_priority(rule, priority) or refuse_weight(rule, weight)


def refuse_priority(rule: Rule, priority: Priority) -> Fault | None:
    """Why the rule does not allow a job this priority, or None."""
    if priority <= rule.max_priority:
        return None
    name, most = priority.name.lower(), rule.max_priority.name.lower()
    return _denied(
        f"priority {name} is above what rule {rule.name!r} allows you, which is {most}",
        f'submit with priority="{most}", or ask the operator: max_priority in {rule.where}',
    )


def refuse_weight(rule: Rule, weight: float) -> Fault | None:
    """Why the rule does not allow a job this weight, or None."""
    if not rule.max_weight or weight <= rule.max_weight:
        return None
    return _denied(
        f"weight {weight:g} is above what rule {rule.name!r} allows you, which is {rule.max_weight:g}",
        f"submit with weight={rule.max_weight:g}, or ask the operator: max_weight in {rule.where}",
    )


# ---- Gangs: a job of a gang has its process connect to a store that the client names, and to its peers.

MAX_RANKS = 4096
MAX_TIMEOUT_S = 86_400.0
_HEX = frozenset("0123456789abcdef")


def split_store(store: str) -> tuple[str, int] | None:
    """The host and the port of `host:port`, or of `[host]:port`; None if it is neither."""
    host, colon, port = store.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    return (host, int(port)) if host else None


def is_loopback(host: str) -> bool:
    """Whether the host is this machine, by its address or as localhost."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def refuse_gang(gang: Gang, networks: Sequence[str]) -> Fault | None:
    """Why no job may be a rank of this gang, or None. `networks`: where stores may be beside this machine. Written so
    that a NaN is refused too."""
    if len(gang.id) != 32 or not _HEX.issuperset(gang.id):
        return _refused(f"the gang's id is {gang.id[:40]!r}", "choose 32 hexadecimal digits in lower case")
    if not 1 <= gang.ranks <= MAX_RANKS or not 0 <= gang.rank < gang.ranks:
        return _refused(f"rank {gang.rank} of {gang.ranks}", f"a gang has 1 to {MAX_RANKS} ranks, from 0 on")
    if not 0.0 < gang.timeout_s <= MAX_TIMEOUT_S:
        return _refused(f"timeout_s is {gang.timeout_s}", f"choose seconds above 0, up to {MAX_TIMEOUT_S:g}")
    place = split_store(gang.store)
    if place is None:
        return _refused(f"the store {gang.store[:80]!r} is no host:port", "write it like 127.0.0.1:29500")
    host = place[0]
    if is_loopback(host):
        return None
    if not _is_address(host):
        return _refused(f"the store's host {host[:80]!r} is a name", "write its address, or localhost")
    if any(ip_address(host) in ip_network(network, strict=False) for network in networks):
        return None
    return _denied(
        f"the store {gang.store} is on another machine, which this daemon does not allow",
        f'ask the operator: stores in [gangs], such as stores = ["{host}"]',
    )


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _refused(message: str, remedy: str) -> Fault:
    return Fault(Refused.code, message, remedy)


def _denied(message: str, remedy: str) -> Fault:
    return Fault(AccessDenied.code, message, remedy)
