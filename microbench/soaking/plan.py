"""What happens in a soak, and when: made of the seed alone, so that the same seed asks for the same things again.

A soak has *tides*. In each one everybody comes, works and is disturbed; at its end everybody leaves, and what the
daemon then holds is compared with what it held after the tide before. Clients are *seats*: whoever sits there lives for
a while, leaves in one way or another, and somebody else comes. What the plan can't fix is who gets the processor when,
so which step meets which pause differs from run to run.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

KINDS = ("counter", "mix", "whole")  # of a light client's program (light.py)
ENDINGS = ("close", "abandon", "vanish")  # drained; with steps under way; without a word
CROWD = 12  # light clients of a process
PAIR = 2  # training clients of a process
TRAINING = 0.08  # of the clients train with torch
HIGH = 0.05  # of the clients are important
LEASE_S = 30.0  # longer than usual: of so many clients on so few cores one may not be heard for ten seconds
STUN_S = 35.0  # a process that stands still for so long has lost its sessions


@dataclass(frozen=True, slots=True)
class Seat:
    """`size`: elements of state and batch. `pace_s`: the longest pause between two steps. `life_s`: of each life, at
    most."""

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
    """At `at_s` of a tide. `what`: kill, stun (of process `which`), pause, priority, weight, stop, look (of a job:
    `which` picks one of those that are there). `much`: seconds of a pause, a weight."""

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
    """About one kill every twelve seconds and one meddling operator every second for 25 clients."""
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
    """Of all that is planned: equal for equal seeds."""
    return hashlib.sha256(json.dumps([asdict(tide) for tide in tides]).encode()).hexdigest()[:16]
