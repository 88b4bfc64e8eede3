"""What low work costs the collectives of a high job that is a rank of a gang.

Between two pieces of its step such a job waits for its peers (a pause of it, in which low work may run) and then
exchanges data with them. The exchange is a range of its own: it may suffer where the operators around it don't, since
sums of gradients are the most sensitive part of a step (DeepPool, section 5). Low work is banned from the whole pause
before it, since nothing says when the exchange will begin.
"""

from __future__ import annotations

from typing import Final

from gpumux.scheduler.guard.bans import Ban, Bans, Why
from gpumux.scheduler.guard.costs import LEAST_OVERLAP, RangeCost
from gpumux.scheduler.guard.device_view import LowLaunch, LowLaunches
from gpumux.scheduler.guard.high_job import Gate, HighJob

LEAST_S: Final = 20e-6  # a shorter exchange tells nothing
MOST_RATE: Final = 0.99  # of the seconds beside low work that may be lost


def cost_of_exchange(gate: Gate, cost: RangeCost, seconds: float) -> tuple[float, float]:
    """What the exchange is expected to lose by a launch of `seconds` in the pause before it, and what it seldom loses
    more of. `cost`: what it loses in a second beside that low work."""
    rate, most = min(max(cost.mean, 0.0), MOST_RATE), min(max(cost.bound, 0.0), MOST_RATE)
    alone = gate.exchange.value
    return rate * min(seconds, alone / (1.0 - rate)), most * min(seconds, alone / (1.0 - most))


def exchange_ended(
    high: HighJob, gate: Gate, bans: Bans, step: int, seconds: float, found: LowLaunches, now: float
) -> None:
    """The exchange at the gate took `seconds` in this step, with these low launches beside it (their `overlap` says for
    how long)."""
    baseline = gate.exchange
    if not found:
        if high.alone_on_all_ranks(step):
            baseline.add(seconds)
        return
    high.shared = True
    if not baseline.known:
        if not high.calibrating:
            high.calibrate(1)
        return
    excess = seconds - baseline.value
    high.excess += excess
    high.budget.used += excess - baseline.late
    if max(seconds, baseline.value) < LEAST_S:
        return
    overlap = sum([low.overlap for low in found])
    least = LEAST_OVERLAP * baseline.value
    for low in found:
        cost = gate.beside(low.key)
        cost.add(min(excess * low.overlap / overlap / max(low.overlap, least), MOST_RATE))
        _judge(high, gate, bans, low, cost, now)


def _judge(high: HighJob, gate: Gate, bans: Bans, low: LowLaunch, cost: RangeCost, now: float) -> None:
    """Impose, lengthen or lift the ban of this low work beside the exchange. It is banned if one launch costs more than
    a step may lose, or if what the exchange loses is dearer than the pause before it is worth to low work."""
    gate.ban(low.key)  # forgets one that was lifted
    budget = high.budget
    if not cost.to_judge(budget.slack):
        return
    rate = cost.judged_rate
    ratio = 1.0 / (1.0 - rate)
    loss = rate * min(min(low.step.pieces), gate.exchange.value * ratio)
    why: Why | None = None
    if ratio > 1.0 + budget.slack:
        if loss > budget.limit:
            why = "tail"
        elif loss * budget.price > gate.arrivals.usual:
            why = "price"
    ban: Ban | None = None
    if why:
        ban = Ban(
            high=high.job.id, low=low.job.id, operators=(gate.operator, gate.operator), program=gate.program,
            share=low.key.share, ratio=ratio, samples=cost.count, why=why, since=now,
        )  # fmt: skip
    cost.update_ban(bans, ban, high.solo_step(), now)
