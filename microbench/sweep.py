"""Random pairs of jobs under the guard: is the promise kept, and how much of what could be harvested is?

Each pair is a high and a low job made of random kernels; the seed says which. The guard's run is `--steps` high steps,
of which the first `--learning` are reported apart. What could be harvested is what an oracle reaches (oracle.py).
`--out` is a JSON list with one entry a pair; pairs in which the oracle finds next to nothing that keeps the promise are
in it as infeasible.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from random import Random
from typing import Any

from gpumux import config
from gpumux.cli.arguments import whole
from gpumux.device.sim.cost import OTHER_ISSUE, PRODUCT_ISSUE, Kernel
from gpumux.device.sim.spec import GpuSpec, preset
from gpumux.errors import ConfigError
from gpumux.simulate.run import Simulation, solo
from gpumux.simulate.workload import Workload, cut_workload
from gpumux.types import Priority
from microbench import charts, common, oracle

SHARE = 0.8  # of the oracle's harvest that the guard is to reach
NOTHING = 0.01  # an oracle that harvests less than this part of the time found nothing
TELL_EVERY_S = 60.0  # where no terminal shows the line that is written anew after each pair


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = arguments.add_argument
    add("--device", choices=("sim", "cpu", "cuda"), default="sim", help="sim: the others can't be repeated exactly")
    add("--gpu-model", choices=config.SIMULATED_GPUS, default="a100", help="the GPU that is simulated (default a100)")
    add("--pairs", type=whole, default=100, help="how many (default 100)")
    add("--first", type=int, default=0, help="number of the first pair")
    add("--seed", type=int, default=0, help="what the pairs are drawn by, with their numbers (default 0)")
    add("--max-slowdown", type=float, default=1.05, help="what the high jobs are promised (default 1.05)")
    add("--steps", type=whole, default=2000, help="high steps of each pair, the learning ones included")
    add("--learning", type=whole, default=200, help="steps reported apart")
    add("--policy", default="guarded", choices=config.POLICIES, help="which job runs next (default guarded)")
    add("--processes", type=whole, default=len(os.sched_getaffinity(0)), help="default: one a core")
    add(
        "--oracle", type=Path, metavar="FILE.json", help="take the oracle's findings from an earlier --out (same pairs)"
    )
    add("--out", type=common.new_file, metavar="FILE.json", help="written after each pair")
    add("--png", type=common.new_file, metavar="FILE.png", help="draw what each pair lost and harvested")
    args = arguments.parse_args(argv)
    if args.steps <= args.learning:
        arguments.error(
            f"--steps ({args.steps}) has to be more than --learning ({args.learning}): those are reported apart"
        )
    if args.device != "sim":
        print(
            f"a sweep runs on --device sim only, not {args.device}: its pairs have to repeat exactly", file=sys.stderr
        )
        return 78
    settings = (args.seed, args.gpu_model, args.policy, args.max_slowdown, args.steps, args.learning)
    known = read_oracle(args.oracle) if args.oracle else {}
    pairs = range(args.first, args.first + args.pairs)
    progress = Progress({pair: expected_work(pair, settings) for pair in pairs})
    found: list[dict[str, Any]] = []
    interrupted = False
    try:
        for each in measure(progress.longest_first, settings, args.processes, known):
            found = sorted([*found, each], key=lambda entry: int(entry["pair"]))
            if args.out:
                keep(args.out, found)
            progress.done(each["pair"])
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted after {len(found)} of {len(pairs)} pairs", file=sys.stderr)
    if found:
        print(summary(found, args.max_slowdown))
        print(f"{len(found)} pairs in {progress.passed_s():.0f} s" + ("" if known else _processor_time(found)))
        if args.png:
            draw(args.png, found, args.max_slowdown)
    return 130 if interrupted else 0


Settings = tuple[int, str, str, float, int, int]
ORACLE = (
    "plan_harvest", "oracle_mean_slowdown", "oracle_p99_slowdown", "oracle_plan", "plans_tried",
)  # fmt: skip


def read_oracle(path: Path) -> dict[int, dict[str, Any]]:
    """By pair, what an earlier sweep wrote. The oracle knows nothing of the guard: what it found of a pair stays so for
    as long as the simulated device, the cuts and the oracle itself do. Raises ConfigError for a file that is none."""
    try:
        read = {int(entry["pair"]): entry for entry in json.loads(path.read_text())}
        if any(
            key not in entry
            for entry in read.values()
            for key in (*ORACLE, "seed", "max_slowdown", "high", "low", "seconds")
        ):
            raise KeyError("oracle")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of a sweep ({error})", "give a file that --out wrote") from None
    return read


def keep(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """Write what is known so far: a sweep takes long, and what was searched for an interrupted one can be given to the
    next (`--oracle`)."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(path)


def measure(
    pairs: Sequence[int], settings: Settings, processes: int, known: Mapping[int, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Every pair as soon as it is done; they are begun in this order. `known`: of `read_oracle`."""
    if processes <= 1:
        for pair in pairs:
            yield measure_pair(pair, settings, known.get(pair))
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_begin_worker) as pool:
        try:
            for done in as_completed([pool.submit(measure_pair, p, settings, known.get(p)) for p in pairs]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise


def _begin_worker() -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the terminal signals all processes; the one that started this one ends it
    gc.freeze()  # what is imported stays


def expected_work(pair: int, settings: Settings) -> float:
    """What a pair takes to measure, in a unit of its own: about as many launches as end while a high step is under
    way."""
    seed, model, _, max_slowdown, _, _ = settings
    spec = preset(model)
    high, low = random_pair(seed, pair, spec, max_slowdown)
    ours, theirs = cut_workload(high, spec), cut_workload(low, spec)
    return len(ours.seconds) + (ours.step_s + high.think_s) / theirs.step_s * len(theirs.seconds)


class Progress:
    """Tells on stderr how many pairs are done, and about how long the others will take. `work`: of each pair."""

    def __init__(self, work: Mapping[int, float]) -> None:
        self.longest_first = sorted(
            work, key=lambda pair: -work[pair]
        )  # no process is left alone with a long one in the end
        self._work = work
        self._done: list[int] = []
        self._began = self._told = time.monotonic()

    def passed_s(self) -> float:
        return time.monotonic() - self._began

    def done(self, pair: int) -> None:
        """That one is."""
        self._done.append(pair)
        last, terminal = len(self._done) == len(self._work), sys.stderr.isatty()
        if not (terminal or last or time.monotonic() - self._told >= TELL_EVERY_S):
            return
        self._told = time.monotonic()
        text = f"{len(self._done)} of {len(self._work)} pairs"
        if not last:
            text += f", about {_duration(self.left_s(self.passed_s()))} left"
        sys.stderr.write(("\r" + text.ljust(48) if terminal else text) + "\n" * (last or not terminal))
        sys.stderr.flush()

    def left_s(self, passed_s: float) -> float:
        """If the others are done at the speed of those that are."""
        done = sum(self._work[pair] for pair in self._done)
        return passed_s * (sum(self._work.values()) / done - 1)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def measure_pair(pair: int, settings: Settings, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """One pair under the policy, and what the oracle makes of it, or made (`known`). Raises ConfigError where that was
    another pair."""
    seed, model, policy, max_slowdown, steps, learning = settings
    spec = preset(model)
    high, low = random_pair(seed, pair, spec, max_slowdown)
    jobs = {"high": describe(high, spec), "low": describe(low, spec)}
    same = {"seed": seed, "max_slowdown": max_slowdown, **jobs}
    if known is not None and any(known[key] != value for key, value in same.items()):
        raise ConfigError(f"pair {pair} of --oracle is another one", "give a file of the same seed, promise and device")
    began = time.process_time()
    simulation = Simulation([high, low], spec, policy)
    result = simulation.run(steps=steps - learning, warmup_steps=learning)
    if result.interrupted:
        raise KeyboardInterrupt
    guard_s, began = time.process_time() - began, time.process_time()
    job = result.job(high.name)
    target_s = simulation.clients[
        1
    ].target_s  # how long the low pieces were to be in the end: the oracle has them so, too
    if known is not None and known.get("low_target_s") != target_s:
        known = None  # it was of other pieces: it has to look for plans again
    reached: dict[str, Any]
    if known is None:
        best = oracle.Search(high, replace(low, target_s=target_s), spec).run()
        reached = {
            "plan_harvest": best.best.harvest if best.best.keeps else None,
            "oracle_mean_slowdown": best.best.mean,
            "oracle_p99_slowdown": best.best.p99,
            "oracle_plan": {"places": len(best.best.plan.shares), "depth": best.best.plan.depth},
            "plans_tried": best.tried,
        }
        oracle_s = time.process_time() - began
    else:
        reached, oracle_s = {key: known[key] for key in ORACLE}, known["seconds"]["oracle"]
    kept = oracle.keeps_promise(job.mean_slowdown, job.p99_slowdown, max_slowdown)
    could = max(reached["plan_harvest"] or 0.0, result.harvest if kept else 0.0)
    feasible = could >= NOTHING
    return {
        "pair": pair,
        **same,
        "low_target_s": target_s,
        "feasible": feasible,
        "mean_slowdown": job.mean_slowdown,
        "p99_slowdown": job.p99_slowdown,
        "harvest_share": result.harvest / could if feasible else None,
        "harvest": result.harvest,
        "oracle_harvest": could,
        **reached,
        "learning_steps": learning,
        "learning_mean_slowdown": job.learning_slowdown,
        "steps": job.steps,
        "seconds": {"policy": guard_s, "oracle": oracle_s},  # of a processor
    }


def describe(job: Workload, spec: GpuSpec) -> dict[str, Any]:
    """What kind of job it is."""
    return {
        "kernels": len(job.kernels),
        "step_s": solo(job, spec).step_s,
        "think_s": job.think_s,
        "longest_block_s": max(kernel.block_s for kernel in job.kernels),
        "sensitive": sum(kernel.sensitivity > 1 for kernel in job.kernels),
    }


# ---- pairs


def random_pair(seed: int, pair: int, spec: GpuSpec, max_slowdown: float) -> tuple[Workload, Workload]:
    """Two jobs of 10 to 40 kernels each. High kernels take 5 to 300 us, low ones 10 to 500 us; two high jobs in five
    pause between steps, for at most as long as a step takes; every third has an operator or two that suffer from
    company."""
    random = Random(f"{seed}/{pair}")
    high = random_kernels(random, spec, 5e-6, 300e-6)
    if random.random() < 1 / 3:
        for _ in range(random.randint(1, 2)):
            seconds = _log_uniform(random, 50e-6, 300e-6)
            reduce = Kernel("all_reduce", 24, seconds, 1, int(seconds * 0.2 * spec.bandwidth), random.uniform(1.5, 3.0))
            high.insert(random.randrange(len(high)), reduce)
    step_s = sum(kernel.block_s * -(-kernel.blocks // (kernel.per_sm * spec.sms)) for kernel in high)
    think_s = random.uniform(0.1, 1.0) * step_s if random.random() < 0.4 else 0.0
    low = random_kernels(random, spec, 10e-6, 500e-6)
    return (
        Workload("high", Priority.HIGH, tuple(high), think_s=think_s, max_slowdown=max_slowdown),
        Workload("low", Priority.LOW, tuple(low)),
    )


def random_kernels(random: Random, spec: GpuSpec, shortest_s: float, longest_s: float) -> list[Kernel]:
    """10 to 40 of them: a quarter of a wave of blocks to 16 waves, a little of the bandwidth to most of it. Those that
    use less than half of the bandwidth need as much of a multiprocessor as matrix products do."""
    made = []
    for index in range(random.randint(10, 40)):
        seconds = _log_uniform(random, shortest_s, longest_s)
        per_sm = random.choice((1, 2, 4, 8))
        waves = _log_uniform(random, 0.25, 16.0)
        blocks = max(1, int(waves * per_sm * spec.sms))
        block_s = seconds / -(-blocks // (per_sm * spec.sms))
        part = random.uniform(0.02, 0.9)
        issue = PRODUCT_ISSUE if part < 0.5 else OTHER_ISSUE
        nbytes = int(seconds * part * spec.bandwidth)
        made.append(Kernel(f"k{index}", blocks, block_s, per_sm, nbytes, issue=issue))
    return made


def _log_uniform(random: Random, low: float, high: float) -> float:
    return float(low * (high / low) ** random.random())


# ---- what came of it


def summary(found: Sequence[dict[str, Any]], max_slowdown: float) -> str:
    """The figures the promise is about, over all pairs, and the pairs that miss them."""
    p99_limit = 1 + 2 * (max_slowdown - 1)
    shares = [pair["harvest_share"] for pair in found if pair["feasible"]]
    lines = [
        (
            f"mean slowdown: worst {max(p['mean_slowdown'] for p in found):.3f} (target {max_slowdown:.2f}), over it in"
            f" {_pairs(p['pair'] for p in found if p['mean_slowdown'] > max_slowdown)}"
        ),
        (
            f"p99 slowdown: worst {max(p['p99_slowdown'] for p in found):.3f} (target {p99_limit:.2f}), over it in "
            f"{_pairs(p['pair'] for p in found if p['p99_slowdown'] > p99_limit)}"
        ),
    ]
    if shares:
        harvested = sum(p["harvest"] for p in found if p["feasible"]) / sum(
            p["oracle_harvest"] for p in found if p["feasible"]
        )
        lines.append(
            f"harvest over the oracle's: mean of pairs {sum(shares) / len(shares):.3f}, median"
            f" {common.percentile(shares, 0.5):.3f}, lowest {min(shares):.3f}, of all work {harvested:.3f} (target"
            f" {SHARE:.2f}); below it in"
            f" {_pairs(p['pair'] for p in found if p['feasible'] and p['harvest_share'] < SHARE)}"
        )
    lines.append(f"even the oracle finds nothing in {_pairs(p['pair'] for p in found if not p['feasible'])}")
    worst = max(p["learning_mean_slowdown"] for p in found)
    mean = sum(p["learning_mean_slowdown"] for p in found) / len(found)
    lines.append(f"while learning: mean slowdown {mean:.3f}, worst pair {worst:.3f}")
    return "\n".join(lines)


def _processor_time(found: Sequence[dict[str, Any]]) -> str:
    policy, searched = (sum(pair["seconds"][part] for pair in found) for part in ("policy", "oracle"))
    return f"; processor time: {policy:.0f} s under the policy, {searched:.0f} s for the oracle"


def _pairs(numbers: Any) -> str:
    named = [str(number) for number in numbers]
    return f"{len(named)} pairs" + (f" ({', '.join(named[:12])}{', ...' if len(named) > 12 else ''})" if named else "")


def draw(path: Path, found: Sequence[dict[str, Any]], max_slowdown: float) -> None:
    """Each pair's mean and 99th percentile slowdown over its share of the oracle's harvest."""
    feasible = [pair for pair in found if pair["feasible"]]
    clouds = [[(pair["harvest_share"], pair[key]) for pair in feasible] for key in ("mean_slowdown", "p99_slowdown")]
    labels = ("mean step time", "99th percentile")
    title = f"{len(feasible)} random pairs, max_slowdown {max_slowdown:.2f}"
    charts.scatter(
        path,
        title,
        clouds,
        labels,
        ("harvest over the oracle's (times)", "high step time over alone (times)"),
        max_slowdown,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"{error.message}: {error.remedy}", file=sys.stderr)
        sys.exit(78)
