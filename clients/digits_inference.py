"""Serve predictions on handwritten digits and report the latency's percentiles.

    python -m clients.digits_inference --priority high --rate 200

With --rate, requests arrive on schedule whether or not earlier ones were answered, and a latency
counts from the scheduled arrival: a stall is felt by every request that it delays. Without it,
each request follows the answer to the one before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.common import Progress, final_state, finish, gate, outcome, parser, run
from clients.data import Digits, digits
from clients.job import Future, Job, open_job
from clients.models.cnn import cnn

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
PRACTICE = 3  # epochs a fresh model is trained for when no file is given


def serve(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    data = digits()
    model = cnn(args.size)
    if args.load:
        load(model, args.load)
    else:
        practise(model, data, args.seed)
    model.eval()

    def predict(x: Tensor) -> Tensor:
        with torch.no_grad():
            classes: Tensor = model(x).argmax(1)
            return classes

    batches = data.batches(args.batch_size, args.seed)
    requests = args.steps or args.epochs * data.steps_per_epoch(args.batch_size)
    result = outcome(args, "digits-inference")
    progress = Progress(result.client, requests)
    with open_job(
        predict,
        plain=args.plain,
        example=(data.x_train[: args.batch_size],),
        model=model,
        optimizer=None,
        priority=args.priority,
        name=result.client,
        seed=args.seed,
        endpoint=args.endpoint,
        microbatches=args.microbatches,
    ) as job:
        asked = [next(batches) for _ in range(requests)]
        gate(args)
        result.began = time.monotonic()
        answers = ask(job, [x for x, _ in asked], args.rate, progress.show)
        result.wall_s = time.monotonic() - result.began
    for future, _ in answers:
        result.queue_s += future.times.queue_s
        result.device_s += future.times.device_s
    right = sum(int((future.result() == y).sum()) for (future, _), (_, y) in zip(answers, asked, strict=True))
    result.steps = requests
    result.accuracy = [right / (requests * args.batch_size)]
    latencies = np.array([latency for _, latency in answers])
    result.extra = {
        "rate_per_s": requests / result.wall_s,
        "latency_s": {f"p{p:g}": float(np.percentile(latencies, p)) for p in PERCENTILES},
    }
    print(f"{result.client}: {result.extra['rate_per_s']:.1f} requests/s, accuracy {result.accuracy[0]:.3f}")
    print("  ".join(f"{name} {1e3 * value:.3f} ms" for name, value in result.extra["latency_s"].items()))
    finish(args, result, final_state({"digits-cnn": model}))


def ask(
    job: Job, inputs: Sequence[Tensor], rate: float | None, show: Callable[[int, str], None]
) -> list[tuple[Future, float]]:
    """Send every input; -> its future and its latency in seconds, in order."""
    done: list[tuple[Future, float]] = []
    waiting: deque[tuple[Future, float]] = deque()
    start = time.perf_counter()

    def receive() -> None:
        future, arrived = waiting.popleft()
        future.result()
        done.append((future, time.perf_counter() - arrived))
        show(len(done), f"{1e3 * done[-1][1]:.2f} ms")

    for index, x in enumerate(inputs):
        if rate is None:
            arrival = time.perf_counter()
        else:
            arrival = start + index / rate
            while waiting and waiting[0][0].done():
                receive()
            while (ahead := arrival - time.perf_counter()) > 0:
                if waiting:
                    wait_for(waiting[0][0], ahead)
                    while waiting and waiting[0][0].done():
                        receive()
                else:
                    time.sleep(ahead)
        waiting.append((job.step(x), arrival))
        if rate is None:
            receive()
    while waiting:
        receive()
    return done


def wait_for(future: Future, seconds: float) -> None:
    """Until the answer is there, but no longer than this."""
    try:
        future.result(timeout=seconds)
    except TimeoutError:
        pass


def load(model: nn.Module, path: Path) -> None:
    """The model part of what `python -m clients.digits_cnn --save FILE` wrote."""
    saved = torch.load(path, weights_only=True)
    prefix = "digits-cnn/"
    model.load_state_dict({key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)})


def practise(model: nn.Module, data: Digits, seed: int) -> None:
    """Train here for a moment, so that there is something to predict with."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = data.batches(64, seed)
    for _ in range(PRACTICE * data.steps_per_epoch(64)):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    # Gradients are no part of an inference job's state.
    optimizer.zero_grad()


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser("Serve predictions on handwritten digits.", epochs=10, batch_size=8)
    flags.add_argument("--load", type=Path, metavar="FILE", help="weights saved by digits_cnn (same --size)")
    flags.add_argument("--rate", type=float, help="requests per second (default: each follows the last answer)")
    return run(serve, flags, argv)


if __name__ == "__main__":
    sys.exit(main())
