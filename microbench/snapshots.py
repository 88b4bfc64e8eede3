"""What it costs a job that its state is saved: the same training with recovery and without, turn and turn about.

plain     a job that does not come back (`replay_bytes=0`): no copies of batches, no snapshots
kept      a job that does: a copy of each batch, and a snapshot every `--interval` seconds, far more often than usual

Two figures: the extra time of a step between snapshots (the copy, and looking whether one is due), from medians of
steps; and what one snapshot costs its job in all, from the seconds of whole turns. The other jobs of a daemon pay
nothing but the processor and disk time of the writing process, which has the lowest priority.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpumux import client
from gpumux.config import Config
from microbench import common, workloads
from microbench.daemon import running_daemon

LONGEST_S = 60.0  # of a turn that waits for a snapshot, on a machine whose disk or processor is busy


def run_turn(
    job: client.Job[Any], work: workloads.Workload, seconds: float, snapshots: int = 0
) -> tuple[list[float], float]:
    """Seconds of each step of one turn, and of the turn, which goes on until the job has asked for so many
    snapshots."""
    steps = []
    began = now = time.perf_counter()
    i = 0
    while now - began < (seconds if snapshots_of(job) >= snapshots else LONGEST_S):
        job.step(*work.batch(i)).result()
        i += 1
        before, now = now, time.perf_counter()
        steps.append(now - before)
    return steps, now - began


def snapshots_of(job: client.Job[Any]) -> int:
    snapshots = job._recovery.snapshots
    return snapshots.number if snapshots is not None else 0


def measure(width: int, args: argparse.Namespace) -> dict[str, Any]:
    """One size of state."""
    state = Path(tempfile.mkdtemp(prefix="gm-"))
    try:
        flags = ["--state-dir", str(state / "state")]
        with running_daemon(threads=1, flags=flags, settings={"GPUMUX_SNAPSHOT_S": str(args.interval)}) as daemon:
            works = {
                name: workloads.mlp(name, layers=4, width=width, batch=args.batch, adam=True)
                for name in ("plain", "kept")
            }
            jobs = {
                name: client.submit(
                    work.step, example=work.batch(0), model=work.model, optimizer=work.optimizer, name=name,
                    endpoint=daemon.endpoint, replay_bytes=0 if name == "plain" else 1 << 30,
                )
                for name, work in works.items()
            }  # fmt: skip
            for name, job in jobs.items():  # past the first snapshot and the measuring of pieces
                run_turn(job, works[name], 1.5)
            steps: dict[str, list[float]] = {"plain": [], "kept": []}
            rates: dict[str, list[float]] = {"plain": [], "kept": []}
            costs = []
            taken = 0
            for _ in range(args.turns):
                before = snapshots_of(jobs["kept"])
                took = {}
                for name, job in jobs.items():
                    least = before + 1 if name == "kept" else 0
                    each, seconds = run_turn(job, works[name], args.seconds, least)
                    steps[name] += each
                    took[name] = seconds / len(each)
                    rates[name].append(1 / took[name])
                    count = len(each)
                number = snapshots_of(jobs["kept"]) - before
                taken += number
                if number:  # count is of the job that was kept, whose turn came second
                    costs.append((took["kept"] - took["plain"]) * count / number)
            nbytes = jobs["kept"]._recovery.recorder.log.nbytes if jobs["kept"]._recovery.recorder is not None else 0
            table = jobs["kept"]._table
            size = sum(table.buffers[b].nbytes for b in jobs["kept"]._remote.resident())
            for job in jobs.values():
                job.close()
    finally:
        shutil.rmtree(state, ignore_errors=True)
    medians = {name: statistics.median(each) for name, each in steps.items()}
    return {
        "state_bytes": size,
        "batch_bytes": sum(t.nbytes for t in works["kept"].batch(0)),
        "snapshots": taken,
        "step_s": medians,
        "extra_s_a_step": medians["kept"] - medians["plain"],
        "longest_step_s": {name: max(each) for name, each in steps.items()},
        "rate": {name: common.figure(each) for name, each in rates.items()},
        "snapshot_costs_s": common.figure(costs) if costs else None,
        "replay_bytes_held": nbytes,
    }


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--turns", type=int, default=6, help="of each job, a size")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between snapshots")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024], help="of the model's layers")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    results = [measure(width, args) for width in args.widths]
    rows = []
    for r in results:
        cost = r["snapshot_costs_s"]
        rows.append(
            (
                f"{r['state_bytes'] / 1e6:.1f} MB", f"{r['step_s']['plain'] * 1e3:.2f} ms",
                f"{r['step_s']['kept'] * 1e3:.2f} ms", f"{r['extra_s_a_step'] * 1e6:.0f} us", str(r["snapshots"]),
                f"{cost.median * 1e3:.0f} ms ({cost.low * 1e3:.0f} to {cost.high * 1e3:.0f})" if cost else "none taken",
            )
        )  # fmt: skip
    print(common.describe(facts))
    print(common.table(("state", "step, plain", "step, kept", "extra a step", "snapshots", "cost of one"), rows))
    # What all snapshots cost a job together, as a part of its time, at the daemon's usual interval.
    dearest = max((r["snapshot_costs_s"].median for r in results if r["snapshot_costs_s"] is not None), default=0.0)
    share = dearest / Config().snapshot_s
    targets = {"part of a job's time that snapshots take": {"value": share, "target": 0.01, "met": share <= 0.01}}
    print(
        f"at the usual interval of {Config().snapshot_s:g} s that is {share:.2%} of the job's time at most; we want 1%"
    )
    options = {name: value for name, value in vars(args).items() if name != "out"}
    common.report("snapshots", args.out, {"machine": facts, "options": options, "sizes": results, "targets": targets})
    return 0


if __name__ == "__main__":
    sys.exit(main())
