"""What a high job may lose, and how selective low work has to be about when it runs.

`max_slowdown` gives every step of a high job a *credit*: the seconds it may take longer. The budget collects credits
and pays what low work was measured to cost; a launch whose expected cost it can't pay has to wait. So the mean is kept
whatever the estimates are worth.

A *tail limit* holds single steps: a step may lose at most twice the credit, scaled by a factor that falls when a step
exceeded the limit that should not have, and recovers slowly. Whatever the cause, each step over the limit uses up one
of the *violations* that are left, and each step adds a small part of one. With some left, unknown launches may be
explored; with too many used, steps may lose less.

Steps that lose as much without low work are not charged to it: steps beside low work are given back as many violations
as such steps cause on average (`StepNoise`), and the mean is measured from such steps' mean.

The *price* says how many low seconds one high second is worth. A low piece costs least beside certain ranges. Anywhere
else it may run as long as its extra cost there, at the price, is less than the piece itself. The price rises while
launches have to wait for credit and falls while credit is left over, so credit goes where it buys most. A piece is
never held by the price for a cost that it can't avoid.
"""

from __future__ import annotations

from math import ceil, log
from typing import Final

MARGIN: Final = 0.92  # of the credit is spent; the rest is for what the scheduler does not see, such as a busy host
MOST_CREDIT: Final = 3.0  # credits that may be saved
MOST_OVERDRAFT: Final = 8.0  # credits that may be owed: after a disaster low work is held for so many steps
TAIL: Final = 2.0  # credits one step may lose
TAIL_START: Final = 0.86
TAIL_FALL: Final = 0.9  # for a step over the limit
TAIL_RISE: Final = 1.0006  # for a step within it
TAIL_LEAST: Final = 0.3
TAIL_MOST: Final = 0.92
TAIL_RECOVER: Final = 1.01  # for each step without low work after RECOVER_AFTER in a row
RECOVER_AFTER: Final = 16
NEAR: Final = 0.985  # of what a step may lose: a step that loses more counts as over the limit
ALLOWED_VIOLATIONS: Final = 3.0  # steps over the limit that may be risked to find something out
VIOLATION_RATE: Final = 0.006  # added for each step
MOST_DEBT: Final = 100.0  # violations too many that are remembered
TOLERATED_DEBT: Final = 0.5  # violations too many without a consequence
DEBT_FACTOR: Final = 0.85  # of the limit, for each violation beyond those
LEAST_DEBT_FACTOR: Final = 0.5  # of the limit, however many they are
UNPAID: Final = 8.0  # credits lost beyond the largest overdraft that count as one more violation
PRICE_RISE: Final = 1.05  # for a step in which low work waited for credit
PRICE_FALL: Final = 0.95  # for a step after which no more credit could be saved
PRICE_MOST: Final = 100.0  # and the least is its inverse
UNSEEN_S: Final = 20e-6  # the scheduler takes for an event, during which a step may come
MOST_DELAY_S: Final = 200e-6  # of a step's delay is charged to low work: beyond that, something else was the cause
LEAST_SLOWDOWN: Final = 0.002  # allowed to a job that allows none


# ---- How often a high job's steps lose much without low work. On a CPU that other programs use that may be every
# fourth step; on a GPU of its own next to none. As many steps beside low work lose much for the same reasons.


DECAY: Final = 0.99  # for each new sample, of the weight of earlier ones in a mean: about a hundred count
PRIOR_SAMPLES: Final = 8.0  # samples without a difference that such a mean begins with
CHANCE: Final = 0.01  # how probable it may be that noise alone passes for the cost of a launch
LIKELY: Final = 0.5  # noise is not taken to be more probable than this
MOST_CONFIRMATIONS: Final = 5


class StepNoise:
    """Of steps without low work: `over` is the part that loses much, and `violations` how many violations (budget.py)
    such steps cause on average. Both are 0.0 where all take the same time."""

    def __init__(self) -> None:
        self.over = self.violations = 0.0
        self._count = self._over = self._violations = 0.0
        self._newest: float | None = None

    def add(self, violations: float) -> None:
        """One more step. It counts when the next one comes, since the work may turn out to have changed."""
        before, self._newest = self._newest, violations
        if before is not None:
            self._count = self._count * DECAY + 1.0
            self._over = self._over * DECAY + (before > 0.0)
            self._violations = self._violations * DECAY + before
            count = self._count + max(0.0, PRIOR_SAMPLES - self._count / 4)  # the prior has faded after 32
            self.over, self.violations = self._over / count, self._violations / count

    def changed(self) -> None:
        """The work changed, and the newest step was the first to show it."""
        self._newest = None

    def confirmations(self) -> int:
        """How many launches in a row have to seem costly before that is believed: so many that noise causes it with
        probability CHANCE, but not more than a few."""
        if self.over <= CHANCE:
            return 1
        return min(ceil(log(CHANCE) / log(min(self.over, LIKELY))), MOST_CONFIRMATIONS)


# ---- The budget.


class SlowdownBudget:
    """What one high job may lose. Seconds, except for `price` (low seconds for a high second) and factors."""

    def __init__(self, max_slowdown: float) -> None:
        self.slack = max(max_slowdown - 1.0, LEAST_SLOWDOWN)
        # Excess seconds in a second beside low work, at most, if the mean is kept.
        self.rate_limit = self.slack / (1.0 + self.slack)
        self.credit = 0.0  # of the step that runs
        self.balance = 0.0
        self.full = False  # the last step's credit could not be saved
        self.exhausted = False  # low work waited for credit in this step
        self.price = 1.0
        self.limit = 0.0  # the most the step that runs may lose
        self.used = 0.0  # what it has lost so far
        self.tail = TAIL_START
        self.violations_left = ALLOWED_VIOLATIONS
        self.learned = False  # unknown launches were explored for long enough: violations count from now on
        self.noise = StepNoise()
        self.confirmations = 1  # launches in a row that have to seem costly before that is believed
        self._shared_steps = 0.0  # steps beside low work, about the newest hundred
        self._solo_steps = 0  # steps since low work last ran beside one
        self._unseen = 0.0  # seconds that the next step may have to wait for the scheduler

    @property
    def most(self) -> float:
        """Seconds a step may lose without counting as over the limit."""
        return NEAR * TAIL * self.credit / MARGIN

    def refuses(
        self, cost: float, upper: float, *, avoidable: float, pending: float, gain: float, next_step: bool
    ) -> str:
        """Why a launch of `gain` low seconds has to wait that costs `cost`, `upper` at worst, of which `avoidable`
        would not be lost elsewhere; "": it has not. `pending`: what launches that are out may still cost. `next_step`:
        the next step will pay, not the one that runs."""
        used = 0.0 if next_step else self.used + pending
        if used + upper > self.limit:
            return "tail"
        if gain < self.price * avoidable:
            return "price"
        credit = 2 * self.credit - self.used - pending if next_step else self.credit
        if cost > 0.0 and used + cost > self.balance + credit and not (self.full and used <= 0.0):
            return "budget"
        return ""

    def begin_step(self, solo_s: float) -> None:
        """A step begins that takes `solo_s` seconds alone."""
        self.used = 0.0
        self.credit = self.slack * solo_s * MARGIN
        self._update_limit()

    def solo_step_ended(self, excess: float) -> None:
        """A step without low work ended `excess` seconds late. Called before `end_step`."""
        before = self.noise.violations
        self.noise.add(self._violations(excess + self.credit / MARGIN))
        self.confirmations = self.noise.confirmations()
        # Earlier steps beside low work were charged by the earlier mean.
        left = self.violations_left + (self.noise.violations - before) * self._shared_steps
        self.violations_left = max(-MOST_DEBT, min(left, ALLOWED_VIOLATIONS))

    def end_step(
        self, excess: float, *, shared: bool, explored: bool, unseen: float, late: float = 0.0, delay: float = 0.0
    ) -> None:
        """A step ended `excess` seconds late.

        `shared`: low work ran beside it, and caused the excess. `explored`: some of it was launched to find out what it
        costs. `unseen`: seconds that the next step may wait for the scheduler; `delay`: those for which this one did.
        `late`: by how much steps are late on average without low work.
        """
        self._unseen = unseen
        overdraft = MOST_OVERDRAFT * self.credit
        if shared:
            excess += delay
            violations = self._violations(excess)
            excess -= late
            self._shared_steps = self._shared_steps * DECAY + 1.0
            if self.noise.violations:
                self.violations_left += self.noise.violations
                self.tail = min(TAIL_MOST, self.tail * TAIL_FALL**-self.noise.over)
            if not violations:
                self.tail = min(TAIL_MOST, self.tail * TAIL_RISE)
            else:
                self.violations_left = max(self.violations_left - violations, -MOST_DEBT)
                if not explored:
                    self.tail = max(TAIL_LEAST, self.tail * TAIL_FALL)
            self.balance -= max(-self.credit, min(excess, overdraft))
            self._solo_steps = 0
        else:
            self._solo_steps += 1
            self.balance -= delay
            if self._solo_steps > RECOVER_AFTER:  # a limit that allows no launch would never be found to be too low
                self.tail = min(TAIL_MOST, self.tail * TAIL_RECOVER)
        self.violations_left = min(self.violations_left + VIOLATION_RATE, ALLOWED_VIOLATIONS)
        self.balance += self.credit
        self.full = self.balance >= MOST_CREDIT * self.credit
        self.balance = max(-overdraft, min(self.balance, MOST_CREDIT * self.credit))
        self.used = 0.0
        if self.exhausted:
            self.price = min(self.price * PRICE_RISE, PRICE_MOST)
        elif self.full:
            self.price = max(self.price * PRICE_FALL, 1.0 / PRICE_MOST)
        self.exhausted = False
        self._update_limit()

    def restore_tail(self) -> None:
        """The cause of the violations is gone: steps may lose as much as at first."""
        self.tail = max(self.tail, TAIL_START)
        self._update_limit()

    def end_learning(self) -> None:
        """From now on violations count."""
        self.learned, self.violations_left = True, ALLOWED_VIOLATIONS
        self._update_limit()

    def _update_limit(self) -> None:
        most, tail, debt = TAIL * self.credit / MARGIN, self.tail, -self.violations_left - TOLERATED_DEBT
        if debt > 0.0 and self.learned:
            tail *= max(DEBT_FACTOR**debt, LEAST_DEBT_FACTOR)
        self.limit = max(0.0, min(tail * most, most - self._unseen))

    def _violations(self, excess: float) -> float:
        """Violations that a step counts as which loses so much."""
        if excess <= self.most:
            return 0.0
        unpaid = excess - MOST_OVERDRAFT * self.credit
        return 1.0 + (unpaid / (UNPAID * self.credit) if unpaid > 0.0 and self.credit > 0.0 else 0.0)
