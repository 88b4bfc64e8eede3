"""Clients that train real models with torch (microbench/killed.py), and the check of their results: each result is
written to a file as it arrives, so that those of a killed client are kept, and `verify` runs the same loops without a
daemon. Imports torch.

    python -m microbench.soaking.trainers SPEC.json PROCESS
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpumux.errors import DaemonGone, JobClosed, StaleState, UnknownJob
from microbench.killed import TRIALS, Trial, plain
from microbench.kills import Run, bits, submit
from microbench.soaking.counters import SharedCounters
from microbench.soaking.light import SuspensionMonitor
from microbench.soaking.plan import ClientSlot

UNDER_WAY = 8  # results that are not waited for yet


@dataclass(frozen=True)
class Verdict:
    """Counts over all trainers; `results`: those that were compared of the `acknowledged` ones; `states`: of those that
    left in order."""

    acknowledged: int
    results: int
    results_wrong: int
    states: int
    states_wrong: int


def train(
    slot: ClientSlot,
    spec: dict[str, Any],
    counters: SharedCounters,
    leave: threading.Event,
    was_suspended: Callable[[], bool],
) -> None:
    """Train one model after the other until SIGTERM. A job that an operator stopped is submitted again."""
    while not leave.is_set():
        number = counters.add(slot.number, "lives")
        seed = 1000 * slot.number + number
        make = TRIALS[int(slot.kind.removeprefix("torch:"))]
        path = Path(spec["results"]) / f"{spec['round']}-{slot.number}-{number}.jsonl"
        with path.open("w", buffering=1) as out:
            out.write(json.dumps({"kind": slot.kind, "seed": seed}) + "\n")
            try:
                live(make, seed, slot, spec["endpoint"], out, leave)
            except (JobClosed, UnknownJob):
                counters.add(slot.number, "stopped")
            except StaleState as error:  # it was stopped while its model was read
                if "closed by user" not in str(error):
                    counters.trouble(slot.number, f"{type(error).__name__}: {error}")
                counters.add(slot.number, "stopped")
            except DaemonGone as error:  # while it is submitted; afterwards it comes back by itself
                if was_suspended():
                    counters.add(slot.number, "cut")
                else:
                    counters.trouble(slot.number, f"{type(error).__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - every other error is recorded
                counters.trouble(slot.number, f"{type(error).__name__}: {error}")


def live(
    make: Callable[[int], Trial], seed: int, slot: ClientSlot, endpoint: str, out: Any, leave: threading.Event
) -> None:
    with making:  # a trial's first weights are drawn from the generator that all threads share
        trial = make(seed)
        run = submit(trial, endpoint, priority="high" if slot.priority else "low")
    with run.job:
        while not leave.is_set():
            turn(run, out, UNDER_WAY)
            leave.wait(slot.pace_s)
        turn(run, out, 0)
        run.job.sync()
        out.write(json.dumps({"turns": run.turns, "state": [bits(t).hex() for t in trial.state()]}) + "\n")


making = threading.Lock()


def turn(run: Run, out: Any, keep: int) -> None:
    """One step of the loop, and the results that are older than `keep` steps."""
    for name, batch in run.trial.turn(run.turns):
        run.futures.append(run.calls[name](*batch))
    run.trial.between(run.turns)
    run.turns += 1
    while len(run.futures) > keep:
        out.write(json.dumps(bits(run.futures[0].result()).hex()) + "\n")
        del run.futures[0]


def verify(directory: Path, within_s: float, seed: int) -> Verdict:
    """Compare the results with the plain loops', life after life in an order drawn from `seed`, and begin no further
    life once `within_s` seconds have passed: one core runs again what two ran."""
    torch.set_num_threads(1)
    acknowledged = results = wrong = states = states_wrong = 0
    paths = sorted(directory.glob("*.jsonl"))
    random.Random(seed).shuffle(paths)
    until = time.monotonic() + within_s
    for path in paths:
        lines = path.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]  # the last line may be incomplete
        if not found:
            continue
        head, rest = found[0], found[1:]
        told = [line for line in rest if isinstance(line, str)]
        acknowledged += len(told)
        if time.monotonic() > until:
            continue
        trial = TRIALS[int(head["kind"].removeprefix("torch:"))](head["seed"])
        end = next((line for line in rest if isinstance(line, dict)), None)
        calls = 0
        turns = 0
        while calls < len(told) or (end is not None and turns < end["turns"]):
            calls += len(trial.turn(turns))
            turns += 1
        expected = [bits(t).hex() for t in plain(trial, turns)]
        results += len(told)
        wrong += sum(a != b for a, b in zip(told, expected, strict=False))
        if end is not None:
            state = [bits(t).hex() for t in trial.state()]
            states += 1
            states_wrong += state != end["state"]
    return Verdict(acknowledged, results, wrong, states, states_wrong)


def main(path: str, process: str) -> int:
    spec = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    logging.getLogger("gpumux.client").setLevel(logging.ERROR)
    counters = SharedCounters(Path(spec["counters"]), spec["all"])
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    slots = [ClientSlot(**slot) for slot in spec["slots"] if slot["process"] == int(process)]
    was_suspended = SuspensionMonitor(spec["lease_s"])
    threads = [threading.Thread(target=train, args=(slot, spec, counters, leave, was_suspended)) for slot in slots]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
