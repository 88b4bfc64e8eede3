"""How long does a low piece delay a high one, by how long it is and by how long its blocks are?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from microbench.cuda.driver import Counter, Gpu, Graph
from microbench.cuda.experiment import Experiment, Row, main, median, spread

LOW_S = (50e-6, 100e-6, 300e-6, 1e-3, 3e-3)
WAVES = (1, 4, 16)  # one wave: every block holds its place until the piece is over
HIGH_S = 100e-6
MOMENTS = (0.1, 0.5, 0.9)  # of the low piece's length, when the high one is launched


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    low, high, counter = gpu.stream(gpu.least), gpu.stream(gpu.greatest), Counter(gpu)
    piece = gpu.graph(lambda stream: gpu.full(stream, HIGH_S), gpu.greatest)
    alone = median([_high(gpu, high, piece, counter) for _ in range(3 * repeats)])
    rows: list[Row] = []
    for seconds in LOW_S:
        for waves in WAVES:
            other = _low(gpu, seconds, waves)
            delays = []
            for repeat in range(repeats):
                gpu.launch(other, low)
                end = time.perf_counter() + MOMENTS[repeat % len(MOMENTS)] * seconds
                while time.perf_counter() < end:
                    pass
                delays.append(_high(gpu, high, piece, counter) - alone)
                gpu.sync(low)
            gpu.call("cuGraphExecDestroy", other.exec)
            row: Row = {"low_us": 1e6 * seconds, "waves": waves, "block_us": 1e6 * seconds / waves}
            rows.append({**row, **spread(delays, "delay_us"), "max_over_block": max(delays) / (seconds / waves)})
    return rows


def _low(gpu: Gpu, seconds: float, waves: int) -> Graph:
    return gpu.graph(lambda stream: gpu.full(stream, seconds, waves), gpu.least)


def _high(gpu: Gpu, stream: Any, piece: Graph, counter: Counter) -> float:
    """Seconds from launching the high piece to seeing its end."""
    began = time.perf_counter()
    gpu.launch(piece, stream)
    counter.wait(counter.signal(stream))
    return time.perf_counter() - began


def answer(rows: Sequence[Row]) -> str:
    single = [row for row in rows if row["waves"] == 1]
    many = [row for row in rows if row["waves"] == max(WAVES)]
    worst = max(row["delay_max_us"] / row["low_us"] for row in single)
    short = max(row["max_over_block"] for row in many)
    return (
        f"a low piece of one wave delays a high one by up to {worst:.2f} of its length; one of {max(WAVES)} waves by up"
        f" to {short:.2f} of a block's: what matters is how long its blocks hold their places"
    )


EXPERIMENT = Experiment(
    "piece_delay",
    "How long does a low piece delay a high one, by how long it is and by how long its blocks are?",
    "A low piece that fills the device, as 1, 4 or 16 waves of blocks; a high piece of 100 us launched when a tenth,"
    " half and nine tenths of it have passed. Seconds until the host sees the high piece's end, less those alone.",
    measure,
    answer,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
