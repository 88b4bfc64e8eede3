"""Separate processes that train equal jobs at one daemon (docs/fusion.md): the digits CNN in float64, each
process with its own batches and learning rate, and nothing but `fusible=True`.

alone    a process a model, without the flag
fused    a process a model, with it
array    one process, which trains the models by submit_array, each with its own batch

All processes are there throughout, and make a block of steps when it is their way's turn. With --straggler one of the
fused processes makes no steps in further blocks, and with --kills one at a time is killed at random and started again.
Every loss is compared with that of the plain loop.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from clients.data import digits
from gpumux import client
from microbench import common
from microbench.daemon import running_daemon
from microbench.equal_jobs import factory

BATCHES = 50  # of each model, again and again
LEAST_LOSS = 1e-6  # of smaller ones the difference itself counts
GIVE_UP_S = 600.0  # until all models run as one
WAYS = ("alone", "fused", "array")
PAUSE_S = 0.5
AMID_S = 0.2  # a process is killed so long after a block began at most


def batches(seed: int, batch: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in islice(digits().batches(batch, seed), BATCHES)]


# ---- The process that trains. It is sent how many steps to make, and answers with their losses.

# Processes begin as copies of one that has imported all this, which would take longer than the rest of their start.
PROCESSES = get_context("forkserver")
PRELOAD = ["clients.data", "gpumux.client", "microbench.daemon", "microbench.equal_jobs", "torch._dynamo"]


def work(
    way: str, seeds: Sequence[int], endpoint: str, size: str, batch: int, dropout: float, told: Connection
) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    take: Callable[[int], Any]
    job: Any
    if way == "array":
        data = [batches(each, batch) for each in seeds]
        job = client.submit_array(factory(size, dropout), list(seeds), data[0][0], endpoint=endpoint, times_file=None)
        stacked = [tuple([each[n][part] for each in data] for part in range(2)) for n in range(BATCHES)]
        take = lambda n: job.step(*stacked[n % BATCHES], per_model=True)  # noqa: E731
    else:
        (seed,) = seeds
        own = batches(seed, batch)
        step, model, optimizer = factory(size, dropout)(seed)  # its draws follow those of the weights
        job = client.submit(
            step, example=own[0], model=model, optimizer=optimizer, endpoint=endpoint, fusible=way == "fused",
            name=f"{way} {seed}",
        )  # fmt: skip
        take = lambda n: job.step(*own[n % BATCHES])  # noqa: E731
    taken = 0
    told.send(None)
    with suppress(EOFError):
        while True:
            futures = []
            for _ in range(told.recv()):
                futures.append(take(taken))
                taken += 1
            losses = [future.result().detach().reshape(-1).tolist() for future in futures]
            told.send((losses, job.stats()["fusion"]))
    job.close(sync=False)


class Trainer:
    """One such process, and the losses it has told. `seeds`: of its models."""

    def __init__(self, way: str, seeds: Sequence[int], endpoint: str, size: str, batch: int, dropout: float) -> None:
        self.way, self.seeds = way, seeds
        self._told, theirs = PROCESSES.Pipe()
        PROCESSES.set_forkserver_preload(PRELOAD)
        self.process = PROCESSES.Process(
            target=work, args=(way, seeds, endpoint, size, batch, dropout, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.losses: list[list[float]] = []
        self.fusion: dict[str, Any] | None = None

    def hear(self) -> Any:
        try:
            return self._told.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise RuntimeError(f"the process of {self.way} {self.seeds} has ended ({self.process.exitcode})") from None

    def ask(self, steps: int) -> None:
        self._told.send(steps)

    def answer(self) -> None:
        losses, self.fusion = self.hear()
        self.losses += losses

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._told.close()

    def off(self, plain: Sequence[Sequence[float]]) -> float:
        """How far its losses are from the plain loops', relatively. `plain`: by seed."""
        wanted = [[plain[seed][step] for seed in self.seeds] for step in range(len(self.losses))]
        return max(
            (abs(a - b) / max(abs(b), LEAST_LOSS))
            for got, want in zip(self.losses, wanted, strict=True)
            for a, b in zip(got, want, strict=True)
        )

    def close(self) -> None:
        self._told.close()
        self.process.join(60)


def block(trainers: Sequence[Trainer], steps: int) -> float:
    """Each makes so many steps. Returns seconds, until all have."""
    began = time.perf_counter()
    for trainer in trainers:
        trainer.ask(steps)
    for trainer in trainers:
        trainer.answer()
    return time.perf_counter() - began


class PlainLoops:
    """The losses of the plain loops, by seed, made as far as they are asked for."""

    def __init__(self, models: int, size: str, batch: int, dropout: float) -> None:
        self._steps = []
        self._drawn = []  # each model's random generator
        for seed in range(models):
            self._steps.append(factory(size, dropout)(seed)[0])
            self._drawn.append(torch.get_rng_state())
        self._data = [batches(seed, batch) for seed in range(models)]
        self.losses: list[list[float]] = [[] for _ in range(models)]

    def until(self, steps: int) -> list[list[float]]:
        for seed, (step, data, losses) in enumerate(zip(self._steps, self._data, self.losses, strict=True)):
            torch.set_rng_state(self._drawn[seed])
            while len(losses) < steps:
                losses.append(step(*data[len(losses) % BATCHES]).item())
            self._drawn[seed] = torch.get_rng_state()
        return self.losses


# ---- What is measured


def until_fused(trainers: Sequence[Trainer], steps: int) -> float:
    """Blocks of steps until all run as one, with pauses in which the fused Program is made, at a low priority. Returns
    seconds. Raises TimeoutError."""
    began = time.perf_counter()
    while not all(each.fusion is not None and each.fusion["jobs"] == len(trainers) for each in trainers):
        if time.perf_counter() - began > GIVE_UP_S:
            raise TimeoutError(f"they never run as one: {trainers[0].fusion}")
        block(trainers, steps)
        time.sleep(PAUSE_S)
    return time.perf_counter() - began


def throughput(trainers: dict[str, list[Trainer]], turns: int, steps: int, models: int) -> dict[str, Any]:
    """Steps a second of all models together, by way, the ways in turns."""
    rates: dict[str, list[float]] = {way: [] for way in trainers}
    fused: list[float] = []
    for turn in range(turns):
        first = turn % len(trainers)
        for way in [*list(trainers)[first:], *list(trainers)[:first]]:
            before = [each.fusion["steps"] if each.fusion is not None else 0 for each in trainers[way]]
            rates[way].append(models * steps / block(trainers[way], steps))
            if way == "fused":
                ran = sum(each.fusion["steps"] - was for each, was in zip(trainers[way], before, strict=True))  # type: ignore[index]
                fused.append(ran / (models * steps))
    over = {
        way: common.figure([a / b for a, b in zip(rates["fused"], rates[way], strict=True)])
        for way in trainers
        if way != "fused"
    }
    return {
        "steps_per_s": {way: common.figure(of) for way, of in rates.items()},
        "fused_over": over,
        "share_of_steps_in_the_group": common.figure(fused),
        "why": trainers["fused"][0].fusion["why"],  # type: ignore[index]
    }


def straggling(trainers: Sequence[Trainer], turns: int, steps: int) -> dict[str, Any]:
    """Seconds a step of the others while one makes none, beside those of as many that all make them, in turns."""
    with_it: list[float] = []
    without: list[float] = []
    for _ in range(turns):
        with_it.append(block(trainers, steps) / steps)
        without.append(block(trainers[1:], steps) / steps)
    return {"all_step_s": common.figure(with_it), "one_makes_none_step_s": common.figure(without)}


def kills(
    trainers: list[Trainer], count: int, steps: int, make: Callable[[int], Trainer], plain: PlainLoops
) -> dict[str, Any]:
    """Kill one at random amid a block, start it again and wait until all run as one; `count` times. Returns how far the
    others' losses are from the plain loops' at most, and seconds until all run as one again."""
    draw, worst, again_s = random.Random(0), 0.0, []
    for number in range(count):
        again_s.append(until_fused(trainers, steps))
        victim = draw.choice(trainers)
        for trainer in trainers:
            trainer.ask(steps)
        time.sleep(draw.uniform(0.0, AMID_S))
        victim.kill()
        others = [each for each in trainers if each is not victim]
        for trainer in others:
            trainer.answer()
        worst = max(worst, *(each.off(plain.until(len(each.losses))) for each in others))
        print(f"killed {number + 1} of {count}: the others are {worst:.1e} off", flush=True)
        trainers[trainers.index(victim)] = fresh = make(victim.seeds[0])
        fresh.hear()
        for trainer in trainers:
            trainer.fusion = None
    return {"count": count, "off": worst, "until_fused_s": common.figure(again_s)}


def measure(args: Any) -> dict[str, Any]:
    settings = {"GPUMUX_LEASE_S": "300"}  # a process that makes an array among many others is silent for long
    settings |= {f"GPUMUX_{name.upper()}": value for name, _, value in (one.partition("=") for one in args.set)}
    plain = PlainLoops(args.models, args.size, args.batch, args.dropout)
    with running_daemon(threads=1, policy="guarded", settings=settings) as daemon:

        def make(way: str, seeds: Sequence[int]) -> Trainer:
            return Trainer(way, seeds, daemon.endpoint, args.size, args.batch, args.dropout)

        every = list(range(args.models))
        seeds = {way: [every] if way == "array" else [[seed] for seed in every] for way in WAYS if way in args.ways}
        trainers = {way: [make(way, each) for each in of] for way, of in seeds.items()}
        try:
            for of in trainers.values():
                for each in of:
                    each.hear()
            result: dict[str, Any] = {"seconds_until_fused": until_fused(trainers["fused"], args.steps)}
            result |= throughput(trainers, args.turns, args.steps, args.models)
            if args.straggler:
                result["straggler"] = straggling(trainers["fused"], args.straggler, args.steps)
            result["off"] = {
                way: max(each.off(plain.until(len(each.losses))) for each in of) for way, of in trainers.items()
            }
            if args.kills:
                result["kills"] = kills(
                    trainers["fused"], args.kills, args.steps, lambda seed: make("fused", [seed]), plain
                )
        finally:
            for of in trainers.values():
                for each in of:
                    each.close()
    return {
        "models": args.models,
        "batch": args.batch,
        "size": args.size,
        "dropout": args.dropout,
        "settings": settings,
        **result,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", default="small", help="of the CNN (clients/models/cnn.py)")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the CNN")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="fused is always one of them")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="of every model, in each turn")
    parser.add_argument("--straggler", type=int, default=0, metavar="TURNS", help="blocks in which one makes no steps")
    parser.add_argument("--kills", type=int, default=0, help="how often one process is killed")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the daemon")
    args = parser.parse_args(argv)
    args.ways = {"fused", *args.ways}
    before = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        result = measure(args)
    finally:
        torch.set_num_threads(before[0])
        torch.set_default_dtype(before[1])
    for way, over in result["fused_over"].items():
        print(f"{args.models} processes: fused over {way} {over.median:.2f} ({over.low:.2f} to {over.high:.2f})")
    print(json.dumps({name: result[name] for name in result if name != "fused_over"}, default=str, indent=1))
    common.report("equal_processes", args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
