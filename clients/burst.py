"""`make burst`: one training job over four daemons by a burst-parallel plan, with a low job at each of them.

gpumux's planner says how many of four devices each layer of a small VGG should have, from layer times in
`clients/digits_vgg.json`. Four daemons start, each with a CPU device of one thread, and the VGG trains over all of
them: in turns alone, and beside a low job at each daemon. At last the same steps run plainly, in this process, and
losses and parameters are compared. Exit status 0 only if they agree.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.common import READY, show_demo
from clients.data import digits
from clients.models.cnn import cnn
from clients.models.vgg import EDGE, vgg
from gpumux import client
from gpumux.plan.costs import powers_of_two, preset
from gpumux.plan.graph import reduce
from gpumux.plan.layers import load
from gpumux.plan.query import PlanQuery
from gpumux.program.saved_plan import SavedPlan
from microbench import common
from microbench.daemon import DaemonFailed, RunningDaemon, running_daemon

RANKS = 4
BATCH = 64
PROFILE = Path(__file__).with_name("digits_vgg.json")
NETWORK, AMPLIFICATION = "25g", 1.5
MAX_SLOWDOWN = 1.10
LOW = "low"
SMALL, TINY = 1e-10, 1e-300  # the largest difference that rounding explains, relative to the largest value


class BurstFailed(Exception):
    """Something the demo promises did not hold."""


@dataclass(frozen=True)
class Size:
    """`turns` alone and as many beside low jobs, of `steps` steps each, after `warm_up` steps of each kind, while the
    guards learn."""

    model: str
    turns: int
    steps: int
    warm_up: int


FULL = Size("small", 3, 25, 40)
QUICK = Size("tiny", 1, 4, 2)


@dataclass
class Rank:
    """What one rank did in the turns of one kind: steps and seconds of the job, seconds it waited for other ranks,
    bytes it sent and received, and steps of the low job at its daemon."""

    steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    sent: int = 0
    received: int = 0
    low_steps: int = 0


@dataclass
class Measured:
    """Seconds of a step in each turn, and what the ranks did in all of them."""

    step_s: list[float] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=lambda: [Rank() for _ in range(RANKS)])


# ---- the job


class Training:
    """A VGG in float64, its optimizer and its step, on digits of EDGE pixels in an order of its own."""

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        self.model = vgg(size).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in digits().batches(BATCH, 0):
        yield F.interpolate(x, size=EDGE, mode="bilinear").double(), y


def plain(size: str, count: int) -> tuple[list[float], nn.Module, float]:
    """The losses and the model after so many steps, and the median seconds of a step."""
    training = Training(size)
    torch.manual_seed(1)
    losses, seconds = [], []
    for batch in islice(batches(), count):
        began = time.perf_counter()
        losses.append(float(training.step(*batch).detach()))
        seconds.append(time.perf_counter() - began)
    return losses, training.model, median(seconds)


def over_ranks(
    size: Size, daemons: Sequence[RunningDaemon], plan: SavedPlan
) -> tuple[list[float], nn.Module, dict[str, Measured]]:
    """Train over the daemons. Returns the losses, the model, and what was measured alone and beside low jobs."""
    training, data = Training(size.model), batches()
    first = next(batches())
    torch.manual_seed(1)
    measured = {"alone": Measured(), "beside low jobs": Measured()}
    losses: list[Any] = []
    with low_jobs([daemon.endpoint for daemon in daemons]), client.submit(
        training.step, example=first, model=training.model, optimizer=training.optimizer, priority="high",
        name="vgg", max_slowdown=MAX_SLOWDOWN, plan=plan, endpoints=[daemon.endpoint for daemon in daemons],
    ) as job:  # fmt: skip
        for turn in range(size.turns + 1):
            for kind, found in measured.items():
                for daemon in daemons:
                    daemon.change("pause" if kind == "alone" else "resume", LOW)
                given = list(islice(data, size.steps if turn else size.warm_up))
                before, began = seen(job, daemons), time.perf_counter()
                futures = [job.step(*batch) for batch in given]
                losses += [float(future) for future in futures]
                seconds = time.perf_counter() - began
                if turn:
                    found.step_s.append(seconds / len(given))
                    add(found.ranks, before, seen(job, daemons), len(given), seconds)
            if turn:
                alone, shared = (1e3 * found.step_s[-1] for found in measured.values())
                print(
                    f"turn {turn}: {alone:.1f} ms a step alone, {shared:.1f} ms beside low jobs; loss {losses[-1]:.3f}",
                    flush=True,
                )
    return losses, training.model, measured


def seen(job: Any, daemons: Sequence[RunningDaemon]) -> list[Rank]:
    """What the ranks have done so far."""
    ranks = [one["gang"] for one in job.stats()["ranks"]]
    low = [sum(one["steps_done"] for one in daemon.status()["jobs"] if one["name"] == LOW) for daemon in daemons]
    return [
        Rank(0, 0.0, gang["waited_s"], gang["sent_bytes"], gang["received_bytes"], done)
        for gang, done in zip(ranks, low, strict=True)
    ]


def add(ranks: Sequence[Rank], before: Sequence[Rank], after: Sequence[Rank], steps: int, seconds: float) -> None:
    for rank, old, new in zip(ranks, before, after, strict=True):
        rank.steps += steps
        rank.seconds += seconds
        rank.waited_s += new.waited_s - old.waited_s
        rank.sent += new.sent - old.sent
        rank.received += new.received - old.received
        rank.low_steps += new.low_steps - old.low_steps


# ---- the low jobs, in a process of their own


@contextmanager
def low_jobs(endpoints: Sequence[str]) -> Iterator[None]:
    """A low job at each daemon, training for as long as the block lasts."""
    command = [sys.executable, "-m", "clients.burst", "--low", *endpoints]
    # A group of its own: Ctrl-C at the terminal reaches us, and the end of its input ends it in order.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline() != READY:
            raise BurstFailed(f"the low jobs' client ended with status {child.wait()}")
        try:
            yield
        except BaseException:
            child.kill()  # a job that is paused would keep it
            raise
        child.stdin.close()
    if child.returncode:
        raise BurstFailed(f"the low jobs' client ended with status {child.returncode}")


def be_low(endpoints: Sequence[str]) -> None:
    """Train a CNN at each daemon until stdin ends."""
    torch.set_num_threads(1)
    logging.getLogger("gpumux.client").setLevel(logging.ERROR)  # it warns that these jobs are paused, as they are to be
    stop = threading.Event()
    data = digits()
    batch = next(data.batches(BATCH, 0))

    def train(job: Any) -> None:
        while not stop.is_set():
            job.step(*batch)

    with ExitStack() as stack:
        jobs = [stack.enter_context(low_job(endpoint, batch)) for endpoint in endpoints]
        threads = [threading.Thread(target=train, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        print(READY, end="", flush=True)
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join()


def low_job(endpoint: str, example: tuple[Tensor, Tensor]) -> Any:
    model = cnn("small")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return client.submit(step, example=example, model=model, optimizer=optimizer, name=LOW, endpoint=endpoint)


# ---- what is said


def make_plan() -> SavedPlan:
    """What `gpumux plan burst` makes of the layer times. Prints it."""
    query = PlanQuery(reduce(load(PROFILE)), BATCH, RANKS, powers_of_two(RANKS), preset(NETWORK), AMPLIFICATION)
    plan = query.plan()
    command = f"gpumux plan burst clients/{PROFILE.name} --gpus {RANKS} --global-batch {BATCH} --network {NETWORK}"
    print(f"the plan, as of `{command} --amplification {AMPLIFICATION}`:\n")
    rows = [
        [layer.name, str(gpus), f"{amplification:.2f}" if amplification is not None else "-"]
        for layer, gpus, amplification in zip(query.graph.layers, plan.placement.gpus, plan.amplification, strict=True)
    ]
    print(common.table(["layer", "ranks", "amplification"], rows), flush=True)
    return query.saved(plan)


def ranks_table(plan: SavedPlan, measured: Measured) -> str:
    """What each rank did beside its low job."""
    rows = []
    for number, rank in enumerate(measured.ranks):
        layers = sum(row.first <= number < row.first + row.gpus for row in plan.rows if not row.transfer)
        rows.append(
            [
                str(number),
                f"{layers} of {len(plan.layers)}",
                f"{rank.sent / rank.steps:,.0f}",
                f"{rank.received / rank.steps:,.0f}",
                f"{1e3 * rank.waited_s / rank.steps:.1f}",
                f"{rank.low_steps / rank.seconds:.1f}",
            ]
        )
    return common.table(["rank", "layers", "bytes sent a step", "received", "waits ms a step", "low steps/s"], rows)


def steps_table(plain_s: float, measured: dict[str, Measured]) -> str:
    rows = [["plain loop, one process", f"{1e3 * plain_s:.1f}", "", "", ""]]
    for kind, found in measured.items():
        step, low = common.figure([1e3 * s for s in found.step_s]), sum(rank.low_steps for rank in found.ranks)
        rows.append([f"{RANKS} ranks, {kind}", f"{step.median:.1f}", f"{step.low:.1f}", f"{step.high:.1f}", str(low)])
    return common.table(["", "ms a step", "lowest turn", "highest", "low steps"], rows)


def verdict(measured: dict[str, Measured]) -> str:
    """Whether the promise was kept, whatever the answer is."""
    alone, shared = (found.step_s for found in measured.values())
    slowdown = median([s / a for s, a in zip(shared, alone, strict=True)])
    kept = "kept" if slowdown <= MAX_SLOWDOWN else "not kept on this machine"
    said = f"promised: at most {MAX_SLOWDOWN:.2f} of the time alone; beside low jobs {slowdown:.2f}: {kept}"
    cores = len(os.sched_getaffinity(0))
    if cores < RANKS:
        said += f"\n({cores} cores for {RANKS} devices: low jobs and daemons take time of all ranks)"
    return said


def differences(losses: Sequence[tuple[float, float]], models: tuple[nn.Module, nn.Module]) -> tuple[float, float]:
    """The largest difference of losses and of parameters, relative to the largest loss and to the largest value of the
    parameter."""
    loss = max(abs(a - b) for a, b in losses) / max(abs(b) for _, b in losses)
    pairs = zip(*[[p.detach() for p in model.parameters()] for model in models], strict=True)
    return loss, max(float((a - b).abs().max() / b.abs().max().clamp_min(TINY)) for a, b in pairs)


def complaints(apart: tuple[float, float]) -> list[str]:
    """What did not hold, in words."""
    found = []
    for what, value in zip(("losses", "parameters"), apart, strict=True):
        if not value <= SMALL:
            found.append(f"{what} differ by {value:.1e}, and rounding explains {SMALL:.0e}")
    return found


def show(size: Size) -> None:
    """The whole demo. Raises BurstFailed if something did not hold."""
    plan = make_plan()
    with ExitStack() as stack:
        daemons = [stack.enter_context(running_daemon(policy="guarded")) for _ in range(RANKS)]
        print(
            f"\n{RANKS} daemons are up, each with a CPU device of one thread; a VGG trains over all of them", flush=True
        )
        given, split, measured = over_ranks(size, daemons, plan)
    print("the daemons have shut down cleanly; now the same steps in this process, without gpumux\n", flush=True)
    wanted, alone, plain_s = plain(size.model, len(given))
    print(
        f"{steps_table(plain_s, measured)}\n\n{ranks_table(plan, measured['beside low jobs'])}\n\n{verdict(measured)}"
    )
    apart = differences(list(zip(given, wanted, strict=True)), (split, alone))
    print(f"after {len(given)} steps in float64, largest relative difference from the plain loop:"
          f" {apart[0]:.1e} of losses, {apart[1]:.1e} of parameters")  # fmt: skip
    if found := complaints(apart):
        raise BurstFailed("\n  ".join(["this did not hold:", *found]))


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description="One training job over four daemons, beside a low job at each.")
    flags.add_argument("--quick", action="store_true", help="a tiny model and few steps, as the tests do")
    flags.add_argument("--low", nargs="+", metavar="ENDPOINT", help=argparse.SUPPRESS)
    args = flags.parse_args(argv)
    if args.low:
        be_low(args.low)
        return 0
    return show_demo("burst", partial(show, QUICK if args.quick else FULL), BurstFailed, DaemonFailed)


if __name__ == "__main__":
    sys.exit(main())
