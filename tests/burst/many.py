"""`python -m tests.burst.many [--placements N] [--steps N] [--only NAME]`: every subject over many random placements on
1, 2 and 4 ranks, beside plain torch, in as many processes as there are cores. With --programs, a thousand placements
are only split, and their Programs checked not to wait for each other."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from multiprocessing import get_context

import torch

from gpumux.burst.programs import bytes_moved
from gpumux.errors import GpumuxError
from tests.burst.subjects import SUBJECTS, compare, random_placement, traces_of

BOUND = 1e-10
RANKS = (1, 2, 4)
SPLIT = {"vgg": 400, "inception": 400, "gan": 200}  # placements of each subject with --programs


def one(task: tuple[str, int, int]) -> tuple[str, int, float, str]:
    """(subject, ranks, largest difference, what went wrong) of a placement."""
    name, seed, steps = task
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rng = random.Random(f"{name} {seed}")
    placement = random_placement(SUBJECTS[name].layers, RANKS[seed % len(RANKS)], rng)
    try:
        difference, _ = compare(SUBJECTS[name], placement, steps)
    except (GpumuxError, AssertionError, KeyError) as error:
        return name, placement.ranks, float("nan"), f"{dict(placement.layers)}: {type(error).__name__}: {error}"
    wrong = "" if difference.largest <= BOUND else f"{dict(placement.layers)}: {difference}"
    return name, placement.ranks, difference.largest, wrong


def split_programs(name: str, placements: int) -> int:
    """Split a subject's traces over random placements. burst/ranks.py refuses Programs that could wait for each other.
    Returns how many of them exchange data."""
    subject = SUBJECTS[name]
    traces = traces_of(subject, (2, 4))
    rng = random.Random(name)
    crossing = 0
    for at in range(placements):
        placement = random_placement(subject.layers, rng.choice((2, 4)), rng)
        step = traces[at % len(traces)].ranked(placement)
        crossing += bool(bytes_moved([rank.lowered.program for rank in step.ranks]))
    return crossing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placements", type=int, default=200, help="of each subject")
    parser.add_argument("--first", type=int, default=0, help="number of the first placement")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=tuple(SUBJECTS))
    parser.add_argument("--programs", action="store_true", help="only split steps, a thousand times")
    options = parser.parse_args()
    if options.programs:
        for name, placements in SPLIT.items():
            print(f"{name:12} {placements} placements, {split_programs(name, placements)} exchange data, none waits")
        return 0
    names = [options.only] if options.only else list(SUBJECTS)
    seeds = range(options.first, options.first + options.placements)
    tasks = [(name, seed, options.steps) for name in names for seed in seeds]
    begun = time.monotonic()
    worst: dict[tuple[str, int], list[float]] = {}
    failures = []
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, ranks, largest, wrong in pool.imap_unordered(one, tasks):
            worst.setdefault((name, ranks), []).append(largest)
            if wrong:
                failures.append(wrong)
                print(name, wrong, flush=True)
    for (name, ranks), found in sorted(worst.items()):
        print(f"{name:12} {ranks} ranks {len(found):4} placements, largest difference {max(found):.1e}")
    print(
        f"{len(tasks)} placements of {options.steps} steps in {time.monotonic() - begun:.0f} s, {len(failures)} wrong"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
