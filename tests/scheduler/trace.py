"""What a scheduler does in fixed histories, line by line: run by test_compiled_is_equal.py interpreted and compiled.

    python -m tests.scheduler.trace FILE

Every command of every event, with the time, and in the end all the core says of itself. So the first line that differs
names the first event that was handled otherwise.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

from gpumux.cli.main import main
from gpumux.config import POLICIES
from gpumux.device.sim.cost import Kernel
from gpumux.device.sim.spec import A100
from gpumux.scheduler import RUNS
from gpumux.scheduler import scheduler as machine
from gpumux.scheduler.config import SchedulerConfig
from gpumux.scheduler.events import Command, Event
from gpumux.simulate import daemon as simulated_daemon
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload
from gpumux.types import Priority
from microbench import core_rate
from tests.scheduler import test_properties, world

LIVES = 8  # of each policy
RULES = 60  # in each
SIMULATIONS = (
    ("--high", "vgg16-b4-burst:think=1.6ms", "--low", "vgg16-b4", "--max-slowdown", "1.05"),
    ("--high", "vgg16-b4-ddp", "--low", "vgg16-b16", "--low", "vgg16-b4:think=3ms", "--gpu-model", "h200"),
)
lines: list[str] = []


class Told:
    """A core that notes what it is asked and answers."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._core = machine.Scheduler(config)
        cores.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = self._core.handle(event, now)
        lines.append(f"{now!r} {event} -> {commands}")
        return commands

    def high_jobs(self) -> list[Any]:
        """The guard's high jobs, if there is one."""
        guard = self._core._state.guard
        return list(guard.high_jobs.values()) if guard is not None else []

    def tell(self) -> None:
        """What is known in the end. Keys are not sorted: their order is part of it."""
        snapshot = self._core.snapshot()
        lines.append(json.dumps(snapshot))
        for job in snapshot["jobs"]:
            lines.extend([*self._core.explain(job["job"]), *self._core.story(job["job"], newest=30)])
        lines.extend(map(str, (self._core.all_out(), self._core.held(), self._core.banned())))


cores: list[Told] = []


def case(name: str) -> None:
    for core in cores:
        core.tell()
    cores.clear()
    lines.append(f"== {name}")


def recordings() -> None:
    """Many jobs on a device that is never idle, as the benchmark of the core has them."""
    for policy in POLICIES:
        for jobs, events in ((12, 2500), (60, 1500)):
            case(f"{policy}, {jobs} jobs")
            recorder = core_rate.Recorder(jobs, 1, policy)
            recorder.set_up(jobs)
            for _ in range(events):
                recorder.advance()


def lives() -> None:
    """Sessions, jobs and steps that come, change, fail and go, by the rules of the property tests."""
    for policy in POLICIES:
        for seed in range(LIVES):
            case(f"a life under {policy}, {seed}")
            draw = random.Random(seed)
            life = type("Life", (test_properties.Life,), {"policy": policy})()
            life.begin(pieces=pieces(draw))
            for _ in range(RULES):
                one_rule(life, draw)
            case("its end")
            life.teardown()


def pieces(draw: random.Random) -> tuple[float, ...]:
    return tuple(draw.uniform(0.0, 2e-3) for _ in range(draw.randint(1, 4)))


def one_rule(life: Any, draw: random.Random) -> None:
    n, really = draw.randrange(1 << 16), draw.random() < 1 / 16
    rules: list[tuple[str, dict[str, Any]]] = [
        ("submit", {"n": n, "program": draw.choice((0, 0, 0, 1, 2))}),
        ("submit_all", {"n": n, "more": draw.choice((0, 0, 3))}),
        ("submit_again", {"n": n}), ("stale", {"n": n}), ("request_again", {"n": n}), ("open_session", {}),
        ("close_session", {"n": n, "really": really}),
        ("request_job", {
            "n": n, "priority": draw.choice(("low", "high")), "weight": draw.uniform(0.1, 10.0),
            "inflight": draw.randint(1, 4), "pieces": pieces(draw), "shared": draw.random() < 0.5,
        }),
        ("offer", {"n": n, "program": draw.randint(0, 3), "state": draw.choice((0, 10, 1 << 31)), "transient": 10}),
        ("ask_transfer", {"n": n, "into": draw.random() < 0.5}), ("transfer_ended", {"n": n, "fault": None}),
        ("pause", {"n": n}), ("resume", {"n": n}), ("resume", {"n": n}),
        ("change", {
            "n": n, "priority": draw.choice(("", "low", "high")),
            "weight": draw.choice((None, draw.uniform(0.1, 10.0))),
        }),
        ("close", {"n": n, "drain": draw.random() < 0.5, "really": really}),
        ("leave", {"really": really, "truly": draw.random() < 0.1}), ("released", {"n": n}),
        ("ready", {
            "n": n, "cut": draw.randint(0, 3), "pieces": pieces(draw), "every": draw.choice((0, 0, 1, 2)),
        }),
        ("drop", {"n": n}), ("peers_came", {"n": n, "seconds": draw.uniform(0.0, 2e-3)}),
        ("job_died", {"n": n, "really": really}),
    ]  # fmt: skip
    if not life.any_job():
        rules = [rule for rule in rules if rule[0] in ("request_job", "transfer_ended", "leave", "released")]
    elif life.any_launch():
        done = ("piece_done", {"n": n, "seconds": draw.uniform(0.0, 2e-3)})
        rules += [done, done, done, ("many_done", {"n": n}), ("many_done", {"n": n})]
        rules.append(("piece_failed", {"n": n, "really": really}))
    name, arguments = draw.choice(rules)
    getattr(life, name)(**arguments)


def simulations() -> None:
    """Two models beside each other on the simulated GPU: the guard learns, tries, bans and lifts bans."""
    for arguments in SIMULATIONS:
        case(" ".join(arguments))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert main(["simulate", *arguments, "--json", "--explain", "--steps", "60", "--warmup", "30"]) == 0
        lines.append(said.getvalue())


def random_arrivals() -> None:
    """Long enough for the guard to find that no gap tells when the next step comes."""
    case("random arrivals")
    full = Kernel("full", 432, 100e-6, 4, 0)
    high = Workload("high", Priority.HIGH, (full,) * 5, rate=100.0, max_slowdown=1.05)
    low = Workload("low", Priority.LOW, (full._replace(name="other", block_s=30e-6),) * 30)
    Simulation((high, low), A100, "guarded").run(steps=400)
    assert [track.step_arrivals.at_random for core in cores for track in core.high_jobs()] == [True]


def run(path: str) -> None:
    for module in (core_rate, world, simulated_daemon):
        setattr(module, "Scheduler", Told)
    recordings()
    lives()
    simulations()
    random_arrivals()
    case("the end")

    Path(path).write_text("\n".join(lines))
    print(RUNS.kind, machine.__file__)


if __name__ == "__main__":
    run(sys.argv[1])
