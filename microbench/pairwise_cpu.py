"""The pairs on the CPU device, measured on a real daemon: steps of one kind of operator, short or long, computing or
moving memory. A CPU operator can't be stopped by another process's priority either, but the kernel's scheduler can:
what is measured is the daemon's pacing on one core."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

from gpumux import client
from microbench.daemon import RunningDaemon, running_daemon
from microbench.pairwise import Kind

KINDS = tuple(Kind(seconds, intensity) for intensity in ("compute", "memory") for seconds in (1e-3, 10e-3))
STEP_S = 20e-3  # a step is as many operators as fill this
WIDTH = 128
INFLIGHT = 4


class Repeated(nn.Module):
    """`count` operators of one kind over a tensor of `size` rows."""

    def __init__(self, intensity: str, count: int) -> None:
        super().__init__()
        self.intensity, self.count = intensity, count
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = x @ self.weight if self.intensity == "compute" else x + 1.0
        return x.sum()


def measure(policy: str, seconds: float) -> list[list[float]]:
    """[high][low]: the high job's steps a second beside the low one, over alone; each for `seconds`."""
    torch.set_num_threads(1)
    rows = {kind: rows_of(kind) for kind in KINDS}
    every = os.sched_getaffinity(0)
    core = max(every)
    os.sched_setaffinity(0, every - {core} or every)
    try:
        with running_daemon(policy=policy, threads=1, cores=[core]) as daemon:
            return [[pair(daemon, high, low, rows, seconds) for low in KINDS] for high in KINDS]
    finally:
        os.sched_setaffinity(0, every)


def rows_of(kind: Kind) -> int:
    """Rows of the tensor whose operator takes about this long here."""
    rows = 256
    while (took := _least(Repeated(kind.intensity, 1), torch.ones(rows, WIDTH))) < 0.8 * kind.seconds:
        rows = max(rows + 256, min(2 * rows, int(rows * kind.seconds / took)))
    return rows


def _least(run: nn.Module, x: Tensor) -> float:
    times = []
    with torch.no_grad():
        for _ in range(5):
            began = time.perf_counter()
            run(x)
            times.append(time.perf_counter() - began)
    return min(times)


def pair(daemon: RunningDaemon, high: Kind, low: Kind, rows: dict[Kind, int], seconds: float) -> float:
    """Throughput of the high job beside the low one, over alone."""
    with _submit(daemon, high, rows, "high") as job:
        batch = torch.ones(rows[high], WIDTH)
        _steps(job, batch, 4)
        alone = _rate(job, batch, seconds)
        with _submit(daemon, low, rows, "low") as other:
            stop = threading.Event()
            greedy = threading.Thread(target=_keep_busy, args=(other, torch.ones(rows[low], WIDTH), stop))
            greedy.start()
            try:
                _rate(job, batch, seconds / 4)  # both programs are measured and cut meanwhile
                shared = _rate(job, batch, seconds)
            finally:
                stop.set()
                greedy.join()
    return shared / alone


def _submit(daemon: RunningDaemon, kind: Kind, rows: dict[Kind, int], priority: str) -> Any:
    model = Repeated(kind.intensity, max(1, round(STEP_S / kind.seconds)))
    options: dict[str, Any] = {"priority": priority, "endpoint": daemon.endpoint, "max_inflight": INFLIGHT}
    return client.submit(lambda x: model(x), example=(torch.ones(rows[kind], WIDTH),), model=model, **options)


def _steps(job: Any, batch: Tensor, count: int) -> None:
    for _ in range(count):
        job.step(batch).result()


def _rate(job: Any, batch: Tensor, seconds: float) -> float:
    """Steps a second, one at a time."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        job.step(batch).result()
        steps += 1
    return steps / (time.perf_counter() - began)


def _keep_busy(job: Any, batch: Tensor, stop: threading.Event) -> None:
    while not stop.is_set():
        last = job.step(batch)
    last.result()
