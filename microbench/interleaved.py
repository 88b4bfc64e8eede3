"""Rounds a second of one program that steps high and low jobs in turn, under several policies.

Each job trains a small network on batches of the size of scikit-learn's digits. A round is one step of every job:
each waited for before the next job's (`in turn`), or all submitted and then waited for (`together`). The program's
high jobs get their next steps only when its low ones are answered, so low work that is held for a high job's next
step stops them all, unless the daemon knows that the client waits; `untold` is `guarded` without that. Daemons of
all policies run at once, and turns of so many seconds alternate between them.

    python -m microbench.interleaved --jobs 2+10 10+20 --policies fifo paced guarded
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpumux import client, config
from microbench import common
from microbench.daemon import RunningDaemon, running_daemon

BATCH, PIXELS, HIDDEN, CLASSES = 64, 64, 128, 10
WAYS = ("in turn", "together")
UNTOLD = "untold"


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--jobs", nargs="+", type=numbers, default=[(2, 10), (10, 20)], metavar="HIGH+LOW")
    arguments.add_argument(
        "--policies", nargs="+", choices=(*config.POLICIES, UNTOLD), default=["fifo", "paced", "guarded", UNTOLD]
    )
    arguments.add_argument("--repeats", type=int, default=5, help="turns of each policy and way")
    arguments.add_argument("--seconds", type=float, default=4.0, help="a turn")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("gpumux.client").setLevel(logging.ERROR)  # jobs are closed with steps not synced
    facts = common.machine()
    measured = {
        f"{high} high, {low} low": measure(high, low, args.policies, args.repeats, args.seconds)
        for high, low in args.jobs
    }
    print(common.describe(facts))
    print(show(measured))
    common.report("interleaved", args.out, {"machine": facts, "threads": 1, "jobs": measured})
    return 0


def numbers(text: str) -> tuple[int, int]:
    """The type of an argument such as 2+10."""
    high, _, low = text.partition("+")
    if not (high.isdigit() and low.isdigit()):
        raise argparse.ArgumentTypeError(f"{text} is not two numbers, such as 2+10")
    return int(high), int(low)


def measure(high: int, low: int, policies: list[str], repeats: int, seconds: float) -> dict[str, dict[str, Any]]:
    """By way and policy: rounds a second, and what they are of the first policy's in the same repeat."""
    rates: dict[str, dict[str, list[float]]] = {way: {policy: [] for policy in policies} for way in WAYS}
    with ExitStack() as stack:
        daemons = {
            policy: stack.enter_context(running_daemon(policy="guarded" if policy == UNTOLD else policy, threads=1))
            for policy in policies
        }
        jobs = {
            policy: [stack.enter_context(submit(daemon, number, number < high)) for number in range(high + low)]
            for policy, daemon in daemons.items()
        }
        for job in jobs.get(UNTOLD, []):
            job._session.holds_low_work = False  # as of a daemon that need not know
        for _ in range(repeats):
            for way in WAYS:
                for policy in policies:
                    rates[way][policy].append(rounds(jobs[policy], way, seconds))
    return {
        way: {
            policy: {
                "rounds_per_s": common.figure(found),
                f"over_{policies[0]}": common.figure(
                    [rate / first for rate, first in zip(found, by_policy[policies[0]], strict=True)]
                ),
                "rounds_per_s_by_repeat": found,
            }
            for policy, found in by_policy.items()
        }
        for way, by_policy in rates.items()
    }  # fmt: skip


def submit(daemon: RunningDaemon, number: int, high: bool) -> client.Job[Any]:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return client.submit(
        step, example=batch(), model=model, optimizer=optimizer, priority="high" if high else "low",
        name=f"{'high' if high else 'low'}-{number}", endpoint=daemon.endpoint,
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.rand(BATCH, PIXELS, generator=draws), torch.randint(0, CLASSES, (BATCH,), generator=draws)


def rounds(jobs: list[client.Job[Any]], way: str, seconds: float) -> float:
    """Rounds a second."""
    x, y = batch()
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        if way == "in turn":
            for job in jobs:
                job.step(x, y).result()
        else:
            for future in [job.step(x, y) for job in jobs]:
                future.result()
        count += 1
    return count / (now - began)


def show(measured: dict[str, dict[str, Any]]) -> str:
    rows = []
    for jobs, ways in measured.items():
        for way, policies in ways.items():
            for policy, found in policies.items():
                rate = found["rounds_per_s"]
                ratio = next(figure for name, figure in found.items() if name.startswith("over_"))
                spread = f"{rate.low:.1f} to {rate.high:.1f}"
                rows.append([f"{jobs}, {way}", policy, f"{rate.median:.1f}", spread, f"{ratio.median:.2f}"])
    first = next(
        name
        for ways in measured.values()
        for found in ways["in turn"].values()
        for name in found
        if name.startswith("over_")
    )
    return common.table(["jobs", "policy", "rounds/s", "spread", first.replace("_", " ")], rows)


if __name__ == "__main__":
    sys.exit(main())
