"""Access rules of a daemon, by user, group and CURVE key, as its administrator sets them (docs/security.md).

Exactly one rule applies to a peer: the first that names its user or its key, else the first that names one of its
groups, else the one called `default`, else BUILT_IN, which allows what the [limits] allow. A rule is complete by
itself: it inherits nothing from `default`. Pure: `config.py` has converted names to ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumux.errors import AccessDenied
from gpumux.types import Fault, Peer, Priority

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

    @property
    def where(self) -> str:
        """The rule's place in the configuration, for messages to refused users."""
        return f"[access.rules.{self.name}]"


BUILT_IN = Rule(DEFAULT)


@dataclass(frozen=True, slots=True)
class Access:
    """All rules, in the order of the file."""

    rules: tuple[Rule, ...] = ()

    def rule_for(self, peer: Peer) -> Rule:
        """The one rule that applies to the peer."""
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


def _denied(message: str, remedy: str) -> Fault:
    return Fault(AccessDenied.code, message, remedy)
