"""What a submit takes that splits the step: into two microbatches, and over two daemons, beside the same step whole.

Each submit runs in a process of its own, with daemons of its own and one thread of torch's: seconds, processor time and
the most memory of the client. A split is proven in float64 (docs/burst.md), which is most of it. Ratios are those to
the submit of the whole step (the baseline) of the same turn; the median of the turns is given, with all of them beside
it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from microbench import common
from microbench.daemon import running_daemon
from microbench.real_models import RECIPES, build

MODELS = ("gpt2", "vit-b16", "t5-small")
WAYS = ("whole", "microbatches", "daemons")
PARTS = 2


def submitted(name: str, way: str) -> dict[str, float]:
    """Seconds, processor time and peak memory (bytes) of one submit, with a batch of twice the model's usual size."""
    from gpumux import client

    torch.set_num_threads(1)
    made = build(name)
    batch = tuple(torch.cat(pair) for pair in zip(made.batch(0), made.batch(0), strict=True))
    with ExitStack() as stack:
        count = PARTS if way == "daemons" else 1
        endpoints = [stack.enter_context(running_daemon(threads=1)).endpoint for _ in range(count)]
        where: dict[str, Any] = {"endpoints": endpoints} if count > 1 else {"endpoint": endpoints[0]}
        if way == "microbatches":
            where["microbatches"] = PARTS
        own, began = time.process_time(), time.perf_counter()
        job = client.submit(made.step, example=batch, model=made.model, optimizer=made.optimizer, **where)
        found = {"wall_s": time.perf_counter() - began, "client_s": time.process_time() - own}
        job.step(*batch).result()  # it does run
        job.close(sync=False)
    return found | {"peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)}


def _in_a_process(name: str, way: str) -> dict[str, float]:
    command = [sys.executable, "-m", "microbench.split_submit", "--part", way, "--models", name]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900)
    if ended.returncode:
        raise RuntimeError(f"a submit of {name}, {way}, ended with {ended.returncode}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measure(name: str, turns: int) -> dict[str, Any]:
    ran = [{way: _in_a_process(name, way) for way in WAYS} for _ in range(turns)]
    ratios = {way: [turn[way]["client_s"] / turn["whole"]["client_s"] for turn in ran] for way in WAYS[1:]}
    medians = {
        way: {what: statistics.median(turn[way][what] for turn in ran) for what in ran[0][way]} for way in WAYS
    }  # fmt: skip
    return {"medians": medians, "turns": ran, "over the whole step's": ratios}


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS, help=f"some of {', '.join(RECIPES)}")
    arguments.add_argument("--turns", type=int, default=3, help="measure each submit so often (default: 3)")
    arguments.add_argument("--part", help=argparse.SUPPRESS)
    args = arguments.parse_args(argv)
    if args.part:
        print(json.dumps(submitted(args.models[0], args.part)))
        return 0
    facts = common.machine()
    print(common.describe(facts))
    models, rows = {}, []
    for name in args.models:
        models[name] = measure(name, args.turns)
        for way in WAYS:
            took, ratios = models[name]["medians"][way], models[name]["over the whole step's"].get(way)
            over = (
                "-" if ratios is None else f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
            )
            rows.append(
                [name, way, f"{took['wall_s']:.1f}", f"{took['client_s']:.1f}", over, f"{took['peak_bytes'] / 1e9:.1f}"]
            )
            print(" ".join(rows[-1]), flush=True)
    print(common.table(["model", "submit", "s", "processor s", "over whole", "peak GB"], rows))
    common.report("split_submit", args.out, {"machine": facts, "turns": args.turns, "models": models})
    return 0


if __name__ == "__main__":
    sys.exit(main())
