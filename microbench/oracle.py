"""The most low work that could be done beside a high job under its promise, all durations known in advance.

The oracle has what the guard has: the same pieces, the same non-preemptive device and host, the same target (mean step
time within `max_slowdown` of alone, the 99th percentile within twice that excess). It knows what the guard has to
learn: every duration, when the next step comes, and what each choice will lead to, because it tries it.

The search is over plans (planned.py). Each is simulated exactly, on the same engine, and only one that keeps the
promise counts:

1. For each high piece and share: low pieces are launched there and nowhere else, one in every second step. So each
  launch's
   cost is known, by low piece, high piece and share: what it adds to its step and the next.
2. Each low piece gets the places where it costs least for the work it does: the best one and those not much dearer, to
  several
   meanings of "much".
3. Every high step adds a credit to an account that launches are paid from. The credit is bisected to where the promise
  is just kept
   in mean and tail. So that the tail holds, what one step may bear is bounded, too, to several bounds.

No plan is simulated whose outcome is known: a plan tried before, and more credit where less has held no launch back
(then each launch is paid at the same moment as before). And none is simulated further once the promise is broken,
whatever comes.

Why this is near the optimum: with steps that repeat, cost and gain of a low launch belong to its place in the step and
to its kind; the low job's pieces come in order, so each has to run somewhere, and where launches don't affect one
another nothing is better than the cheapest places as often as the promise bears. It is not above the optimum, since
everything it reports was reached; and it is not proven to be it: a plan tells no moments within a high piece apart and
does not look ahead in the low job. So the harvest of the guard itself, where it kept the promise, is one of the
candidates (sweep.py): no share exceeds 1 unless the promise was broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, inf

from gpumux.device.sim.spec import GpuSpec
from gpumux.simulate.result import Result, Solo
from gpumux.simulate.run import Simulation, solo
from gpumux.simulate.workload import Workload, cut_workload
from gpumux.types import Priority
from microbench.planned import GAP, Cost, Entry, Plan, Planned

STEPS, WARMUP = 100, 20  # of every plan tried
BISECTIONS = 6
LOWER_LIMIT = 0.75  # of the tail's room: what one step may bear in the stricter of two plans
DEARER = (1.15, 2.0, inf)  # times a low piece's least cost at which a place is still used
SHORTEST_GAP_S = 20e-6
MIN_COST_S = 1e-6  # below this a launch is as good as free
PROBES = 2  # launches of each low piece at each place
MOST_PROBES = 60  # launches at each place


@dataclass(frozen=True)
class Tried:
    """One plan, simulated."""

    plan: Plan
    mean: float  # slowdown of the high job
    p99: float
    harvest: float  # low seconds of work a second
    keeps: bool  # if not, the other figures are of the steps until that was certain
    short: bool = True  # whether a larger credit would change anything


@dataclass(frozen=True)
class Oracle:
    """The best plan found that keeps the promise, how many were tried, and how many of those were simulated."""

    best: Tried
    tried: int
    simulated: int


def keeps_promise(mean: float, p99: float, max_slowdown: float) -> bool:
    return mean <= max_slowdown and p99 <= 1 + 2 * (max_slowdown - 1)


class Search:
    """For one pair of jobs. Without `shortcuts` every plan is simulated, to its end: the same is found, later."""

    def __init__(self, high: Workload, low: Workload, spec: GpuSpec, *, shortcuts: bool = True) -> None:
        self._jobs, self._spec = (high, low), spec
        self._pieces = cut_workload(high, spec), cut_workload(low, spec)
        self._high_count, self._low_count = (len(pieces.seconds) for pieces in self._pieces)
        self._gap_s = gap_seconds(replace(high, name="alone"), spec)
        self._tried = self._simulated = 0
        self._shortcuts = shortcuts
        self._hopeful = False  # whether there is a plan that keeps the promise
        self._known: dict[object, list[Tried]] = {}  # what came of a plan's credits

    def run(self) -> Oracle:
        nothing = self._try(Plan({}))
        candidates, self._hopeful = [nothing], nothing.keeps
        costs = self._costs()
        for dearer in DEARER:
            for widest in (False, True):
                candidates += self._paid(self._plan(costs, dearer, widest=widest))
        plan = self._best(candidates).plan
        if plan.shares:
            candidates += self._paid(replace(plan, depth=2))
            candidates += self._paid(replace(plan, step_limit=LOWER_LIMIT * plan.step_limit))
        return Oracle(self._best(candidates), self._tried, self._simulated)

    # ---- plans

    def _simulate(
        self, plan: Plan, steps: int, enough: Callable[[Simulation], bool] | None = None
    ) -> tuple[Result, Planned]:
        self._tried += 1
        self._simulated += 1
        core = Planned(plan, self._spec, *self._pieces, self._gap_s)
        simulation = Simulation(list(self._jobs), self._spec, scheduler=core)
        result = simulation.run(steps=steps, warmup_steps=WARMUP, enough=enough)
        if result.interrupted:
            raise KeyboardInterrupt
        return result, core

    def _try(self, plan: Plan) -> Tried:
        # A plan that breaks the promise counts only if all do: then the one that breaks it least.
        hopeful = self._shortcuts and self._hopeful
        broken = Broken(self._jobs[0].max_slowdown, solo(self._jobs[0], self._spec)) if hopeful else None
        result, core = self._simulate(plan, STEPS, broken)
        job = result.of(Priority.HIGH)[0]
        keeps = job.steps == STEPS and keeps_promise(job.mean_slowdown, job.p99_slowdown, self._jobs[0].max_slowdown)
        return Tried(plan, job.mean_slowdown, job.p99_slowdown, result.harvest, keeps, core.short)

    @staticmethod
    def _best(candidates: Sequence[Tried]) -> Tried:
        """The one with the most harvest of those that keep the promise; without any, the mildest."""
        keeping = [tried for tried in candidates if tried.keeps]
        return max(keeping, key=lambda t: t.harvest) if keeping else min(candidates, key=lambda t: t.mean)

    def _costs(self) -> dict[Entry, Cost]:
        """High seconds that a launch costs, by low piece, high piece and share; a piece never seen at a place costs
        what others cost there, by their length."""
        found: dict[Entry, Cost] = {}
        launches = min(MOST_PROBES, PROBES * self._low_count)
        for share in self._spec.shares:
            for p in range(GAP if self._gap_s > SHORTEST_GAP_S else 0, self._high_count):
                plan = Plan({(j, p): share for j in range(self._low_count)}, most=1, every=2)
                result, core = self._simulate(plan, 2 * launches)
                self._note(result.of(Priority.HIGH)[0].step_seconds, core, found, (p, share))
        return found

    def _note(
        self, seconds: Sequence[float], core: Planned, found: dict[Entry, Cost], place: tuple[int, float]
    ) -> None:
        alone, work = min(seconds), self._pieces[1].seconds
        samples: dict[int, list[Cost]] = {}
        for step, _, j, _ in core.begun:
            if step + 1 < len(seconds):
                samples.setdefault(j, []).append((seconds[step] - alone, seconds[step + 1] - alone))
        known = {j: _mean(costs) for j, costs in samples.items()}
        if known:
            here, after = _mean([(cost[0] / work[j], cost[1] / work[j]) for j, cost in known.items()])
            for j in range(self._low_count):
                found[(j, *place)] = known.get(j, (here * work[j], after * work[j]))

    def _plan(self, costs: dict[Entry, Cost], dearer: float, *, widest: bool) -> Plan:
        """For each low piece the places that cost no more than `dearer` times its cheapest, and there the cheapest
        share, or the widest of those that cost no more: it is done sooner."""
        least = dict.fromkeys(range(self._low_count), inf)
        for (j, _, _), cost in costs.items():
            least[j] = min(least[j], max(sum(cost), MIN_COST_S))
        best: dict[tuple[int, int], tuple[float, float]] = {}
        for (j, p, share), cost in costs.items():
            paid = max(sum(cost), MIN_COST_S)
            rank = (-share, paid) if widest else (paid, -share)
            if paid <= dearer * least[j] and rank < best.get((j, p), (inf, inf)):
                best[j, p] = rank
        high = self._jobs[0]
        room = 2 * (high.max_slowdown - 1) * solo(high, self._spec).step_s
        shares = {place: -rank[0 if widest else 1] for place, rank in best.items()}
        return Plan(shares, costs, room)

    def _paid(self, plan: Plan) -> list[Tried]:
        """The plan at credits that are bisected to where the promise is just kept."""
        key = (frozenset(plan.shares.items()), plan.depth, plan.step_limit)  # all that differs between plans
        if key in self._known and self._shortcuts:
            self._tried += BISECTIONS
            return self._known[key]
        high = self._jobs[0]
        enough = (high.max_slowdown - 1) * solo(high, self._spec).step_s
        low, most = 0.0, 4 * enough
        found: list[Tried] = []
        credit = enough
        for left in reversed(range(BISECTIONS)):
            found.append(self._try(replace(plan, credit=credit)))
            if found[-1].keeps:
                if self._shortcuts and not found[-1].short:  # all that would follow is more credit
                    self._tried += left
                    break
                low = credit
            else:
                most = credit
            credit = (low + most) / 2
        self._known[key] = found
        return found


class Broken:
    """Tells of a simulation under way that its high job's promise can't be kept any more, whatever the steps left
    take."""

    def __init__(self, max_slowdown: float, alone: Solo) -> None:
        self._alone = alone
        self._max_slowdown = max_slowdown
        self._may_exceed = STEPS - ceil(0.99 * STEPS)  # steps that the 99th percentile leaves out
        self._seen, self._sum, self._over = WARMUP, 0.0, 0

    def __call__(self, simulation: Simulation) -> bool:
        seconds = simulation.clients[0].step_seconds
        if len(seconds) <= self._seen:
            return False
        for took in seconds[self._seen :]:
            self._sum += took
            self._over += not keeps_promise(0.0, took / self._alone.p99_s, self._max_slowdown)
        self._seen = len(seconds)
        mean = self._sum / STEPS / self._alone.step_s
        return self._over > self._may_exceed or not keeps_promise(mean, 0.0, self._max_slowdown)


def _mean(costs: Sequence[Cost]) -> Cost:
    return (sum(c[0] for c in costs) / len(costs), sum(c[1] for c in costs) / len(costs))


@lru_cache(maxsize=256)
def gap_seconds(workload: Workload, spec: GpuSpec) -> float:
    """From the end of a step to the beginning of the next, alone."""
    result = Simulation([workload], spec, timeline=True).run(steps=12)
    rows = result.timeline
    last = len(cut_workload(workload, spec).seconds) - 1
    gaps = [b.started - a.ended for a, b in pairwise(rows) if a.piece == last and b.piece == 0]
    return max(0.0, sum(gaps[2:]) / len(gaps[2:]))
