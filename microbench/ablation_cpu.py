"""The rows of the ablation that mean something on the CPU device, measured on a real daemon with real jobs.

There are no graphs to launch and no stream priorities in hardware: the naive row is `fifo`, priorities are the daemon's
own `streams`. Throughput is in steps; a smaller background step does less work, so that row's low job is counted by its
work (plain seconds a step) over what the larger one does alone.
"""

from __future__ import annotations

import os
import time

import torch

from microbench import priority
from microbench.ablation import ROWS, Row
from microbench.daemon import running_daemon

WAYS = (
    (ROWS[2], "fifo", priority.LOW_S),
    (ROWS[3], "streams", priority.LOW_S),
    (ROWS[4], "paced", priority.LOW_S),
    (ROWS[5], "guarded", priority.LOW_S),
    (ROWS[6], "guarded", priority.LOW_S / 3),
)
ALONE_S = 3.0


def measure(steps: int, repeats: int, max_slowdown: float) -> tuple[list[Row], str]:
    """The rows, and a line that says what ran."""
    torch.set_num_threads(1)
    every = os.sched_getaffinity(0)
    core = max(every)
    os.sched_setaffinity(0, every - {core} or every)
    try:
        low_alone = low_alone_per_s(core)
        rows = [Row("alone", 1.0, 0.0)]
        for label, policy, low_s in WAYS:
            found = priority.measure(policy, core, repeats, steps, low_s=low_s, max_slowdown=max_slowdown)
            slowdown, low = found["slowdown"].median, found["low_steps_per_s"].median
            rows.append(Row(label, 1 / slowdown, low * low_s / (low_alone * priority.LOW_S), slowdown))
    finally:
        os.sched_setaffinity(0, every)
    return rows, "a residual MLP next to a greedy larger one on one core, a real daemon; slowdowns are of median steps"


def low_alone_per_s(core: int) -> float:
    """Steps a second of the greedy client with the device to itself."""
    with running_daemon(policy="paced", threads=1, cores=[core]) as daemon, priority.greedy_client(daemon):
        time.sleep(ALONE_S / 3)  # its program is measured and cut meanwhile
        before, began = priority.low_steps(daemon.status()), time.monotonic()
        time.sleep(ALONE_S)
        return (priority.low_steps(daemon.status()) - before) / (time.monotonic() - began)
