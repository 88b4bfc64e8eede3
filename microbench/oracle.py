"""The most low work that could be done beside a high job under its promise, all durations known in advance.

The oracle has what the guard has: the same pieces, the same non-preemptive device and host, the same target (mean step
time within `max_slowdown` of alone, the 99th percentile within twice that excess). It knows what the guard has to
learn: every duration, when the next step comes, and what each choice will lead to, because it tries it.

The search is over plans (planned.py): what share of the GPU low work may have beside each high piece, and how many low
launches are outstanding. Every plan is simulated exactly, on the same engine, and only one that keeps the promise counts:

1. Beside every high piece, each share: what that costs the piece and what low work gets there. One run a share.
2. For a price on high seconds, the best share of each piece is then known: Lagrange's relaxation of the choice. The price is
   bisected until the dearest plan that keeps the promise and the cheapest that breaks it are known.
3. Steps take turns between those two plans, as often as the promise bears: a mean between what single plans reach.
4. Single pieces of the best plan are given more or less, as long as that finds something better.

Why this is near the optimum: with steps that repeat, cost and gain belong to the moment of a step at which low work
runs, and the relaxation is the exact answer where the moments don't affect one another; where they do, 2 to 4 work on
exact simulations. It is not above the optimum, since everything it reports was reached, and not proven to be it: a plan can't tell low pieces apart, nor moments within a high piece. So the
harvest of the guard itself, where it kept the promise, is one of the candidates: nobody's share exceeds 1 unless the
promise was broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from gpumux.device.sim.spec import GpuSpec
from gpumux.model import Priority
from gpumux.simulate.result import Result, Row
from gpumux.simulate.run import Simulation
from gpumux.simulate.workload import Workload, cut_workload
from microbench.planned import Plan, Planned

STEPS, WARMUP = 100, 20  # of every plan tried
BISECTIONS = 7
DEPTHS = (1, 2)
TRIES = 8  # of step 4
SETTLE = 3  # times a mixture that breaks the promise is thinned


@dataclass(frozen=True)
class Tried:
    """One plan, simulated."""

    plan: Plan
    mean: float  # slowdown of the high job
    p99: float
    harvest: float  # low seconds of work a second
    keeps: bool


@dataclass(frozen=True)
class Oracle:
    """The best plan found that keeps the promise, and how many were tried."""

    best: Tried
    tried: int


def keeps_promise(mean: float, p99: float, max_slowdown: float) -> bool:
    return mean <= max_slowdown and p99 <= 1 + 2 * (max_slowdown - 1)


class Search:
    """For one pair of jobs."""

    def __init__(self, high: Workload, low: Workload, spec: GpuSpec) -> None:
        self._jobs, self._spec = (high, low), spec
        self._pieces = cut_workload(high, spec), cut_workload(low, spec)
        self._count = len(self._pieces[0].seconds)
        self._gap_s = gap_seconds(replace(high, name="alone"), spec)
        self._all: dict[Plan, Tried] = {}

    def run(self) -> Oracle:
        nothing = self._try(self._even(0.0))
        candidates = [nothing]
        for depth in DEPTHS:
            candidates += self._priced(depth)
        best = self._best(candidates)
        for _ in range(2):
            better = self._improve(best)
            if better.harvest <= best.harvest:
                break
            best = better
        return Oracle(best, len(self._all))

    # ---- plans

    def _even(self, share: float, depth: int = 1) -> Plan:
        return Plan(((share,) * self._count,), depth)

    def _try(self, plan: Plan) -> Tried:
        return self._simulate(plan)[0] if plan not in self._all else self._all[plan]

    def _simulate(self, plan: Plan) -> tuple[Tried, Result]:
        high, low = self._jobs
        core = Planned(plan, self._spec, *self._pieces, self._gap_s)
        simulation = Simulation([high, low], self._spec, core=core, timeline=True)
        result = simulation.run(steps=STEPS, warmup_steps=WARMUP)
        job = result.of(Priority.HIGH)[0]
        keeps = keeps_promise(job.mean_slowdown, job.p99_slowdown, high.max_slowdown)
        tried = self._all[plan] = Tried(plan, job.mean_slowdown, job.p99_slowdown, result.harvest, keeps)
        return tried, result

    @staticmethod
    def _best(candidates: Sequence[Tried]) -> Tried:
        """The one with the most harvest of those that keep the promise; without any, the mildest."""
        keeping = [tried for tried in candidates if tried.keeps]
        return max(keeping, key=lambda t: t.harvest) if keeping else min(candidates, key=lambda t: t.mean)

    def _priced(self, depth: int) -> list[Tried]:
        """Steps 1 to 3."""
        offers: list[list[tuple[float, float, float]]] = [
            [(0.0, 0.0, 0.0)] for _ in range(self._count)
        ]  # gain, cost, share
        found: list[Tried] = []
        alone = self._spans(self._simulate(self._even(0.0, depth))[1])
        for share in self._spec.shares:
            tried, result = self._simulate(self._even(share, depth))
            found.append(tried)
            if tried.keeps:
                break  # the smaller shares give less
            spans, gains = self._spans(result), self._gains(result)
            for p in range(self._count):
                offers[p].append((gains[p], max(0.0, spans[p] - alone[p]), share))
        below, above = self._bisect(offers, depth, found)
        if below is not None and above is not None:
            found += self._mixtures(below, above)
        return found

    def _bisect(
        self, offers: list[list[tuple[float, float, float]]], depth: int, found: list[Tried]
    ) -> tuple[Tried | None, Tried | None]:
        cheap, dear = 0.0, 1e3  # a price at which everything is taken, and one at which only what is free is
        below: Tried | None = None
        above: Tried | None = None
        for _ in range(BISECTIONS):
            price = (max(cheap, 1e-3) * dear) ** 0.5
            chosen = [max(options, key=lambda o: (o[0] - price * o[1], o[2]))[2] for options in offers]
            tried = self._try(Plan((tuple(chosen),), depth))
            found.append(tried)
            if tried.keeps:
                dear, below = price, tried if below is None or tried.harvest > below.harvest else below
            else:
                cheap, above = price, tried
        return below, above

    def _mixtures(self, below: Tried, above: Tried) -> list[Tried]:
        """Take turns between a plan that keeps the promise and one that does not."""
        target = self._jobs[0].max_slowdown
        if above.mean <= below.mean or above.plan.depth != below.plan.depth:
            return []
        part = min(1.0, (target - below.mean) / (above.mean - below.mean))
        found: list[Tried] = []
        for _ in range(SETTLE):
            second = int(part * 20)
            if second == 0:
                break
            plan = Plan((below.plan.shares[0], above.plan.shares[0]), below.plan.depth, second, 20)
            found.append(self._try(plan))
            if found[-1].keeps:
                break
            part *= 0.7
        return found

    def _improve(self, best: Tried) -> Tried:
        """Step 4: give single pieces the next larger or smaller share."""
        ladder = sorted({0.0, *self._spec.shares})
        shares = best.plan.shares[0]
        for p in self._spread(TRIES):
            for move in (1, -1):
                place = ladder.index(shares[p]) + move
                if not 0 <= place < len(ladder):
                    continue
                changed = (*shares[:p], ladder[place], *shares[p + 1 :])
                tried = self._try(replace(best.plan, shares=(changed, *best.plan.shares[1:])))
                if tried.keeps and tried.harvest > best.harvest:
                    best, shares = tried, changed
        return best

    def _spread(self, most: int) -> list[int]:
        """At most so many pieces, evenly over the step."""
        step = max(1, -(-self._count // most))
        return list(range(0, self._count, step))

    # ---- what a run says of each high piece

    def _spans(self, result: Result) -> list[float]:
        """Mean seconds of each high piece, waiting behind low blocks included."""
        sums, counts, end = [0.0] * self._count, [0] * self._count, 0.0
        for row in _rows(result, Priority.HIGH):
            sums[row.piece] += row.ended - max(end, row.started)
            counts[row.piece] += 1
            end = row.ended
        return [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]

    def _gains(self, result: Result) -> list[float]:
        """Low seconds of work done beside each high piece in a step, split by overlap."""
        work = self._pieces[1].seconds
        low = _rows(result, Priority.LOW)
        gains, steps, at, end = [0.0] * self._count, 0, 0, 0.0
        for row in _rows(result, Priority.HIGH):
            begin = max(end, row.started)
            while at < len(low) and low[at].ended <= begin:
                at += 1
            for other in low[at : at + 8]:
                overlap = min(other.ended, row.ended) - max(other.started, begin)
                if overlap > 0:
                    gains[row.piece] += work[other.piece] * overlap / (other.ended - other.started)
            steps += row.piece == 0
            end = row.ended
        return [gain / max(steps, 1) for gain in gains]


def _rows(result: Result, priority: Priority) -> list[Row]:
    names = {job.name for job in result.of(priority)}
    return [row for row in result.timeline if row.job in names]


@lru_cache(maxsize=256)
def gap_seconds(workload: Workload, spec: GpuSpec) -> float:
    """From the end of a step to the beginning of the next, alone."""
    result = Simulation([workload], spec, timeline=True).run(steps=12)
    rows = result.timeline
    last = len(cut_workload(workload, spec).seconds) - 1
    gaps = [b.started - a.ended for a, b in pairwise(rows) if a.piece == last and b.piece == 0]
    return max(0.0, sum(gaps[2:]) / len(gaps[2:]))
