"""Enough of PromQL to say which metrics and labels an expression names. Prometheus itself checks the grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.metrics.contract import CLUSTER, FROZEN

TARGET = frozenset({"job", "instance"})  # what Prometheus adds to every sample
SCRAPED = {name: frozenset(labels) | TARGET for name, (_, labels) in (FROZEN | CLUSTER).items()}
BUILT_IN = {"up": TARGET}  # what Prometheus says of a target

_TEXT = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
_SELECTOR = re.compile(r"(?<![\w:])((?:\w+:)?(?:gpumux_\w+(?::\w+)?)|up)(?![\w:(])\s*(\{[^}]*\})?")
_LIST = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Named:
    """A metric with the labels its selector names, as they stand in an expression."""

    metric: str
    labels: frozenset[str]


def selectors(expression: str) -> list[Named]:
    bare = _TEXT.sub('""', expression)
    bare = _LIST.sub("", bare)
    found = []
    for metric, braces in _SELECTOR.findall(bare):
        found.append(Named(metric, frozenset(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces))))
    return found


def listed_labels(expression: str) -> set[str]:
    """Labels in by, without, on, group_left and their like."""
    bare = _TEXT.sub('""', expression)
    return {label.strip() for group in _LIST.findall(bare) for label in group.split(",") if label.strip()}


def labels_of(metric: str, recorded: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    """The labels a metric can have in Prometheus, None for one that does not exist."""
    if metric in recorded:
        return recorded[metric]
    known = {**BUILT_IN, **SCRAPED}
    if metric in known and FROZEN.get(metric, ("",))[0] != "histogram":
        return known[metric]
    for suffix, more in (("_bucket", {"le"}), ("_sum", set()), ("_count", set())):
        name = metric.removesuffix(suffix)
        if name != metric and FROZEN.get(name, ("",))[0] == "histogram":
            return SCRAPED[name] | more
    return None


def mistakes(expression: str, recorded: Mapping[str, frozenset[str]]) -> list[str]:
    """What an expression names that is in neither the metric contract nor `recorded` (rules, with their labels)."""
    found, possible = [], set()
    for named in selectors(expression):
        labels = labels_of(named.metric, recorded)
        if labels is None:
            found.append(f"no metric {named.metric}")
            continue
        possible |= labels
        found += [f"{named.metric} has no label {label}" for label in sorted(named.labels - labels)]
    found += [f"nothing here has a label {label}" for label in sorted(listed_labels(expression) - possible)]
    if not selectors(expression):
        found.append("names no metric of gpumux")
    return found


def recorded_labels(rules: list[dict[str, str]]) -> dict[str, frozenset[str]]:
    """What recording rules make, in their order: a label an expression drops counts as there, which is settled by
    asking a real Prometheus (test_live.py)."""
    recorded: dict[str, frozenset[str]] = {}
    for rule in rules:
        parts = [labels_of(named.metric, recorded) or frozenset() for named in selectors(rule["expr"])]
        recorded[rule["record"]] = frozenset().union(*parts) - {"le"}
    return recorded
