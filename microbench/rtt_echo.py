"""Round trips to compare a step's with: a raw ZeroMQ echo, and gpumux's wire layer with no daemon.

    raw    DEALER to ROUTER over ipc, one small frame each way, blocking sockets: the floor
    wire   Session to Router, Step answered by StepDone at once: what framing, checks and limits add

Both servers run in a process of their own. As a program this prints both; rtt.py measures a real
daemon next to them. Imports no torch.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from gpumux.client.session import Session
from gpumux.wire.messages import Step, StepDone
from gpumux.wire.router import Incoming, Router
from microbench import common

Measure = Callable[[int], list[float]]  # rounds in, seconds of each out

PAYLOAD = b"x" * 64  # about the size of an encoded Step
JOB = "0" * 32
READY = "ready\n"
STOP_S = 10.0
WIRE_TARGET = 3.0  # a step's whole round trip over the raw echo's; the wire is a part of it


@contextlib.contextmanager
def raw_echo() -> Iterator[Measure]:
    """Yields a function that measures `rounds` round trips against a raw echo."""
    with _server("raw") as endpoint, zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(endpoint)

        def measure(rounds: int) -> list[float]:
            samples = []
            for _ in range(rounds):
                start = time.perf_counter()
                sock.send(PAYLOAD)
                sock.recv()
                samples.append(time.perf_counter() - start)
            return samples

        measure(1)  # the connection is made before the measurement
        yield measure


@contextlib.contextmanager
def wire_echo() -> Iterator[Measure]:
    """Yields a function that measures `rounds` round trips of Step and StepDone."""
    with _server("wire") as endpoint, Session.connect(endpoint) as session:
        done: list[int] = []
        session.register(JOB, lambda message, _: done.append(message.step))

        def measure(rounds: int) -> list[float]:
            samples = []
            for step in range(rounds):
                done.clear()
                start = time.perf_counter()
                session.post(Step(JOB, step, 1, 0, [], 0))
                session.wait(lambda: bool(done))
                samples.append(time.perf_counter() - start)
            return samples

        measure(1)
        yield measure


@contextlib.contextmanager
def _server(kind: str) -> Iterator[str]:
    directory = Path(tempfile.mkdtemp(prefix="gpumux-echo-"))
    endpoint = f"ipc://{directory}/echo.sock"
    command = [sys.executable, "-m", "microbench.rtt_echo", "--serve", kind, str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != READY:
            raise RuntimeError(f"the {kind} echo server did not start")
        yield endpoint
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stdout.close()
        shutil.rmtree(directory)


def serve_raw(directory: Path) -> None:
    """Echo until terminated."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.bind(f"ipc://{directory}/echo.sock")
        print(READY, end="", flush=True)
        while True:
            sock.send_multipart(sock.recv_multipart())


def serve_wire(directory: Path) -> None:
    """Answer every Step at once until terminated."""
    router = Router([f"ipc://{directory}/echo.sock"], directory)
    print(READY, end="", flush=True)
    poller = zmq.Poller()
    for fd in router.fds():
        poller.register(fd, zmq.POLLIN)
    while True:
        now = time.monotonic()
        for arrival in router.receive(now):
            if isinstance(arrival, Incoming) and isinstance(arrival.message, Step):
                step = arrival.message
                router.send(arrival.session, StepDone(step.job, step.step, 0.0, 0.0, 0.0, 0))
        router.expire(now)
        poller.poll(max(1, int((router.next_deadline(now) - now) * 1000)))


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3000, help="round trips in each repeat")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each, in turn")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "DIRECTORY"), help="be the echo server (used internally)")
    args = parser.parse_args(argv)
    if args.serve:
        {"raw": serve_raw, "wire": serve_wire}[args.serve[0]](Path(args.serve[1]))
    facts = common.machine()
    print(common.describe(facts))
    medians: dict[str, list[float]] = {"raw": [], "wire": []}
    tails: dict[str, list[float]] = {"raw": [], "wire": []}
    with raw_echo() as raw, wire_echo() as wire:
        for _ in range(args.repeats):  # in turn, so that both see the same load
            for name, measure in (("raw", raw), ("wire", wire)):
                samples = measure(args.rounds)
                medians[name].append(common.percentile(samples, 0.5))
                tails[name].append(common.percentile(samples, 0.99))
    p50 = {name: common.figure(values) for name, values in medians.items()}
    p99 = {name: common.figure(values) for name, values in tails.items()}
    ratio = p50["wire"].median / p50["raw"].median
    rows = [[name, f"{p50[name].median * 1e6:.1f}", f"{p99[name].median * 1e6:.1f}"] for name in p50]
    print(common.table(["round trip", "p50 us", "p99 us"], rows))
    print(f"wire over raw: {ratio:.2f} (a whole step may take {WIRE_TARGET:g})")
    targets = {"wire_over_raw": {"value": ratio, "target": WIRE_TARGET, "met": ratio <= WIRE_TARGET}}
    common.report(
        "rtt_echo", args.out, {"machine": facts, "rounds": args.rounds, "p50_s": p50, "p99_s": p99, "targets": targets}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
