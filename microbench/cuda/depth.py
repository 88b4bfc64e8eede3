"""Does low work that is queued deep block the way of a high launch, and do more hardware queues help?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from microbench.cuda.driver import Counter, Gpu
from microbench.cuda.experiment import Experiment, Row, main, median

CONNECTIONS = (1, 8, 32)
STREAMS = (1, 8, 40)
DEPTHS = (1, 2, 4, 16, 64)
PIECE_S, WAVES = 300e-6, 6
HIGH_S = 100e-6
HEAD_START_S = 400e-6
CHILD_S = 120.0


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    """The number of hardware queues is read when the driver starts, so each has a process of its own. This one's
    context stays idle meanwhile."""
    rows: list[Row] = []
    for connections in CONNECTIONS:
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        command = [sys.executable, "-m", "microbench.cuda.depth", "--child", str(repeats)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_S)
        if done.returncode:
            raise RuntimeError(f"with {connections} connections: {done.stderr.strip()[-2000:]}")
        rows += [{"connections": connections, **row} for row in json.loads(done.stdout.splitlines()[-1])]
    return rows


def measure_here(gpu: Gpu, repeats: int) -> list[Row]:
    """The measurement for the number of queues of this process."""
    high, counter = gpu.stream(gpu.greatest), Counter(gpu)
    lows = [gpu.stream(gpu.least) for _ in range(max(STREAMS))]
    piece = gpu.graph(lambda stream: gpu.full(stream, PIECE_S, WAVES), gpu.least)
    test = gpu.graph(lambda stream: gpu.full(stream, HIGH_S), gpu.greatest)

    def once(streams: Sequence[Any], depth: int) -> float:
        for index in range(depth * len(streams)):
            gpu.launch(piece, streams[index % len(streams)])
        end = time.perf_counter() + HEAD_START_S
        while time.perf_counter() < end:
            pass
        began = time.perf_counter()
        gpu.launch(test, high)
        counter.wait(counter.signal(high))
        took = time.perf_counter() - began
        for stream in streams:
            gpu.sync(stream)
        return took

    alone = median([once([], 0) for _ in range(repeats)])
    rows: list[Row] = []
    for streams in STREAMS:
        for depth in (each for each in DEPTHS if each * streams <= 128):
            delays = sorted(once(lows[:streams], depth) - alone for _ in range(repeats))
            middle, most = 1e6 * delays[len(delays) // 2], 1e6 * delays[-1]
            queued = 1e6 * PIECE_S * depth * streams
            row: Row = {"low_streams": streams, "depth": depth, "queued_us": queued}
            rows.append({**row, "delay_us": middle, "delay_max_us": most})
    return rows


def answer(rows: Sequence[Row]) -> str:
    def worst(connections: int, deep: bool) -> float:
        of = (row for row in rows if row["connections"] == connections and (row["depth"] > 1) == deep)
        return float(max(row["delay_us"] for row in of))

    few, many = min(CONNECTIONS), max(CONNECTIONS)
    return (
        f"with {many} queues low work one deep delays a high piece by {worst(many, False):.0f} us at most and queued"
        f" deeper by {worst(many, True):.0f}; with {few} queue by {worst(few, False):.0f} and {worst(few, True):.0f} (a"
        f" block lasts {1e6 * PIECE_S / WAVES:.0f} us)"
    )


EXPERIMENT = Experiment(
    "depth",
    "Does low work that is queued deep block the way of a high launch, and do more hardware queues help?",
    "1 to 64 low pieces of 300 us (6 waves) queued on each of 1, 8 and 40 low streams, then one high piece: the median"
    " delay of its end. CUDA_DEVICE_MAX_CONNECTIONS is 1, 8 and 32, each in a process of its own.",
    measure,
    answer,
    repeats=12,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure_here(Gpu(), int(sys.argv[2]))))
        sys.exit(0)
    sys.exit(main(EXPERIMENT))
