"""The round trip of a step that does nothing worth mentioning, next to a raw ZeroMQ echo and a call.

direct   the one-operator function called in this process
echo     one frame, DEALER to ROUTER and back, over ipc, to another Python process
wire     a step message and its answer through gpumux's wire layer, with no daemon behind it
empty    `job.step().result()` of a program without operators: client, daemon, executor process and back
one op   `job.step(x).result()` of one: a batch into shared memory, a kernel, a result back

All take turns in one run; the ratio is empty over echo, of each turn's medians. Waking a process on
another core costs tens of microseconds where the machine is virtual, and the kernel places the echo's
two processes now on one core, now on two: `--cores 1` confines everything to one core, where all ways
pay for computation alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpumux import client
from microbench import common
from microbench.daemon import running_daemon
from microbench.rtt_echo import Measure, raw_echo, wire_echo

TARGET = 3.0


def empty() -> None:
    """No operators, no batch, no result."""


def one_operator(x: Tensor) -> Tensor:
    """The smallest step there is: one operator on one number."""
    return x + 1


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=9, help="turns of each")
    arguments.add_argument("--trips", type=int, default=500, help="round trips a turn")
    arguments.add_argument("--cores", type=int, default=0, help="confine all processes to so many cores (0: all)")
    arguments.add_argument("--policy", default="paced", help="of the daemon")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: args.cores] or cores)
    try:
        return run(args)
    finally:
        os.sched_setaffinity(0, cores)


def run(args: argparse.Namespace) -> int:
    facts = common.machine()
    x = torch.zeros(())
    with (
        raw_echo() as echo,
        wire_echo() as wire,
        running_daemon(policy=args.policy, threads=1) as daemon,
        client.submit(empty, example=(), priority="high", name="rtt-empty", endpoint=daemon.endpoint) as bare,
        client.submit(one_operator, example=(x,), priority="high", name="rtt", endpoint=daemon.endpoint) as job,
    ):
        if job.step(x).result().item() != 1.0:
            raise RuntimeError("the step's answer is wrong")
        ways = {
            "direct": timed(lambda: one_operator(x)),
            "echo": echo,
            "wire": wire,
            "empty": timed(lambda: bare.step().result()),
            "one op": timed(lambda: job.step(x).result()),
        }
        samples = turns(ways, args.repeats, args.trips)
    measured = {name: summary(runs) for name, runs in samples.items()}
    medians = {name: [common.percentile(run, 0.5) for run in runs] for name, runs in samples.items()}
    ratio = common.figure([ours / echo for ours, echo in zip(medians["empty"], medians["echo"], strict=True)])
    print(common.describe(facts))
    print(show(measured))
    met = ratio.median <= TARGET
    print(
        f"an empty step over echo: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), at most {TARGET}:", end=" "
    )
    print("met" if met else "MISSED")
    result: dict[str, Any] = {
        "machine": facts,
        "policy": args.policy,
        "cores": args.cores,
        "ways": measured,
        "ratio": ratio,
    }
    result["targets"] = {"empty step over echo": {"value": ratio.median, "target": TARGET, "met": met}}
    common.report("rtt", args.out, result)
    return 0


def timed(trip: Callable[[], Any]) -> Measure:
    """A function that makes so many trips -> seconds of each."""

    def measure(trips: int) -> list[float]:
        samples = []
        for _ in range(trips):
            began = time.perf_counter()
            trip()
            samples.append(time.perf_counter() - began)
        return samples

    return measure


def turns(ways: dict[str, Measure], repeats: int, trips: int) -> dict[str, list[list[float]]]:
    """Seconds of every trip, by way and turn, after one turn to warm up."""
    samples: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, measure in ways.items():
            samples[name].append(measure(trips))
    return {name: runs[1:] for name, runs in samples.items()}


def summary(runs: list[list[float]]) -> dict[str, Any]:
    """Over all turns: percentiles; and the median of each turn as a figure with its spread."""
    every = [seconds for run in runs for seconds in run]
    return {
        "median_s": common.figure([common.percentile(run, 0.5) for run in runs]),
        "p90_s": common.percentile(every, 0.9),
        "p99_s": common.percentile(every, 0.99),
        "p999_s": common.percentile(every, 0.999),
    }


def show(measured: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, m in measured.items():
        median = m["median_s"]
        times = (median.median, median.low, median.high, m["p90_s"], m["p99_s"], m["p999_s"])
        rows.append([name, *(f"{1e6 * seconds:.1f}" for seconds in times)])
    return common.table(["us a round trip", "median", "lowest", "highest", "p90", "p99", "p99.9"], rows)


if __name__ == "__main__":
    sys.exit(main())
