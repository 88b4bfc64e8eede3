"""How high each planner's arena of temporaries is, and what the CPU device really takes beside what it charges.

Each workload's Programs are captured and the largest is planned in every way; the seconds of planning are processor
time. Workloads in --run are then submitted to a daemon and run some steps, for what temporaries really took: what the
executor held at most in a step (`measured_bytes` of `job.stats()`), without the 48 MiB that every executor is allowed
beside its tensors, the job's state and a batch. Kernels' own scratch memory is in it, and gaps in the heap. `declared`
is what the job's Programs say with first fit, which is what it is charged; where more is measured, that is charged from
then on (`charged`).
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from gpumux import client
from gpumux.device.cpu.jobs import OWN_BYTES
from gpumux.fuse.member import Member
from gpumux.program.ir import Program
from gpumux.program.memory import first_fit, footprint, heights, live_peak, plan, plans
from microbench import common
from microbench.daemon import running_daemon

STEPS, PAUSE_S = 4, 0.6  # the executor's memory is looked at every half second
PHASES = 6  # of an optimizer's beginning, at most
REAL = ("resnet50", "gpt2", "bert-base", "vit-b16", "t5-small", "whisper-tiny", "llama-160m")
RUN = ("cnn:small", "resnet50:full", "vit-b16:full")  # sizes, and workloads
HIGHEST = 1.02  # of the plan over the live peak, wanted at most


def names() -> list[str]:
    """All workloads: clients/models at two sizes, then microbench/real_models tiny and at their real sizes."""
    from clients.models.workloads import RECIPES

    own = [f"{name}:{size}" for size in ("tiny", "small") for name in RECIPES]
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


def captured(workload: str) -> Program:
    """The Program of the step when the optimizer has all its state. Nothing runs."""
    step, model, optimizer, batch = build(workload)
    member = Member(workload, step, model, optimizer, max_variants=None, twice=False)
    choice = member.choose(batch, {})
    for _ in range(PHASES):
        before = member.state.structure
        member.advance(choice)
        choice = member.choose(batch, {})
        if member.state.structure is before:
            break
    member.release()
    program: Program = choice.program.lowered.program
    return program


def planned(program: Program) -> dict[str, Any]:
    began = time.process_time()
    first = first_fit(program)
    first_s = time.process_time() - began
    began = time.process_time()
    lowest = plan(program)
    plan_s = time.process_time() - began
    held = footprint(program, first)
    made = plans(program)
    return {
        "operators": len(program.ops),
        "temporaries": sum(size > 0 for size in first.sizes),
        "live_bytes": live_peak(first),
        "first_fit_bytes": first.peak_bytes,
        "plan_bytes": lowest.peak_bytes,
        "chosen": next(name for name, each in made.items() if each == lowest),
        "plans": {name: each.peak_bytes for name, each in made.items()},
        "average_heights": {name: sum(heights(each)) / len(program.ops) for name, each in made.items()},
        "first_fit_s": first_s,
        "plan_s": plan_s,
        "state_bytes": held.state_bytes,
        "slot_bytes": held.slot_bytes,
    }


def ran(workload: str, endpoint: str) -> dict[str, Any]:
    """What a job of this workload took and was charged."""
    step, model, optimizer, batch = build(workload)
    with client.submit(
        step, example=batch, model=model, optimizer=optimizer, priority="high", name=workload.replace(":", "-"),
        endpoint=endpoint,
    ) as job:  # fmt: skip
        for _ in range(STEPS):
            job.step(*batch).result()
            time.sleep(PAUSE_S)
        stats = job.stats()
        found = [footprint(each.program, first_fit(each.program)) for each in job._remote.programs.values()]
        job.close(sync=False)
    state = max(each.state_bytes for each in found)
    taken = stats["measured_bytes"] - OWN_BYTES - state - max(each.slot_bytes for each in found)
    return {
        "declared_bytes": state + max(each.transient_bytes + each.slot_bytes for each in found),
        "charged_bytes": stats["memory_bytes"],
        "measured_bytes": stats["measured_bytes"],
        "taken_bytes": max(0, taken),
    }


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--workloads", nargs="+", metavar="NAME:SIZE", help="default: all")
    arguments.add_argument("--run", nargs="*", default=RUN, metavar="NAME:SIZE", help="sizes and workloads that run")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    print(common.describe(facts))
    found: dict[str, dict[str, Any]] = {}
    with running_daemon(threads=1) as daemon:
        for workload in args.workloads or names():
            found[workload] = planned(captured(workload))
            if workload in args.run or workload.partition(":")[2] in args.run:
                found[workload] |= ran(workload, daemon.endpoint)
            print(f"{workload}: {found[workload]}", flush=True)
    print(show(found))
    worst = max(each["plan_bytes"] / each["live_bytes"] for each in found.values())
    under = [
        name for name, each in found.items() if each.get("measured_bytes", 0) - OWN_BYTES > each.get("charged_bytes", 0)
    ]
    targets = {
        "plan over live bytes, at most": {"value": worst, "target": HIGHEST, "met": worst <= HIGHEST},
        "workloads charged less than they took": {"value": len(under), "target": 0, "met": not under},
    }
    common.report("temporaries", args.out, {"machine": facts, "workloads": found, "targets": targets})
    return 0


def show(found: dict[str, dict[str, Any]]) -> str:
    """Sizes in MiB."""
    rows = []
    for name, each in found.items():
        mib = {key: f"{value / 2**20:.2f}" for key, value in each.items() if key.endswith("_bytes")}
        live = each["live_bytes"]
        rows.append(
            [name, str(each["operators"]), str(each["temporaries"]), mib["live_bytes"], mib["plan_bytes"],
             mib["first_fit_bytes"], f"{each['plan_bytes'] / live:.3f}", f"{each['first_fit_bytes'] / live:.3f}",
             each["chosen"], f"{each['plan_s']:.2f}",
             *(mib.get(f"{key}_bytes", "-") for key in ("taken", "declared", "charged"))]
        )  # fmt: skip
    header = ["workload", "operators", "temporaries", "live", "plan", "first fit", "plan/live", "first/live", "chosen",
              "plan s", "taken", "declared", "charged"]  # fmt: skip
    return common.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
