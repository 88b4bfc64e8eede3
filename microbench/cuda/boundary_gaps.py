"""How long does the device idle between two pieces, with the next one queued and with the next one launched late?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from microbench.cuda.driver import Counter, Gpu, Graph
from microbench.cuda.experiment import Experiment, Row, main, median

KERNELS = 64
KERNEL_S = 20e-6
PIECES = (1, 2, 4, 8, 16, 32, 64)
DEPTHS = (1, 2, 4, 64)  # launches outstanding at most


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    stream, counter = gpu.stream(gpu.greatest), Counter(gpu)
    rows: list[Row] = []
    graphs = {pieces: _piece(gpu, KERNELS // pieces) for pieces in PIECES}
    for signalled in (False, True):
        for depth in DEPTHS:
            if not signalled and depth < max(DEPTHS):
                continue  # without a counter the host can't know when to launch the next
            whole = 0.0
            for pieces in PIECES:
                run = _runner(gpu, stream, graphs[pieces], pieces, depth, counter if signalled else None)
                took = median([gpu.timed(stream, run) for _ in range(repeats)])
                whole = whole or took
                gap = (took - whole) / (pieces - 1) if pieces > 1 else 0.0
                row = {"counter": "yes" if signalled else "no", "depth": depth, "pieces": pieces}
                rows.append({**row, "total_us": 1e6 * took, "gap_us": 1e6 * gap})
    return rows


def _piece(gpu: Gpu, kernels: int) -> Graph:
    def body(stream: Any) -> None:
        for _ in range(kernels):
            gpu.full(stream, KERNEL_S)

    return gpu.graph(body, gpu.greatest)


def _runner(
    gpu: Gpu, stream: Any, graph: Graph, pieces: int, depth: int, counter: Counter | None
) -> Callable[[], None]:
    def run() -> None:
        out: list[int] = []
        for _ in range(pieces):
            if counter and len(out) >= depth:
                counter.wait(out[-depth])
            gpu.launch(graph, stream)
            if counter:
                out.append(counter.signal(stream))

    return run


def answer(rows: Sequence[Row]) -> str:
    most = max(row["pieces"] for row in rows)
    gaps = {(row["counter"], row["depth"]): row["gap_us"] for row in rows if row["pieces"] == most}
    queued, marked = gaps["no", max(DEPTHS)], gaps["yes", max(DEPTHS)]
    late, two = gaps["yes", 1], gaps["yes", 2]
    return (
        f"a boundary costs {queued:.1f} us when all is queued, {marked:.1f} us with a counter behind each piece,"
        f" {two:.1f} us with two outstanding and {late:.1f} us when the host launches the next only when it sees the"
        " end of the last"
    )


EXPERIMENT = Experiment(
    "boundary_gaps",
    "How long does the device idle between two pieces, with the next one queued and with the next one launched late?",
    f"{KERNELS} kernels of {KERNEL_S * 1e6:.0f} us that each fill the device, as 1 to 64 graphs; device time from event"
    " to event, over that of one graph, by boundaries. Depth: launches outstanding at most, counted by a pinned"
    " counter that each piece raises.",
    measure,
    answer,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
