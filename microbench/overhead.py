"""What gpumux costs a job that is alone: its rate over that of the plain loop, in one run.

Two programs of about 10 ms a step, one of about 300 operators and one of 1,500 or more. Plain and
gpumux take turns, on equal models, with the same number of threads, steps submitted without
waiting for losses. At the end the two losses must be equal: what is measured did the same work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from gpumux import client
from gpumux.errors import ConfigError
from microbench import common
from microbench.daemon import running_daemon
from microbench.workloads import Workload, operators, sized

TARGET = 0.97
STEP_S = 0.010
PROGRAMS: dict[str, dict[str, Any]] = {
    "300 operators": {"layers": 18, "width": 128, "adam": False},
    "1,500 operators": {"layers": 56, "width": 120, "adam": True},
}
WARM_UP = 60  # steps: torch's caches, and the daemon's measuring and cutting


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=9, help="turns of each")
    arguments.add_argument("--steps", type=int, default=100, help="steps a turn")
    arguments.add_argument("--threads", type=int, default=1, help="torch threads, of both")
    arguments.add_argument("--policy", default="paced", help="of the daemon")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    arguments.add_argument("--jobs", nargs="+", metavar="MODEL:KIND", help="which of them on cuda (default: all four)")
    args = arguments.parse_args(argv)
    if args.device == "cuda":
        return on_cuda(args)
    if args.jobs:
        arguments.error("--jobs is of --device cuda")
    torch.set_num_threads(args.threads)
    facts = common.machine()
    measured = {}
    with running_daemon(policy=args.policy, threads=args.threads) as daemon:
        for name, shape in PROGRAMS.items():
            make = sized(name, seconds=STEP_S, **shape)
            measured[name] = compare(make, daemon.endpoint, args.repeats, args.steps)
    print(common.describe(facts))
    print(show(measured))
    result: dict[str, Any] = {"machine": facts, "threads": args.threads, "policy": args.policy, "programs": measured}
    result["targets"] = {
        name: {"value": m["ratio"].median, "target": TARGET, "met": m["ratio"].median >= TARGET}
        for name, m in measured.items()
    }
    for name, target in result["targets"].items():
        verdict = "met" if target["met"] else "MISSED"
        print(f"{name}: {target['value']:.3f} of the plain rate, target {TARGET}: {verdict}")
    common.report("overhead", args.out, result)
    return 0


def on_cuda(args: argparse.Namespace) -> int:
    """Real models on the GPU against hand-captured graphs of whole steps (overhead_cuda)."""
    from microbench import overhead_cuda
    from microbench.cuda import probe

    jobs = args.jobs or overhead_cuda.JOBS
    if wrong := [job for job in jobs if job.partition(":")[2] not in ("train", "infer")]:
        print(f"{wrong[0]!r} is no job: write MODEL:train or MODEL:infer", file=sys.stderr)
        return 64
    try:
        card = probe.card()
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        return 78
    print(f"{card.card}, torch {card.torch}", flush=True)

    def save(told: dict[str, Any]) -> None:
        """Replaces the file in one go: a run that is killed leaves what it had."""
        if args.out is not None:
            unready = args.out.with_suffix(args.out.suffix + ".new")
            common.report("overhead", unready, told | {"card": card.card})
            unready.replace(args.out)

    found = overhead_cuda.main(args.repeats, args.policy, jobs, save)
    save(found)
    return 1 if any("error" in job for job in found["jobs"].values()) else 0


def compare(make: Callable[[], Workload], endpoint: str, repeats: int, steps: int) -> dict[str, Any]:
    """Rates of the plain loop and of the job, in turns. Raises RuntimeError if their losses differ."""
    plain, ours = make(), make()
    count = operators(make())
    with client.submit(
        ours.step,
        example=ours.batch(0),
        model=ours.model,
        optimizer=ours.optimizer,
        priority="high",
        name="overhead",
        endpoint=endpoint,
    ) as job:
        plain_loop, job_loop = Loop(plain.step, plain), Loop(job.step, ours)
        for loop in (plain_loop, job_loop):
            loop.rate(WARM_UP)
        rates: dict[str, list[float]] = {"plain": [], "gpumux": []}
        turns = [("plain", plain_loop), ("gpumux", job_loop)]
        for repeat in range(repeats):
            for name, loop in turns if repeat % 2 == 0 else reversed(turns):
                rates[name].append(loop.rate(steps))
        job.sync()
    if plain_loop.loss != job_loop.loss:
        raise RuntimeError(f"the plain loss is {plain_loop.loss!r}, the job's is {job_loop.loss!r}")
    ratios = [ours / plain for ours, plain in zip(rates["gpumux"], rates["plain"], strict=True)]
    return {
        "operators": count,
        "plain_steps_per_s": common.figure(rates["plain"]),
        "gpumux_steps_per_s": common.figure(rates["gpumux"]),
        "ratio": common.figure(ratios),
        "samples": {**rates, "ratio": ratios},
    }


class Loop:
    """A training loop that goes on where it stopped."""

    def __init__(self, step: Callable[..., Any], workload: Workload) -> None:
        self._step, self._workload = step, workload
        self._done = 0
        self.loss = 0.0

    def rate(self, steps: int) -> float:
        """Steps a second over `steps` more of them; only the last loss is waited for."""
        began = time.perf_counter()
        for index in range(self._done, self._done + steps):
            loss = self._step(*self._workload.batch(index))
        self.loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._done += steps
        return steps / (time.perf_counter() - began)


def show(measured: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, m in measured.items():
        ratio = m["ratio"]
        rows.append([name, str(m["operators"]), f"{1e3 / m['plain_steps_per_s'].median:.2f}"])
        rows[-1] += [f"{1e3 / m['gpumux_steps_per_s'].median:.2f}", f"{ratio.median:.3f}"]
        rows[-1] += [f"{ratio.low:.3f}", f"{ratio.high:.3f}"]
    header = ["program", "operators", "plain ms/step", "gpumux ms/step", "ratio", "lowest", "highest"]
    return common.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
