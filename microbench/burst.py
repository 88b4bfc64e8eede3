"""Steps a second of one job over several daemons, beside torch's DistributedDataParallel over gloo.

Both split every batch evenly over 1, 2 or 4 ranks of one thread each; every layer is on all ranks. Blocks of steps
through gpumux and of DistributedDataParallel alternate, and while one runs the other waits without a core. A block is
measured from its first step to the answer of its last one, in gpumux by the client, whose time is part of it.
DistributedDataParallel's ranks have their parts of the batches in memory; gpumux's client copies each batch to its
ranks. The mark is for as many ranks as there are cores.

`--real` measures real models in their place (microbench/real_models.py, batches four times as large) over two daemons:
seconds of submit, which proves the split, and of a step, beside steps of the plain loop in this process.

`--beside-low` measures what a low job at each daemon costs such a job of high priority, under the policy
guarded: blocks with and without low work alternate.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clients.models.transformer import DigitsTransformer
from clients.models.vgg import EDGE, vgg
from gpumux import client
from microbench import common, real_models
from microbench.daemon import running_daemon

TARGET = 0.9  # steps a second over DistributedDataParallel's
MAX_SLOWDOWN = 1.1  # promised beside low jobs
LOW_ALONE_S = 2.0
REAL_RANKS, REAL_TIMES, REAL_WARM_UP = 2, 4, 2
BATCHES = 8  # different ones, in turn


@dataclass(frozen=True)
class Model:
    """`edge`: pixels of its images."""

    make: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: int
    edge: int


MODELS = {
    "vgg": Model(
        lambda: vgg("small", dropout=0.0), lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9), 64, EDGE
    ),
    "transformer": Model(
        lambda: DigitsTransformer(256, 8, 6, dropout=0.0), lambda params: torch.optim.AdamW(params, lr=1e-4), 32, 8
    ),
}


def main(argv: list[str] | None = None) -> int:
    arguments = common.parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    arguments.add_argument("--repeats", type=int, default=9, help="blocks of each kind")
    arguments.add_argument("--steps", type=int, default=20, help="steps a block")
    arguments.add_argument("--warm-up", type=int, default=20, help="steps before the first block")
    arguments.add_argument("--real", nargs="+", choices=real_models.RECIPES, help="real models instead")
    arguments.add_argument("--beside-low", action="store_true", help="beside low jobs instead")
    arguments.add_argument("--rank", nargs=3, metavar=("RANK", "RANKS", "PORT"), help="be a DistributedDataParallel's")
    args = arguments.parse_args(argv)
    torch.set_num_threads(1)
    if args.rank:
        be_rank(MODELS[args.models[0]], *map(int, args.rank))
        return 0
    facts = common.machine()
    if args.beside_low:
        return report_beside_low(args, facts)
    if args.real:
        return report_real(args, facts)
    models = {
        name: {str(ranks): measure(name, ranks, args.repeats, args.steps, args.warm_up) for ranks in args.ranks}
        for name in args.models
    }
    print(common.describe(facts))
    print(show(models))
    result: dict[str, Any] = {"machine": facts, "threads": 1, "steps": args.steps, "models": models}
    result["targets"] = targets(models, facts["cores"])
    for name, target in result["targets"].items():
        verdict = "met" if target["met"] else "MISSED"
        print(f"{name}: {target['value']:.2f} against {target['target']:.2f}: {verdict}")
    common.report("burst", args.out, result)
    return 0


def report_beside_low(args: Any, facts: dict[str, Any]) -> int:
    models = {
        name: {str(ranks): beside_low(name, ranks, args.repeats, args.steps, args.warm_up) for ranks in args.ranks}
        for name in args.models
    }
    rows = [
        [
            f"{name}, {ranks} ranks", f"{m['slowdown'].median:.3f}", f"{m['slowdown'].low:.3f}",
            f"{m['slowdown'].high:.3f}", f"{m['low_steps_per_s']:.1f}", f"{m['low_alone_per_s']:.1f}",
        ]
        for name, by_ranks in models.items()
        for ranks, m in by_ranks.items()
    ]  # fmt: skip
    print(common.describe(facts))
    print(common.table(["", "slowdown", "lowest", "highest", "low steps/s", "all alone"], rows))
    common.report("burst-beside-low", args.out, {"machine": facts, "max_slowdown": MAX_SLOWDOWN, "models": models})
    return 0


def report_real(args: Any, facts: dict[str, Any]) -> int:
    models = {name: real(name, args.repeats) for name in args.real}
    rows = [
        [
            name, str(m["batch"]), f"{m['submit_s']:.1f}", f"{m['step_s'].median:.2f}", f"{m['plain_s'].median:.2f}",
            f"{m['submit_s'] / m['plain_s'].median:.0f}",
        ]
        for name, m in models.items()
    ]  # fmt: skip
    print(common.describe(facts))
    print(common.table(["", "batch", "submit s", "step s", "plain step s", "submit, in plain steps"], rows))
    common.report("burst-real", args.out, {"machine": facts, "ranks": REAL_RANKS, "models": models})
    return 0


def real(name: str, repeats: int) -> dict[str, Any]:
    """Seconds of submit and of steps over REAL_RANKS daemons, and of the plain loop's steps in this process, which take
    turns; first steps are not counted."""
    ours, theirs = (real_models.build(name) for _ in range(2))
    batches = [tuple(torch.cat([t] * REAL_TIMES) for t in ours.batch(i)) for i in range(real_models.BATCHES)]
    step_s, plain_s = [], []
    with ExitStack() as stack:
        endpoints = [stack.enter_context(running_daemon()).endpoint for _ in range(REAL_RANKS)]
        began = time.perf_counter()
        job = stack.enter_context(
            client.submit(
                ours.step, example=batches[0], model=ours.model, optimizer=ours.optimizer, batch_norm="sync",
                endpoints=endpoints,
            )
        )  # fmt: skip
        submit_s = time.perf_counter() - began
        for i in range(repeats + REAL_WARM_UP):
            began = time.perf_counter()
            job.step(*batches[i % len(batches)]).result()
            step_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            theirs.step(*batches[i % len(batches)])
            plain_s.append(time.perf_counter() - began)
    counted = {"step_s": step_s[REAL_WARM_UP:], "plain_s": plain_s[REAL_WARM_UP:]}
    figures = {key: common.figure(values) for key, values in counted.items()}
    return {"submit_s": submit_s, "batch": len(batches[0][0]), **figures, "samples": counted}


def targets(models: dict[str, dict[str, dict[str, Any]]], cores: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, by_ranks in models.items():
        for ranks, measured in by_ranks.items():
            if 1 < int(ranks) <= cores:
                value = measured["ratio"].median
                said = f"{name} on {ranks} ranks, over DistributedDataParallel"
                found[said] = {"value": value, "target": TARGET, "met": value >= TARGET}
    return found


def show(models: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = []
    for name, by_ranks in models.items():
        for ranks, m in by_ranks.items():
            rows.append(
                [
                    f"{name}, {ranks} ranks", f"{m['steps_per_s'].median:.2f}", f"{m['ddp_steps_per_s'].median:.2f}",
                    f"{m['ratio'].median:.2f}", f"{m['ratio'].low:.2f}", f"{m['ratio'].high:.2f}",
                    str(max(m["collectives"])), f"{max(m['sent_bytes']) / 1e6:.2f}",
                    f"{1e3 * max(m['waited_s']):.1f}",
                ]
            )  # fmt: skip
    header = ["", "steps/s", "DDP's", "ratio", "lowest", "highest", "collectives", "MB sent", "waits ms"]
    return common.table(header, rows)


def measure(name: str, ranks: int, repeats: int, steps: int, warm_up: int) -> dict[str, Any]:
    """Steps a second of each block, ours and theirs, and what each rank exchanged in a step."""
    with over_daemons(MODELS[name], ranks) as ours, distributed(name, ranks) as theirs:
        for run in (ours.run, theirs):
            run(warm_up)
        before = ours.exchanged()
        rates: dict[str, list[float]] = {"steps_per_s": [], "ddp_steps_per_s": []}
        for _ in range(repeats):
            rates["steps_per_s"].append(steps / ours.run(steps))
            rates["ddp_steps_per_s"].append(steps / theirs(steps))
        each = [
            {key: (new[key] - old[key]) / (repeats * steps) for key in new}
            for old, new in zip(before, ours.exchanged(), strict=True)
        ]
        collectives = ours.collectives()
    ratio = [a / b for a, b in zip(*rates.values(), strict=True)]
    return {
        **{key: common.figure(values) for key, values in rates.items()},
        "ratio": common.figure(ratio),
        "samples": rates,
        "collectives": collectives,
        **{key: [rank[key] for rank in each] for key in ("sent_bytes", "waited_s")},
    }


# ---- through gpumux


def beside_low(name: str, ranks: int, repeats: int, steps: int, warm_up: int) -> dict[str, Any]:
    """How many times as long a job of high priority over so many daemons takes beside a low job of the same model at
    each, and how many steps the low jobs make then, and without it."""
    model = MODELS[name]
    with ExitStack() as stack:
        endpoints = [stack.enter_context(running_daemon(policy="guarded")).endpoint for _ in range(ranks)]
        ours = Ours(
            stack.enter_context(submit(model, priority="high", max_slowdown=MAX_SLOWDOWN, endpoints=endpoints)),
            batches_of(model),
        )
        low = [LowLoop(stack.enter_context(submit(model, priority="low", endpoint=one)), model) for one in endpoints]
        for one in low:
            stack.callback(one.end)
        ours.run(warm_up)

        def beside(run: Callable[[], Any]) -> tuple[Any, float]:
            """What `run` returns, and the low steps a second meanwhile."""
            before, began = sum(one.steps for one in low), time.perf_counter()
            for one in low:
                one.wanted.set()
            found = run()
            for one in low:
                one.wanted.clear()
            made = (sum(one.steps for one in low) - before) / (time.perf_counter() - began)
            for one in low:
                one.settle()
            return found, made

        beside(lambda: ours.run(10 * warm_up))  # in which the guard learns
        alone_s, beside_s, low_rates = [], [], []
        for _ in range(repeats):
            alone_s.append(ours.run(steps))
            seconds, rate = beside(lambda: ours.run(steps))
            beside_s.append(seconds)
            low_rates.append(rate)
        _, low_alone = beside(lambda: time.sleep(LOW_ALONE_S))
    slowdown = [b / a for a, b in zip(alone_s, beside_s, strict=True)]
    return {
        "slowdown": common.figure(slowdown),
        "samples": {"alone_s": alone_s, "beside_s": beside_s, "low_steps_per_s": low_rates},
        "low_steps_per_s": sum(low_rates) / len(low_rates),
        "low_alone_per_s": low_alone,
    }


class LowLoop:
    """Steps of a low job, one after the other, on a thread, while they are `wanted`."""

    def __init__(self, job: Any, model: Model) -> None:
        self.steps = 0
        self.wanted, self._idle, self._over = threading.Event(), threading.Event(), False
        self._job, self._batch = job, batches_of(model)[0]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            if not self.wanted.is_set():
                self._idle.set()
                self.wanted.wait()
                self._idle.clear()
            else:
                self._job.step(*self._batch).result()
                self.steps += 1

    def settle(self) -> None:
        """Wait until no step is under way."""
        self._idle.wait()

    def end(self) -> None:
        self._over = True
        self.wanted.set()
        self._thread.join()


class Ours:
    def __init__(self, job: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._job, self._batches, self._at = job, batches, 0

    def run(self, steps: int) -> float:
        """Seconds that so many steps take."""
        began = time.perf_counter()
        for _ in range(steps):
            last = self._job.step(*self._batches[self._at % BATCHES])
            self._at += 1
        last.result()
        return time.perf_counter() - began

    def exchanged(self) -> list[dict[str, float]]:
        """By rank, the bytes it has sent and the seconds it has waited for the others. A job on one daemon has none."""
        stats = self._job.stats()
        if "ranks" not in stats:
            return [{"sent_bytes": 0, "waited_s": 0.0}]
        gangs = [rank["gang"] for rank in stats["ranks"]]
        return [{key: gang[key] for key in ("sent_bytes", "waited_s")} for gang in gangs]

    def collectives(self) -> list[int]:
        """By rank, the most of a Program: an optimizer's first step has one of its own."""
        loaded = self._job._remote.programs.values()
        programs = [part.program for gang in loaded for part in getattr(gang, "parts", (gang,))]
        found: dict[int, int] = {}
        for program in programs:
            found[program.rank] = max(found.get(program.rank, 0), len(program.collectives))
        return [found[rank] for rank in sorted(found)]


@contextmanager
def over_daemons(model: Model, ranks: int) -> Iterator[Ours]:
    with ExitStack() as stack:
        endpoints = [stack.enter_context(running_daemon()).endpoint for _ in range(ranks)]
        yield Ours(stack.enter_context(submit(model, endpoints=endpoints)), batches_of(model))


def submit(model: Model, **options: Any) -> client.Job[Any]:
    net = model.make()
    optimizer = model.optimizer(net.parameters())
    step = step_of(net, optimizer)
    return client.submit(step, example=batches_of(model)[0], model=net, optimizer=optimizer, name="burst", **options)


def batches_of(model: Model) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(model.batch, 1, model.edge, model.edge, generator=draws),
            torch.randint(0, 10, (model.batch,), generator=draws),
        )
        for _ in range(BATCHES)
    ]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


# ---- DistributedDataParallel


@contextmanager
def distributed(name: str, ranks: int) -> Iterator[Callable[[int], float]]:
    """A function that has a DistributedDataParallel's ranks run steps and returns their seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "microbench.burst", "--models", name, "--rank"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip

    def run(steps: int) -> float:
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"{steps}\n")
            child.stdin.flush()
        return max(answer(child) for child in children)

    try:
        yield run
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        if sum(abs(child.wait(60)) for child in children):
            raise RuntimeError("a rank of DistributedDataParallel failed")
    finally:
        for child in children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def answer(child: subprocess.Popen[str]) -> float:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank of DistributedDataParallel ended with status {child.wait()}")
    return float(line)


def be_rank(model: Model, rank: int, ranks: int, port: int) -> None:
    """Train this rank's part of each batch, so many steps for each number that comes."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        torch.manual_seed(0)
        net = DistributedDataParallel(model.make())
        step = step_of(net, model.optimizer(net.parameters()))
        parts = [tuple(t.tensor_split(ranks)[rank].clone() for t in batch) for batch in batches_of(model)]
        at = 0
        for line in sys.stdin:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(int(line)):
                step(*parts[at % BATCHES])
                at += 1
            print(time.perf_counter() - began, flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
