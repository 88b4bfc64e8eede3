"""What a high job may lose, and where low work gets most for it.

`max_slowdown` gives every step of a high job a credit: the seconds it may take longer. An *account*
collects credits and pays what low work was measured to cost; a launch whose expected cost it can't pay
has to wait. So the mean is held whatever the estimates are worth. A *tail limit* holds single steps: a
step loses at most twice the credit, scaled by a factor that falls with each step over the limit and
recovers slowly, such that about one step in 200 exceeds it.

Where the credit does not pay for everything, a *price* says how much low work a high second must at
least buy. It comes from the estimates: what each range costs and gives, the best bargains first, until
the credit is spent. Low work that is cheap at the price is never held by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MARGIN = 0.93  # of the credit is spent: the estimates' errors need the rest
BANK = 3.0  # credits an account holds at most
DEBT = 8.0  # credits it can owe: after a disaster low work is held for so many steps, not for ever
TAIL = 2.0  # credits one step may lose
TAIL_START = 0.8
TAIL_FALL = 0.85  # for a step over the limit
TAIL_RISE = 1.0008  # for one that is not: balanced at one step in 200
LEAST_SLOWDOWN = 0.002  # what a job that allows none is still measured by
PRICED_EVERY = 16  # steps


class Offer(NamedTuple):
    """What collocation with one range on one share gives in a step: low seconds gained, high seconds lost."""

    gain: float
    cost: float


class Account:
    """One high job's. Seconds, but for `price` (low seconds for a high second) and factors."""

    __slots__ = ("balance", "blocked", "credit", "full", "price", "reach", "slack", "tail", "used")

    def __init__(self, max_slowdown: float) -> None:
        self.slack = max(max_slowdown - 1.0, LEAST_SLOWDOWN)
        self.balance = 0.0
        self.credit = 0.0  # of the step that runs
        self.used = 0.0  # excess of the step that runs, so far
        self.price = 0.0
        self.reach = 1.0  # how much more than the credit the priced offers must cost to spend it all
        self.tail = TAIL_START
        self.blocked = 0  # launches refused for want of credit since the last price
        self.full = 0  # steps since then that found the account full

    def begin(self, solo_step: float) -> None:
        """A step begins that takes `solo_step` seconds alone."""
        self.credit = self.slack * solo_step * MARGIN
        self.used = 0.0

    def limit(self) -> float:
        """The most one step may lose."""
        return TAIL * self.tail * self.credit / MARGIN

    def refuses(self, cost: float, upper: float, pending: float, gain: float) -> str:
        """Why a launch that gives `gain` and costs `cost`, `upper` at worst, has to wait; "" if it has not."""
        if self.used + pending + upper > self.limit():
            return "tail"
        if gain < self.price * cost:
            return "price"
        if cost > 0.0 and self.used + pending + cost > self.balance + self.credit:
            return "budget"
        return ""

    def end(self, excess: float, shared: bool) -> None:
        """A step ended `excess` seconds late; `shared`: low work ran beside it, so that the loss is ours."""
        credit = self.credit
        if shared:
            over = excess > TAIL * credit / MARGIN
            self.tail = max(0.2, self.tail * TAIL_FALL) if over else min(1.0, self.tail * TAIL_RISE)
            self.balance -= min(max(excess, -credit), DEBT * credit)
        self.balance += credit
        if self.balance > BANK * credit:
            self.balance = BANK * credit
            self.full += 1
        self.balance = max(self.balance, -DEBT * credit)
        self.used = 0.0

    def reprice(self, offers: Iterable[Sequence[Offer]]) -> None:
        """Set the price by which one share of each range (or none) spends the credit of a step."""
        if self.full * 2 > PRICED_EVERY:
            self.reach = min(self.reach * 1.25, 64.0)
        elif self.blocked:
            self.reach = max(self.reach * 0.95, 0.5)
        self.full = self.blocked = 0
        self.price = price_for(list(offers), self.credit * self.reach)


def price_for(ranges: Sequence[Sequence[Offer]], credit: float) -> float:
    """The highest price at which all offers worth it cost `credit` or more together, so that the marginal
    ones are let in and the account rations them; 0.0 when everything can be paid."""
    if _spent(ranges, 0.0) <= credit:
        return 0.0
    prices = sorted({offer.gain / offer.cost for offers in ranges for offer in offers if offer.cost > 0})
    low, high = 0, len(prices) - 1  # at the lowest everything is bought
    while low < high:
        middle = (low + high + 1) // 2
        if _spent(ranges, prices[middle]) >= credit:
            low = middle
        else:
            high = middle - 1
    return 0.95 * prices[low]


def _spent(ranges: Sequence[Sequence[Offer]], price: float) -> float:
    total = 0.0
    for offers in ranges:
        best, cost = 0.0, 0.0
        for offer in offers:
            worth = offer.gain - price * offer.cost
            if worth >= best and offer.gain > 0:
                best, cost = worth, offer.cost
        total += cost
    return total
