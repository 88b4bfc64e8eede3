"""What it saves that consecutive pieces of a step are one launch while nothing waits for their end.

A low job steps a Transformer (clients/models, 25 MB of parameters) or a small VGG on one thread of a CPU daemon, in
turns by itself and beside an open high job that makes no steps, for whose sake each piece is a launch. Of each turn:
steps a second, and the processor time that the daemon's process takes for a step.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch

from gpumux import client
from microbench import burst, common
from microbench.daemon import RunningDaemon, running_daemon

WARM_UP = 20  # steps: the daemon measures and cuts
ALONE, BESIDE = "several pieces a launch", "each piece a launch"


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=burst.MODELS, default=list(burst.MODELS), help="default: all")
    arguments.add_argument("--repeats", type=int, default=9, help="turns of each")
    arguments.add_argument("--steps", type=int, default=40, help="steps a turn")
    arguments.add_argument("--policy", default="guarded", help="of the daemon")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    facts = common.machine()
    measured = {}
    with running_daemon(policy=args.policy, threads=1) as daemon:
        for name in args.models:
            measured[name] = measure(burst.MODELS[name], daemon, args.repeats, args.steps)
    print(common.describe(facts))
    print(show(measured))
    result = {"machine": facts, "policy": args.policy, "steps": args.steps, "models": measured, "targets": {}}
    common.report("launches", args.out, result)
    return 0


def measure(model: burst.Model, daemon: RunningDaemon, repeats: int, steps: int) -> dict[str, Any]:
    """Both ways in turns, the first of each pair in turns, too."""
    found: dict[str, dict[str, list[float]]] = {way: {"steps_per_s": [], "daemon_s": []} for way in (ALONE, BESIDE)}
    with burst.submit(model, priority="low", endpoint=daemon.endpoint) as job:
        loop, pid = burst.Ours(job, burst.batches_of(model)), daemon.process.pid
        loop.run(WARM_UP)
        for repeat in range(repeats):
            for way in (ALONE, BESIDE) if repeat % 2 == 0 else (BESIDE, ALONE):
                with ExitStack() as stack:
                    if way == BESIDE:
                        stack.enter_context(idle_high_job(daemon.endpoint))
                    loop.run(2)  # launches that were made before are over
                    rate, daemon_s = turn(loop, pid, steps)
                found[way]["steps_per_s"].append(rate)
                found[way]["daemon_s"].append(daemon_s)
    saved = [one / other for one, other in zip(found[ALONE]["daemon_s"], found[BESIDE]["daemon_s"], strict=True)]
    quicker = [
        one / other for one, other in zip(found[ALONE]["steps_per_s"], found[BESIDE]["steps_per_s"], strict=True)
    ]
    return {
        **{way: {key: common.figure(samples) for key, samples in of.items()} for way, of in found.items()},
        "daemon_s_ratio": common.figure(saved),
        "steps_per_s_ratio": common.figure(quicker),
        "samples": found,
    }


def idle_high_job(endpoint: str) -> client.Job[Any]:
    return client.submit(lambda x: x + 1, example=(torch.zeros(1),), priority="high", name="idle", endpoint=endpoint)


def turn(loop: burst.Ours, pid: int, steps: int) -> tuple[float, float]:
    """Steps a second, and seconds of the daemon's processor time a step."""
    before = common.processor_s(pid)
    seconds = loop.run(steps)
    return steps / seconds, (common.processor_s(pid) - before) / steps


def show(measured: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            f"{name}, {way}", f"{of[way]['steps_per_s'].median:.2f}", f"{1e3 * of[way]['daemon_s'].median:.2f}",
            f"{100 * of[way]['daemon_s'].median * of[way]['steps_per_s'].median:.1f}",
        ]
        for name, of in measured.items()
        for way in (ALONE, BESIDE)
    ]  # fmt: skip
    told = common.table(["", "steps/s", "daemon ms a step", "% of a core"], rows)
    for name, of in measured.items():
        ratio, rate = of["daemon_s_ratio"], of["steps_per_s_ratio"]
        told += (
            f"\n{name}: the daemon takes {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of the time,"
            f" and the job makes {rate.median:.2f} ({rate.low:.2f} to {rate.high:.2f}) times as many steps a second"
        )
    return told


if __name__ == "__main__":
    sys.exit(main())
