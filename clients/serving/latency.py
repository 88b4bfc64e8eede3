"""Latencies of the two services, alone and beside a greedy low-priority job, with and without the guard.

    python -m clients.serving.latency

A daemon of its own is started for each policy, on the last core; everything else keeps to the other cores. The low job
runs in another process and always has steps waiting.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from clients.serving.decoder import Decoder, Size, example, generate, step_of
from clients.serving.http_server import Batcher, serving
from gpumux import client
from microbench import common
from microbench.daemon import running_daemon

POLICIES = ("fifo", "guarded")
PERCENTILES = (0.5, 0.9, 0.99)
ROWS, WIDTH = 8, 64  # of the HTTP server's batches
CALLERS = 4  # that ask at once, each again when it is answered


def greedy(endpoint: str) -> int:
    """A low job that trains without a pause until standard input ends. Says "ready" after its first step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(256, 512)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with client.submit(step, example=x, model=model, optimizer=optimizer, name="greedy", endpoint=endpoint) as job:
        job.step(x).result()
        print("ready", flush=True)
        while not ended.is_set():
            job.step(x)
        job.close(sync=False)
    return 0


@contextmanager
def beside_greedy(endpoint: str) -> Iterator[None]:
    command = [sys.executable, "-m", "clients.serving.latency", "--greedy", endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the low job did not start")
            yield
        finally:
            process.stdin.close()


def decoding(endpoint: str, words: int) -> tuple[list[float], list[float]]:
    """Seconds for each word, alone and beside the low job. The words must be those of the plain loop."""
    size = Size()
    torch.manual_seed(0)
    model = Decoder(size).eval()
    prompt = torch.randint(0, size.words, (size.rows, 4))
    words = min(words, size.length - prompt.shape[1])
    plain, _ = generate(step_of(model), prompt, words)
    with client.submit(
        step_of(model), example=example(size), model=model, priority="high", name="decoder", endpoint=endpoint
    ) as job:
        found = []
        generate(job.step, prompt, words)  # the guard gets to know it
        found.append(generate(job.step, prompt, words))
        with beside_greedy(endpoint):
            generate(job.step, prompt, words)
            found.append(generate(job.step, prompt, words))
    if not all(torch.equal(made, plain) for made, _ in found):
        raise RuntimeError("the job decoded other words than the plain loop")
    return found[0][1], found[1][1]


def answering(endpoint: str, requests: int) -> tuple[list[float], list[float]]:
    """Seconds for each request over HTTP, alone and beside the low job."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 10)).eval()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(x)
        return out

    with client.submit(
        predict, example=torch.zeros(ROWS, WIDTH), model=model, priority="high", name="http", endpoint=endpoint
    ) as job:
        batcher = Batcher(lambda x: job.step(x).result(), ROWS, WIDTH)
        try:
            with serving(batcher) as port:
                asked(port, requests)
                alone = asked(port, requests)
                with beside_greedy(endpoint):
                    asked(port, requests)
                    beside = asked(port, requests)
        finally:
            batcher.close()
    return alone, beside


def asked(port: int, requests: int) -> list[float]:
    """Seconds from each request to its answer, by `CALLERS` callers at once."""
    latencies: list[float] = []

    def call() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"inputs": [0.5] * WIDTH})
        for _ in range(requests // CALLERS):
            began = time.perf_counter()
            connection.request("POST", "/predict", body)
            answer = connection.getresponse()
            answer.read()
            latencies.append(time.perf_counter() - began if answer.status == 200 else float("inf"))
        connection.close()

    callers = [threading.Thread(target=call) for _ in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return latencies


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--words", type=int, default=60, help="that the decoder makes in each turn (default: 60)")
    arguments.add_argument("--requests", type=int, default=400, help="over HTTP in each turn (default: 400)")
    arguments.add_argument("--out", type=Path, metavar="FILE.json", help="also write the result here")
    arguments.add_argument("--greedy", metavar="ENDPOINT", help=argparse.SUPPRESS)
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    if args.greedy:
        return greedy(args.greedy)
    facts = common.machine()
    print(common.describe(facts))
    measured: dict[str, dict[str, float]] = {}
    every = os.sched_getaffinity(0)
    device = max(every)
    os.sched_setaffinity(0, every - {device} or every)
    try:
        for policy in POLICIES:
            with running_daemon(policy=policy, threads=1, cores=[device]) as daemon:
                for name, service, count in (("decoder", decoding, args.words), ("http", answering, args.requests)):
                    for how, found in zip(("alone", "beside"), service(daemon.endpoint, count), strict=True):
                        figures = {f"p{100 * p:g}": common.percentile(found, p) for p in PERCENTILES}
                        measured[f"{policy} {name} {how}"] = figures
    finally:
        os.sched_setaffinity(0, every)
    rows = [[*name.split(), *(f"{1e3 * value:.2f}" for value in found.values())] for name, found in measured.items()]
    print(common.table(["policy", "service", "low job", *(f"p{100 * p:g} ms" for p in PERCENTILES)], rows))
    if args.out:
        args.out.write_text(json.dumps({"machine": facts, "latency_s": measured}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
