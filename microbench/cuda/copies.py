"""What do copies from the host cost kernels that run beside them, and does a large copy delay a small, more urgent
one?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from microbench.cuda.driver import Counter, Gpu
from microbench.cuda.experiment import Experiment, Row, main, median

MIB = 1 << 20
SIZES = (1 * MIB, 16 * MIB, 64 * MIB)
CHUNK = 1 * MIB
SMALL = 64 << 10
KERNELS, KERNEL_S = 16, 250e-6
MOVED = 512 * MIB  # of the bandwidth-bound kernel: several times any cache
BESIDE = 1024 * MIB  # copied beside the kernels: more than they last


def measure(gpu: Gpu, repeats: int) -> list[Row]:
    compute, copy, urgent = gpu.stream(gpu.greatest), gpu.stream(gpu.least), gpu.stream(gpu.greatest)
    counter = Counter(gpu)
    host = gpu.call("cuMemHostAlloc", max(SIZES), gpu.api.CU_MEMHOSTALLOC_PORTABLE)
    to, small = gpu.call("cuMemAlloc", max(SIZES)), gpu.call("cuMemAlloc", SMALL)
    left, right = gpu.call("cuMemAlloc", MOVED), gpu.call("cuMemAlloc", MOVED)
    kinds = {"compute": lambda: gpu.full(compute, KERNEL_S), "memory": lambda: gpu.move(compute, left, right, MOVED)}

    def send(nbytes: int, chunk: int, stream: Any) -> None:
        for begin in range(0, nbytes, chunk):
            gpu.call("cuMemcpyHtoDAsync", int(to) + begin, int(host) + begin, min(chunk, nbytes - begin), stream)

    def kernels(kind: str) -> None:
        for _ in range(KERNELS):
            kinds[kind]()

    def beside(kind: str, nbytes: int) -> float:
        for _ in range(BESIDE // nbytes):
            send(nbytes, nbytes, copy)
        took = gpu.timed(compute, lambda: kernels(kind))
        gpu.sync(copy)
        return took

    def delayed(nbytes: int, chunk: int) -> float:
        if nbytes:
            send(nbytes, chunk, copy)
        began = time.perf_counter()
        gpu.call("cuMemcpyHtoDAsync", int(small), int(host), SMALL, urgent)
        counter.wait(counter.signal(urgent))
        took = time.perf_counter() - began
        gpu.sync(copy)
        return took

    rows: list[Row] = []
    alone = {kind: median([gpu.timed(compute, lambda: kernels(kind)) for _ in range(repeats)]) for kind in kinds}  # noqa: B023
    quick = median([delayed(0, 1) for _ in range(repeats)])
    for nbytes in SIZES:
        rate = nbytes / median([gpu.timed(copy, lambda: send(nbytes, nbytes, copy)) for _ in range(repeats)])  # noqa: B023
        chunked = nbytes / median([gpu.timed(copy, lambda: send(nbytes, CHUNK, copy)) for _ in range(repeats)])  # noqa: B023
        slow = {kind: median([beside(kind, nbytes) for _ in range(repeats)]) / alone[kind] for kind in kinds}
        waits = [median([delayed(nbytes, chunk) for _ in range(repeats)]) - quick for chunk in (nbytes, CHUNK)]
        rows.append(
            {
                "copy_mib": nbytes // MIB,
                "rate_gb_s": rate / 1e9,
                "rate_in_chunks_gb_s": chunked / 1e9,
                "compute_slowdown": slow["compute"],
                "memory_slowdown": slow["memory"],
                "small_copy_waits_us": 1e6 * waits[0],
                "with_chunks_us": 1e6 * waits[1],
            }
        )
    return rows


def answer(rows: Sequence[Row]) -> str:
    last = rows[-1]
    return (
        f"copies slow compute-bound kernels to {max(r['compute_slowdown'] for r in rows):.3f} and memory-bound ones to"
        f" {max(r['memory_slowdown'] for r in rows):.3f}; a {SMALL >> 10} KiB copy waits"
        f" {last['small_copy_waits_us']:.0f} us behind one of {last['copy_mib']} MiB, {last['with_chunks_us']:.0f} us"
        " if that is sent in chunks of 1 MiB"
    )


EXPERIMENT = Experiment(
    "copies",
    "What do copies from the host cost kernels that run beside them, and does a large copy delay a small, more urgent"
    " one?",
    "Kernels bound by computing and by bandwidth, alone and beside a stream of copies from pinned memory; a copy of 64"
    " KiB on a high stream behind a large one on a low stream, whole and in chunks of 1 MiB.",
    measure,
    answer,
    repeats=10,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
