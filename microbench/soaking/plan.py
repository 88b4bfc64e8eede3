"""The plan of a soak: what happens, and when. It is derived from the seed alone, so equal seeds give equal plans.

A soak has several *tides*. In each, all clients connect, work and are disturbed; at its end all of them leave, and what
the daemon then holds is compared with what it held after the tide before. A tide has *seats*: on each seat one client
runs for a while and leaves in one of several ways, then the next one connects. The plan does not fix when each process
runs, so which step meets which pause differs from run to run.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

KINDS = ("counter", "mix", "whole")  # of a light client's program (light.py)
ENDINGS = ("close", "abandon", "vanish")  # drained; with steps under way; without a message
CROWD = 12  # light clients of a process
PAIR = 2  # training clients of a process
TRAINING = 0.08  # of the clients train with torch
HIGH = 0.05  # of the clients are important
LEASE_S = 30.0  # longer than the default: with many clients on few cores one may send nothing for ten seconds
STUN_S = 35.0  # a process that is stopped for so long loses its sessions


@dataclass(frozen=True, slots=True)
class Seat:
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
class Happening:
    """An event `at_s` seconds after the start of a tide. `what`: kill or stun (process `which`), or pause, priority,
    weight, stop or look (a job, which `which` picks of those that are open). `much`: seconds of a pause, or a
    weight."""

    at_s: float
    what: str
    which: int
    much: float


@dataclass(frozen=True, slots=True)
class Tide:
    number: int
    seconds: float
    seats: tuple[Seat, ...]
    happenings: tuple[Happening, ...]

    @property
    def processes(self) -> list[int]:
        return sorted({seat.process for seat in self.seats})

    def of(self, process: int) -> list[Seat]:
        return [seat for seat in self.seats if seat.process == process]


def make(seed: int, seconds: float, clients: int, tides: int = 2) -> list[Tide]:
    """Tides of equal length. Raises ValueError for less than one client or tide."""
    if clients < 1 or tides < 1 or seconds <= 0:
        raise ValueError("a soak needs a client, a tide and some time")
    return [_tide(random.Random(f"{seed}:{n}"), n, seconds / tides, clients) for n in range(tides)]


def _tide(draw: random.Random, number: int, seconds: float, clients: int) -> Tide:
    training = round(TRAINING * clients)
    light = clients - training
    seats = [_light(draw, n, seconds) for n in range(light)]
    first = -(-light // CROWD)
    seats += [_torch(draw, light + n, first + n // PAIR, seconds) for n in range(training)]
    processes = sorted({seat.process for seat in seats})
    return Tide(number, seconds, tuple(seats), tuple(_happenings(draw, seconds, processes, clients)))


def _light(draw: random.Random, number: int, seconds: float) -> Seat:
    return Seat(
        number, number // CROWD, draw.choice(KINDS), int(draw.random() < HIGH), draw.choice([0.5, 1.0, 1.0, 3.0]),
        draw.choice([1, 16, 1024, 32_768]), draw.randint(1, 4), draw.choice([0.0, 0.05, 0.2, 0.5]),
        min(30.0, max(0.5, seconds * draw.uniform(0.05, 0.8))),
    )  # fmt: skip


def _torch(draw: random.Random, number: int, process: int, seconds: float) -> Seat:
    priority = int(draw.random() < 0.25)
    return Seat(number, process, f"torch:{draw.randrange(4)}", priority, 1.0, 0, 2, draw.choice([0.0, 0.05]), seconds)


def _happenings(draw: random.Random, seconds: float, processes: Sequence[int], clients: int) -> list[Happening]:
    """About one kill in twelve seconds, and one change by an operator in a second for 25 clients."""
    found = [
        Happening(draw.uniform(0.15, 0.9) * seconds, "kill", draw.choice(processes), 0.0)
        for _ in range(max(1, round(seconds / 12)))
    ]
    if seconds > 3 * STUN_S:
        found += [
            Happening(draw.uniform(0.2, 0.6) * seconds, "stun", draw.choice(processes), STUN_S)
            for _ in range(max(1, round(seconds / 60)))
        ]
    for _ in range(max(4, round(seconds * clients / 25))):
        what = draw.choice([*["pause"] * 4, *["priority", "weight", "look"] * 2, "stop"])
        much = draw.uniform(0.05, 1.5) if what == "pause" else draw.choice([0.25, 1.0, 4.0])
        found.append(Happening(draw.uniform(0.05, 0.95) * seconds, what, draw.randrange(1 << 30), much))
    return sorted(found, key=lambda h: h.at_s)


def digest(tides: Sequence[Tide]) -> str:
    """A digest of the plan, equal for equal seeds."""
    return hashlib.sha256(json.dumps([asdict(tide) for tide in tides]).encode()).hexdigest()[:16]
