"""What does launching cost the host, by how many kernels a graph has and into how many pieces it is cut?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from microbench.cuda.driver import Gpu, Graph
from microbench.cuda.experiment import Experiment, Row, main, median

NODES = (1, 10, 100, 1000)
PIECES = (1, 2, 5, 10, 20, 50)


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    stream = gpu.stream()
    binding = median([_binding(gpu) for _ in range(repeats)])
    rows = [_row("one by one", nodes, nodes, binding, *_single(gpu, stream, nodes, repeats)) for nodes in NODES]
    for nodes in NODES:
        for pieces in (each for each in PIECES if each <= nodes):
            cuts = [round(nodes * i / pieces) for i in range(pieces + 1)]
            graphs = [_empty(gpu, end - begin) for begin, end in pairwise(cuts)]
            rows.append(_row("graphs", nodes, pieces, binding, *_graphs(gpu, stream, graphs, repeats)))
            for graph in graphs:
                gpu.call("cuGraphExecDestroy", graph.exec)
    return rows


def _row(way: str, nodes: int, launches: int, binding: float, host: list[float], total: list[float]) -> Row:
    each = median(host) / launches
    return {
        "way": way,
        "nodes": nodes,
        "launches": launches,
        "host_us": 1e6 * median(host),
        "host_each_us": 1e6 * each,
        "of_it_python_us": 1e6 * binding * launches,
        "total_us": 1e6 * median(total),
    }


def _binding(gpu: Gpu, calls: int = 100) -> float:
    """Seconds of Python and the binding for a call that does nothing."""
    version = gpu.api.cuDriverGetVersion
    began = time.perf_counter()
    for _ in range(calls):
        version()
    return (time.perf_counter() - began) / calls


def _empty(gpu: Gpu, nodes: int) -> Graph:
    def body(stream: Any) -> None:
        for _ in range(nodes):
            gpu.spin(stream, 0.0, 1)

    return gpu.graph(body)


def _single(gpu: Gpu, stream: Any, nodes: int, repeats: int) -> tuple[list[float], list[float]]:
    def run() -> None:
        for _ in range(nodes):
            gpu.spin(stream, 0.0, 1)

    return _times(gpu, stream, run, repeats)


def _graphs(gpu: Gpu, stream: Any, graphs: Sequence[Graph], repeats: int) -> tuple[list[float], list[float]]:
    launch, execs = gpu.api.cuGraphLaunch, [graph.exec for graph in graphs]

    def run() -> None:
        for each in execs:
            launch(each, stream)

    return _times(gpu, stream, run, repeats)


def _times(gpu: Gpu, stream: Any, run: Callable[[], None], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds until the host is free again, and until the device is done. The stream is idle before each."""
    host, total = [], []
    for repeat in range(repeats + 3):
        gpu.sync(stream)
        began = time.perf_counter()
        run()
        launched = time.perf_counter()
        gpu.sync(stream)
        if repeat >= 3:
            host.append(launched - began)
            total.append(time.perf_counter() - began)
    return host, total


def answer(rows: Sequence[Row]) -> str:
    whole = {row["nodes"]: row["host_us"] for row in rows if row["way"] == "graphs" and row["launches"] == 1}
    few, many = min(whole), max(whole)
    per_node = 1e3 * (whole[many] - whole[few]) / (many - few)
    return f"a graph costs the host {whole[few]:.1f} us and {per_node:.1f} ns a node; each further piece as much again"


EXPERIMENT = Experiment(
    "launch_cost",
    "What does launching cost the host, by how many kernels a graph has and into how many pieces it is cut?",
    "Empty kernels in a chain, captured as one graph and cut into pieces, launched into an idle stream; medians. Beside"
    " them the same kernels launched one by one, and what Python and the binding alone cost for as many calls.",
    measure,
    answer,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
