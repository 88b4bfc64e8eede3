"""What a fork of the fork server takes, and the end of the child, with its memory in pages of 4 KiB and of 2 MiB: that
much of a core is gone from other jobs' steps, as most kernels preempt neither.

The fork server's imports are made, its memory frozen, as it does. Each child makes 50,000 objects, in between. Then the
memory is put into huge pages (gpumux/device/workers/fork_server_process.py), and the same is done again.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

from gpumux.device.workers.fork_server_process import collapsing, warm_checker
from microbench import common

PARTS = ("fork", "work", "end")
TARGET = 0.5  # of the time of a fork and an end


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--forks", type=int, default=50, help="with each size of pages")
    args = arguments.parse_args(argv)
    facts = common.machine()
    print(common.describe(facts))
    warm_checker()
    gc.collect()
    gc.freeze()
    found: dict[str, Any] = {"4 KiB": measure(args.forks)}
    began = time.perf_counter()
    put = list(collapsing())
    took = time.perf_counter() - began
    found["2 MiB"] = measure(args.forks)
    if not any(put):
        print("this kernel puts no pages together: it is older than 6.1, or memory is short", file=sys.stderr)
        return 1
    rows = [
        [
            pages,
            *(
                f"{1e3 * parts[part].median:.2f} ({1e3 * parts[part].low:.2f}-{1e3 * parts[part].high:.2f})"
                for part in PARTS
            ),
        ]
        for pages, parts in found.items()
    ]
    print(common.table(["pages of", *(f"{part}, ms" for part in PARTS)], rows))
    print(f"{sum(put)} huge pages of {len(put)}, put together in {took:.2f} s")
    small, huge = (found[pages]["fork"].median + found[pages]["end"].median for pages in ("4 KiB", "2 MiB"))
    print(f"fork and end: {huge / small:.2f} of the time with small pages")
    targets = {"fork and end": {"value": huge / small, "target": TARGET, "met": huge / small <= TARGET}}
    common.report("forks", args.out, {
        "machine": facts, "forks": args.forks, "pages": found, "put_together": sum(put), "of": len(put),
        "seconds": took, "targets": targets,
    })  # fmt: skip
    return 0


def measure(forks: int) -> dict[str, common.Figure]:
    """Seconds of the fork and of the end (waited for), and processor seconds of the child's work between them."""
    taken: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(forks):
        reader, writer = os.pipe()
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            _work(writer)
        taken["fork"].append(time.perf_counter() - began)
        taken["work"].append(float(os.read(reader, 100)))
        began = time.perf_counter()
        os.waitpid(pid, 0)
        taken["end"].append(time.perf_counter() - began)
        os.close(reader)
        os.close(writer)
    return {part: common.figure(seconds) for part, seconds in taken.items()}


def _work(writer: int) -> None:
    """What the child does; never returns."""
    began = time.thread_time()
    made = [object() for _ in range(50_000)]
    taken = time.thread_time() - began
    os.write(writer, str(taken if made else 0.0).encode())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
