"""How often a client copies a 10 MB batch on its way to the daemon: once is the most allowed.

Two witnesses. Every torch operator that runs inside `job.step` is watched and the bytes it writes
are added up; the same for a batch that `job.collate` has stacked from samples, as a DataLoader would have it do, and
for torch's own stacking: with it each byte is copied twice in all. And the call is timed, next to a copy of the same
batch into shared memory: a copy that torch does not see (bytes, numpy) would show as a call twice as long.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from gpumux import client
from microbench import common
from microbench.daemon import running_daemon

BATCH_BYTES = 10 * 10**6
ROWS = 50
TARGET = 1.0  # copies of the batch, counted
TARGET_TIME = 1.5  # the call's seconds over those of one copy


class Writes(TorchDispatchMode):
    """Bytes written by operators, counted by what they return (a copy returns its target)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::detach", "aten::set_", "aten::empty"):
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


def summary(x: Tensor) -> Tensor:
    """The step: it reads all of its batch and writes none of it."""
    return x.amax()


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=50, help="steps measured")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    batch = torch.rand(ROWS, BATCH_BYTES // 4 // ROWS)
    with (
        running_daemon(threads=1) as daemon,
        client.submit(summary, example=(batch,), priority="high", name="copies", endpoint=daemon.endpoint) as job,
    ):
        with Writes() as seen:
            answer = job.step(batch)
        if answer.item() != batch.amax().item():
            raise RuntimeError("the step's answer is wrong")
        stacked = stacking(job, batch)
        calls, copies = turns(lambda: job.step(batch), batch, args.repeats)
    counted = seen.nbytes / batch.nbytes
    ratio = [call / copy for call, copy in zip(calls, copies, strict=True)]
    figures = {"call_s": common.figure(calls), "one_copy_s": common.figure(copies), "ratio": common.figure(ratio)}
    rows = [
        [name, f"{1e3 * f.median:.3f}", f"{1e3 * f.low:.3f}", f"{1e3 * f.high:.3f}"]
        for name, f in (("job.step(batch)", figures["call_s"]), ("one copy", figures["one_copy_s"]))
    ]
    print(common.describe(facts))
    print(common.table([f"{batch.nbytes / 1e6:g} MB", "median ms", "lowest", "highest"], rows))
    targets = {
        "copies counted": {"value": counted, "target": TARGET, "met": counted <= TARGET * 1.001},
        "copies counted, from samples": {
            "value": stacked["collate"], "target": TARGET, "met": stacked["collate"] <= TARGET * 1.001
        },
        "call over one copy": {
            "value": figures["ratio"].median, "target": TARGET_TIME, "met": figures["ratio"].median <= TARGET_TIME
        },
    }  # fmt: skip
    for name, target in targets.items():
        print(f"{name}: {target['value']:.3f}, at most {target['target']}: {'met' if target['met'] else 'MISSED'}")
    result = {
        "machine": facts,
        "batch_bytes": batch.nbytes,
        "bytes_written": seen.nbytes,
        "from_samples": stacked,
        **figures,
    }
    common.report("copies", args.out, {**result, "targets": targets})
    return 0


def stacking(job: client.Job[Any], batch: Tensor) -> dict[str, float]:
    """Copies of a batch on its way from samples into the device's memory: stacked by `job.collate`, and by torch."""
    samples = list(batch)
    counted = {}
    for name, collate in (("collate", job.collate), ("torch", default_collate)):
        job.step(collate(samples)).result()  # from now on there is a slot for such batches
        with Writes() as seen:
            future = job.step(collate(samples))
        if future.item() != batch.amax().item():
            raise RuntimeError("the step's answer is wrong")
        counted[name] = seen.nbytes / batch.nbytes
    return counted


def turns(step: Callable[[], Any], batch: Tensor, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of the call, and of one copy into shared memory, in turns."""
    fd = os.memfd_create("copies")
    os.ftruncate(fd, batch.nbytes)
    shared = torch.frombuffer(mmap.mmap(fd, batch.nbytes), dtype=batch.dtype).view_as(batch)
    os.close(fd)
    calls, copies = [], []
    for repeat in range(repeats + 5):
        began = time.perf_counter()
        answer = step()
        called = time.perf_counter()
        answer.result()
        again = time.perf_counter()
        shared.copy_(batch)
        copied = time.perf_counter()
        if repeat >= 5:  # the first ones touch pages for the first time
            calls.append(called - began)
            copies.append(copied - again)
    return calls, copies


if __name__ == "__main__":
    sys.exit(main())
