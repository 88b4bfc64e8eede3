"""How high each planner's arena of temporaries is, and what the CPU device really takes beside what it charges.

Each workload is submitted to a daemon of its own in a process of its own, and runs some steps. Its largest Program is
planned in every way; the seconds of planning are processor time. `taken` is what temporaries took: what
the executor held at most in a step (`measured_bytes` of `job.stats()`), without the 48 MiB that every executor is
allowed beside its tensors, the job's state and a batch; kernels' own scratch memory is in it. `charged` is what the
job is charged: what its Programs declare with first fit, or what was measured, if that is more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

from gpumux import client
from gpumux.device.cpu.jobs import OWN_BYTES
from gpumux.program.memory import first_fit, footprint, live_peak, plan, plans
from microbench import common
from microbench.daemon import running_daemon

STEPS, PAUSE_S = 4, 0.6  # the executor's memory is looked at every half second
TINY = ("tiny", "small")
REAL = ("resnet50", "gpt2", "bert-base", "vit-b16", "t5-small", "whisper-tiny", "llama-160m")
HIGHEST = 1.02  # of the plan over the live peak, wanted at most


def names() -> list[str]:
    """All workloads: clients/models at two sizes, then microbench/real_models tiny and at their real sizes."""
    from clients.models.workloads import RECIPES

    own = [f"{name}:{size}" for size in TINY for name in RECIPES]
    return [*own, *(f"{name}:{size}" for size in ("tiny", "full") for name in REAL)]


def build(workload: str) -> tuple[Any, Any, Any, Any]:
    """Step, model, optimizer and batch."""
    name, _, size = workload.partition(":")
    if name in REAL:
        from microbench import real_models

        made = real_models.build(name, size)
        return made.step, made.model, made.optimizer, made.batch(0)
    from clients.models.workloads import workload as own

    found = own(name, size)
    return *found.factory({}), found.batch(0)


def measure(workload: str) -> dict[str, Any]:
    step, model, optimizer, batch = build(workload)
    with (
        running_daemon(threads=1) as daemon,
        client.submit(
            step, example=batch, model=model, optimizer=optimizer, priority="high", name="temporaries",
            endpoint=daemon.endpoint,
        ) as job,
    ):  # fmt: skip
        for _ in range(STEPS):
            job.step(*batch).result()
            time.sleep(PAUSE_S)
        stats = job.stats()
        programs = [each.program for each in job._remote.programs.values()]
        job.close(sync=False)
    largest = max(programs, key=lambda program: first_fit(program).peak_bytes)
    began = time.process_time()
    first = first_fit(largest)
    first_s = time.process_time() - began
    began = time.process_time()
    lowest = plan(largest)
    plan_s = time.process_time() - began
    held = footprint(largest, first)
    return {
        "operators": len(largest.ops),
        "temporaries": sum(size > 0 for size in first.sizes),
        "live_bytes": live_peak(first),
        "first_fit_bytes": first.peak_bytes,
        "plan_bytes": lowest.peak_bytes,
        "plans": {name: made.peak_bytes for name, made in plans(largest).items()},
        "first_fit_s": first_s,
        "plan_s": plan_s,
        "state_bytes": held.state_bytes,
        "slot_bytes": held.slot_bytes,
        "charged_bytes": stats["memory_bytes"],
        "measured_bytes": stats["measured_bytes"],
    }


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--workloads", nargs="+", metavar="NAME:SIZE", help="default: all")
    arguments.add_argument("--part", help=argparse.SUPPRESS)
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    if args.part:
        print(json.dumps(measure(args.part)))
        return 0
    facts = common.machine()
    print(common.describe(facts))
    found: dict[str, dict[str, Any]] = {}
    for workload in args.workloads or names():
        command = [sys.executable, "-m", "microbench.temporaries", "--part", workload]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900)
        if ended.returncode:
            raise RuntimeError(f"{workload} ended with {ended.returncode}")
        found[workload] = json.loads(ended.stdout.splitlines()[-1])
        print(f"{workload}: {json.dumps(found[workload])}", flush=True)
    print(show(found))
    worst = max(each["plan_bytes"] / each["live_bytes"] for each in found.values())
    under = [name for name, each in found.items() if each["measured_bytes"] - OWN_BYTES > each["charged_bytes"]]
    targets = {
        "plan over live bytes, at most": {"value": worst, "target": HIGHEST, "met": worst <= HIGHEST},
        "workloads charged less than they took": {"value": len(under), "target": 0, "met": not under},
    }
    common.report("temporaries", args.out, {"machine": facts, "workloads": found, "targets": targets})
    return 0


def show(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, each in found.items():
        taken = each["measured_bytes"] - OWN_BYTES - each["state_bytes"] - each["slot_bytes"]
        mib = {name: f"{each[name] / 2**20:.2f}" for name in each if name.endswith("_bytes")}
        rows.append(
            [name, str(each["temporaries"]), mib["live_bytes"], mib["plan_bytes"], mib["first_fit_bytes"],
             f"{each['plan_bytes'] / each['live_bytes']:.3f}", f"{each['first_fit_bytes'] / each['live_bytes']:.3f}",
             f"{max(0, taken) / 2**20:.1f}", mib["state_bytes"], mib["measured_bytes"], mib["charged_bytes"],
             f"{each['plan_s']:.2f}"]
        )  # fmt: skip
    header = ["workload", "temporaries", "live MiB", "plan", "first fit", "plan/live", "first/live", "taken", "state",
              "measured", "charged", "plan s"]  # fmt: skip
    return common.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
