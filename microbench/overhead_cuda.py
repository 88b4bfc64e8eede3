"""What gpumux costs a job that is alone on a GPU: against the whole step captured by hand as one CUDA graph.

Training steps are pipelined, two asked for at a time, and compared by rate; requests come one at a time at random and
are compared by the seconds from their arrival to their answer. Both ways are open at once and take turns.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from microbench import common
from microbench.daemon import DaemonFailed, running_daemon
from microbench.ways import Setting, is_request
from microbench.worker import Worker, WorkerFailed

JOBS = ("resnet50:train", "bert_base:infer", "gpt2:train", "resnet50:infer")  # the most telling first
RATE_TARGET = 0.98  # for steps of STEP_S or more
STEP_S = 0.010
ADDED_S = 250e-6
REQUESTS_PER_S = 50.0  # far below what either can answer: nothing waits for the request before it
SETTLE_S, TURN_S = 0.4, 1.6


def measure(
    setting: Setting, jobs: Sequence[str] = JOBS, repeats: int = 4, policy: str = "guarded",
    after: Callable[[dict[str, dict[str, Any]]], None] = lambda measured: None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Results by job; `after` is called with those so far after each. A job that can't be measured has an `error`, and
    the others are measured in a daemon of their own. Raises DaemonFailed where none can be started."""
    measured: dict[str, dict[str, Any]] = {}
    while left := [job for job in jobs if job not in measured]:
        try:
            with running_daemon(policy=policy, threads=1, device=setting.device) as daemon:
                for job in left:
                    print(job, file=sys.stderr, flush=True)
                    try:
                        measured[job] = _compare(setting, job, daemon.endpoint, repeats)
                    except (WorkerFailed, subprocess.TimeoutExpired) as error:
                        measured[job] = {"error": str(error)}
                    after(measured)
                    if "error" in measured[job]:
                        break  # the daemon may be what failed
        except DaemonFailed as error:
            if left[0] not in measured:
                raise
            print(f"the daemon: {error}", file=sys.stderr, flush=True)
    return measured


def _compare(setting: Setting, job: str, endpoint: str, repeats: int) -> dict[str, Any]:
    rate = REQUESTS_PER_S if is_request(job) else None
    with (
        Worker([setting.task(job, setting.plain, "high")]) as plain,
        Worker([setting.task(job, "gpumux", "high", endpoint)]) as ours,
    ):
        turns = {"plain": plain, "gpumux": ours}
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
        for worker in turns.values():
            worker.answer()
        for repeat in range(repeats + 1):
            for name, worker in list(turns.items())[:: 1 if repeat % 2 else -1]:
                begin = time.monotonic() + setting.settle_s
                worker.run(begin, begin + setting.seconds, [rate])
                (found,) = worker.answer()
                if repeat:  # the first turns warm both up
                    samples[name].append(found)
    what = "median_s" if is_request(job) else "rate"
    pairs = list(zip(samples["gpumux"], samples["plain"], strict=True))
    made = {name: common.figure([each[what] for each in of]) for name, of in samples.items()}
    told: dict[str, Any] = {f"{name}_{what}": figure for name, figure in made.items()} | {"samples": samples}
    if is_request(job):
        return told | {"added_s": common.figure([a[what] - b[what] for a, b in pairs])}
    return told | {"ratio": common.figure([a[what] / b[what] for a, b in pairs])}


def targets(measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Steps shorter than STEP_S are shown without one."""
    found: dict[str, dict[str, Any]] = {}
    for job, m in measured.items():
        if "error" in m:
            found[f"{job}, measured"] = {"value": 0.0, "target": 1.0, "met": False}
        elif "added_s" in m:
            value = m["added_s"].median
            found[f"{job}, seconds added"] = {"value": value, "target": ADDED_S, "met": value <= ADDED_S}
        elif 1 / m["plain_rate"].median >= STEP_S:
            value = m["ratio"].median
            found[f"{job}, of the plain rate"] = {"value": value, "target": RATE_TARGET, "met": value >= RATE_TARGET}
    return found


def show(measured: dict[str, dict[str, Any]]) -> str:
    rows = []
    for job, m in measured.items():
        if "error" in m:
            rows.append([job, f"failed: {m['error'][:60]}", *[""] * 4])
            continue
        if "added_s" in m:
            plain, ours, gain = m["plain_median_s"].median, m["gpumux_median_s"].median, m["added_s"]
            verdict = [f"{1e6 * each:+.0f} us" for each in (gain.median, gain.low, gain.high)]
        else:
            plain, ours, gain = 1 / m["plain_rate"].median, 1 / m["gpumux_rate"].median, m["ratio"]
            verdict = [f"{each:.3f}" for each in (gain.median, gain.low, gain.high)]
        rows.append([job, f"{1e3 * plain:.3f}", f"{1e3 * ours:.3f}", *verdict])
    return common.table(["job", "plain ms", "gpumux ms", "rate, or added", "lowest", "highest"], rows)


def main(
    repeats: int, policy: str, jobs: Sequence[str] = JOBS, save: Callable[[dict[str, Any]], None] = lambda told: None
) -> dict[str, Any]:
    """Measure on CUDA and print the table; what goes into the file, which `save` gets after each job, too."""
    setting = Setting("cuda", "full", TURN_S, SETTLE_S)

    def told(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {"device": "cuda", "policy": policy, "jobs": measured, "targets": targets(measured)}

    measured = measure(setting, jobs, repeats, policy, lambda measured: save(told(measured)))
    for name, target in targets(measured).items():
        print(f"{name}: {target['value']:.6g}, target {target['target']:g}: {'met' if target['met'] else 'MISSED'}")
    print(show(measured))
    return told(measured)
