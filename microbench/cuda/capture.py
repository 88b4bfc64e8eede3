"""Does capturing, instantiating or loading one job disturb another that runs?"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from microbench.cuda.driver import Counter, DriverError, Gpu
from microbench.cuda.experiment import Experiment, Row, main, spread

PIECE_S = 200e-6
LAYERS, WIDTH = 48, 512
LOADED = 256 << 20
LEAST_S = 1.0  # of each activity


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    import torch  # not needed to list the experiments

    # As the daemon has it: a thread that computes in Python gives way after this long.
    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        return [_beside(gpu, name, work) for name, work in _activities(gpu, torch).items()]
    finally:
        sys.setswitchinterval(switched)


def _activities(gpu: Gpu, torch: Any) -> dict[str, Callable[[], None]]:
    """The activities that the other thread repeats."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).cuda()
    x = torch.randn(64, WIDTH, device="cuda")
    side = torch.cuda.Stream()
    host = torch.empty(LOADED // 4, pin_memory=True)
    pageable = torch.empty(LOADED // 4)
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).sum().backward()
    side.synchronize()

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()

    def capture(mode: str, keep: list[Any] | None = None) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode=mode)
            try:
                step()
            finally:
                graph.capture_end()
        if keep is not None:
            keep.append(graph)

    def whole() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side, capture_error_mode="thread_local"):
            step()

    def eager() -> None:
        with torch.cuda.stream(side):
            step()
        side.synchronize()

    def load(source: Any) -> None:
        with torch.cuda.stream(side):
            target = torch.empty(LOADED // 4, device="cuda")
            target.copy_(source, non_blocking=True)
        side.synchronize()

    def allocate() -> None:
        address = gpu.call("cuMemAlloc", LOADED)
        gpu.call("cuMemFree", address)

    return {
        "nothing": lambda: time.sleep(1e-3),
        "runs the step operator by operator": eager,
        "captures (thread-local)": lambda: capture("thread_local"),
        "captures (relaxed)": lambda: capture("relaxed"),
        "captures (global)": lambda: capture("global"),
        "captures with torch.cuda.graph, which synchronises": whole,
        "allocates and frees at the driver": allocate,
        "loads state from pinned memory": lambda: load(host),
        "loads state from pageable memory": lambda: load(pageable),
        "empties torch's cache": torch.cuda.empty_cache,
    }


def _beside(gpu: Gpu, name: str, work: Callable[[], None]) -> Row:
    """Pieces of a high job, one at a time, while the other thread works."""
    stream, counter = gpu.stream(gpu.greatest), Counter(gpu)
    piece = gpu.graph(lambda each: gpu.full(each, PIECE_S), gpu.greatest)
    stop, ready = threading.Event(), threading.Event()
    errors: list[str] = []
    turns = [0]

    def other() -> None:
        gpu.call("cuCtxSetCurrent", gpu.context)
        while not stop.is_set():
            try:
                work()
            except RuntimeError as error:  # what a capture that was disturbed itself raises
                errors.append(str(error).splitlines()[0])
                if len(errors) > 3:
                    ready.set()
                    return
            turns[0] += 1
            ready.set()

    thread = threading.Thread(target=other)
    thread.start()
    took, failed = [], ""
    try:
        ready.wait()
        end = time.perf_counter() + LEAST_S
        while time.perf_counter() < end:
            began = time.perf_counter()
            gpu.launch(piece, stream)
            counter.wait(counter.signal(stream))
            took.append(time.perf_counter() - began)
    except DriverError as error:
        failed = f"the running job's: {error}"
    finally:
        stop.set()
        thread.join()
    row: Row = {"the other thread": name, **spread(took or [0.0], "piece_us"), "its_turns": turns[0]}
    return row | {"errors": failed or (errors[0] if errors else None)}


def answer(rows: Sequence[Row]) -> str:
    quiet = rows[0]
    found = [
        f"{row['the other thread']} {row['piece_p99_us'] / quiet['piece_p99_us']:.2f}"
        + (" (with errors)" if row["errors"] else "")
        for row in rows[1:]
    ]
    return "p99 of a high piece over undisturbed: " + ", ".join(found)


EXPERIMENT = Experiment(
    "capture",
    "Does capturing, instantiating or loading one job disturb another that runs?",
    "Pieces of 200 us launched and seen one at a time by one thread, while another thread of the process captures a"
    " step of 48 layers in each capture mode, runs it, loads 256 MiB of state, or allocates; a second of each.",
    measure,
    answer,
    repeats=1,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
