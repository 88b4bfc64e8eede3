"""The plan of a soak: what happens, and when. It is derived from the seed alone, so equal seeds give equal plans.

A soak has several *rounds*. In each, all clients connect, work and are disturbed; at its end all of them leave, and
what the daemon then holds is compared with what it held after the round before. A round has *slots*: in each slot one
client runs for a while and leaves in one of several ways, then the next one connects. The plan does not fix when each
process runs, so which step meets which pause differs from run to run.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

KINDS = ("counter", "mix", "whole")  # of a light client's program (light.py)
ENDINGS = ("close", "abandon", "vanish")  # drained; with steps under way; without a message
LIGHT_PER_PROCESS = 12  # light clients of a process
TRAINING_PER_PROCESS = 2  # training clients of a process
TRAINING = 0.08  # of the clients train with torch
HIGH = 0.05  # of the clients are important
LEASE_S = 30.0  # longer than the default: with many clients on few cores one may send nothing for ten seconds
SUSPEND_S = 35.0  # a process that is stopped for so long loses its sessions


@dataclass(frozen=True, slots=True)
class ClientSlot:
    """A place for one client at a time. `size`: elements of state and batch. `pace_s`: the longest pause between two
    steps. `life_s`: the longest time that one client runs."""

    number: int
    process: int
    kind: str  # of KINDS, or "torch:0" to "torch:3"
    priority: int
    weight: float
    size: int
    inflight: int
    pace_s: float
    life_s: float


@dataclass(frozen=True, slots=True)
class Disturbance:
    """An event `at_s` seconds after the start of a round. `what`: kill or stun (process `which`), or pause, priority,
    weight, stop or look (a job, which `which` picks of those that are open). `much`: seconds of a pause, or a
    weight."""

    at_s: float
    what: str
    which: int
    much: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its clients, and what disturbs them."""

    number: int
    seconds: float
    slots: tuple[ClientSlot, ...]
    disturbances: tuple[Disturbance, ...]

    @property
    def processes(self) -> list[int]:
        return sorted({slot.process for slot in self.slots})

    def of(self, process: int) -> list[ClientSlot]:
        return [slot for slot in self.slots if slot.process == process]


def make(seed: int, seconds: float, clients: int, rounds: int = 2) -> list[Round]:
    """Rounds of equal length. Raises ValueError for less than one client or round."""
    if clients < 1 or rounds < 1 or seconds <= 0:
        raise ValueError("a soak needs a client, a round and some time")
    return [_round(random.Random(f"{seed}:{n}"), n, seconds / rounds, clients) for n in range(rounds)]


def _round(draw: random.Random, number: int, seconds: float, clients: int) -> Round:
    training = round(TRAINING * clients)
    light = clients - training
    slots = [_light(draw, n, seconds) for n in range(light)]
    first = -(-light // LIGHT_PER_PROCESS)
    slots += [_torch(draw, light + n, first + n // TRAINING_PER_PROCESS, seconds) for n in range(training)]
    processes = sorted({slot.process for slot in slots})
    return Round(number, seconds, tuple(slots), tuple(_disturbances(draw, seconds, processes, clients)))


def _light(draw: random.Random, number: int, seconds: float) -> ClientSlot:
    return ClientSlot(
        number, number // LIGHT_PER_PROCESS, draw.choice(KINDS), int(draw.random() < HIGH),
        draw.choice([0.5, 1.0, 1.0, 3.0]), draw.choice([1, 16, 1024, 32_768]), draw.randint(1, 4),
        draw.choice([0.0, 0.05, 0.2, 0.5]),
        min(30.0, max(0.5, seconds * draw.uniform(0.05, 0.8))),
    )  # fmt: skip


def _torch(draw: random.Random, number: int, process: int, seconds: float) -> ClientSlot:
    priority = int(draw.random() < 0.25)
    return ClientSlot(
        number, process, f"torch:{draw.randrange(4)}", priority, 1.0, 0, 2, draw.choice([0.0, 0.05]), seconds
    )


def _disturbances(draw: random.Random, seconds: float, processes: Sequence[int], clients: int) -> list[Disturbance]:
    """About one kill in twelve seconds, and one change by an operator in a second for 25 clients."""
    found = [
        Disturbance(draw.uniform(0.15, 0.9) * seconds, "kill", draw.choice(processes), 0.0)
        for _ in range(max(1, round(seconds / 12)))
    ]
    if seconds > 3 * SUSPEND_S:
        found += [
            Disturbance(draw.uniform(0.2, 0.6) * seconds, "stun", draw.choice(processes), SUSPEND_S)
            for _ in range(max(1, round(seconds / 60)))
        ]
    for _ in range(max(4, round(seconds * clients / 25))):
        what = draw.choice([*["pause"] * 4, *["priority", "weight", "look"] * 2, "stop"])
        much = draw.uniform(0.05, 1.5) if what == "pause" else draw.choice([0.25, 1.0, 4.0])
        found.append(Disturbance(draw.uniform(0.05, 0.95) * seconds, what, draw.randrange(1 << 30), much))
    return sorted(found, key=lambda h: h.at_s)


def digest(rounds: Sequence[Round]) -> str:
    """A digest of the plan, equal for equal seeds."""
    return hashlib.sha256(json.dumps([asdict(round_) for round_ in rounds]).encode()).hexdigest()[:16]
