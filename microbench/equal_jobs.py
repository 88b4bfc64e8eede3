"""What it would give to run the steps of jobs with equal Programs as one (gpumux/fuse/equal.py): the digits CNN without
dropout, each job with its own batches and learning rate, on one thread of this process. No daemon is in it.

alone    each job's own Program, one after another
fused    one Program over stacked state; batches are copied in and results out
array    fuse.Array of as many models, each with its own batch, everything fused

Steps of all jobs are timed in turns, a block of steps of each way; a turn's rates are compared with each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clients.data import digits
from clients.models.cnn import cnn
from gpumux import fuse
from gpumux.capture.state import byte_view
from gpumux.device.run.operands import allocate
from gpumux.fuse.equal import StackedState, fuse_jobs
from gpumux.fuse.member import Member
from gpumux.fuse.proof import ProgramRunner
from gpumux.program.ir import Program
from microbench import common

WARM = 5  # steps of each way before any is timed: the first of a Program run operator by operator


class RecordedJob:
    """A job after its first step, which makes its momentum: the Program of all further ones, and its buffers."""

    def __init__(self, seed: int, size: str, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.member = Member(f"job {seed}", *factory(size)(seed), max_variants=None)
        local: list[Tensor] = []
        self.batches = batches
        for batch in batches[:2]:
            choice = self.member.choose(batch, {})
            for buffer in self.member.table.buffers[len(local) :]:
                made = allocate(buffer.nbytes)
                for storage, start in buffer.home if buffer.filled else ():
                    made[start : start + storage.nbytes()].copy_(byte_view(storage))
                local.append(made)
            self.member.advance(choice)
        lowered = choice.program.lowered
        self.program: Program = lowered.program
        self.scalars = choice.values[: len(self.program.scalars)]
        self.buffers = [local[index] for index in lowered.binding]
        self.member.release()


def factory(size: str, dropout: float = 0.0) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = cnn(size, dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (seed + 1), momentum=0.9, weight_decay=1e-4)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    return make


def ways(jobs: int, size: str, batch: int, steps: int) -> dict[str, Callable[[int], None]]:
    """For each way, a function that makes step number `n` of all jobs."""
    batches = [list(islice(digits().batches(batch, seed), steps)) for seed in range(jobs)]
    found = [RecordedJob(seed, size, batches[seed]) for seed in range(jobs)]
    program = found[0].program
    if any(job.program != program for job in found):
        raise RuntimeError("the jobs' Programs are not equal")
    alone = [ProgramRunner(program, [buffer.clone() for buffer in job.buffers]) for job in found]
    group = fuse_jobs(program, jobs)
    state = StackedState(group)
    for place, job in enumerate(found):
        state.stack(place, job.buffers)
    whole = ProgramRunner(group.fused.program, state.lines)
    values = [job.scalars for job in found]
    array = fuse.Array(factory(size), list(range(jobs)), batches[0][0], choose="fused", times_file=None)

    def run_alone(n: int) -> None:
        for job, runner in zip(found, alone, strict=True):
            for target, source in zip(runner.inputs, job.batches[n % steps], strict=True):
                target.copy_(source)
            runner.run(job.scalars)

    def run_fused(n: int) -> None:
        for place, job in enumerate(found):
            for target, source in zip(whole.inputs, job.batches[n % steps], strict=False):
                target[place].copy_(source)
        group.layout.fill_tables(whole.inputs, values)
        whole.run(group.layout.scalars(values))

    def run_array(n: int) -> None:
        each = [job.batches[n % steps] for job in found]
        array.step([x for x, _ in each], [y for _, y in each], per_model=True)

    return {"alone": run_alone, "fused": run_fused, "array": run_array}


def measure(jobs: int, size: str, batch: int, turns: int, steps: int) -> dict[str, Any]:
    """Steps a second of all jobs together, each way, and the ratios of `fused` to the others in the same turn."""
    rates: dict[str, list[float]] = {}
    found = ways(jobs, size, batch, max(2, steps))
    for run in found.values():
        for n in range(WARM):
            run(n)
    for turn in range(turns):
        first = turn % len(found)
        order = [*list(found)[first:], *list(found)[:first]]
        for name in order:
            began = perf_counter()
            for n in range(steps):
                found[name](n)
            rates.setdefault(name, []).append(jobs * steps / (perf_counter() - began))
    over = {name: [a / b for a, b in zip(rates["fused"], rates[name], strict=True)] for name in ("alone", "array")}
    return {
        "steps_per_s": {name: common.figure(r) for name, r in rates.items()},
        "fused_over": {name: common.figure(r) for name, r in over.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", default="small", help="of the CNN (clients/models/cnn.py)")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40, help="of every job, in each turn")
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = measure(args.jobs, args.size, args.batch, args.turns, args.steps)
    finally:
        torch.set_num_threads(before)
    for name, over in result["fused_over"].items():
        spread = f"{over.median:.2f} ({over.low:.2f} to {over.high:.2f})"
        print(f"{args.jobs} jobs, batch {args.batch}: fused over {name} {spread}")
    common.report("equal_jobs", args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
