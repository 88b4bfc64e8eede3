"""The round trip of a step that does nothing worth mentioning, next to a raw ZeroMQ echo and a call.

direct   the step function called in this process
echo     one frame, DEALER to ROUTER and back, over ipc, to another Python process
gpumux   `job.step(x).result()`: batch into shared memory, daemon, executor process, result back

All three take turns in one run; the ratio is gpumux over echo, of each turn's medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor

from gpumux import client
from microbench import common
from microbench.daemon import running_daemon

TARGET = 3.0
PAYLOAD = bytes(64)  # about what a step message weighs
REPLY_S = 10.0


def nothing(x: Tensor) -> Tensor:
    """The smallest step there is: one operator on one number."""
    return x + 1


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=9, help="turns of each")
    arguments.add_argument("--trips", type=int, default=500, help="round trips a turn")
    arguments.add_argument("--policy", default="paced", help="of the daemon")
    arguments.add_argument("--serve-echo", metavar="ENDPOINT", help=argparse.SUPPRESS)
    args = arguments.parse_args(argv)
    if args.serve_echo:
        serve_echo(args.serve_echo)
        return 0
    torch.set_num_threads(1)
    facts = common.machine()
    x = torch.zeros(())
    with (
        echo_client() as echo,
        running_daemon(policy=args.policy, threads=1) as daemon,
        client.submit(nothing, example=(x,), priority="high", name="rtt", endpoint=daemon.endpoint) as job,
    ):
        ways: dict[str, Callable[[], Any]] = {
            "direct": lambda: nothing(x),
            "echo": echo,
            "gpumux": lambda: job.step(x).result(),
        }
        if ways["gpumux"]().item() != 1.0:
            raise RuntimeError("the step's answer is wrong")
        samples = turns(ways, args.repeats, args.trips)
    measured = {name: summary(runs) for name, runs in samples.items()}
    medians = {name: [common.percentile(run, 0.5) for run in runs] for name, runs in samples.items()}
    ratio = common.figure([ours / echo for ours, echo in zip(medians["gpumux"], medians["echo"], strict=True)])
    print(common.describe(facts))
    print(show(measured))
    met = ratio.median <= TARGET
    print(f"gpumux over echo: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), at most {TARGET}:", end=" ")
    print("met" if met else "MISSED")
    result: dict[str, Any] = {"machine": facts, "policy": args.policy, "ways": measured, "ratio": ratio}
    result["targets"] = {"gpumux over echo": {"value": ratio.median, "target": TARGET, "met": met}}
    common.report("rtt", args.out, result)
    return 0


def turns(ways: dict[str, Callable[[], Any]], repeats: int, trips: int) -> dict[str, list[list[float]]]:
    """Seconds of every trip, by way and turn, after one turn to warm up."""
    samples: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, trip in ways.items():
            run = []
            for _ in range(trips):
                began = time.perf_counter()
                trip()
                run.append(time.perf_counter() - began)
            samples[name].append(run)
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


@contextmanager
def echo_client() -> Iterator[Callable[[], Any]]:
    """A call that sends one frame to an echo in another process and waits for it to come back."""
    with tempfile.TemporaryDirectory(prefix="gm-") as directory:
        endpoint = f"ipc://{Path(directory)}/echo.sock"
        child = subprocess.Popen([sys.executable, "-m", "microbench.rtt", "--serve-echo", endpoint])
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.rcvtimeo = int(1e3 * REPLY_S)
                socket.connect(endpoint)

                def trip() -> bytes:
                    socket.send(PAYLOAD)
                    return socket.recv()

                trip()
                yield trip
        finally:
            child.kill()
            child.wait()


def serve_echo(endpoint: str) -> None:
    """Send every message back, until killed."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        while True:
            socket.send_multipart(socket.recv_multipart())


if __name__ == "__main__":
    sys.exit(main())
