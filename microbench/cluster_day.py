"""A day of a cluster, simulated: 1,000 jobs on 64 GPUs, placed by the cluster's placement or in simpler ways.

    python -m microbench.cluster_day --out cluster-day.json

Jobs are synthetic: arrivals are Poisson with a rate that follows the hour (DAY), lengths are log-normal, classes, gang
sizes and memory are drawn from the tables below. What two jobs cost each other on one GPU is simulated before, once for
each pair of kinds, with the guard (`gpumux.simulate` on the shipped profiles): what the high job takes over alone, and
what the low one gets. Several low jobs on one GPU take turns; how far that is from the simulator is measured for some.

The placement (`gpumux/cluster/placement.py`) is the one that a coordinator runs. It learns a pair when that has run
for LEARN_S. Compared are: one job a GPU, with and without moving low jobs; a partition into nodes for high and for low
jobs; and sharing, where low jobs are spread, packed, or placed by what was learned.
"""

from __future__ import annotations

import heapq
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Any, NamedTuple

from gpumux.cli.arguments import whole
from gpumux.cluster import events as ev
from gpumux.cluster.events import ClusterJob, DeviceChoice, DeviceFacts, DeviceId, PlacementConfig
from gpumux.cluster.jobs import JobPhase
from gpumux.cluster.placement import ClusterPlacement
from gpumux.device.sim.spec import A100
from gpumux.simulate.run import simulate
from gpumux.simulate.workload import Workload, find, from_profile
from gpumux.types import JobId, Priority
from microbench import common

GIB = 2**30
HOUR = 3600.0
DAY = 24 * HOUR
NODES, GPUS = 8, 8  # nodes, and GPUs of each
MEMORY = 80 * GIB
PROMISED = 1.05
PEAK_HOUR, SWING = 15.0, 0.6  # arrivals: 1 + SWING at the peak, 1 - SWING twelve hours later, over the mean
HIGH_SHARE = 0.3  # of the jobs
MEDIAN_S, SIGMA, LONGEST_S = 0.75 * HOUR, 1.2, 12 * HOUR  # of a job's length alone; its mean is 1.4 hours
GANGS = {1: 0.6, 2: 0.2, 4: 0.15, 8: 0.05}  # GPUs of high jobs; low jobs have one
USERS = 20  # the k-th submits in proportion to 1/k
HIGH_GIB, LOW_GIB = (20, 30, 40, 50), (6, 10, 14, 20)
STOP_S, START_S, ANSWER_S = 5.0, 10.0, 0.05  # snapshot and stop, start, a daemon's answer
LEARN_S = 60.0
MOST_JOBS = 3  # on a shared GPU


class Kind(NamedTuple):
    """What a job does: a shipped profile; seconds of pause after each step, or steps a second that come at random."""

    profile: str
    think_s: float = 0.0
    rate: float | None = None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.profile}, {self.rate:g} requests/s"
        return f"{self.profile}, pauses of {self.think_s * 1e3:g} ms" if self.think_s else self.profile

    def workload(self, priority: Priority, name: str) -> Workload:
        high = (
            {"think_s": self.think_s, "rate": self.rate, "max_slowdown": PROMISED} if priority is Priority.HIGH else {}
        )
        return from_profile(find(self.profile), A100, priority, name=name, **high)


HIGHS = (
    Kind("vgg16-b16"),
    Kind("transformer-b16"),
    Kind("small-kernels-b16"),
    Kind("vgg16-b4-ddp"),
    Kind("vgg16-b4-burst", think_s=2e-3),
    Kind("transformer-b2", think_s=1e-3),
    Kind("small-kernels-b4", think_s=2e-3),
    Kind("transformer-b2", rate=250.0),
)
LOWS = (
    Kind("vgg16-b16"),
    Kind("vgg16-b4"),
    Kind("transformer-b16"),
    Kind("transformer-b2"),
    Kind("small-kernels-b4"),
)


class Pair(NamedTuple):
    """What the high job takes over alone, and what the low one does in a second, over alone."""

    slowdown: float
    low_speed: float


PairTable = dict[tuple[Kind, Kind], Pair]


def pair_table(highs: Sequence[Kind], lows: Sequence[Kind], steps: int) -> PairTable:
    """Every pair under the guard, after as many steps to learn."""
    return {(high, low): Pair(*beside(high, [low], steps)) for high in highs for low in lows}


def beside(high: Kind, lows: Sequence[Kind], steps: int) -> tuple[float, float]:
    """The high job's mean step over alone, and the low jobs' throughputs over alone, together."""
    jobs = [high.workload(Priority.HIGH, "high")]
    jobs += [low.workload(Priority.LOW, f"low{at}") for at, low in enumerate(lows)]
    result = simulate(jobs, A100, "guarded", steps=steps, warmup_steps=steps)
    if result.interrupted:
        raise KeyboardInterrupt
    speed = sum(result.job(f"low{at}").relative_throughput for at in range(len(lows)))
    return max(1.0, result.job("high").mean_slowdown), speed


# ---- The jobs of a day.


@dataclass(frozen=True)
class DayJob:
    request: ClusterJob
    kind: Kind
    arrives: float
    length_s: float  # alone


def draw_jobs(number: int, seed: int, highs: Sequence[Kind], lows: Sequence[Kind]) -> list[DayJob]:
    """The day's jobs, by arrival."""
    random = Random(f"day/{seed}")
    weights = [1.0 / (at + 1) for at in range(USERS)]
    jobs = []
    for at, arrives in enumerate(sorted(_arrival(random) for _ in range(number))):
        high = random.random() < HIGH_SHARE
        kind = random.choice(highs if high else lows)
        devices = random.choices(list(GANGS), list(GANGS.values()))[0] if high else 1
        (user,) = random.choices(range(USERS), weights)
        length = min(LONGEST_S, random.lognormvariate(math.log(MEDIAN_S), SIGMA))
        request = ClusterJob(
            JobId(f"job{at}"),
            f"user{user}",
            "all",
            Priority.HIGH if high else Priority.LOW,
            devices,
            random.choice(HIGH_GIB if high else LOW_GIB) * GIB,
            (f"high {kind.label}" if high else f"low {kind.label}",),
        )
        jobs.append(DayJob(request, kind, arrives, length))
    return jobs


def _arrival(random: Random) -> float:
    """A time of the day, by rejection; sorted, so many of them are a Poisson process of that number."""
    while True:
        when = random.uniform(0.0, DAY)
        rate = 1.0 + SWING * math.cos(2 * math.pi * (when / HOUR - PEAK_HOUR) / 24)
        if random.uniform(0.0, 1.0 + SWING) < rate:
            return when


# ---- The cluster.


class Way(NamedTuple):
    """How the cluster is used. `high_nodes`: nodes for high jobs alone, the others for low ones alone; 0: all take
    both."""

    name: str
    choice: DeviceChoice = DeviceChoice.SPREAD
    max_jobs: int = 1
    high_nodes: int = 0
    moves: bool = True

    def facts(self, node: int) -> DeviceFacts:
        classes = frozenset(Priority)
        if self.high_nodes:
            classes = frozenset({Priority.HIGH if node < self.high_nodes else Priority.LOW})
        return DeviceFacts(MEMORY, self.max_jobs, classes)


WAYS = (
    Way("one job a GPU", moves=False),
    Way("one job a GPU, low jobs moved"),
    Way("partition, 4 nodes of 8 for high jobs", high_nodes=4),
    Way("partition, 6 nodes of 8 for high jobs", high_nodes=6),
    Way("shared, packed", DeviceChoice.PACK, MOST_JOBS),
    Way("shared, spread", DeviceChoice.SPREAD, MOST_JOBS),
    Way("shared, by learned costs", DeviceChoice.LEARNED, MOST_JOBS),
)


@dataclass(eq=False)
class Running:
    """A job of the day as the cluster sees it. `rate`: solo seconds of it done in a second, since `at`."""

    job: DayJob
    remaining: float
    started_at: float = inf
    ended_at: float = inf
    attempt: int = 0
    devices: tuple[DeviceId, ...] = ()
    rate: float = 0.0
    at: float = 0.0
    ran_s: float = 0.0  # seconds on its devices
    epoch: int = 0

    @property
    def high(self) -> bool:
        return self.job.request.priority is Priority.HIGH


@dataclass(eq=False)
class Day:
    """Runs one day's jobs in one way, until all have ended."""

    jobs: Sequence[DayJob]
    way: Way
    pairs: PairTable
    nodes: int = NODES
    gpus: int = GPUS  # on each
    now: float = 0.0
    work_s: dict[Priority, float] = field(default_factory=lambda: dict.fromkeys(Priority, 0.0))  # in the day
    moves: int = 0

    def __post_init__(self) -> None:
        self.placement = ClusterPlacement(PlacementConfig(choice=self.way.choice))
        self.known = {job.request.id: Running(job, job.length_s) for job in self.jobs}
        self.on: dict[DeviceId, list[Running]] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wake_at = inf
        self._learned: set[tuple[str, str]] = set()

    def run(self) -> None:
        for node in range(self.nodes):
            self.join(node)
        for job in self.jobs:
            request = replace(job.request, movable=self.way.moves)
            self._at(job.arrives, partial(self.submit, request))
        self._at(DAY, self._day_over)
        open_jobs = len(self.jobs)
        while open_jobs and self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()
            open_jobs = len(self.jobs) - self._ended
        if open_jobs:
            raise RuntimeError(f"{open_jobs} jobs never ended")

    def join(self, node: int) -> None:
        self.feed(ev.NodeJoined(f"node{node}", (self.way.facts(node),) * self.gpus))

    _ended = 0
    _counted = True  # the day is not over

    def _day_over(self) -> None:
        for running in self.known.values():
            self._progress(running)
        self._counted = False

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), act))

    # ---- the placement, and daemons that do what it says

    def submit(self, request: ClusterJob) -> None:
        self.feed(ev.JobSubmitted(request))

    def finished(self, running: Running) -> None:
        self.feed(ev.JobFinished(running.job.request.id, running.attempt))

    def feed(self, event: ev.ClusterEvent) -> None:
        for command in self.placement.handle(event, self.now):
            self._carry_out(command)
        due = self.placement.due
        if due < inf and due != self._wake_at:
            self._wake_at = due
            self._at(due, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if due == self._wake_at:
            self._wake_at = inf
            self.feed(ev.TimePassed())

    def _later(self, seconds: float, event: ev.ClusterEvent) -> None:
        self._at(self.now + seconds, lambda: self.feed(event))

    def _carry_out(self, command: ev.ClusterCommand) -> None:
        match command:
            case ev.ReserveDevice():
                self._later(ANSWER_S, ev.DeviceReserved(command.attempt, command.device))
            case ev.ConfirmDevice():
                self._later(ANSWER_S, ev.DeviceConfirmed(command.attempt, command.device))
            case ev.StartJob():
                self._at(self.now + START_S, lambda: self._start(command))
            case ev.StopRank():
                self._stop(self.known[command.job], command.attempt)
                self._later(STOP_S, ev.RankStopped(command.attempt, command.device))
            case ev.AnswerJob():
                self._ended += 1
            case _:
                pass

    def _start(self, command: ev.StartJob) -> None:
        attempt = self.placement.attempts.get(command.attempt)
        if attempt is None or attempt.phase is JobPhase.STOPPING:
            return  # stopped before it began
        self.begin(command)

    def begin(self, command: ev.StartJob) -> None:
        """The job runs from now on."""
        running = self.known[command.job]
        running.attempt, running.devices = command.attempt, command.devices
        running.started_at = min(running.started_at, self.now)
        running.at = self.now
        for device in running.devices:
            self.on.setdefault(device, []).append(running)
        self._changed(running.devices)
        self._at(self.now + LEARN_S, lambda: self._learn(running, command.attempt))

    def _stop(self, running: Running, attempt: int) -> None:
        if running.attempt != attempt or not running.devices:
            return
        self.moves += 1
        self._leave(running)

    def _leave(self, running: Running) -> None:
        self._progress(running)
        devices, running.devices, running.rate = running.devices, (), 0.0
        running.epoch += 1
        for device in devices:
            self.on[device].remove(running)
        self._changed(devices)

    def _learn(self, running: Running, attempt: int) -> None:
        """The daemons have measured the job beside those that are there, if it is still there."""
        if running.attempt != attempt:
            return
        for device in running.devices:
            for high in self.on[device]:
                for low in self.on[device]:
                    if not high.high or low.high:
                        continue
                    (one,), (other,) = high.job.request.programs, low.job.request.programs
                    if (one, other) not in self._learned:
                        self._learned.add((one, other))
                        pair = self.pairs[high.job.kind, low.job.kind]
                        self.feed(ev.PairMeasured(one, other, pair.slowdown, pair.low_speed))

    # ---- how fast everything runs

    def _changed(self, devices: Sequence[DeviceId]) -> None:
        """Other jobs are on these devices than before."""
        for running in dict.fromkeys(each for device in devices for each in self.on[device]):
            self._progress(running)
            running.rate = self._rate(running)
            running.epoch += 1
            self._at(self.now + running.remaining / running.rate, partial(self._end, running, running.epoch))

    def _rate(self, running: Running) -> float:
        if running.high:
            return 1.0 / max(self._slowdown(running, device) for device in running.devices)
        (device,) = running.devices
        there = self.on[device]
        lows = sum(not each.high for each in there)
        high = next((each for each in there if each.high), None)
        speed = 1.0 if high is None else self.pairs[high.job.kind, running.job.kind].low_speed
        return max(1e-6, speed / lows)

    def _slowdown(self, high: Running, device: DeviceId) -> float:
        lows = [each for each in self.on[device] if not each.high]
        if not lows:
            return 1.0
        return statistics.fmean(self.pairs[high.job.kind, low.job.kind].slowdown for low in lows)

    def _progress(self, running: Running) -> None:
        if not running.devices:
            return
        passed = self.now - running.at
        done = passed * running.rate
        running.remaining, running.at = max(0.0, running.remaining - done), self.now
        running.ran_s += passed
        if self._counted:
            self.work_s[running.job.request.priority] += done * len(running.devices)

    def _end(self, running: Running, epoch: int) -> None:
        if running.epoch != epoch:
            return
        self._leave(running)
        running.ended_at = self.now
        self.finished(running)

    # ---- what came of it

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {
            "low_work_gpu_h": self.work_s[Priority.LOW] / HOUR,
            "utilisation": sum(self.work_s.values()) / (self.nodes * self.gpus * DAY),
            "all_ended_h": self.now / HOUR,
            "moves": float(self.moves),
        }
        for name, high in (("high", True), ("low", False)):
            of = [each for each in self.known.values() if each.high is high]
            queued = [each.started_at - each.job.arrives for each in of]
            stretch = [(each.ended_at - each.job.arrives) / each.job.length_s for each in of]
            found[f"{name}_queue_mean_s"] = statistics.fmean(queued)
            found[f"{name}_queue_p95_s"] = common.percentile(queued, 0.95)
            found[f"{name}_stretch_p50"] = common.percentile(stretch, 0.5)
            found[f"{name}_ended_h"] = max(each.ended_at for each in of) / HOUR
        slowdowns = [each.ran_s / each.job.length_s for each in self.known.values() if each.high]
        found["high_slowdown_mean"] = statistics.fmean(slowdowns)
        found["high_slowdown_max"] = max(slowdowns)
        return found


def run_day(jobs: Sequence[DayJob], way: Way, pairs: PairTable) -> dict[str, float]:
    day = Day(jobs, way, pairs)
    day.run()
    return day.figures()


# ---- The report.


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--jobs", type=whole, default=1000, help="of a day (default 1000)")
    parser.add_argument("--days", type=whole, default=5, help="each with jobs of its own (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=whole, default=300, help="high steps of each pair, after as many (default 300)")
    parser.add_argument("--kinds", type=whole, default=len(HIGHS), help="of high jobs, and of low ones at most")
    args = parser.parse_args(argv)
    facts = common.machine()
    print(common.describe(facts))
    highs, lows = HIGHS[: args.kinds], LOWS[: args.kinds]
    pairs = pair_table(highs, lows, args.steps)
    print("\nwhat a high job takes over alone / what the low job gets, in the simulator with the guard")
    print(common.table(*show_pairs(pairs, highs, lows)))
    triples = check_turns(pairs, highs, lows, args.steps)
    rows = []
    for day in range(args.days):
        jobs = draw_jobs(args.jobs, args.seed + day, highs, lows)
        for way in WAYS:
            rows.append({"day": day, "way": way.name, **run_day(jobs, way, pairs)})
            if sys.stderr.isatty():
                print(f"day {day}, {way.name}".ljust(60), end="\r", file=sys.stderr)
    print(f"\nmeans of {args.days} days of {args.jobs} jobs on {NODES * GPUS} GPUs")
    print(common.table(*show_ways(rows)))
    judged = targets(rows, triples)
    for name, target in judged.items():
        print(f"{name}: {target['value']:.3f}, wanted {target['target']}, {'met' if target['met'] else 'NOT MET'}")
    report = {
        "machine": facts,
        "seed": args.seed,
        "pairs": [{"high": high.label, "low": low.label, **pair._asdict()} for (high, low), pair in pairs.items()],
        "two_low_jobs": triples,
        "rows": rows,
        "targets": judged,
    }
    common.report("cluster_day", args.out, report)
    return 0


def check_turns(pairs: PairTable, highs: Sequence[Kind], lows: Sequence[Kind], steps: int) -> list[dict[str, Any]]:
    """Two low jobs beside a high one in the simulator, and as they are taken here: half of what each gets alone."""
    found = []
    for at, high in enumerate(highs):
        two = lows[at % len(lows)], lows[(at + 1) % len(lows)]
        slowdown, speed = beside(high, two, steps)
        known = [pairs[high, low] for low in two]
        found.append({
            "high": high.label, "lows": [low.label for low in two], "slowdown": slowdown, "low_speed": speed,
            "taken_slowdown": statistics.fmean(pair.slowdown for pair in known),
            "taken_low_speed": statistics.fmean(pair.low_speed for pair in known),
        })  # fmt: skip
    return found


def show_pairs(pairs: PairTable, highs: Sequence[Kind], lows: Sequence[Kind]) -> tuple[list[str], list[list[str]]]:
    def cell(high: Kind, low: Kind) -> str:
        return f"{pairs[high, low].slowdown:.3f} / {pairs[high, low].low_speed:.2f}"

    return ["", *[low.label for low in lows]], [[high.label, *[cell(high, low) for low in lows]] for high in highs]


COLUMNS = {
    "low work, GPU h": ("low_work_gpu_h", 1.0, 0),
    "utilisation": ("utilisation", 1.0, 3),
    "high: queue, s": ("high_queue_mean_s", 1.0, 0),
    "p95": ("high_queue_p95_s", 1.0, 0),
    "slowdown": ("high_slowdown_mean", 1.0, 3),
    "max": ("high_slowdown_max", 1.0, 3),
    "low: queue, min": ("low_queue_mean_s", 60.0, 1),
    "stretch": ("low_stretch_p50", 1.0, 2),
    "all ended, h": ("all_ended_h", 1.0, 1),
    "moves": ("moves", 1.0, 0),
}


def mean(rows: Sequence[dict[str, Any]], way: str, figure: str) -> float:
    return statistics.fmean(row[figure] for row in rows if row["way"] == way)


def show_ways(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for way in WAYS:
        cells = [f"{mean(rows, way.name, key) / unit:.{digits}f}" for key, unit, digits in COLUMNS.values()]
        lines.append([way.name, *cells])
    return ["", *COLUMNS], lines


def targets(rows: Sequence[dict[str, Any]], triples: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Learned costs against the other choices and other uses of the cluster, at the same promise to high jobs."""
    learned, found = WAYS[-1].name, {}
    for way in WAYS[:-1]:
        # Ways that share keep the same promise, so low work is compared; the others also in how much high work they do.
        figure = "low_work_gpu_h" if way.max_jobs > 1 else "utilisation"
        gain = mean(rows, learned, figure) / mean(rows, way.name, figure)
        what = "low work" if way.max_jobs > 1 else "all work"
        found[f"{what} by learned costs, over: {way.name}"] = {"value": gain, "target": "above 1", "met": gain > 1.0}
    worst = max(row["high_slowdown_max"] for row in rows if row["way"] == learned)
    found["worst slowdown of a high job, by learned costs"] = {
        "value": worst, "target": f"at most {PROMISED}", "met": worst <= PROMISED
    }  # fmt: skip
    error = statistics.fmean(abs(each["low_speed"] - each["taken_low_speed"]) for each in triples)
    found["two low jobs: what they get, against what is taken here (mean error)"] = {
        "value": error, "target": "at most 0.1", "met": error <= 0.1
    }  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
