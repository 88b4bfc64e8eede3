"""What do clients that hold a CUDA context of their own cost the daemon, idle or now and then busy?"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from microbench.cuda.driver import Counter, Driver, Gpu, Graph
from microbench.cuda.experiment import Experiment, Row, main, median, spread

CONTEXTS = (0, 1, 4)
PIECE_S = 100e-6
CHAIN = 100
TICK_S = 10e-3
IDLE, TICKING = "idle", f"a kernel every {TICK_S * 1e3:.0f} ms"


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    stream, counter = gpu.stream(gpu.greatest), Counter(gpu)
    piece = gpu.graph(lambda each: gpu.full(each, PIECE_S), gpu.greatest)
    rows: list[Row] = []
    for doing in (IDLE, TICKING):
        for count in (each for each in CONTEXTS if each or doing == IDLE):
            free = int(gpu.call("cuMemGetInfo")[0])
            with ExitStack() as clients:
                for _ in range(count):
                    clients.enter_context(_client(doing))
                taken = (free - int(gpu.call("cuMemGetInfo")[0])) / max(1, count)
                rows.append({"contexts": count, "doing": doing, **_row(gpu, stream, piece, counter, repeats)})
                rows[-1]["mib_each"] = taken / (1 << 20) if count else 0.0
    return rows


def _row(gpu: Gpu, stream: Any, piece: Graph, counter: Counter, repeats: int) -> Row:
    single, chains = [], []
    for _ in range(10 * repeats):
        began = time.perf_counter()
        gpu.launch(piece, stream)
        counter.wait(counter.signal(stream))
        single.append(time.perf_counter() - began)

    def chain() -> None:
        for _ in range(CHAIN):
            gpu.launch(piece, stream)

    for _ in range(repeats):
        chains.append(gpu.timed(stream, chain) / CHAIN)
    return {**spread(single, "piece_us"), "in_chain_us": 1e6 * median(chains)}


@contextmanager
def _client(doing: str) -> Iterator[None]:
    """A process with a context of its own, for as long as the block lasts."""
    command = [sys.executable, "-m", "microbench.cuda.idle_contexts", "--child", doing]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"a client ended with {child.wait()} before its context was there")
        try:
            yield
        finally:
            child.stdin.close()


def be_client(doing: str) -> None:
    """Hold a context until stdin closes."""
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    if doing == TICKING:
        gpu = Gpu()
        stream = gpu.stream()
        print("ready", flush=True)
        while not stop.wait(TICK_S):
            gpu.spin(stream, 10e-6, 1)
        return
    driver = Driver()
    driver.start()
    driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
    driver.call("cuMemAlloc", 1 << 20)
    print("ready", flush=True)
    stop.wait()


def answer(rows: Sequence[Row]) -> str:
    alone = rows[0]
    many = [row for row in rows if row["contexts"] == max(CONTEXTS)]
    answers = [
        f"{row['contexts']} contexts, {row['doing']}: {row['piece_us'] / alone['piece_us']:.3f} of a piece's time"
        f" alone, p99 {row['piece_p99_us'] / alone['piece_p99_us']:.2f}, {row['mib_each']:.0f} MiB each"
        for row in many
    ]
    return "; ".join(answers)


EXPERIMENT = Experiment(
    "idle_contexts",
    "What do clients that hold a CUDA context of their own cost the daemon, idle or now and then busy?",
    "Pieces of 100 us, one at a time and in chains, beside 0 to 4 other processes with a context: idle, or running a"
    " tiny kernel every 10 ms. Device memory that each context takes is what less of it is free.",
    measure,
    answer,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        be_client(sys.argv[2])
        sys.exit(0)
    sys.exit(main(EXPERIMENT))
