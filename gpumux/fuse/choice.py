"""Which operators run for all models at once and which once a model: by their measured times.

Every operator gets one of two labels. Each label has its time, and an operator that runs once a model before one
that runs for all costs the time of bringing its results together, once. The cheapest labelling is a minimum
cut of a small graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

END = -1  # the results, which are wanted together


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one operator: for all models at once (None: there is no way), once a model, and of bringing the results of
    the latter together."""

    fused: float | None
    each: float
    join: float


def cheapest(times: Mapping[int, Timed], reads: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Of the operators in `times`, those that should run once a model. `reads`: (operator or END, operator whose result it
    takes); those with an operator that has no times are left out."""
    import networkx

    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(("fused", "each"))
    for op, timed in times.items():  # on the side of "fused" when it is
        graph.add_edge("fused", op, capacity=timed.each)
        if timed.fused is None:
            graph.add_edge(op, "each")
        else:
            graph.add_edge(op, "each", capacity=timed.fused)
        graph.add_edge(("together", op), op, capacity=timed.join)
    graph.add_edge("fused", END)
    for reader, maker in reads:
        if maker in times and (reader == END or reader in times):
            graph.add_edge(reader, ("together", maker))
    _, (_, each) = networkx.minimum_cut(graph, "fused", "each")
    return frozenset(op for op in times if op in each)
