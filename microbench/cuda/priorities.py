"""Which priorities are there, and does a graph run with the priority of its nodes or of the stream it is launched
on?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product

from microbench.cuda.driver import Counter, Gpu
from microbench.cuda.experiment import Experiment, Row, main, median

FILLER_S, WAVES = 4e-3, 80  # what keeps the device busy: 80 waves of 50 us
TEST_S = 100e-6
ASIDE_S = 200e-6  # the filler's head start


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    """The filler's priority lies between those of the test, so a test of the higher one overtakes it at the end of a
    wave, and one of the lower waits until it is over."""
    between = (gpu.least + gpu.greatest) // 2
    if not gpu.least > between > gpu.greatest:
        raise RuntimeError(
            f"priorities from {gpu.least} to {gpu.greatest} leave none in between: nothing can be told apart"
        )
    filler, counter = gpu.stream(between), Counter(gpu)
    levels = {"low": gpu.least, "high": gpu.greatest}
    streams = {name: gpu.stream(priority) for name, priority in levels.items()}
    rows: list[Row] = []
    for captured, flagged, launched in product(levels, (False, True), levels):
        graph = gpu.graph(lambda stream: gpu.full(stream, TEST_S), levels[captured], node_priority=flagged)
        took = []
        for _ in range(repeats):
            gpu.full(filler, FILLER_S, WAVES)
            _spin_host(ASIDE_S)
            began = time.perf_counter()
            gpu.launch(graph, streams[launched])
            counter.wait(counter.signal(streams[launched]))
            took.append(time.perf_counter() - began)
            gpu.sync(filler)
        acts = "high" if median(took) < FILLER_S / 2 else "low"
        rows.append(
            {
                "captured_on": captured,
                "node_flag": "set" if flagged else "not set",
                "launched_on": launched,
                "done_us": 1e6 * median(took),
                "acts_as": acts,
            }
        )
    return rows


def _spin_host(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def answer(rows: Sequence[Row]) -> str:
    def rule(flag: str) -> str:
        of = [row for row in rows if row["node_flag"] == flag]
        if all(row["acts_as"] == row["captured_on"] for row in of):
            return "the stream it was captured on rules"
        if all(row["acts_as"] == row["launched_on"] for row in of):
            return "the stream it is launched on rules"
        return "neither stream rules alone"

    return f"with the node priority flag {rule('set')}; without it {rule('not set')}"


EXPERIMENT = Experiment(
    "priorities",
    "Which priorities are there, and does a graph run with the priority of its nodes or of the stream it is"
    " launched on?",
    "A filler of many short waves at a priority in between; a graph captured on a low or a high stream, instantiated"
    " with and without the node priority flag, launched on either. It acts as high if it is done long before the"
    " filler. The range is in the file.",
    measure,
    answer,
    repeats=10,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
