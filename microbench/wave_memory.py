"""Bytes and predicted time of a training step by way: a doubled batch, two microbatches, checkpointing, two waves.

Five models at two batches each, from their configurations (gpumux/plan/zoo.py): what `gpumux plan memory` says of each,
captured in a process of its own. Nothing runs, so that the table needs no more memory than the weights. `half a step`:
what the waves take in all if the second one begins half a step behind the first, or behind its last peak, if later.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

from gpumux.device.sim.cost import op_profiles
from gpumux.device.sim.spec import A100
from microbench import common

MODELS: dict[str, tuple[tuple[int, int], str]] = {
    "resnet50": ((8, 64), "momentum"),
    "vgg16": ((8, 64), "momentum"),
    "vgg19_bn": ((8, 64), "momentum"),
    "bert_base": ((8, 32), "adamw"),
    "gpt2": ((8, 32), "adamw"),
}


def measure(model: str, batch: int, optimizer: str) -> dict[str, Any]:
    from gpumux.plan.memory import advice, ways
    from gpumux.plan.models import find
    from gpumux.program.memory import shared_arenas

    began = time.process_time()
    loaded = find(model, device="cpu")
    found = ways.compare(loaded, batch, A100, optimizer=optimizer)
    spent = time.process_time() - began
    program = ways.captured_step(loaded.module, ways.OPTIMIZERS[optimizer], loaded.example(batch))
    seconds = [each.seconds for each in op_profiles(program, A100)]
    at_once, half_apart = (
        min(arena for arena, _ in shared_arenas(program, seconds, half_a_step)) for half_a_step in (False, True)
    )
    saved = at_once - half_apart
    half = found.way("waves").total_bytes - saved
    return {**advice.body(found, 1.1), "half_step_bytes": half, "captured_s": spent, "operators": len(program.ops)}


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument("--batches", nargs="+", type=int, help="instead of each model's two")
    arguments.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    if args.part:
        model, batch, optimizer = args.part
        print(json.dumps(measure(model, int(batch), optimizer)))
        return 0
    facts = common.machine()
    print(common.describe(facts))
    found: dict[str, dict[str, Any]] = {}
    for model in args.models:
        batches, optimizer = MODELS[model]
        for batch in args.batches or batches:
            command = [sys.executable, "-m", "microbench.wave_memory", "--part", model, str(batch), optimizer]
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1200)
            if ended.returncode:
                raise RuntimeError(f"{model} at {batch} ended with {ended.returncode}")
            found[f"{model}, {batch}"] = json.loads(ended.stdout.splitlines()[-1])
            print(show({f"{model}, {batch}": found[f"{model}, {batch}"]}), flush=True)
    print(show(found))
    common.report("wave_memory", args.out, {"machine": facts, "steps": found})
    return 0


def show(found: dict[str, dict[str, Any]]) -> str:
    """MiB in all, and the predicted time over that of the doubled batch."""

    def cell(step: dict[str, Any], way: str) -> str:
        if way not in step["ways"]:
            return "-"
        each = step["ways"][way]
        return f"{each['total_bytes'] / 2**20:,.0f} (x {each['relative_time']:.2f})"

    rows = []
    for name, step in found.items():
        doubled, waves = (step["ways"][way]["total_bytes"] for way in ("doubled", "waves"))
        ways = [cell(step, way) for way in ("doubled", "waves", "microbatches", "checkpointing")]
        against = [f"{each / doubled - 1:+.0%}" for each in (waves, step["half_step_bytes"])]
        rows.append([name, *ways, *against, step["advice"]])
    header = ["model, batch", "doubled MiB", "waves", "microbatches", "checkpointing", "waves", "half a step", "advice"]
    return common.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
