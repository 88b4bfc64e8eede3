"""How soon does the host know that a piece has ended, and what does finding out cost: a pinned counter or events?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from microbench.cuda.driver import Counter, Gpu
from microbench.cuda.experiment import Experiment, Row, main, median, spread

PIECE_S = 100e-6
CHAIN = 32  # pieces, to see what a mark behind each costs the device
POLLS = 2000


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    stream, counter = gpu.stream(gpu.greatest), Counter(gpu)
    piece = gpu.graph(lambda each: gpu.full(each, PIECE_S), gpu.greatest)
    timed, untimed, blocking = (
        gpu.call("cuEventCreate", int(flags))
        for flags in (
            gpu.api.CUevent_flags.CU_EVENT_DEFAULT,
            gpu.api.CUevent_flags.CU_EVENT_DISABLE_TIMING,
            gpu.api.CUevent_flags.CU_EVENT_DISABLE_TIMING | gpu.api.CUevent_flags.CU_EVENT_BLOCKING_SYNC,
        )
    )
    ready, query, stream_query = int(gpu.api.CUresult.CUDA_SUCCESS), gpu.api.cuEventQuery, gpu.api.cuStreamQuery
    record = gpu.api.cuEventRecord

    def until(asked: Callable[[], bool]) -> None:
        end = time.perf_counter() + 20.0
        while not asked():
            if time.perf_counter() > end:
                raise TimeoutError("the device did not get there within 20 s")

    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[], Any]]] = {
        "pinned counter": (lambda: counter.signal(stream), counter.wait, lambda: counter.value),
        "event, polled": (
            lambda: record(untimed, stream),
            lambda _: until(lambda: int(query(untimed)[0]) == ready),
            lambda: query(untimed),
        ),
        "event with times, polled": (
            lambda: record(timed, stream),
            lambda _: until(lambda: int(query(timed)[0]) == ready),
            lambda: query(timed),
        ),
        "stream, polled": (
            lambda: None,
            lambda _: until(lambda: int(stream_query(stream)[0]) == ready),
            lambda: stream_query(stream),
        ),
        "event, waited for": (
            lambda: record(blocking, stream),
            lambda _: gpu.call("cuEventSynchronize", blocking),
            lambda: query(blocking),
        ),
    }
    bare = median([gpu.timed(stream, lambda: _chain(gpu, piece, stream, lambda: None)) for _ in range(repeats)])
    rows: list[Row] = []
    for name, (mark, wait, poll) in ways.items():
        seen = []
        for _ in range(repeats):
            began = time.perf_counter()
            gpu.launch(piece, stream)
            wait(mark())
            seen.append(time.perf_counter() - began)
            gpu.sync(stream)
        chain = median([gpu.timed(stream, lambda: _chain(gpu, piece, stream, mark)) for _ in range(repeats)])  # noqa: B023
        began = time.perf_counter()
        for _ in range(POLLS):
            poll()
        poll_s = (time.perf_counter() - began) / POLLS
        row = {"way": name, **spread(seen, "seen_us"), "poll_us": 1e6 * poll_s}
        rows.append({**row, "mark_costs_device_us": 1e6 * (chain - bare) / CHAIN})
    return rows


def _chain(gpu: Gpu, piece: Any, stream: Any, mark: Callable[[], Any]) -> None:
    for _ in range(CHAIN):
        gpu.launch(piece, stream)
        mark()


def answer(rows: Sequence[Row]) -> str:
    best = min(rows, key=lambda row: float(row["seen_us"]))
    counter = rows[0]
    return (
        f"soonest: {best['way']} ({best['seen_us']:.1f} us for a piece of {1e6 * PIECE_S:.0f}); the pinned counter"
        f" takes {counter['seen_us']:.1f} us, {1e3 * counter['poll_us']:.0f} ns a look, and costs the device"
        f" {counter['mark_costs_device_us']:.2f} us a piece"
    )


EXPERIMENT = Experiment(
    "completion",
    "How soon does the host know that a piece has ended, and what does finding out cost: a pinned counter or events?",
    "A piece of 100 us, then the mark: seconds from the launch until the host has seen it, what one look costs, and"
    " what the mark adds to each of 32 queued pieces on the device. Looks are made from Python, as the daemon's are.",
    measure,
    answer,
    repeats=200,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
