"""HFTA's tuning workloads (section 5.4, figure 8; tables 11 and 12): what a sweep costs the device, by scheduler.

PointNet and MobileNet are each tuned by random search and by Hyperband, with the paper's spaces and settings, but with
tiny models, drawn data and epochs of four steps (clients/hfta). The paper's figure is in GPU hours on a V100; here it
is the seconds that the device worked. Its text gives one number, fusing's largest gain, and one ordering: random search
gains more than Hyperband, whose late rounds train few sets for long.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from clients.hfta import tasks
from clients.hfta.tasks import SETTINGS
from gpumux.tune.run import ALGORITHMS, SweepResult, read_space, tune
from gpumux.tune.task import find
from microbench import common
from microbench.daemon import running_daemon
from microbench.tuning import AS_JOBS, agree, summary

SCHEDULERS = ("serial", "concurrent", "daemon", "fused")
PUBLISHED = 5.10  # serial's GPU hours over fusing's, the most of the four workloads


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    arguments.add_argument("--schedulers", nargs="+", choices=SCHEDULERS, default=["serial", "concurrent", "fused"])
    arguments.add_argument("--concurrent", type=int, default=4, help="jobs at a time")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    rows: list[dict[str, Any]] = []
    for name in args.tasks:
        for algorithm in args.algorithms:
            found = {each: [_sweep(name, algorithm, each, args.concurrent)] for each in args.schedulers}
            rows.append({
                "task": name, "algorithm": algorithm, "trials": len(next(iter(found.values()))[0].entries),
                "schedulers": {each: summary(runs) for each, runs in found.items()}, "agreement": agree(found),
            })  # fmt: skip
            print(show(rows[-1:]), flush=True)
    print(common.describe(facts))
    print(show(rows))
    print(f"published, on a V100: fusing up to {PUBLISHED:.2f}, random search more than Hyperband")
    common.report("hfht", args.out, {"machine": facts, "published_most": PUBLISHED, "workloads": rows})
    return 0


def _sweep(name: str, algorithm: str, scheduler: str, concurrent: int) -> SweepResult:
    """A daemon of its own for each sweep of jobs: it begins with what it knows of none."""
    with ExitStack() as stack:
        endpoint = stack.enter_context(running_daemon(threads=1)).endpoint if scheduler in AS_JOBS else None
        return tune(
            find(f"clients.hfta.{name}:factory"), read_space(Path(tasks.__file__).with_name(f"{name}.toml")),
            scheduler=scheduler, concurrent=concurrent, endpoint=endpoint, **SETTINGS[name].budget(algorithm),
        )  # fmt: skip


def show(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        reference = next(iter(row["schedulers"].values()))
        for name, found in row["schedulers"].items():
            wall, device = found["wall_s"].median, found["device_s"].median
            cells.append([
                row["task"], row["algorithm"], name, str(row["trials"]), f"{device:.1f} s",
                f"{reference['device_s'].median / device:.2f}", f"{wall:.0f} s",
            ])  # fmt: skip
    return common.table(["task", "algorithm", "scheduler", "trials", "device", "x", "wall"], cells)


if __name__ == "__main__":
    sys.exit(main())
