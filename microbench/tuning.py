"""What a sweep costs by scheduler: `gpumux.tune.tune` on digits, trials one after another, as jobs, and as arrays.

The same configurations, seeds and data for each; what is compared is the time from begin to end, capture and scoring
included, and the seconds the device worked. Scores are compared, too: the best configuration must be one for all. One
torch thread everywhere; the daemon may run as many jobs' pieces at once as there are cores.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch

from clients import digits_sweep
from gpumux.tune.run import SCHEDULERS, SweepResult, tune
from gpumux.tune.task import Task, find
from microbench import common
from microbench.daemon import running_daemon

AS_JOBS = {"concurrent", "daemon"}  # schedulers that need a daemon
FUSIBLE: dict[str, Any] = {
    "lr": {"low": 1e-3, "high": 3e-2, "log": True, "fusible": True},
    "weight_decay": {"low": 1e-6, "high": 1e-2, "log": True, "fusible": True},
    "beta1": {"low": 0.8, "high": 0.98, "fusible": True},
    "decay": {"low": 0.3, "high": 1.0, "fusible": True},
}


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--model", choices=sorted(digits_sweep.MODELS), default="mlp", help="default mlp")
    arguments.add_argument("--batch", type=int, default=16, help="samples a step (default 16)")
    arguments.add_argument("--trials", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--algorithm", choices=("random", "hyperband"), default="random")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--concurrent", type=int, default=4, help="jobs at a time")
    arguments.add_argument("--schedulers", nargs="+", choices=SCHEDULERS, default=list(SCHEDULERS))
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    found: dict[str, list[SweepResult]] = {name: [] for name in args.schedulers}
    task = find("clients.digits_sweep:factory")
    with ExitStack() as stack:
        endpoint = stack.enter_context(running_daemon(threads=1)).endpoint if AS_JOBS & set(found) else None
        for _ in range(args.repeats):
            for name in args.schedulers:
                found[name].append(_sweep(task, name, endpoint if name in AS_JOBS else None, args))
    rows = {name: summary(runs) for name, runs in found.items()}
    print(common.describe(facts))
    print(show(rows))
    agreement = agree(found)
    print(agreement["said"])
    result = {"machine": facts, "asked": vars(args) | {"out": None}, "schedulers": rows, "agreement": agreement}
    common.report("tuning", args.out, result)
    return 0 if agreement["same_best"] else 1


def _sweep(task: Task, scheduler: str, endpoint: str | None, args: Any) -> SweepResult:
    space = {
        "model": {"choices": [args.model]},
        "batch_size": {"choices": [args.batch]},
        "optimizer": {"choices": ["adamw"]},
        **FUSIBLE,
    }
    return tune(
        task, space, scheduler=scheduler, algorithm=args.algorithm, trials=args.trials, steps=args.steps,
        concurrent=args.concurrent, endpoint=endpoint,
    )  # fmt: skip


def summary(runs: list[SweepResult]) -> dict[str, Any]:
    best = runs[0].best
    return {
        "wall_s": common.figure([run.wall_s for run in runs]),
        "device_s": common.figure([run.device_s for run in runs]),
        "gpu_hours": common.figure([run.device_s / 3600 for run in runs]),
        "best": None if best is None else {"trial": best.number, "score": best.score, "config": dict(best.config)},
        "scores": [entry.score for entry in runs[0].entries],
        "notes": dict(runs[-1].notes),
    }


def agree(found: dict[str, list[SweepResult]]) -> dict[str, Any]:
    """How far the schedulers' scores are apart, and whether they chose the same trial."""
    runs = [run for each in found.values() for run in each]
    scores = [[entry.score for entry in run.entries] for run in runs]
    apart = max(abs(a - b) for each in zip(*scores, strict=True) for a in each for b in each)
    chosen = {run.best.number if run.best is not None else None for run in runs}
    same = "the same best trial" if len(chosen) == 1 else f"other best trials ({sorted(map(str, chosen))})"
    return {
        "same_best": len(chosen) == 1,
        "largest_score_difference": apart,
        "said": f"{same}; scores differ by {apart:g} at most",
    }


def show(rows: dict[str, dict[str, Any]]) -> str:
    reference = next(iter(rows.values()))
    cells = []
    for name, row in rows.items():
        wall, device = row["wall_s"], row["device_s"]
        cells.append(
            [
                name, f"{wall.median:.2f} s", f"{100 * wall.spread:.0f} %",
                f"{reference['wall_s'].median / wall.median:.2f}", f"{device.median:.2f} s",
                f"{reference['device_s'].median / device.median:.2f}",
            ]
        )  # fmt: skip
    return common.table(["scheduler", "wall", "spread", "x", "device", "x"], cells)


if __name__ == "__main__":
    sys.exit(main())
