"""What does confining low work to a share of the multiprocessors buy, and do work queues of its own add to that?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from microbench.cuda.driver import Counter, DriverError, Gpu, Graph
from microbench.cuda.experiment import Experiment, Row, main, median, spread

SHARES = (1.0, 0.5, 0.25)
LOW_S, HIGH_S = 1e-3, 100e-6  # the low piece is one wave: nothing of it ends before all of it does
OUTSTANDING = 2  # low pieces
GAP_S = 50e-6  # between high pieces
SHARED, SEPARATE = "shared", "separate"


class Unavailable(RuntimeError):
    """The binding or the driver has no such thing. The message says which."""


@dataclass(frozen=True)
class Part:
    """A stream, where its kernels may run, and what has to be current to launch there."""

    stream: Any
    sms: int
    context: Any
    green: Any = None


def part(gpu: Gpu, share: float, queues: str, priority: int) -> Part:
    """A low-priority stream confined to a share of the multiprocessors, rounded up to what the device can set apart."""
    if share == 1.0 and queues == SHARED:
        return Part(gpu.stream(priority), gpu.sms, gpu.context)
    for name in ("cuDeviceGetDevResource", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"):
        if not gpu.has(name):
            raise Unavailable(f"the binding has no {name}: install cuda-bindings 12.5 or newer")
    kinds = gpu.api.CUdevResourceType
    whole = gpu.call("cuDeviceGetDevResource", gpu.device, kinds.CU_DEV_RESOURCE_TYPE_SM)
    wanted, sms = [whole], gpu.sms
    if share < 1.0:
        groups, made, _ = gpu.call("cuDevSmResourceSplitByCount", 1, whole, 0, max(1, round(share * gpu.sms)))
        if made != 1:
            raise Unavailable(f"the device can't set {share} of its multiprocessors apart")
        wanted, sms = [groups[0]], int(groups[0].sm.smCount)
    if queues == SEPARATE:
        if not hasattr(kinds, "CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG"):
            raise Unavailable(
                "the binding knows no work queue resources: cuda-bindings 13.1 or newer, and such a driver"
            )
        config = gpu.call("cuDeviceGetDevResource", gpu.device, kinds.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG)
        inner = config.wqConfig
        inner.sharingScope = gpu.api.CUdevWorkqueueConfigScope.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
        config.wqConfig = inner
        wanted.append(config)
    described = gpu.call("cuDevResourceGenerateDesc", wanted, len(wanted))
    flags = int(gpu.api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    green = gpu.call("cuGreenCtxCreate", described, gpu.device, flags)
    stream = gpu.call("cuGreenCtxStreamCreate", green, int(gpu.api.CUstream_flags.CU_STREAM_NON_BLOCKING), priority)
    return Part(stream, sms, gpu.call("cuCtxFromGreenCtx", green), green)


def captured(gpu: Gpu, where: Part, seconds: float) -> Graph:
    """A piece captured on the part's stream: `seconds` on the part alone, one wave of it."""
    mode = gpu.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    gpu.call("cuCtxPushCurrent", where.context)
    try:
        gpu.call("cuStreamBeginCapture", where.stream, mode)
        gpu.spin(where.stream, seconds, gpu.wave * where.sms // gpu.sms)
        made = gpu.instantiate(gpu.call("cuStreamEndCapture", where.stream))
        gpu.call("cuGraphUpload", made.exec, where.stream)
        gpu.sync(where.stream)
    finally:
        gpu.call("cuCtxPopCurrent")
    return made


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    high = gpu.stream(gpu.greatest)
    piece = gpu.graph(lambda stream: gpu.full(stream, HIGH_S), gpu.greatest)
    alone = [_high(gpu, high, piece, Counter(gpu)) for _ in range(10 * repeats)]
    whole_rate = 0.0
    rows: list[Row] = []
    for queues in (SHARED, SEPARATE):
        for share in SHARES:
            row: Row = {"low_share": share, "queues": queues}
            try:
                where = part(gpu, share, queues, gpu.least)
                low = captured(gpu, where, LOW_S)
                elsewhere = _elsewhere(gpu, where)
            except (Unavailable, DriverError) as error:
                rows.append(row | _nothing(str(error)))
                continue
            rate = where.sms / gpu.sms / median([_timed_low(gpu, where, low) for _ in range(repeats)])
            whole_rate = whole_rate or rate
            seen, done_rate = _together(gpu, where, low, high, piece, repeats)
            gain = {"low_alone": rate / whole_rate, "low_beside": done_rate * where.sms / gpu.sms / whole_rate}
            slow = {"high_slowdown": median(seen) / median(alone), "high_p99_slowdown": _p99(seen) / _p99(alone)}
            rows.append(row | {"sms": where.sms} | slow | gain | {"elsewhere": elsewhere, "note": None})
            gpu.call("cuGraphExecDestroy", low.exec)
            if where.green is not None:
                gpu.call("cuStreamDestroy", where.stream)
                gpu.call("cuGreenCtxDestroy", where.green)
    return rows


def _nothing(why: str) -> Row:
    names = ("sms", "high_slowdown", "high_p99_slowdown", "low_alone", "low_beside", "elsewhere")
    return dict.fromkeys(names) | {"note": why}


def _p99(samples: Sequence[float]) -> float:
    return float(spread(samples, "x_us")["x_p99_us"])


def _elsewhere(gpu: Gpu, where: Part) -> float:
    """Time of a piece with as many blocks as the whole device holds, captured on the part and launched on an ordinary
    stream, over its block's: 1 if the stream it is launched on decides where it runs, the share's inverse if the one it
    was captured on does."""
    ordinary = gpu.stream(gpu.least)
    graph = captured(gpu, Part(where.stream, gpu.sms, where.context), LOW_S)
    took = median([gpu.timed(ordinary, lambda: gpu.launch(graph, ordinary)) for _ in range(5)])
    gpu.call("cuGraphExecDestroy", graph.exec)
    gpu.call("cuStreamDestroy", ordinary)
    return took / LOW_S


def _timed_low(gpu: Gpu, where: Part, low: Graph) -> float:
    """Seconds of one low piece alone."""
    began = time.perf_counter()
    gpu.launch(low, where.stream)
    gpu.sync(where.stream)
    return time.perf_counter() - began


def _high(gpu: Gpu, stream: Any, piece: Graph, counter: Counter) -> float:
    began = time.perf_counter()
    gpu.launch(piece, stream)
    counter.wait(counter.signal(stream))
    return time.perf_counter() - began


def _together(gpu: Gpu, where: Part, low: Graph, high: Any, piece: Graph, repeats: int) -> tuple[list[float], float]:
    """Seconds of each high piece while the part is kept busy, and low pieces a second."""
    mine, theirs = Counter(gpu), Counter(gpu)
    out, seen = 0, []
    began = time.perf_counter()
    for _ in range(20 * repeats):
        for _ in range(max(0, OUTSTANDING - (out - theirs.value))):
            gpu.launch(low, where.stream)
            out = theirs.signal(where.stream)
        seen.append(_high(gpu, high, piece, mine))
        end = time.perf_counter() + GAP_S
        while time.perf_counter() < end:
            pass
    rate = theirs.value / (time.perf_counter() - began)
    gpu.sync(where.stream)
    return seen, rate


def answer(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["note"] is None]
    answers = [
        f"{row['low_share']} ({row['queues']} queues): high {row['high_slowdown']:.2f}, p99"
        f" {row['high_p99_slowdown']:.2f}, low keeps {row['low_beside']:.2f}"
        for row in found
    ]
    binds = [row for row in found if row["low_share"] < 1.0]
    if binds:
        where = "captured on" if all(row["elsewhere"] > 1.5 for row in binds) else "launched on"
        answers.append(f"where a node runs is decided by the stream it was {where}")
    missing = sorted({row["note"] for row in rows if row["note"]})
    return "; ".join([*answers, *(f"not measured: {why}" for why in missing)])


EXPERIMENT = Experiment(
    "green",
    "What does confining low work to a share of the multiprocessors buy, and do work queues of its own add to that?",
    "High pieces of 100 us that fill the device, 50 us apart, beside low pieces of 1 ms in one wave, on green contexts"
    " of 1, 1/2 and 1/4 of the multiprocessors with shared and with separate work queues. Low work is counted in"
    " blocks, over what it does alone on all of them.",
    measure,
    answer,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
