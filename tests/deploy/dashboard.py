"""The dashboard's queries, as Prometheus gets them from Grafana."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .packages import ROOT

FILE = ROOT / "deploy" / "grafana" / "gpumux.json"
VALUES = {"$instance": ".*", "$__rate_interval": "1m"}  # what Grafana puts in


@dataclass(frozen=True)
class Query:
    panel: str
    expression: str
    legend: str


def load() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in load()["panels"] if panel["type"] != "row"]


def filled(expression: str) -> str:
    for name, value in VALUES.items():
        expression = expression.replace(name, value)
    return expression


def queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], filled(target["expr"]), target["legendFormat"])
