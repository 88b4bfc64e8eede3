"""A high job's step time next to a greedy low one, under each policy, over its step time alone.

Both jobs want the whole device: the daemon is given one core and runs one piece at a time there; the
clients keep to the other cores, if there are any. The high job asks for a step, waits for its answer and asks for the
next; the low job, in a process of its own, keeps as many steps submitted as it may. In each policy's daemon, turns
alone and turns next to the low job (paused and resumed) alternate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch

from gpumux import client, config
from microbench import common
from microbench.daemon import RunningDaemon, running_daemon
from microbench.workloads import Workload, sized

POLICIES = config.POLICIES
HIGH_S, LOW_S = 0.010, 0.030  # seconds of a plain step
INFLIGHT = 8  # steps the greedy job keeps submitted
GREEDY = "greedy"


def high_workload() -> Workload:
    return sized("high", layers=18, width=128, adam=False, seconds=HIGH_S)()


def low_workload(seconds: float) -> Workload:
    return sized("low", layers=24, width=192, adam=False, seconds=seconds)()


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=5, help="turns alone and turns shared, for each policy")
    arguments.add_argument("--steps", type=int, default=500, help="high steps a turn, at most")
    arguments.add_argument("--seconds", type=float, default=2.0, help="a turn, at most: some policies make steps long")
    arguments.add_argument(
        "--warmup", type=int, default=300, help="high steps of the first turns, alone and shared, which don't count"
    )
    arguments.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="default: all")
    arguments.add_argument("--greedy", metavar="ENDPOINT", help=argparse.SUPPRESS)
    arguments.add_argument("--greedy-seconds", type=float, default=LOW_S, help="of a plain step of the low job")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    if args.greedy:
        be_greedy(args.greedy, args.greedy_seconds)
        return 0
    facts = common.machine()
    every = os.sched_getaffinity(0)
    device = max(every)
    os.sched_setaffinity(0, every - {device} or every)  # and the greedy client's, which inherits it
    try:
        measured = {
            policy: measure(
                policy,
                device,
                args.repeats,
                args.steps,
                low_s=args.greedy_seconds,
                warmup=args.warmup,
                seconds=args.seconds,
            )
            for policy in args.policies
        }
    finally:
        os.sched_setaffinity(0, every)
    print(common.describe(facts))
    print(show(measured))
    result: dict[str, Any] = {"machine": facts, "threads": 1, "policies": measured}
    result["targets"] = targets(measured)
    for name, target in result["targets"].items():
        verdict = "met" if target["met"] else "MISSED"
        print(f"{name}: {target['value']:.2f} against {target['target']:.2f}: {verdict}")
    common.report("priority", args.out, result)
    return 0


def targets(measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Under `paced` the high job is to be nearer to its time alone than under `fifo`."""
    if not {"fifo", "paced"} <= measured.keys():
        return {}
    fifo, paced = (measured[policy]["slowdown"].median for policy in ("fifo", "paced"))
    return {"slowdown, paced and fifo": {"value": paced, "target": fifo, "met": paced < fifo}}


def measure(
    policy: str,
    core: int,
    repeats: int,
    steps: int,
    *,
    low_s: float = LOW_S,
    max_slowdown: float = 1.10,
    warmup: int | None = None,
    seconds: float = inf,
) -> dict[str, Any]:
    """Median high step seconds of each turn, alone and shared, and what the low job got done. `low_s`: how long a plain
    step of it takes; `max_slowdown`: what the high job is promised; `warmup`: steps of the first turns (default: as
    many); `seconds`: after which a turn ends, whatever its steps are."""
    workload = high_workload()
    alone: list[float] = []
    shared: list[float] = []
    low_rates: list[float] = []
    with (
        running_daemon(policy=policy, threads=1, cores=[core]) as daemon,
        client.submit(
            workload.step,
            example=workload.batch(0),
            model=workload.model,
            optimizer=workload.optimizer,
            priority="high",
            name="high",
            endpoint=daemon.endpoint,
            max_slowdown=max_slowdown,
        ) as job,
        greedy_client(daemon, low_s),
    ):
        for repeat in range(repeats + 1):
            count = steps if repeat or warmup is None else warmup
            daemon.change("pause", GREEDY)
            solo = median_step(job, workload, count, seconds)
            daemon.change("resume", GREEDY)
            before, began = low_steps(daemon.status()), time.monotonic()
            next_to_low = median_step(job, workload, count, seconds)
            rate = (low_steps(daemon.status()) - before) / (time.monotonic() - began)
            if repeat:  # the first turns warm up: the daemon measures and cuts both programs, and a guard learns
                alone.append(solo)
                shared.append(next_to_low)
                low_rates.append(rate)
        job.sync()
    slowdown = [s / a for s, a in zip(shared, alone, strict=True)]
    return {
        "alone_s": common.figure(alone),
        "shared_s": common.figure(shared),
        "slowdown": common.figure(slowdown),
        "low_steps_per_s": common.figure(low_rates),
        "samples": {"alone_s": alone, "shared_s": shared, "low_steps_per_s": low_rates},
    }


def median_step(job: Any, workload: Workload, steps: int, seconds: float = inf) -> float:
    """Median seconds from asking for a step to having its answer, of so many steps, or as many as `seconds` are enough
    for."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < steps and (not times or time.perf_counter() < end):
        began = time.perf_counter()
        job.step(*workload.batch(len(times))).result()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def low_steps(status: dict[str, Any]) -> int:
    return sum(job["steps_done"] for job in status["jobs"] if job["name"] == GREEDY)


@contextmanager
def greedy_client(daemon: RunningDaemon, low_s: float = LOW_S) -> Iterator[None]:
    """A low client in a process of its own, training for as long as the block lasts."""
    command = [sys.executable, "-m", "microbench.priority", "--greedy", daemon.endpoint, "--greedy-seconds", str(low_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline() != "training\n":
            child.wait()
            raise RuntimeError(f"the greedy client ended with {child.returncode}")
        try:
            yield
        finally:
            daemon.change("resume", GREEDY)
            child.stdin.close()
    if child.returncode:
        raise RuntimeError(f"the greedy client ended with {child.returncode}")


def be_greedy(endpoint: str, seconds: float) -> None:
    """Train until stdin closes."""
    workload = low_workload(seconds)
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        stop.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with client.submit(
        workload.step,
        example=workload.batch(0),
        model=workload.model,
        optimizer=workload.optimizer,
        priority="low",
        name=GREEDY,
        endpoint=endpoint,
        max_inflight=INFLIGHT,
    ) as job:
        float(job.step(*workload.batch(0)))
        print("training", flush=True)
        index = 0
        while not stop.is_set():
            job.step(*workload.batch(index := index + 1))
        job.sync()
    watcher.join()


def show(measured: dict[str, dict[str, Any]]) -> str:
    rows = []
    for policy, m in measured.items():
        alone, shared, slowdown, low = (m[k] for k in ("alone_s", "shared_s", "slowdown", "low_steps_per_s"))
        row = [policy, f"{1e3 * alone.median:.2f}", f"{1e3 * shared.median:.2f}", f"{slowdown.median:.2f}"]
        rows.append([*row, f"{slowdown.low:.2f}", f"{slowdown.high:.2f}", f"{low.median:.1f}"])
    header = ["policy", "high alone ms", "next to low ms", "slowdown", "lowest", "highest", "low steps/s"]
    return common.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
